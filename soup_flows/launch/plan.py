"""The launch as data: one frozen value that says all about starting an attempt, made by a plain function."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

import soup_flows
from soup_flows.launch import layout
from soup_flows.launch.elastic import elastic_argv
from soup_flows.launch.proc import MARKER, SUPERVISOR_MARKER
from soup_flows.lent import run_environment
from soup_flows.paths import AttemptPaths, RunPaths
from soup_flows.ray_settings import RaySettings
from soup_flows.settings import EngineName
from soup_flows.slurm_settings import SlurmSettings

PACKAGE_ROOT = str(Path(soup_flows.__file__).resolve().parent.parent)
"""Folder that holds the package; a checkout or a site-packages folder."""

INHERITED_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "NODE_RANK",
    "CROSS_RANK",
    "CROSS_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_*",
    "ACCELERATE_*",
    "FSDP_*",
    "DEEPSPEED_*",
    "PARALLELISM_CONFIG_*",
    "MEGATRON_LM_*",
    "OMPI_COMM_WORLD_*",
    "PMI_*",
    "PMIX_*",
    "MV2_COMM_WORLD_*",
    *(MARKER, SUPERVISOR_MARKER, layout.ATTEMPT_DIR, layout.CHANNEL, layout.SUPERVISOR_PID),
)
"""Variables of another launch. torch.distributed, accelerate (`utils/other.py`, `get_int_from_env`) and
DeepSpeed (`comm/comm.py`, `mpi_discovery`) would believe them. A trailing `*` stands for anything."""

ORCHESTRATOR_SECRETS = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Credentials of the orchestrator and of the cluster, which ranks have no use for."""

PASSED_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD",
                  "MLFLOW_TRACKING_TOKEN", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "CLEARML_API_SECRET_KEY",
                  "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")  # fmt: skip
"""Secrets that ranks may need. They are passed by name: their values never enter a `LaunchPlan`."""

