"""Rules about what a run writes."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.hardware.values import Disk
from soup_flows.user_file import expanded
from soup_flows.validation.table import ANY, TRANSFORMERS, Context, Found, rule, rules_in

GIB = 1 << 30
MANY_STEPS = 200
LOCAL_DISKS = ("ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs", "f2fs")
"""File systems of one machine."""


def output_disk(run: Context) -> Disk | None:
    """Return the reading of the output folder's disk, if the machine's recording has one."""
    folder = str(expanded(run.spec.output_dir).absolute())
    return next((d for d in run.hardware.disks if d.path == folder), None)


def checkpoint_bytes(run: Context) -> int | None:
    """Return the size of a checkpoint of a full fine-tune: weights and optimizer state; None where unknown."""
    count = run.model.parameters
    if count is None or not run.full:
        return None
    return count * (12 if run.plan.engine in ("ddp", "single") else 14)


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
    need, disk = _saved_bytes(run), output_disk(run)
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
    disk = output_disk(run)
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
        output = expanded(run.spec.output_dir).absolute()
        model = run.model.folder.absolute()
        if model == output or model in output.parents:
            yield Found(f"{output} is in the model folder")


@rule(
    "CP004",
    "warning",
    "recovery.save_steps",
    "a run that is interrupted starts over, and on_nan has nothing to go back to",
    fix="leave save_steps empty (about ten checkpoints a run)",
    source="this package: a retry goes on from the newest checkpoint that verifies",
)
def never_saved(run: Context) -> Iterator[Found]:
    """A run of many steps without a checkpoint."""
    steps = run.plan.steps
    if run.spec.recovery.save_steps == 0 and steps is not None and steps.total_steps >= MANY_STEPS:
        yield Found(f"save_steps=0 and {steps.total_steps} steps")


@rule(
    "CP005",
    "warning",
    "recovery.save_steps",
    "no checkpoint is ever written",
    fix="lower save_steps, or leave it empty",
    source="transformers/trainer_callback.py, DefaultFlowCallback; the last step is saved as the model",
    versions=TRANSFORMERS,
)
def rarely_saved(run: Context) -> Iterator[Found]:
    """As many steps between checkpoints as the run has, or more."""
    steps, every = run.plan.steps, run.spec.recovery.save_steps
    if steps is not None and every and every >= steps.total_steps > 1:
        yield Found(f"save_steps={every}, and the run has {steps.total_steps} steps")


@rule(
    "CP006",
    "warning",
    "recovery.save_total_limit",
    "saves fail once the disk is full, and a retry goes back to an old step",
    fix="free space, choose another output folder, or lower save_total_limit",
    source="files of checkpoints with AdamW, per weight: DDP 12 bytes, ZeRO 14 to 16, FSDP 16; one more while saving",
    versions=ANY,
)
def no_room_for_checkpoints(run: Context) -> Iterator[Found]:
    """An output disk that holds the final model but not the checkpoints to keep."""
    each, disk = checkpoint_bytes(run), output_disk(run)
    if each is None or disk is None or run.spec.recovery.save_steps == 0:
        return
    need = each * (run.spec.recovery.save_total_limit + 1) + (_saved_bytes(run) or 0)
    if need > disk.free_bytes >= (_saved_bytes(run) or 0):
        yield Found(
            f"{run.spec.recovery.save_total_limit} checkpoints of {each / GIB:.1f} GiB, one being written, and the "
            f"model take {need / GIB:.1f} GiB; {disk.free_bytes / GIB:.1f} GiB are free"
        )


@rule(
    "CP007",
    "error",
    "output_dir",
    "each machine keeps only the shards of its own ranks, and no resume finds them all",
    fix="choose a folder on a file system that all machines share",
    source="huggingface/accelerate#3010; transformers/integrations/deepspeed.py, use_node_local_storage",
    versions=ANY,
)
def shards_apart(run: Context) -> Iterator[Found]:
    """Several machines, and an output folder on a disk of one of them."""
    disk = output_disk(run)
    if run.plan.nodes > 1 and disk is not None and disk.filesystem in LOCAL_DISKS:
        yield Found(f"{disk.path} is on {disk.filesystem} and the run has {run.plan.nodes} nodes")


RULES = rules_in(globals())
