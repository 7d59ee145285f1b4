"""A DeepSpeed checkpoint for another number of ranks: converted to the universal form, beside the original."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from soup_flows.launch import rank
from soup_flows.paths import RunPaths
from soup_flows.resume import Orders

FOLDER = ".universal"
"""Folder below `checkpoints/` for the converted checkpoint; it lasts until the first step after the resume."""
LONGEST = timedelta(hours=6)
"""The others wait this long for the rank that converts."""
BEAT_S = 10.0
SPACE = 3
"""Times the checkpoint's size that must be free: fp32 weights and moments, once as fragments and once whole."""
SERIAL_BYTES = 1 << 30
"""Below this size worker processes cost more than they save."""


def folder_to_resume(orders: Orders, paths: RunPaths, is_main: bool) -> str | None:
    """Return the folder that `Trainer` resumes from, or None to start from the model; every rank calls it.

    A checkpoint of ZeRO-1, ZeRO-2, or of ZeRO-3 with adapters is converted first where `orders` say so. Nothing
    in it is changed: the result is a folder with links to its files and the shards in their universal form.
    Source: deepspeed 0.19.8, `checkpoint/ds_to_universal.py` and `runtime/engine.py` (`latest_universal`).

    Args:
        orders: where this attempt starts.
        paths: the run's files.
        is_main: True on the rank that converts, while the others wait.

    Raises:
        OSError: if there is too little room.
        RuntimeError: if the conversion fails, with its last lines.
    """
    if orders.checkpoint is None or orders.weights_only:
        return None
    if not orders.universal:
        return orders.checkpoint
    target = paths.checkpoints / FOLDER / Path(orders.checkpoint).name
    if is_main:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.mkdir(parents=True, mode=0o700)
        _convert(Path(orders.checkpoint), target)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group=dist.new_group(backend="gloo", timeout=LONGEST))
    return str(target)


def _convert(checkpoint: Path, target: Path) -> None:
    tag = (checkpoint / "latest").read_text().strip()
    size = sum(file.stat().st_size for file in (checkpoint / tag).iterdir())
    free = shutil.disk_usage(target).free
    if free < SPACE * size:
        raise OSError(f"{free / 2**30:.2f} GiB are free in {target}, converting the checkpoint needs "
                      f"{SPACE * size / 2**30:.2f} GiB")  # fmt: skip
    for entry in checkpoint.iterdir():
        if entry.name not in (tag, "latest"):
            (target / entry.name).symlink_to(entry.resolve())
    workers = str(1 if size < SERIAL_BYTES else min(4, os.cpu_count() or 1))
    argv = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
            "--input_folder", str(checkpoint / tag), "--output_folder", str(target / f"{tag}_universal"),
            "--num_extract_workers", workers, "--num_merge_workers", workers]  # fmt: skip
    begun = time.monotonic()
    with (target.parent / "log").open("w+") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            rank.heartbeat(0, "convert")
            try:
                process.wait(BEAT_S)
            except subprocess.TimeoutExpired:
                continue
        log.seek(0)
        lines = log.read().strip().splitlines()
    if process.returncode:
        raise RuntimeError("the checkpoint could not be converted: " + "\n".join(lines[-5:]))
    (target / "latest_universal").write_text(f"{tag}_universal")
    print(f"converted {checkpoint.name} in {time.monotonic() - begun:.1f} s", flush=True)  # noqa: T201 (rank's log)
