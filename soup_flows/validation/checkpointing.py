"""Rules about what a run writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from soup_flows.hardware.values import Disk
from soup_flows.validation.table import ANY, TRANSFORMERS, Context, Found, rule, rules_in

GIB = 1 << 30


def _disk(run: Context) -> Disk | None:
    """Return the reading of the output folder's disk, if the machine's recording has one."""
    folder = str(Path(run.spec.output_dir).expanduser().absolute())
    return next((d for d in run.hardware.disks if d.path == folder), None)


def _saved_bytes(run: Context) -> int | None:
    """Return the size of the final model: fp32 without DeepSpeed's copies, else in the compute dtype."""
    count = run.model.parameters
    if count is None or not run.full:
        return None
    return count * (2 if run.plan.engine == "deepspeed" and run.plan.dtype != "fp32" else 4)


@rule(
    "CP001",
    "error",
    "output_dir",
    "the disk is full in the middle of the final save, and the trained model is lost",
    fix="free space, or choose another output folder",
    source="safetensors files hold every weight once",
    versions=TRANSFORMERS,
)
def no_room(run: Context) -> Iterator[Found]:
    """An output disk that does not hold the final model."""
    need, disk = _saved_bytes(run), _disk(run)
    if need and disk and need > disk.free_bytes:
        yield Found(f"the model takes {need / GIB:.1f} GiB and {disk.free_bytes / GIB:.1f} GiB are free")


@rule(
    "CP002",
    "warning",
    "output_dir",
    "everything the run writes takes main memory and is gone after a restart",
    fix="choose a folder on a disk",
    source="Linux, tmpfs(5)",
    versions=ANY,
)
def in_memory(run: Context) -> Iterator[Found]:
    """An output folder in main memory."""
    disk = _disk(run)
    if disk and disk.filesystem in ("tmpfs", "ramfs"):
        yield Found(f"{disk.path} is on {disk.filesystem}")


@rule(
    "CP003",
    "warning",
    "output_dir",
    "the run's files and the model you start from are mixed, and a copy of the model takes them along",
    fix="choose another output folder",
    source="this package: runs are kept in <output_dir>/runs",
    versions=ANY,
)
def inside_model(run: Context) -> Iterator[Found]:
    """An output folder inside the model folder."""
    if run.model.folder is not None:
        output = Path(run.spec.output_dir).expanduser().absolute()
        model = run.model.folder.absolute()
        if model == output or model in output.parents:
            yield Found(f"{output} is in the model folder")


RULES = rules_in(globals())
