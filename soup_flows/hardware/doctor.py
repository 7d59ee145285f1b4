"""`doctor`: what is wrong with a machine and what to do about it.

Each check takes a `Hardware` and yields `Problem`s; `CHECKS` lists them. Severities: `error` where a run on
this machine would fail or be wrong, `warning` where it may, `note` where something is merely worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from soup_flows.errors import Problem
from soup_flows.hardware import checks_gpu, checks_host
from soup_flows.hardware.values import Hardware

CHECKS: tuple[Callable[[Hardware], Iterator[Problem]], ...] = (
    checks_gpu.driver,
    checks_gpu.unused,
    checks_gpu.sick,
    checks_gpu.occupied,
    checks_gpu.software,
    checks_gpu.models,
    checks_host.building,
    checks_host.host,
    checks_host.links,
)


def doctor(hardware: Hardware) -> list[Problem]:
    """Return everything that is wrong or odd with this machine, errors first.

    Args:
        hardware: what `detect` returned, here or on another machine.

    Returns:
        Problems with ids `HW002` and up, each with a fix; an empty list for a healthy machine.
    """
    found = [problem for check in CHECKS for problem in check(hardware)]
    return sorted(found, key=lambda p: ("error", "warning", "note").index(p.severity))
