"""Which of the machine's GPUs a process here would see, and why not the others.

Rules, with their sources: CUDA_VISIBLE_DEVICES as in the CUDA C++ Programming Guide (environment variables)
and `torch.cuda._parse_visible_devices`, which tests compare with; MIG as in NVIDIA's MIG User Guide (device
enumeration); NVIDIA_VISIBLE_DEVICES as in the NVIDIA Container Toolkit; SLURM_STEP_GPUS and SLURM_JOB_GPUS as
in sbatch(1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from soup_flows.hardware.probe import GpuReading, MigSlice
from soup_flows.hardware.values import UnusedGpu

CUDA = "CUDA_VISIBLE_DEVICES"
CONTAINER = "NVIDIA_VISIBLE_DEVICES"
SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")

Device = tuple[GpuReading, MigSlice | None]


@dataclass
class Selection:
    """The devices a process sees, in CUDA's order, and what is left out."""

    devices: list[Device] = field(default_factory=list)
    unused: list[UnusedGpu] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def select(readings: Sequence[GpuReading], environ: Mapping[str, str]) -> Selection:
    """Apply CUDA_VISIBLE_DEVICES, the container's and Slurm's grants, and CUDA's MIG rule to `readings`.

    Args:
        readings: every GPU the driver shows, in its order.
        environ: the environment the run would get.

    Returns:
        The visible devices in CUDA's order; every other one with its reason.
    """
    result = Selection()
    readings = _granted_slices(readings, environ.get(CONTAINER, ""), result)
    named, reason = _by_cuda(readings, environ.get(CUDA), result.notes)
    allowed, grant = _granted(readings, environ, result.notes)
    whole: list[Device] = []
    for reading, part in named:
        if reading.index in allowed:
            whole.append((reading, part))
        else:
            result.unused.append(unused(reading, part, "hidden", grant))
    shown = {reading.index for reading, _ in named}
    result.unused += [unused(r, None, "hidden", reason) for r in readings if r.index not in shown]
    _one_slice(whole, result)
    if len({r.name for r in readings if r.name}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        result.notes.append(
            "The GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID: CUDA numbers the fastest first, so its "
            "numbers may not be those of nvidia-smi that are shown here. UUIDs are unambiguous."
        )
    return result


def unused(reading: GpuReading, part: MigSlice | None, why: str, reason: str) -> UnusedGpu:
    """Describe a device that is left out."""
    return UnusedGpu.model_validate(
        {
            "vendor": "nvidia",
            "name": (part.name if part else reading.name) or "NVIDIA GPU",
            "why": why,
            "reason": reason,
            "index": reading.index,
            "uuid": part.uuid if part else reading.uuid,
        }
    )


def _by_cuda(readings: Sequence[GpuReading], value: str | None, notes: list[str]) -> tuple[list[Device], str]:
    """Return what CUDA_VISIBLE_DEVICES leaves, and the reason for everything it hides."""
    if value is None:
        return [(reading, None) for reading in readings], ""
    reason = f"hidden by {CUDA}={value!r}"
    twice = f"{CUDA}={value!r} names a device twice, and CUDA then shows no device at all."
    prefix = next((p for p in ("GPU-", "MIG-") if value.startswith(p)), "")
    found: list[Device] = []
    items = _items(value, prefix)
    if len(set(items)) < len(items):
        notes.append(twice)
        return [], reason
    for item in items:
        device = _device(readings, item, prefix)
        if device is None:
            notes.append(f"{CUDA}={value!r}: {item!r} names no device here; CUDA stops reading there.")
            break
        if device in found:
            notes.append(twice)
            return [], reason
        found.append(device)
    return found, reason


def _items(value: str, prefix: str) -> list[str]:
    """Split CUDA_VISIBLE_DEVICES up to its first entry that is no device of its kind, such as -1."""
    items = []
    for item in value.split(","):
        if prefix:
            known = item if item.startswith(prefix) else None
        else:
            number = re.match(r"\+?(\d+)", item.strip())  # read like strtoul: `1gpu` is 1
            known = str(int(number[1])) if number else None
        if known is None:
            break
        items.append(known)
    return items


def _device(readings: Sequence[GpuReading], item: str, prefix: str) -> Device | None:
    """Return the device one entry of CUDA_VISIBLE_DEVICES names; a UUID may be cut short if it is unique."""
    if not prefix:
        return next(((r, None) for r in readings if str(r.index) == item), None)
    if prefix == "GPU-":
        gpus = [r for r in readings if r.uuid and r.uuid.startswith(item)]
        return (gpus[0], None) if len(gpus) == 1 else None
    parts = [(r, s) for r in readings for s in r.slices if s.uuid.startswith(item)]
    return parts[0] if len(parts) == 1 else None


def _granted(
    readings: Sequence[GpuReading], environ: Mapping[str, str], notes: list[str]
) -> tuple[set[int], str]:
    """Return the `index` of every GPU the container and Slurm grant, and the reason for the rest.

    A container that works as intended, and a Slurm step with device confinement, show the driver's granted
    GPUs only, renumbered from 0. A list of numbers is therefore applied only if the driver shows more GPUs
    than it names (a privileged container, Slurm without `ConstrainDevices`).
    """
    every = {reading.index for reading in readings}
    value = environ.get(CONTAINER, "all").strip()
    if value == "none":
        return set(), f"hidden by {CONTAINER}='none'"
    if value.lower() not in ("all", "void", "") and "/" not in value:
        granted = _listed(readings, value)
        if granted is not None and granted < every:
            return granted, f"not granted to this container ({CONTAINER}={value!r})"
    if CUDA in environ:
        return every, ""  # Slurm sets it to what it granted
    for name in SLURM:
        granted = _listed(readings, environ[name]) if environ.get(name) else None
        if granted is not None:
            return granted, f"not granted to this Slurm job ({name}={environ[name]!r})"
    if "SLURM_JOB_ID" in environ and readings and not any(environ.get(name) for name in SLURM):
        notes.append(
            "This is a Slurm job without granted GPUs, and Slurm does not keep it from using the ones that "
            "are here: they may belong to other jobs. Ask for them with --gpus or --gres=gpu:N."
        )
    return every, ""


def _granted_slices(readings: Sequence[GpuReading], value: str, result: Selection) -> list[GpuReading]:
    """Leave out the MIG slices that a container's list of MIG UUIDs does not name."""
    if "MIG-" not in value:
        return list(readings)
    kept = []
    for reading in readings:
        mine = tuple(part for part in reading.slices if part.uuid in value.split(","))
        reason = f"not granted to this container ({CONTAINER}={value!r})"
        result.unused += [unused(reading, p, "hidden", reason) for p in reading.slices if p not in mine]
        kept.append(reading.model_copy(update={"slices": mine}))
    return kept


def _listed(readings: Sequence[GpuReading], value: str) -> set[int] | None:
    """Return the GPUs a list of numbers or UUIDs names; None if the driver shows no more than it names."""
    items = [item.strip().split(":")[0] for item in _ranges(value)]
    if len(items) >= len(readings):
        return None
    by_uuid = {r.index for r in readings for i in items if r.uuid and i.startswith("GPU-") and r.uuid == i}
    by_uuid |= {r.index for r in readings for s in r.slices if s.uuid in items}
    by_number = {r.index for r in readings if str(r.index) in items}
    return by_uuid | by_number


def _ranges(value: str) -> list[str]:
    """Split `0,2-3` into `0 2 3`; UUIDs pass unchanged."""
    items: list[str] = []
    for item in value.split(","):
        span = re.fullmatch(r"\s*(\d+)-(\d+)\s*", item)
        items += [str(n) for n in range(int(span[1]), int(span[2]) + 1)] if span else [item]
    return items


def _one_slice(devices: Sequence[Device], result: Selection) -> None:
    """Apply CUDA's rule: a process sees one MIG slice, and then no whole GPU beside it."""
    expanded: list[Device] = []
    for reading, part in devices:
        if part is not None or not reading.mig_enabled:
            expanded.append((reading, part))
        elif reading.slices:
            expanded += [(reading, piece) for piece in reading.slices]
        else:
            reason = "MIG is on and the GPU is not divided: create slices or turn MIG off"
            result.unused.append(unused(reading, None, "mig", reason))
    first = next(((r, p) for r, p in expanded if p is not None), None)
    if first is None:
        result.devices = expanded
        return
    result.devices = [first]
    for reading, part in expanded:
        if (reading.index, part) == (first[0].index, first[1]):
            continue
        reason = (
            "CUDA shows a process one MIG slice only, the first"
            if part is not None
            else "CUDA shows no whole GPU to a process that sees a MIG slice"
        )
        result.unused.append(unused(reading, part, "mig", reason))
