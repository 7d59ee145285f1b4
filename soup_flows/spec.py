"""What the user asks for: `TrainingSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from soup_flows.errors import Problem, Refused
from soup_flows.group import Group
from soup_flows.roots import problems_with_names, problems_with_roots
from soup_flows.settings import (
    DEMO_DATASET,
    DEMO_MODEL,
    BlockNames,
    DataSettings,
    DeepSpeedPreset,
    Device,
    DrillName,
    FSDPPreset,
    GpuCount,
    LauncherSettings,
    LoraSettings,
    PlainStrategy,
    RecoverySettings,
    TrainingSettings,
    ValidationSettings,
)
from soup_flows.spec_problems import problems_of
from soup_flows.user_file import expanded

__all__ = [
    "DEMO_DATASET",
    "DEMO_MODEL",
    "BlockNames",
    "Blocks",
    "Data",
    "DataSettings",
    "Dataset",
    "DeepSpeedChoice",
    "DeepSpeedFile",
    "DeepSpeedPreset",
    "Device",
    "DeviceChoice",
    "DrillName",
    "FSDPChoice",
    "FSDPPreset",
    "GpuCount",
    "Gpus",
    "Group",
    "Launcher",
    "LauncherSettings",
    "Lora",
    "LoraSettings",
    "Model",
    "NvmeFolder",
    "OutputDir",
    "PlainStrategy",
    "Recovery",
    "RecoverySettings",
    "Strategy",
    "Training",
    "TrainingSettings",
    "TrainingSpec",
    "TrustRemoteCode",
    "Validation",
    "ValidationSettings",
    "parse_spec",
    "titled",
]


def titled(title: str, **limits: Any) -> Any:
    """Return a field of a flow's parameter with a title; Prefect would show the bare name (prefect 3.9.1)."""
    return Field(title=title, json_schema_extra={"title": title}, **limits)


# The types of the spec's fields and of the flows' parameters, with the titles that Prefect's form shows.
Model = Annotated[str, titled("Model", min_length=1)]
Dataset = Annotated[str, titled("Data set", min_length=1)]
OutputDir = Annotated[str, titled("Output folder", min_length=1)]
DeepSpeedChoice = Annotated[DeepSpeedPreset | None, titled("DeepSpeed preset")]
FSDPChoice = Annotated[FSDPPreset | None, titled("FSDP preset")]
DeepSpeedFile = Annotated[str | None, titled("DeepSpeed JSON")]
Strategy = Annotated[PlainStrategy, titled("Strategy without a preset")]
Gpus = Annotated[GpuCount, titled("GPUs")]
DeviceChoice = Annotated[Device, titled("Device")]
NvmeFolder = Annotated[str | None, titled("NVMe folder")]
TrustRemoteCode = Annotated[bool, titled("Run the model's own Python code")]
Training = Annotated[TrainingSettings, titled("Training")]
Lora = Annotated[LoraSettings, titled("LoRA")]
Data = Annotated[DataSettings, titled("Data")]
Recovery = Annotated[RecoverySettings, titled("Recovery")]
Launcher = Annotated[LauncherSettings, titled("Launcher")]
Validation = Annotated[ValidationSettings, titled("Validation")]
Blocks = Annotated[BlockNames, titled("Blocks")]


