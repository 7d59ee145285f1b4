"""The memory that attempts really needed corrects the predictions for the next attempts and runs of the same work."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from soup_flows.data.reading import list_files
from soup_flows.errors import Refused
from soup_flows.hardware import Hardware
from soup_flows.json_text import parse_json
from soup_flows.ledger import Measured
from soup_flows.manifest import library_versions
from soup_flows.memory.estimate import correction_from
from soup_flows.paths import AttemptPaths, write_atomic
from soup_flows.report import RankMemory
from soup_flows.resume import digest
from soup_flows.resume_fit import identity
from soup_flows.sharding import Correction, ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.units import gib
from soup_flows.user_file import expanded

LEAST_FACTOR = 0.5
"""Rows that happened to be short must not make the next run bold."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?) (bytes|KiB|MiB|GiB)"
_OOM = (
    rf"Tried to allocate {_NUMBER}",
    rf"{_NUMBER} is allocated by PyTorch",
    rf"{_NUMBER} is reserved by PyTorch but unallocated",
)
"""The figures of torch's message (c10/cuda/CUDACachingAllocator.cpp, torch 2.13)."""


def needed_at_oom(text: str) -> int | None:
    """Return the bytes that torch's allocator would have needed when it gave up, from its message; None without.

    It holds what is allocated and what is stranded between blocks, and could not get what it asked for besides:
    the least that this step needs.
    """
    found = [re.search(pattern, text) for pattern in _OOM]
    if found[0] is None or found[1] is None:
        return None
    return sum(round(float(match[1]) * _UNITS[match[2]]) for match in found if match is not None)


def measure(
    plan: ShardingPlan | None, attempt: AttemptPaths, memory: Sequence[RankMemory]
) -> Measured | None:
    """Compare what an attempt needed with its prediction.

    Args:
        plan: what it ran.
        attempt: its files; the errors of ranks that ran out of GPU memory are in them.
        memory: the ranks' peaks, of an attempt that was completed.

    Returns:
        None where nothing was predicted, or nothing measured.
    """
    if plan is None or plan.memory is None:
        return None
    needs = []
    for file in attempt.errors.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            needs.append(needed_at_oom(parse_json(file.read_text())["message"]))
    failed = [need for need in needs if need is not None]
    peaks = failed or [m.device_peak_allocated_bytes for m in memory if m.device_peak_allocated_bytes]
    if not peaks:
        return None
    before = plan.correction.factor if plan.correction else 1.0
    return Measured(
        peak_bytes=max(peaks),
        predicted_bytes=plan.memory.allocated_bytes,
        factor=before * correction_from(plan.memory, max(peaks)),
        out_of_memory=bool(failed),
        settings=plan.chosen.label if plan.chosen else plan.strategy,
    )


class Known(BaseModel):
    """What is known of one kind of work; `<output_dir>/memory/<key>.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    finished: Measured | None = None
    """Of the last attempt that was completed."""
    out_of_memory: Measured | None = None
    """The highest need at which one ran out of memory."""


def remember(spec: TrainingSpec, hardware: Hardware, measured: Measured) -> None:
    """Keep a measurement for later plans of the same work on such a machine; a disk that refuses is no error."""
    file, known = _file(spec, hardware), _known(spec, hardware)
    if not measured.out_of_memory:
        known = known.model_copy(update={"finished": measured})
    elif known.out_of_memory is None or known.out_of_memory.factor < measured.factor:
        known = known.model_copy(update={"out_of_memory": measured})
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(file, known.model_dump_json(indent=1))


def recall(spec: TrainingSpec, hardware: Hardware) -> Correction | None:
    """Return how earlier attempts at this work, on such a machine and with these libraries, correct predictions.

    A run out of memory says what is needed at least, so it can only raise a prediction.
    """
    known = _known(spec, hardware)
    found = [m for m in (known.finished, known.out_of_memory) if m is not None]
    found = [m for m in found if not m.out_of_memory or m.factor > 1]
    if not found:
        return None
    most = max(found, key=lambda m: m.factor)
    factor = max(LEAST_FACTOR, most.factor)
    how = "ran out of memory needing at least" if most.out_of_memory else "needed"
    reason = (
        f"{most.settings} {how} {gib(most.peak_bytes, 2)} in an earlier attempt, "
        f"{gib(most.predicted_bytes, 2)} were predicted; activations and buffers count {factor:.2f} times"
    )
    return Correction(factor=factor, reason=reason)


def _known(spec: TrainingSpec, hardware: Hardware) -> Known:
    with contextlib.suppress(OSError, ValueError):
        return Known.model_validate_json(_file(spec, hardware).read_bytes())
    return Known()


def _file(spec: TrainingSpec, hardware: Hardware) -> Path:
    """Name the file by what decides how much is needed, whatever the strategy, micro batch and number of steps.

    The content of the rows counts by size alone: plans are made before they are read.
    """
    settings = identity(spec) | {"dtype": spec.training.dtype, "dataset": spec.dataset}
    settings.pop("training.max_steps")
    with contextlib.suppress(Refused, OSError):
        settings["bytes"] = [Path(file).stat().st_size for file in list_files(spec.dataset)]
    gpus = sorted({(gpu.name, gpu.memory_total_bytes) for gpu in hardware.gpus})
    key = digest([settings, gpus, library_versions()])[:32]
    return expanded(spec.output_dir).absolute() / "memory" / f"{key}.json"
