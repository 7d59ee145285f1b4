"""What can be leased, and which of it a run should take."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from soup_flows.errors import refuse
from soup_flows.hardware.values import Gpu, UnusedGpu

SEARCH_LIMIT = 50_000
"""Most device sets that are compared for their links; beyond it the first free devices are taken."""


@dataclass(frozen=True)
class Device:
    """One thing that can be leased: a GPU or MIG slice by UUID, or a slot of one CPU core."""

    id: str
    name: str
    links: frozenset[str] = frozenset()
    """Ids of the devices it reaches by NVLink."""
    sick: str | None = None
    """Why it must not be used at all."""
    occupied: str | None = None
    """Who uses it without a lease."""


def gpu_devices(gpus: Sequence[Gpu], unused: Sequence[UnusedGpu] = ()) -> list[Device]:
    """Return what can be leased of a machine's GPUs, in their order.

    CUDA shows a process the first MIG slice only, but every slice of the same profile would do as well.

    Args:
        gpus: the devices that a process here would see.
        unused: those that it would not see, and why.
    """
    by_index = {gpu.index: gpu.uuid for gpu in gpus if not gpu.mig}
    devices = []
    for gpu in gpus:
        held = [f"process {p.pid}" + (f" ({p.used_bytes >> 20} MiB)" if p.used_bytes else "")
                for p in gpu.processes]  # fmt: skip
        devices.append(
            Device(
                id=gpu.uuid,
                name=gpu.name,
                links=frozenset(by_index[index] for index in gpu.nvlinks if index in by_index),
                sick=gpu.sick,
                occupied=", ".join(held) or None,
            )
        )
    profiles = {gpu.name for gpu in gpus if gpu.mig}
    slices = [other for other in unused if other.why == "mig" and other.name in profiles]
    return devices + [Device(id=other.uuid, name=other.name) for other in slices if other.uuid]


def core_slots() -> list[Device]:
    """Return one slot per CPU core that this process may use; it is what CPU rehearsals lease."""
    return [Device(id=f"core-{core}", name="CPU core") for core in sorted(os.sched_getaffinity(0))]


def refuse_too_few(count: int, devices: Sequence[Device]) -> None:
    """Raise `Refused` when fewer than `count` devices are healthy, naming the sick ones."""
    healthy = [device for device in devices if device.sick is None]
    if len(healthy) < count:
        sick = "; ".join(f"{device.id} {device.sick}" for device in devices if device.sick)
        message = f"{count} devices are needed, {len(healthy)} of {len(devices)} are healthy"
        raise refuse("LEASE002", "gpus", message + (f": {sick}" if sick else ""), f"use gpus={len(healthy)}"
                     if healthy else "repair a device (soup-flows doctor)")  # fmt: skip


def choose(count: int, free: Sequence[Device]) -> list[Device]:
    """Return the `count` best connected of `free`: one model first, then most NVLink pairs, then first ones."""
    sets = itertools.islice(itertools.combinations(free, count), SEARCH_LIMIT)

    def score(group: Iterable[Device]) -> tuple[bool, int]:
        group = tuple(group)
        pairs = sum(b.id in a.links for a, b in itertools.combinations(group, 2))
        return len({device.name for device in group}) == 1, pairs

    return list(max(sets, key=score))  # the first of equals