class TrainingSpec(Group):
    """One fine-tuning job. Strict: unknown keys and contradictions are errors.

    Raises:
        pydantic.ValidationError: use `parse_spec` to get `Refused` with readable problems instead.
    """

    model: Model
    """Folder with `config.json`, or a Hub id; `demo://tiny-llama` builds a tiny random model."""
    dataset: Dataset
    """File or folder (JSON lines, JSON, CSV, text, Parquet, Arrow), Hub data set
    `owner/name[@revision][/path][:split]`, or URL that fsspec opens (`s3://`, `https://`);
    `demo://stdlib-qa` is made from the standard library."""
    output_dir: OutputDir = "outputs"
    """Runs are kept in `<output_dir>/runs/<run id>/`."""
    deepspeed: DeepSpeedChoice = None
    """DeepSpeed ZeRO preset; not together with `fsdp` or `deepspeed_config`."""
    fsdp: FSDPChoice = None
    """PyTorch FSDP2 preset; not together with `deepspeed` or `deepspeed_config`."""
    deepspeed_config: DeepSpeedFile = None
    """Path of your own DeepSpeed JSON, used byte for byte."""
    strategy: Strategy = "auto"
    """`auto` picks the least sharding that fits; `single` and `ddp` are strategies without a preset."""
    gpus: Gpus = "auto"
    """GPUs of this machine (one rank each), or CPU ranks with `device=cpu`."""
    device: DeviceChoice = "auto"
    """`cpu` runs the ranks on CPU over gloo: rehearsals, tests, the demo."""
    nvme_path: NvmeFolder = None
    """Folder on a local NVMe disk for `zero3_nvme`."""
    trust_remote_code: TrustRemoteCode = False
    """Off unless you asked for it: the model repository's code runs with your rights."""
    training: Training = TrainingSettings()
    """How the model is trained."""
    lora: Lora = LoraSettings()
    """Adapter settings, used when `training.method` is `lora` or `qlora`."""
    data: Data = DataSettings()
    """What the rows mean and how long they may be."""
    recovery: Recovery = RecoverySettings()
    """What is saved on the way, what a run goes on from, and what happens after a failure."""
    launcher: Launcher = LauncherSettings()
    """How the processes are started, watched and stopped."""
    validation: Validation = ValidationSettings()
    """Which findings of the validation count."""
    blocks: Blocks = BlockNames()
    """Settings and secrets that are kept in Prefect as blocks, by name."""

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus_from_text(cls, value: object) -> object:
        """Accept `"4"` as well as 4, since command lines and forms send text."""
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    def local_paths(self) -> dict[str, str]:
        """Return the fields that may name files of this machine, with what was given for them."""
        resume = self.recovery.resume if "/" in self.recovery.resume else None
        written = {
            "output_dir": self.output_dir,
            "deepspeed_config": self.deepspeed_config,
            "nvme_path": self.nvme_path,
            "data.cache_dir": self.data.cache_dir,
            "recovery.resume": resume,
            "launcher.slurm.hardware": self.launcher.slurm.hardware,
            "launcher.ray.hardware": self.launcher.ray.hardware,
        }
        absolute = {field: str(expanded(p).absolute()) for field, p in written.items() if p}
        named = {"model": self.model, "dataset": self.dataset, "data.eval_dataset": self.data.eval_dataset}
        return {field: value for field, value in named.items() if value} | absolute

    @property
    def nodes(self) -> int:
        """Machines of the run."""
        return self.launcher.cluster.nodes if self.launcher.cluster is not None else 1

    @property
    def recorded_machine(self) -> tuple[str | None, str]:
        """The file that says what the cluster's machines are, if one is named, and the setting that names it."""
        cluster = self.launcher.cluster
        return (cluster.hardware if cluster else None), f"launcher.{self.launcher.engine}.hardware"

    @property
    def compares_answers(self) -> bool:
        """True for tasks that learn from better and worse answers, with TRL's trainers."""
        return self.training.task in ("dpo", "kto", "orpo")

    @property
    def trains_adapters(self) -> bool:
        """True when the weights of the model stay frozen."""
        return self.training.method != "full"

    @model_validator(mode="after")
    def _one_strategy(self) -> TrainingSpec:
        words = _contradiction(vars(self))
        if words:
            raise ValueError(words)
        return self


def _contradiction(values: Mapping[str, Any]) -> str:
    """Say which of the settings that name a strategy exclude each other; empty if none do."""
    named = [name for name in ("deepspeed", "fsdp", "deepspeed_config") if values.get(name) is not None]
    strategy = values.get("strategy", "auto")
    named += [f"strategy={strategy}"] if named and strategy != "auto" else []
    return f"{' and '.join(named)} exclude each other; keep one of them" if len(named) > 1 else ""


def parse_spec(values: Mapping[str, Any]) -> TrainingSpec:
    """Build a `TrainingSpec`, or explain everything that is wrong with `values` at once.

    Args:
        values: field names to values; groups may be mappings or group objects.

    Raises:
        Refused: with one problem per wrong field, each naming the nearest valid value where there is one; and
            for paths outside `SOUP_FLOWS_ROOTS`.
    """
    try:
        spec = TrainingSpec.model_validate(dict(values))
    except ValidationError as error:
        problems = problems_of(error, TrainingSpec)
        words = _contradiction(values)
        if words:  # pydantic looks at single fields first, and goes no further when one is wrong
            fix = "remove the other; `soup-flows presets` tells them apart"
            problems.append(
                Problem(id="SPEC001", severity="error", field=words.split(" ", 1)[0], message=words, fix=fix)
            )
        raise Refused(problems) from None
    outside = problems_with_names(spec.local_paths()) or problems_with_roots(spec.local_paths())
    if outside:
        raise Refused(outside)
    return spec
