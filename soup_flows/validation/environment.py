"""Rules about the installed packages and the folders of a run."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from soup_flows.hardware.host import disk
from soup_flows.paths import is_writable_folder, nearest_existing
from soup_flows.user_file import expanded
from soup_flows.validation.table import ANY, DEEPSPEED, Context, Found, rule, rules_in

TRAIN_MODULES = ("torch", "transformers", "accelerate", "datasets")
OLDEST = {
    "torch": "2.13",
    "transformers": "5.24",
    "accelerate": "1.15",
    "peft": "0.21",
    "deepspeed": "0.19.8",
}
"""What the rules and the training program were checked with, as in the extra `train`."""
LOCK_IS_OLD_S = 600.0
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "ceph", "9p", "fuse")


def missing(*modules: str) -> Iterator[Found]:
    """Yield one finding that names the modules that are not installed; nothing is imported."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        yield Found(", ".join(absent) + " cannot be found")


@rule(
    "EN001",
    "error",
    "model",
    "the ranks could not start",
    fix="pip install 'soup-flows[train]' on the machine that trains",
    source="the extra `train` of this package",
    local=True,
)
def no_stack(_: Context) -> Iterator[Found]:
    """torch, transformers, accelerate or datasets not installed."""
    yield from missing(*TRAIN_MODULES)


@rule(
    "EN002",
    "error",
    "deepspeed",
    "the ranks would fail after loading the model",
    fix="pip install 'soup-flows[train]', or use fsdp= instead",
    source="MakazhanAlpamys/Soup: found after 34 s of loading",
    local=True,
)
def no_deepspeed(run: Context) -> Iterator[Found]:
    """A DeepSpeed strategy without DeepSpeed."""
    if run.plan.engine == "deepspeed":
        yield from missing("deepspeed")


@rule(
    "EN003",
    "error",
    "training.method",
    "adapters could not be made",
    fix="pip install 'soup-flows[train]'",
    source="the extra `train` of this package",
    local=True,
)
def no_peft(run: Context) -> Iterator[Found]:
    """LoRA without peft."""
    if not run.full:
        yield from missing("peft")


@rule(
    "EN004",
    "error",
    "output_dir",
    "nothing could be saved",
    fix="name a folder you may write",
    source="POSIX permissions",
    local=True,
)
def unwritable_output(run: Context) -> Iterator[Found]:
    """An output folder that cannot be written."""
    folder = nearest_existing(expanded(run.spec.output_dir).absolute())
    if not is_writable_folder(folder):
        yield Found(f"{folder} is not a folder that this user may write")


def builds_operator(run: Context) -> bool:
    """Whether DeepSpeed compiles its CPU optimizer or its NVMe operator in this run."""
    devices = {run.device_of("offload_optimizer"), run.device_of("offload_param")}
    forced = run.plan.config.get("zero_force_ds_cpu_optimizer") is not False
    return "nvme" in devices or (run.device_of("offload_optimizer") == "cpu" and forced)


@rule(
    "EN005",
    "error",
    "deepspeed",
    "DeepSpeed's CPU Adam is compiled at the first use and would fail after the model was loaded",
    fix="install g++ and ninja, or use a preset without off-load",
    source="deepspeed/ops/op_builder/builder.py; nvcc is not needed",
    versions=DEEPSPEED,
)
def no_compiler(run: Context) -> Iterator[Found]:
    """Off-load of DeepSpeed without a C++ compiler or ninja."""
    parts = (("C++ compiler", run.hardware.cxx), ("ninja", run.hardware.ninja))
    lacking = [name for name, there in parts if not there]
    if lacking and builds_operator(run):
        yield Found(f"no {' and no '.join(lacking)} was found")


