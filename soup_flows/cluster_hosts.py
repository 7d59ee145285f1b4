"""What the machines of a run say about themselves before its ranks start, and why they could not run together."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from soup_flows.data.prepare import PreparedData
from soup_flows.manifest import library_versions
from soup_flows.paths import RunPaths, write_atomic

SHARED_S = 70.0
"""Longest wait until a new file is seen by another machine: NFS may take a minute (`man 5 nfs`, acdirmax)."""
SKEW_S = 5.0
"""Difference of clocks that is pointed out: which rank failed first is told by them."""
_ENDS = 1 << 20
"""Bytes at the beginning and at the end of a large file that are compared."""


class HostSeen(BaseModel):
    """What a machine of the run says about itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    address: str
    """By which the others reach it."""
    time: float
    """Unix seconds."""
    versions: dict[str, str]
    """Library to version."""
    data: str
    """See `data_digest`."""
    shares: bool = True
    """Whether it saw what another left for it in the run directory, and could write beside it."""

    @classmethod
    def here(cls, paths: RunPaths, **more: object) -> Self:
        """Look at this machine."""
        facts = {"name": socket.gethostname(), "time": time.time(), "versions": library_versions()}
        return cls.model_validate({**facts, "data": data_digest(paths), **more})


def data_digest(paths: RunPaths) -> str:
    """Return a SHA-256 over the prepared rows as this machine reads them; empty where a run has none.

    Of each file it takes name, size, and the first and last MiB: a folder of that name is never written twice, so
    that a difference is another disk or a torn copy, and a terabyte is not read for it.
    """
    try:
        data = PreparedData.model_validate_json(paths.data.read_bytes())
    except (OSError, ValidationError):
        return ""
    total = hashlib.sha256()
    for source in filter(None, (data.train, data.evaluation)):
        entry = Path(source.entry)
        if not entry.is_dir():
            return f"{entry} is not there"
        for file in sorted(path for path in entry.iterdir() if path.is_file()):
            size = file.stat().st_size
            total.update(f"{file.name} {size} ".encode())
            with file.open("rb") as opened:
                total.update(opened.read(_ENDS))
                opened.seek(max(0, size - _ENDS))
                total.update(opened.read(_ENDS))
    return total.hexdigest()


def differences(seen: Sequence[HostSeen], since: float) -> tuple[list[str], list[str]]:
    """Return why these machines cannot run together, and what is odd about them.

    Args:
        seen: what each said; the first is the measure.
        since: Unix time here when they were asked.
    """
    now = time.time()
    faults = [
        f"{host.name} ({host.address}) does not share the run directory" for host in seen if not host.shares
    ]
    first = seen[0]
    for host in seen[1:]:
        names = {**first.versions, **host.versions}
        faults += [
            f"{name} is {first.versions.get(name)} on {first.name} and {host.versions.get(name)} on {host.name}"
            for name in names
            if first.versions.get(name) != host.versions.get(name)
        ]
        if host.data != first.data:
            lacks = [h.data for h in (first, host) if " " in h.data]
            why = f" ({lacks[0]})" if lacks else ""
            faults.append(f"the prepared rows differ between {first.name} and {host.name}{why}")
    odd = [
        f"the clock of {host.name} differs by at least {max(since - host.time, host.time - now):.0f} s"
        for host in seen
        if max(since - host.time, host.time - now) > SKEW_S
    ]
    return faults, odd


def meet_others(
    paths: RunPaths, start: str, number: int, count: int, stopped: Callable[[], object]
) -> list[HostSeen] | str:
    """Say what this machine is in the run directory, and read there what the others say.

    Args:
        paths: the run's files.
        start: another one for every start of the job.
        number: of this machine.
        count: of all machines.
        stopped: whether to give up.

    Returns:
        What all of them said, in their order; or why not all could be heard.
    """
    folder = paths.temp
    here = HostSeen.here(paths, address=socket.gethostname())
    write_atomic(_said(folder, start, number), here.model_dump_json())
    heard = [_said(folder, start, other) for other in range(count)]
    end = time.monotonic() + SHARED_S
    while True:
        silent = [other for other, file in enumerate(heard) if not file.exists()]
        if not silent:
            return [HostSeen.model_validate_json(file.read_bytes()) for file in heard]
        if stopped() or time.monotonic() > end:
            numbers = ", ".join(map(str, silent))
            return (
                f"{here.name} has heard nothing of machine {numbers} of {count} in {folder}: "
                "the output directory must be on storage that all machines share"
            )
        time.sleep(0.2)


def forget_meetings(paths: RunPaths) -> None:
    """Remove what machines said at the start of a job."""
    for file in paths.temp.glob("host-*.json"):
        file.unlink(missing_ok=True)


def _said(folder: Path, start: str, number: int) -> Path:
    return folder / f"host-{start}-{number}.json"
