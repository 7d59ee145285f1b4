"""From readings to `Gpu` values, and how the GPUs are connected."""

from __future__ import annotations

from collections.abc import Sequence

from soup_flows.hardware.probe import GpuReading
from soup_flows.hardware.values import Gpu, Interconnect
from soup_flows.hardware.visible import Selection, unused


def build(selection: Selection) -> list[Gpu]:
    """Return the selected devices as values; what cannot be read moves to `selection.unused`.

    A device without uuid, or whose memory cannot be read, is left out: nothing could be planned on it.
    """
    readable = []
    for reading, part in selection.devices:
        memory = (reading if part is None else part).memory_total_bytes
        free = (reading if part is None else part).memory_free_bytes
        uuid = reading.uuid if part is None else part.uuid
        if memory and free is not None and uuid:
            readable.append((reading, part, memory, free, uuid))
            continue
        answers = ", ".join(f"{name}: {text}" for name, text in reading.unread.items())
        reason = f"the driver does not tell its memory or uuid ({answers or 'no reason given'})"
        selection.unused.append(unused(reading, part, "unreadable", reason))
    links = neighbours([reading for reading, *_ in readable])
    gpus = []
    for reading, part, memory, free, uuid in readable:
        gpus.append(
            Gpu(
                index=reading.index,
                uuid=uuid,
                name=(part.name if part else reading.name) or "unknown",
                memory_total_bytes=memory,
                memory_free_bytes=free,
                compute_capability=reading.compute_capability,
                mig=part is not None,
                ecc_errors=reading.ecc_errors,
                processes=part.processes if part else reading.processes,
                pcie_generation=reading.pcie_generation,
                pcie_width=reading.pcie_width,
                pcie_width_max=reading.pcie_width_max,
                nvlinks=() if part else tuple(sorted(links[reading.index])),
                faults=reading.faults,
            )
        )
    return gpus


def neighbours(readings: Sequence[GpuReading]) -> dict[int, set[int]]:
    """Return, for each GPU, which of the others NVLink reaches directly or through NVSwitch."""
    by_bus = {reading.bus_id: reading.index for reading in readings if reading.bus_id}
    switched = {r.index for r in readings if _on_switch(r)}
    found: dict[int, set[int]] = {}
    for reading in readings:
        ends = {by_bus[e.remote_bus_id] for e in reading.nvlinks or () if e.remote_bus_id in by_bus}
        found[reading.index] = ends | (switched if reading.index in switched else set()) - {reading.index}
    return found


def interconnect(readings: Sequence[GpuReading]) -> tuple[Interconnect, str]:
    """Say how the GPUs reach each other.

    Args:
        readings: the visible whole GPUs.

    Returns:
        `nvswitch` if all are on one, `nvlink` if NVLink alone connects every GPU to every other (perhaps
        through a third), `pcie` if it does not, `none` for fewer than two, `unknown` if NVML did not tell;
        and a sentence to note, or an empty one.
    """
    if len(readings) < 2:
        return "none", ""
    silent = [r for r in readings if r.nvlinks is None]
    if silent:
        answer = silent[0].unread.get("nvlinks", "no answer")
        return "unknown", f"The links between the GPUs could not be read (NVML: {answer})."
    if all(_on_switch(r) for r in readings):
        return "nvswitch", ""
    links = neighbours(readings)
    reached, frontier = {readings[0].index}, [readings[0].index]
    while frontier:
        new = links[frontier.pop()] - reached
        reached |= new
        frontier += new
    if len(reached) == len(readings):
        return "nvlink", ""
    strange = [e for r in readings for e in r.nvlinks or () if e.remote_type == "unknown"]
    if any(e.remote_bus_id is None for e in strange):
        return "unknown", "NVLinks are active, but the driver does not tell where they end."
    pairs = sorted({tuple(sorted((a, b))) for a, others in links.items() for b in others})
    if pairs:
        shown = ", ".join(f"{a}-{b}" for a, b in pairs)
        return "pcie", f"NVLink connects only the GPUs {shown}; between the others traffic takes PCIe."
    return "pcie", ""


def peer_access(readings: Sequence[GpuReading]) -> bool | None:
    """Return whether every pair can read each other's memory; None if unknown or fewer than two GPUs."""
    if len(readings) < 2 or any(r.peers is None for r in readings):
        return None
    every = {r.index for r in readings}
    return all(every - {r.index} <= set(r.peers or ()) for r in readings)


def _on_switch(reading: GpuReading) -> bool:
    return any(link.remote_type == "switch" for link in reading.nvlinks or ())