PASSED_BY_VALUE = (
    "CUDA_HOME", "GLOO_SOCKET_IFNAME", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_OFFLINE", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME",
    "PATH", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "TRANSFORMERS_OFFLINE", "TRITON_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables of the flow that a job of a cluster gets; none of them is a secret."""


class StallSettings(BaseModel):
    """When the watchdog calls a run stalled; see `soup_flows.launch.watchdog`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    floor_s: float = Field(300.0, gt=0)
    """Seconds without a step that are always allowed."""
    factor: float = Field(10.0, ge=1)
    """Times the longest step so far that a step may take."""
    startup_s: float = Field(3600.0, gt=0)
    """Seconds allowed before the first step, and for loading, evaluating and saving."""


class LeaseSettings(BaseModel):
    """Which devices the attempt holds while it runs; see `soup_flows.launch.leases`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["gpu", "core"]
    """GPUs (or MIG slices) by UUID, or slots of CPU cores."""
    max_wait_s: float | None = Field(None, ge=0)
    """Longest wait for devices that others hold; None waits for as long as it takes."""


class LaunchPlan(BaseModel):
    """Everything about starting one attempt. It can be printed and kept: secrets appear by name only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Names the run, and is the value of the marker that all its processes carry."""
    run_dir: str
    """The run directory, absolute."""
    attempt: int = Field(ge=1)
    """Number of the attempt, counted from 1."""
    nproc_per_node: int = Field(ge=1)
    """Number of ranks on each host."""
    nodes: int = Field(1, ge=1)
    """Number of hosts."""
    node: int = Field(0, ge=0)
    """Number of this host among them."""
    engine: EngineName = "local"
    """What starts the hosts' supervisors; see `soup_flows.launch.engines`."""
    slurm: SlurmSettings = SlurmSettings()
    """What the job asks for, with `engine="slurm"`."""
    ray: RaySettings = RaySettings()
    """The same with `engine="ray"`."""
    cpus_per_node: int = Field(1, ge=1)
    """CPU cores that the ranks of a host use."""
    uses_gpus: bool = False
    """Whether each rank has a GPU."""
    argv: tuple[str, ...] = Field(min_length=1)
    """The launcher's command; nothing goes through a shell."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables added to the inherited environment; none is secret."""
    unset: tuple[str, ...] = ()
    """Names removed from the inherited environment; a trailing `*` stands for anything."""
    secrets: tuple[str, ...] = ()
    """Names of secret variables that are passed on from the flow's environment."""
    config_path: str | None = None
    """The temporary sharding config, below `<run_dir>/tmp`; removed at every end of the attempt."""
    stop_budget_s: float = Field(20.0, ge=1, le=28)
    """Seconds from the request to stop until nothing is left."""
    timeout_s: float | None = Field(None, gt=0)
    """The attempt is stopped after this many seconds."""
    stall: StallSettings = StallSettings()
    """When the watchdog stops the attempt."""
    silence_s: float = Field(1800.0, gt=0)
    """Seconds without an answer of the cluster and without a sign of life after which the flow waits no longer."""
    lease: LeaseSettings | None = None
    """Devices to lease, one per rank, when the attempt starts; None takes what is visible."""
    log_limit_bytes: int = Field(64 << 20, ge=1 << 12)
    """Size at which a log file is rotated; one older file is kept."""

    @model_validator(mode="after")
    def _check_paths(self) -> LaunchPlan:
        if not os.path.isabs(self.run_dir):
            raise ValueError(f"run_dir must be absolute, found {self.run_dir!r}; use RunPaths.of(...)")
        temp = self.paths.temp
        if self.config_path is not None and temp not in Path(self.config_path).parents:
            raise ValueError(
                f"config_path {self.config_path!r} will be removed at the end: pass a copy below {temp}"
            )
        return self

    @property
    def paths(self) -> RunPaths:
        """The files of the run."""
        return RunPaths(Path(self.run_dir))

    @property
    def attempt_paths(self) -> AttemptPaths:
        """The files of this attempt."""
        return self.paths.attempt(self.attempt)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the attempt: `inherited` less `unset`, secrets kept, plus `env`."""
        return {
            **{k: v for k, v in inherited.items() if k in self.secrets or not _named(k, self.unset)},
            **self.env,
            MARKER: self.run_id,
            layout.ATTEMPT_DIR: str(self.attempt_paths.root),
        }


def _named(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name.startswith(p[:-1]) if p.endswith("*") else name == p for p in patterns)


def build_launch_plan(
    *,
    paths: RunPaths,
    run_id: str,
    attempt: int,
    nproc_per_node: int,
    device: Literal["cuda", "cpu"],
    config_path: str | None,
    omp_num_threads: int | None,
    stop_budget_s: float,
    timeout_s: float | None,
    cuda_visible_devices: str | None = None,
    stall: StallSettings | None = None,
    lease: LeaseSettings | None = None,
    nodes: int = 1,
    cluster: SlurmSettings | RaySettings | None = None,
    silence_s: float = 1800.0,
) -> LaunchPlan:
    """Return the plan that starts the rank program on this host under torch elastic.

    Args:
        paths: the run's files.
        run_id: the flow run's id, or one given by the user.
        attempt: number of the attempt, from 1.
        nproc_per_node: ranks on this host.
        device: `cpu` runs the ranks over gloo and hides every GPU.
        config_path: the temporary sharding config below `paths.temp`, or None.
        omp_num_threads: CPU threads per rank; the usable cores divided by the ranks when None.
        stop_budget_s: seconds between the request to stop and the last process being gone.
        timeout_s: seconds after which the attempt is stopped, or None.
        cuda_visible_devices: devices, comma separated (UUIDs or indices); None leaves what is inherited. A
            lease puts its own in their place.
        stall: the watchdog's limits; its defaults when None.
        lease: the devices to hold while the attempt runs, or None.
        nodes: hosts.
        cluster: what a job asks its cluster for, or None to start on this host.
        silence_s: as in `LaunchPlan`.

    Raises:
        pydantic.ValidationError: if a value is out of range or `config_path` is not a temporary copy.
    """
    engine = "local" if cluster is None else "slurm" if isinstance(cluster, SlurmSettings) else "ray"
    threads = omp_num_threads or max(1, len(os.sched_getaffinity(0)) // nproc_per_node)
    env = {
        # Without it an elastic restart reads addresses of the attempt before (pytorch issue 135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # transformers 5.24, integrations/integration_utils.py; else they lie among the checkpoints
        "TENSORBOARD_LOGGING_DIR": os.environ.get("TENSORBOARD_LOGGING_DIR", str(paths.tensorboard)),
    }
    if PACKAGE_ROOT not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        if nodes == 1:  # the loopback device does; a host name that does not resolve then costs nothing
            env["GLOO_SOCKET_IFNAME"] = "lo"
    elif cuda_visible_devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
    return LaunchPlan(
        run_id=run_id,
        run_dir=str(paths.root),
        attempt=attempt,
        nproc_per_node=nproc_per_node,
        nodes=nodes,
        engine=engine,
        **({} if cluster is None else {engine: cluster}),
        cpus_per_node=threads * nproc_per_node,
        uses_gpus=device == "cuda",
        argv=elastic_argv(
            run_id, nproc_per_node, stop_budget_s, "-m", "soup_flows.training", str(paths.root)
        ),
        env=env,
        unset=INHERITED_RANK_VARIABLES + ORCHESTRATOR_SECRETS,
        secrets=tuple(name for name in PASSED_SECRETS if name in run_environment()),
        config_path=config_path,
        stop_budget_s=stop_budget_s,
        timeout_s=timeout_s,
        stall=stall or StallSettings(),
        lease=lease,
        silence_s=silence_s,
    )