@rule(
    "EN006",
    "error",
    "model",
    "the strategies were checked with newer versions, and older ones differ in silence",
    fix="pip install -U 'soup-flows[train]'",
    source="huggingface/accelerate#4206, huggingface/peft#3576, deepspeedai/DeepSpeed#8148",
    local=True,
)
def old_packages(run: Context) -> Iterator[Found]:
    """An installed package older than the oldest that is supported."""
    needed = ["torch", "transformers", "accelerate"]
    needed += [] if run.full else ["peft"]
    needed += ["deepspeed"] if run.plan.engine == "deepspeed" else []
    for name in needed:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # EN001 to EN003
        if _numbers(version) < _numbers(OLDEST[name]):
            yield Found(f"{name} {version} is older than {OLDEST[name]}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


@rule(
    "EN007",
    "error",
    "model",
    "the ranks could not load the quantised weights",
    fix="pip install 'soup-flows[quantised]' on the machine that trains",
    source="transformers/quantizers/quantizer_bnb_4bit.py, validate_environment",
    local=True,
)
def no_bitsandbytes(run: Context) -> Iterator[Found]:
    """QLoRA, or a model quantised by bitsandbytes, without bitsandbytes."""
    config = run.model.quantization or {}
    if (
        run.spec.training.method == "qlora"
        or config.get("quant_method") == "bitsandbytes"
        or config.get("load_in_4bit")
        or config.get("load_in_8bit")
    ):
        yield from missing("bitsandbytes")


def _extension_folder(run: Context) -> Path:
    """Return where torch keeps compiled extensions (torch/utils/cpp_extension.py, get_default_build_root)."""
    home = run.environ.get("HOME", "~")
    cache = run.environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    return expanded(run.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions")


@rule(
    "EN008",
    "error",
    "deepspeed",
    "torch waits for it for ever, without a word, when it compiles the operator",
    fix="remove the lock file if no build is running",
    source="pytorch/pytorch#189245; torch/utils/file_baton.py",
    local=True,
)
def stale_lock(run: Context) -> Iterator[Found]:
    """A lock that a killed build of an operator left behind."""
    if not builds_operator(run):
        return
    folder = _extension_folder(run)
    for lock in sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")]):
        try:
            age = time.time() - lock.stat().st_mtime
        except OSError:
            continue
        if age > LOCK_IS_OLD_S:
            yield Found(f"{lock} is {age / 60:.0f} minutes old")


@rule(
    "EN009",
    "warning",
    "deepspeed",
    "ranks build into it at once: slow starts, races and stale locks",
    fix="set TORCH_EXTENSIONS_DIR to a folder on a local disk",
    source="pytorch/pytorch#189245; DeepSpeed documentation, pre-building operators",
    versions=ANY,
    local=True,
)
def shared_extensions(run: Context) -> Iterator[Found]:
    """Operators that are compiled in a folder on a network file system."""
    if builds_operator(run) and run.plan.world_size > 1:
        yield from _on_network(_extension_folder(run))


def _on_network(folder: Path) -> Iterator[Found]:
    found = disk(folder, Path("/"))
    if found and found.filesystem.split(".")[0] in NETWORK:
        yield Found(f"{folder} is on {found.filesystem}")


@rule(
    "EN027",
    "warning",
    "launcher",
    "every rank compiles into it and waits for its locks; DeepSpeed warns of hangs at the end",
    fix="set TRITON_CACHE_DIR to a folder on a local disk",
    source="deepspeed/ops/transformer/inference/triton/matmul_ext.py, is_nfs_path",
    versions=DEEPSPEED,
    local=True,
)
def shared_triton(run: Context) -> Iterator[Found]:
    """Triton's cache on a network file system, under DeepSpeed on GPUs."""
    if run.plan.engine == "deepspeed" and run.plan.device == "cuda" and run.plan.world_size > 1:
        home = run.environ.get("TRITON_HOME") or f"{run.environ.get('HOME', '~')}/.triton"
        yield from _on_network(expanded(run.environ.get("TRITON_CACHE_DIR") or home))


@rule(
    "EN010",
    "error",
    "training.task",
    "the ranks stop when the trainer is made, after the model was loaded",
    fix="pip install 'soup-flows[preference]' on the machine that trains",
    source="the extra `preference` of this package",
    local=True,
)
def no_trl(run: Context) -> Iterator[Found]:
    """DPO, KTO or ORPO without TRL."""
    if run.spec.compares_answers:
        yield from missing("trl")


@rule(
    "EN013",
    "error",
    "deepspeed",
    "DeepSpeed cannot compile its operator and the ranks stop after the model was loaded",
    fix="set TORCH_EXTENSIONS_DIR to a folder that you may write",
    source="torch/utils/cpp_extension.py, _get_build_directory; homes of containers are often read-only",
    local=True,
)
def unwritable_extensions(run: Context) -> Iterator[Found]:
    """Operators that would be compiled in a folder that cannot be written."""
    folder = nearest_existing(_extension_folder(run))
    if builds_operator(run) and not is_writable_folder(folder):
        yield Found(f"{folder} is not a folder that this user may write")


RULES = rules_in(globals())
