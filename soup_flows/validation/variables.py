"""Rules about inherited environment variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from soup_flows.launch.plan import INHERITED_RANK_VARIABLES
from soup_flows.user_file import expanded
from soup_flows.validation.table import ACCELERATE, ANY, TRANSFORMERS, Context, Found, rule, rules_in

OWN = "SOUP_FLOWS_"
SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "TORCH_USE_CUDA_DSA": ("1",),
    "NCCL_DEBUG": ("TRACE",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCH_CPP_LOG_LEVEL": ("INFO",),
    "NCCL_DEBUG_SUBSYS": ("ALL",),
}
SLOW_LINKS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
}


def removed_variables(run: Context) -> list[str]:
    """Return the variables of another launch that the ranks do not inherit."""
    prefixes = tuple(name[:-1] for name in INHERITED_RANK_VARIABLES if name.endswith("*"))
    names = {name for name in INHERITED_RANK_VARIABLES if not name.endswith("*")}
    return sorted(
        key for key in run.environ if (key in names or key.startswith(prefixes)) and not key.startswith(OWN)
    )


@rule(
    "EN020",
    "note",
    "launcher",
    "they are left out, since accelerate and DeepSpeed would believe them over the plan",
    fix="say what you mean in the spec; an accelerate YAML can be given with --accelerate-config",
    source="accelerate/state.py, accelerate/utils/dataclasses.py, transformers/training_args.py",
    versions=f"{ACCELERATE}, {TRANSFORMERS}",
    local=True,
)
def another_launch(run: Context) -> Iterator[Found]:
    """Inherited variables of another launch: ranks, ACCELERATE_*, FSDP_*, DEEPSPEED_*."""
    names = removed_variables(run)
    if names:
        yield Found(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set here")


@rule(
    "EN021",
    "warning",
    "launcher",
    "every kernel or collective waits or is logged, and training is many times slower",
    fix="unset it unless you are looking for a fault",
    source="PyTorch documentation, CUDA environment variables; NCCL user guide, environment variables",
    local=True,
)
def debugging(run: Context) -> Iterator[Found]:
    """Debugging switches left on."""
    for name, values in SLOW.items():
        if run.environ.get(name, "").upper() in values and run.plan.device == "cuda":
            yield Found(f"{name}={run.environ[name]}")


@rule(
    "EN022",
    "warning",
    "launcher",
    "traffic between the GPUs goes through host memory",
    fix="unset it on machines with NVLink",
    source="NCCL user guide, environment variables",
    local=True,
)
def links_off(run: Context) -> Iterator[Found]:
    """NCCL kept off NVLink on a machine that has it."""
    for name, value in SLOW_LINKS.items():
        nvlink = run.hardware.interconnect in ("nvlink", "nvswitch")
        if nvlink and run.plan.world_size > 1 and run.environ.get(name) == value:
            yield Found(f"{name}={value} on a machine with NVLink")


def interfaces() -> list[str]:
    """Return the names of this machine's network interfaces, sorted; empty where they cannot be listed."""
    try:
        return sorted(entry.name for entry in Path("/sys/class/net").iterdir())
    except OSError:
        return []


@rule(
    "EN023",
    "error",
    "launcher",
    "the ranks find no way to each other",
    fix="name an interface of this machine, or unset it",
    source="NVIDIA/nccl#1580, #1581; NCCL user guide, NCCL_SOCKET_IFNAME",
    versions=ANY,
    local=True,
)
def no_interface(run: Context) -> Iterator[Found]:
    """`NCCL_SOCKET_IFNAME` or `GLOO_SOCKET_IFNAME` that names no interface of this machine."""
    here = interfaces()
    # The launcher sets GLOO_SOCKET_IFNAME itself for CPU ranks.
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if run.plan.device == "cuda" else ():
        wanted = run.environ.get(name, "")
        if not here or not wanted or wanted.startswith("^") or run.plan.world_size == 1:
            continue
        exact = wanted.startswith("=") or name.startswith("GLOO")
        listed = [part for part in wanted.removeprefix("=").split(",") if part]
        if not any(each == part or (not exact and each.startswith(part)) for each in here for part in listed):
            yield Found(f"{name}={wanted}, and the interfaces are {', '.join(here)}")


@rule(
    "EN026",
    "warning",
    "launcher",
    "NCCL and gloo each take the first that they find, and hang in the first collective if the other machine's "
    "differs",
    fix="set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME on every machine to the one that joins them",
    source="NVIDIA/nccl#286, #1580, #1581; NCCL user guide, NCCL_SOCKET_IFNAME",
    versions=ANY,
    local=True,
)
def several_interfaces(run: Context) -> Iterator[Found]:
    """Several machines, several network interfaces and none named."""
    unset = [name for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if not run.environ.get(name)]
    real = [
        name for name in interfaces() if not name.startswith(("lo", "docker", "veth", "br-", "virbr", "cni"))
    ]
    if run.plan.nodes > 1 and len(real) > 1 and unset:
        yield Found(f"{' and '.join(unset)} not set, and this machine has {', '.join(real)}")


def _hub_id(run: Context) -> bool:
    return run.model.folder is None and run.model.config is None and not Path(run.spec.model).exists()


def _hub_cache(run: Context) -> Path:
    """Return the Hub cache (huggingface_hub/constants.py)."""
    home = run.environ.get("HF_HOME") or f"{run.environ.get('HOME', '~')}/.cache/huggingface"
    return expanded(run.environ.get("HF_HUB_CACHE") or f"{home}/hub")


def _is_on(run: Context, name: str) -> bool:
    return run.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def _cached(run: Context) -> bool:
    folder = _hub_cache(run) / ("models--" + run.spec.model.replace("/", "--")) / "snapshots"
    return folder.is_dir() and any(folder.iterdir())


@rule(
    "EN024",
    "error",
    "model",
    "nothing may be downloaded, and the ranks stop while loading",
    fix="download it first (hf download), name a folder, or unset HF_HUB_OFFLINE",
    source="huggingface_hub/constants.py, HF_HUB_OFFLINE",
    local=True,
)
def offline(run: Context) -> Iterator[Found]:
    """A Hub model that is not in the cache, in offline mode."""
    if (
        _hub_id(run)
        and (_is_on(run, "HF_HUB_OFFLINE") or _is_on(run, "TRANSFORMERS_OFFLINE"))
        and not _cached(run)
    ):
        yield Found(f"{run.spec.model} is not in {_hub_cache(run)} and the Hub is offline")


@rule(
    "EN025",
    "warning",
    "model",
    "GPUs wait for the download, every rank asks the Hub, and a private model fails only then",
    fix="download it first (hf download), then set HF_HUB_OFFLINE=1 or name the folder",
    source="huggingface/huggingface_hub#1133, #4306; huggingface/transformers#31019",
    local=True,
)
def download(run: Context) -> Iterator[Found]:
    """A Hub model that is not in the cache."""
    if (
        _hub_id(run)
        and not (_is_on(run, "HF_HUB_OFFLINE") or _is_on(run, "TRANSFORMERS_OFFLINE"))
        and not _cached(run)
    ):
        yield Found(f"{run.spec.model} is not in {_hub_cache(run)}")


RULES = rules_in(globals())
