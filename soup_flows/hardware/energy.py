"""What an attempt's GPUs used, from the counters that NVML keeps for each whole GPU since the driver was loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from soup_flows.hardware.nvml import NvmlProbe
from soup_flows.hardware.probe import Probe
from soup_flows.json_text import parse_json
from soup_flows.paths import write_json


@contextlib.contextmanager
def metered(uuids: Sequence[str], file: Path, probe: Probe | None = None) -> Iterator[None]:
    """Write the counters of some GPUs to `file` before and after what runs inside, however that ends.

    Nothing is written without GPUs. A counter that cannot be read is left out; reading never raises.

    Args:
        uuids: the GPUs; MIG slices have no counter of their own.
        file: `energy.json` of the attempt; its folder is made.
        probe: reads the GPUs; NVML on this machine when None.
    """
    probe = probe or NvmlProbe()
    if not uuids:
        yield
        return
    before = _read(probe, uuids)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(file, {"uuids": list(uuids), "before_mj": before, "after_mj": _read(probe, uuids)})


def used_joules(file: Path) -> float | None:
    """Return what all GPUs of an attempt used together, in joules; None unless every counter was read twice.

    A counter that went back was reset, by a driver that was loaded anew, and says nothing.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = parse_json(file.read_text())
        spent = [found["after_mj"][uuid] - found["before_mj"][uuid] for uuid in found["uuids"]]
        return sum(spent) / 1000 if spent and min(spent) >= 0 else None
    return None


def _read(probe: Probe, uuids: Sequence[str]) -> dict[str, int]:
    return {
        gpu.uuid: gpu.energy_mj
        for gpu in probe.read().gpus
        if gpu.uuid in uuids and gpu.uuid is not None and gpu.energy_mj is not None
    }
