"""Read the Python stacks that the ranks of a stalled run wrote, and say who waits for whom."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from soup_flows.launch import layout

_COLLECTIVE_FILES = ("distributed_c10d.py", "c10d_logger.py", "torch.py")
"""Files in which a rank waits for the others; `torch.py` is DeepSpeed's wrapper (deepspeed/comm/torch.py)."""


def stuck_frame(stacks: Path) -> str | None:
    """Return the main thread's innermost frame in a faulthandler dump, as `all_reduce (x.py, line 12)`.

    faulthandler writes the main thread last and each thread's innermost frame first.
    """
    try:
        lines = stacks.read_text(errors="replace").splitlines()
    except OSError:
        return None
    heads = [number for number, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    if not heads or heads[-1] + 1 >= len(lines):
        return None
    file, _, rest = lines[heads[-1] + 1].strip().removeprefix("File ").partition(", line ")
    line, _, function = rest.partition(" in ")
    return f"{function} ({os.path.basename(file.strip(chr(34)))}, line {line})"


def stall_cause(attempt: Path, stall: dict[str, Any]) -> str:
    """Return a sentence that names the stuck rank and where every rank stood.

    Ranks that made equally many steps are told apart by their stacks: one that is in no collective is the one
    the others wait for.

    Args:
        attempt: the attempt's folder.
        stall: the receipt's entry, from `Watchdog.check`.
    """
    beats = stall.get("beats") or [stall]
    frames = {beat.get("rank", 0): stuck_frame(layout.stacks(attempt, beat.get("rank", 0))) for beat in beats}
    fewest = min(beat.get("step", 0) for beat in beats)
    behind = [beat for beat in beats if beat.get("step", 0) == fewest]
    busy = [beat for beat in behind if not _in_collective(frames[beat.get("rank", 0)])]
    stuck = busy[0] if len(busy) == 1 else (behind[0] if len(behind) == 1 else None)
    text = f"no step for {stall.get('quiet_s')} s (allowed {stall.get('threshold_s')} s); "
    if stuck is None:
        text += f"all {len(behind)} ranks made {fewest} steps and wait" if len(behind) == len(beats) else (
            f"ranks {', '.join(str(beat.get('rank')) for beat in behind)} are furthest behind, at step {fewest}"
        )  # fmt: skip
    else:
        text += (
            f"rank {stuck.get('rank')} is furthest behind, at step {stuck.get('step')}, "
            f"phase {stuck.get('phase')}"
        )
    places = "; ".join(f"rank {rank} in {frame}" for rank, frame in sorted(frames.items()) if frame)
    return f"{text}: {places}" if places else text


def _in_collective(frame: str | None) -> bool:
    return frame is not None and any(f"({name}," in frame for name in _COLLECTIVE_FILES)
