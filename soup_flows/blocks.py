"""Block types: what can be kept in Prefect, edited in its page and named in a run's parameter `blocks`.

`soup-flows deploy` or `prefect block register -m soup_flows.blocks` registers them; servers and workers find them
by the entry point `prefect.collections`. Runs get names, never objects: a block passed as an object through an API
arrives with its secrets masked.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from prefect.blocks.core import Block
from prefect.types import SecretDict
from pydantic import Field, HttpUrl, SecretStr

from soup_flows.report import TrainReport
from soup_flows.spec import GpuCount, TrainingSpec
from soup_flows.store import Confirm, Store

DOCUMENTATION = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
LOGO = HttpUrl(
    "https://raw.githubusercontent.com/PrefectHQ/prefect/420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9/assets/"
    "block-logos/process.png"
)


class SoupTrainingJob(Block):
    """A fine-tuning job, kept as a whole: model, data, preset and every setting.

    Example:
        Load a stored job and run it:
        ```python
        from soup_flows.blocks import SoupTrainingJob

        job = SoupTrainingJob.load("BLOCK_NAME")
        report = job.run()
        ```
    """

    _block_type_name = "Soup Training Job"
    _block_type_slug = "soup-training-job"
    _description = "A fine-tuning job for the flow soup-train: model, data set, preset and every setting."
    _documentation_url = DOCUMENTATION
    _logo_url = LOGO

    # Blocks keep unknown keys silently; the spec inside refuses them.
    spec: TrainingSpec = Field(default=..., title="Job", description="What to train, on what, and how.")

    def parameters(self) -> dict[str, Any]:
        """Return the job as parameters of the flow `soup-train`."""
        return {name: getattr(self.spec, name) for name in TrainingSpec.model_fields}

    def run(self) -> TrainReport:
        """Run the flow `soup-train` with this job, in this process.

        Raises:
            Refused: nothing was started; all problems, each with its fix.
            TrainingFailed: a started run ended badly; class, cause, advice.
        """
        from soup_flows.flows import soup_train

        report: TrainReport = soup_train(**self.parameters())
        return report


class HuggingFaceCredentials(Block):
    """A token of the Hugging Face Hub. Ranks get it as the variable HF_TOKEN; it is written nowhere.

    Example:
        Name it in a run with `blocks={"hugging_face": "BLOCK_NAME"}`, or use it yourself:
        ```python
        from soup_flows.blocks import HuggingFaceCredentials

        credentials = HuggingFaceCredentials.load("BLOCK_NAME")
        credentials.environment()
        ```
    """

    _block_type_name = "Soup Hugging Face Credentials"
    _block_type_slug = "soup-hugging-face-credentials"
    _description = "A token of the Hugging Face Hub, for gated and private models and data sets."
    _documentation_url = HttpUrl("https://huggingface.co/docs/hub/security-tokens")
    _logo_url = LOGO

    token: SecretStr = Field(default=..., title="Token", description="A token with read access.")
    endpoint: str | None = Field(None, title="Endpoint", description="Address of a Hub mirror (HF_ENDPOINT).")

    def environment(self) -> dict[str, str]:
        """Return the variables, the token in clear."""
        found = {"HF_TOKEN": self.token.get_secret_value()}
        return found | ({"HF_ENDPOINT": self.endpoint} if self.endpoint else {})


class RayCluster(Block):
    """Where a Ray cluster is, and the token that its dashboard wants. Neither reaches a job or its ranks.

    Example:
        Name it in a run with `blocks={"ray_cluster": "BLOCK_NAME"}`, or use it yourself:
        ```python
        from soup_flows.blocks import RayCluster

        cluster = RayCluster.load("BLOCK_NAME")
        cluster.environment()
        ```
    """

    _block_type_name = "Soup Ray Cluster"
    _block_type_slug = "soup-ray-cluster"
    _description = "A Ray cluster for launcher.engine=ray: the address of its dashboard, and its token."
    _documentation_url = HttpUrl("https://docs.ray.io/en/latest/ray-security/token-auth.html")
    _logo_url = LOGO

    address: HttpUrl = Field(
        default=..., title="Dashboard", description="Address of the dashboard, such as http://head:8265."
    )
    token: SecretStr | None = Field(
        None, title="Token", description="What `ray get-auth-token` prints on the head; none without a token."
    )

    def environment(self) -> dict[str, str]:
        """Return the variables that find the cluster, the token in clear."""
        found = {"RAY_API_SERVER_ADDRESS": str(self.address).rstrip("/")}
        if self.token is None:
            return found | {"RAY_AUTH_MODE": "disabled"}
        return found | {"RAY_AUTH_TOKEN": self.token.get_secret_value(), "RAY_AUTH_MODE": "token"}


class ExperimentTracker(Block):
    """Where losses are tracked: rank 0 reports there through Transformers' own integration.

    Example:
        Name it in a run with `blocks={"tracker": "BLOCK_NAME"}`, or look at it yourself:
        ```python
        from soup_flows.blocks import ExperimentTracker

        tracker = ExperimentTracker.load("BLOCK_NAME")
        tracker.environment()
        ```
    """

    _block_type_name = "Soup Experiment Tracker"
    _block_type_slug = "soup-experiment-tracker"
    _description = (
        "An experiment tracker with its credentials: wandb, mlflow, comet_ml, neptune, clearml, trackio."
    )
    _documentation_url = HttpUrl("https://huggingface.co/docs/transformers/main_classes/callback")
    _logo_url = LOGO

    # What each client library reads (their documentation of environment variables).
    VARIABLES: ClassVar[dict[str, dict[str, str]]] = {
        "wandb": {"api_key": "WANDB_API_KEY", "project": "WANDB_PROJECT", "workspace": "WANDB_ENTITY",
                  "url": "WANDB_BASE_URL"},
        "mlflow": {"api_key": "MLFLOW_TRACKING_TOKEN", "project": "MLFLOW_EXPERIMENT_NAME",
                   "url": "MLFLOW_TRACKING_URI"},
        "comet_ml": {"api_key": "COMET_API_KEY", "project": "COMET_PROJECT_NAME", "workspace": "COMET_WORKSPACE",
                     "url": "COMET_URL_OVERRIDE"},
        "neptune": {"api_key": "NEPTUNE_API_TOKEN", "project": "NEPTUNE_PROJECT"},
        "clearml": {"api_key": "CLEARML_API_SECRET_KEY", "key_id": "CLEARML_API_ACCESS_KEY",
                    "project": "CLEARML_PROJECT", "url": "CLEARML_API_HOST"},
        "trackio": {"project": "TRACKIO_PROJECT", "workspace": "TRACKIO_SPACE_ID"},
    }  # fmt: skip

    kind: Literal["wandb", "mlflow", "comet_ml", "neptune", "clearml", "trackio"] = Field(
        default=...,
        title="Kind",
        description="The tracker; its package must be installed where the ranks run.",
    )
    api_key: SecretStr | None = Field(
        None, title="API key", description="Key, token or secret of an account."
    )
    key_id: str | None = Field(None, title="Key id", description="Name of the key (clearml).")
    project: str | None = Field(None, title="Project", description="Project or experiment to report to.")
    workspace: str | None = Field(
        None, title="Workspace", description="Entity (wandb), workspace (comet_ml) or Space (trackio)."
    )
    url: str | None = Field(
        None, title="Server", description="Address of your own server (wandb, mlflow, comet_ml, clearml)."
    )

    def environment(self) -> dict[str, str]:
        """Return the variables that the tracker's client reads, the key in clear.

        Raises:
            ValueError: for a field that this kind of tracker has no variable for.
        """
        names, found = self.VARIABLES[self.kind], {}
        for field in ("api_key", "key_id", "project", "workspace", "url"):
            value = getattr(self, field)
            if value is None:
                continue
            if field not in names:
                raise ValueError(f"{self.kind} takes no {field}; it takes {', '.join(names)}")
            found[names[field]] = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        return found


class CheckpointStore(Block):
    """A store that outlives the machine: verified checkpoints and the final model are copied there.

    Example:
        Name it in a run with `blocks={"checkpoint_store": "BLOCK_NAME"}`, or look into it yourself:
        ```python
        from soup_flows.blocks import CheckpointStore

        store = CheckpointStore.load("BLOCK_NAME")
        store.open().steps("RUN-ID")
        ```
    """

    _block_type_name = "Soup Checkpoint Store"
    _block_type_slug = "soup-checkpoint-store"
    _description = (
        "Copies verified checkpoints and the final model to S3, GCS, Azure or any other fsspec URL."
    )
    _documentation_url = HttpUrl("https://filesystem-spec.readthedocs.io/en/latest/api.html")
    _logo_url = LOGO

    url: str = Field(
        default=...,
        min_length=1,
        title="URL",
        description="Such as s3://bucket/folder or file:///mnt/share; needs fsspec's package for it (s3fs, ...).",
    )
    options: dict[str, Any] = Field(
        {}, title="Options", description="What fsspec's file system takes, such as an endpoint_url."
    )
    secret_options: SecretDict | None = Field(
        None, title="Secret options", description="The same for what is secret, such as key and secret."
    )
    keep: int = Field(
        2,
        ge=1,
        title="Checkpoints to keep",
        description="Older checkpoints of a run are removed from the store.",
    )
    confirm: Confirm = Field(
        "content",
        title="Confirm by",
        description="content reads every upload back and compares hashes; size compares sizes and costs no traffic.",
    )

    def open(self) -> Store:
        """Return the store.

        Raises:
            Refused: if fsspec cannot open the URL.
        """
        secret = self.secret_options.get_secret_value() if self.secret_options else {}
        return Store(self.url, self.options, self.keep, self.confirm, secret)


class Placement(Block):
    """Where runs go on a kind of machine; a run's own settings win over it.

    Example:
        Name it in a run with `blocks={"placement": "BLOCK_NAME"}`, or apply it yourself:
        ```python
        from soup_flows.blocks import Placement

        placement = Placement.load("BLOCK_NAME")
        spec = placement.apply(spec)
        ```
    """

    _block_type_name = "Soup Placement"
    _block_type_slug = "soup-placement"
    _description = (
        "Defaults of a GPU host: output folder, number of GPUs, NVMe folder, threads, waiting for GPUs."
    )
    _documentation_url = DOCUMENTATION
    _logo_url = LOGO

    output_dir: str = Field(
        default=..., min_length=1, title="Output folder", description="Runs are kept below this folder."
    )
    gpus: GpuCount | None = Field(None, title="GPUs", description="GPUs of a run, or auto for all.")
    nvme_path: str | None = Field(None, title="NVMe folder", description="Folder for zero3_nvme.")
    cache_dir: str | None = Field(None, title="Data cache", description="Folder for tokenised data.")
    omp_num_threads: int | None = Field(None, ge=1, title="Threads", description="CPU threads per rank.")
    max_wait_min: float | None = Field(
        None, ge=0, title="Longest wait for GPUs (minutes)", description="Longest wait for leased devices."
    )
    gpu_hour_price: float | None = Field(
        None, ge=0, title="Price of a GPU-hour", description="Shown per attempt in the report."
    )

    _HOMES: ClassVar[dict[str, str]] = {
        "cache_dir": "data",
        "omp_num_threads": "launcher",
        "max_wait_min": "launcher",
        "gpu_hour_price": "recovery",
    }

    def apply(self, spec: TrainingSpec) -> TrainingSpec:
        """Return `spec` with this placement in every field that is at its default."""
        for name in type(self).model_fields:
            value, home = getattr(self, name), self._HOMES.get(name)
            holder: Any = spec if home is None else getattr(spec, home)
            default = type(holder).model_fields[name].get_default(call_default_factory=True)
            if value is None or getattr(holder, name) != default:
                continue
            changed = holder.model_copy(update={name: value})
            spec = changed if home is None else spec.model_copy(update={home: changed})
        return spec
