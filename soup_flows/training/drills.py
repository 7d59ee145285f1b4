"""The suffering of a fault drill, as a rank brings it about. It acts only when the run's spec names a drill.

Nothing here is simulated by a message: processes are really killed, memory really runs out, collectives really
hang. Standard library at import, so that rehearsals without torch can use it.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from soup_flows.launch import layout, rank
from soup_flows.launch.proc import parent_of
from soup_flows.launch.rank import EventWriter

AT_STEP = 4
"""Optimizer step after which a drill begins."""
VICTIM = 1
"""Rank that suffers where only one does; rank 0 brings about what happens outside the ranks."""
FLOOD_LINES = 50_000
SPARE_BYTES = 256 << 20
"""Memory that is left to a rank when its host memory is to run out."""


class Drill:
    """Waits for its step and then acts, once.

    Args:
        name: the drill, or None for a run that is left in peace.
        events: takes the event `drill`, whose time is that of the cause.
        small_disk: a small file system that the drill `disk_full` mounted; it need not exist.
    """

    def __init__(self, name: str | None, events: EventWriter, small_disk: Path) -> None:
        self.name, self.events, self.small_disk = name, events, small_disk
        if name == "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def at_step(self, step: int, trainer: Any = None) -> None:
        """Call after every optimizer step of every rank; `trainer` is None in a rehearsal."""
        if self.name is None or step != AT_STEP:
            return
        if self.name == "ignore_sigterm":  # again: the rank program has set a handler of its own since
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        first = self.events.rank == 0
        if first or self.name in ("kill_rank", "hang_rank", "hang_collective", "cuda_oom", "host_oom"):
            self.events.write("drill", name=self.name, step=step)
        if self.name in _OUTSIDE and first:
            _OUTSIDE[self.name]()
        elif self.name in _VICTIM and self.events.rank == VICTIM:
            _VICTIM[self.name]()
        elif self.name == "nan_loss":
            _poison(trainer)
        elif self.name == "log_flood":
            _flood()

    def at_save(self) -> None:
        """Call on every rank before the final model is saved."""
        if self.name == "disk_full" and self.events.rank == 0:
            self.events.write("drill", name=self.name)
            _fill_disk(self.small_disk)
        elif self.name == "exit_abort" and self.events.rank == VICTIM:
            self.events.write("drill", name=self.name)
            atexit.register(os.abort)


def _supervisor() -> int:
    return int(os.environ[layout.SUPERVISOR_PID])


def _flow() -> int:
    flow = parent_of(_supervisor())
    if flow is None or flow == 1:
        raise RuntimeError("the flow process is gone already")
    return flow


def _hang() -> None:
    while True:
        time.sleep(1)


def _hang_in_collective() -> None:
    """Wait in a collective that no other rank enters, as after a mismatch of shapes or branches."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        _hang()
    dist.recv(torch.zeros(1), src=0)


def _run_out_of_memory() -> None:
    """Lower this process's own limit (`man 2 setrlimit`, RLIMIT_AS) and take memory until the kernel refuses."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    taken = []
    while True:
        taken.append(bytearray(32 << 20))


def _run_out_of_gpu_memory() -> None:
    """Raise what torch raises, since a CPU rank has no GPU memory to run out of."""
    import torch

    if torch.cuda.is_available():
        taken = []
        while True:
            taken.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB (a fault drill)")


def _fill_disk(small_disk: Path) -> None:
    """Fill the small file system that the drill mounted; without one, write to a device that is always full."""
    target = small_disk / "filler" if small_disk.is_mount() else Path("/dev/full")
    with target.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def _poison(trainer: Any) -> None:
    """Make one weight NaN on every rank, as a diverging step would."""
    import torch

    with torch.no_grad():
        next(p for p in trainer.model.parameters() if p.requires_grad and p.numel()).fill_(float("nan"))


def _flood() -> None:
    for number in range(FLOOD_LINES):
        print(f"flood {number} " + "x" * 80)  # noqa: T201 (the rank's log)


_OUTSIDE = {
    "kill_supervisor": lambda: os.kill(_supervisor(), signal.SIGKILL),
    "kill_flow": lambda: os.kill(_flow(), signal.SIGKILL),
    "sigterm": lambda: os.kill(_flow(), signal.SIGTERM),
    "ignore_sigterm": lambda: os.kill(_flow(), signal.SIGTERM),
}
_VICTIM = {
    "kill_rank": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang_rank": _hang,
    "hang_collective": _hang_in_collective,
    "cuda_oom": _run_out_of_gpu_memory,
    "host_oom": _run_out_of_memory,
}


def rehearse(run_dir: Path, attempt: Path) -> None:
    """Pretend to train: beat and write events as the rank program does, without torch, for drills of processes."""
    import json

    spec = json.loads((run_dir / "spec.json").read_text())
    events = EventWriter(attempt / "events.jsonl", rank.rank_number())
    events.write("started", pid=os.getpid(), torch=None, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    drill = Drill(spec["launcher"]["drill"], events, run_dir / "drill-disk")
    rank.heartbeat(0, "load")
    for step in range(1, 10_000):
        time.sleep(0.1)
        rank.heartbeat(step)
        events.write("step", step=step, seconds=0.1)
        print(f"step {step}", flush=True)  # noqa: T201 (the rank's log)
        drill.at_step(step)


if __name__ == "__main__":
    import sys

    rank.attach()
    try:
        rehearse(Path(sys.argv[1]), Path(os.environ[layout.ATTEMPT_DIR]))
    except BaseException as error:
        rank.write_error(error)
        raise
