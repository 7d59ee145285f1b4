"""Devices are leased on the host with kernel file locks, so that two runs never share one by accident.

A lease is an `flock` on `<folder>/<device>.lock`. The flow takes it and hands the descriptors to the
supervisor, so it lasts until the flow is done *and* nothing of the attempt is left; the kernel frees it when
its holders die, however they die (`man 2 flock`). The file's text says who holds it.

Waiting runs stand in line: a run leaves every device alone that an older waiting run could use.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soup_flows.errors import TrainingFailed, refuse
from soup_flows.json_text import parse_json
from soup_flows.launch.devices import Device, choose, refuse_too_few

LEASE_DIR = "SOUP_FLOWS_LEASE_DIR"
SHARED_FOLDERS = ("/run/lock/soup-flows", "/tmp/soup-flows-leases")  # noqa: S108 (shared by design, see _open)
"""Where the locks are without `SOUP_FLOWS_LEASE_DIR`: the first one that can be made. Containers that share
GPUs have to share this folder too."""
POLL_S = 1.0


@dataclass(frozen=True)
class Lease:
    """Devices that are ours until the descriptors are closed, here and in the supervisor."""

    devices: tuple[str, ...]
    fds: tuple[int, ...]
    waited_s: float = 0.0


def lease_folder() -> Path:
    """Return the folder of the locks, made if missing and writable for every user like `/tmp`.

    Raises:
        Refused: if no folder can be made, or the named one is no folder.
    """
    named = os.environ.get(LEASE_DIR)
    for folder in map(Path, (named,) if named else SHARED_FOLDERS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not folder.is_symlink() and os.access(folder, os.W_OK | os.X_OK):
                if folder.stat().st_uid == os.getuid() and not named:
                    folder.chmod(0o1777)
                return folder
        except OSError:
            continue
    where = named or " nor ".join(SHARED_FOLDERS)
    raise refuse(
        "LEASE001",
        "launcher.lease",
        f"the lock folder {where} cannot be written",
        f"set {LEASE_DIR} to a folder that all runs on this host share, or launcher.lease=off",
    )


@contextlib.contextmanager
def leased(
    count: int,
    find: Callable[[], Sequence[Device]],
    run_id: str,
    *,
    max_wait_s: float | None = None,
    on_wait: Callable[[str], None] = lambda _: None,
    should_stop: Callable[[], str | None] = lambda: None,
    folder: Path | None = None,
) -> Iterator[Lease]:
    """Hold `count` healthy, free and best connected devices; wait in line while there are too few.

    Args:
        count: number of devices.
        find: lists the devices as they are now; asked again while waiting.
        run_id: written into the locks, so that others can say for whom they wait.
        max_wait_s: seconds after which waiting fails; None waits for as long as it takes.
        on_wait: called with a sentence that names the holders, when waiting begins and when they change.
        should_stop: a text ends the wait.
        folder: of the locks; `lease_folder()` when None.

    Raises:
        Refused: if the machine has too few healthy devices, however long one would wait.
        TrainingFailed: class `timeout` after `max_wait_s`, `cancelled` when stopped while waiting.
    """
    folder = folder or lease_folder()
    begun, said = time.monotonic(), ""
    devices = list(find())
    refuse_too_few(count, devices)
    with _Ticket(folder, run_id, [device.id for device in devices]) as ticket:
        while True:
            taken, blocked = _try_all(folder, count, devices, run_id, ticket)
            waited = time.monotonic() - begun
            if taken is not None or (max_wait_s is not None and waited >= max_wait_s):
                break
            text = f"waiting for {count} of {len(devices)} devices: " + "; ".join(blocked)
            if text != said:
                on_wait(text)
                said = text
            if reason := should_stop():
                raise TrainingFailed("cancelled", f"stopped while it waited for devices: {reason}")
            time.sleep(POLL_S if max_wait_s is None else min(POLL_S, max(0.01, max_wait_s - waited)))
            devices = list(find())
            refuse_too_few(count, devices)
    if taken is None:
        cause = f"waited {waited:.0f} s for {count} devices: " + "; ".join(blocked)
        raise TrainingFailed("timeout", cause, "Raise launcher.max_wait_min, or end what holds them.")
    try:
        yield Lease(tuple(taken), tuple(taken.values()), waited)
    finally:
        release(taken.values())


def release(fds: Sequence[int] | Any) -> None:
    """Free leases at once, even if a fork of this process keeps a copy of a descriptor."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(fd)


def holder(folder: Path, device: str) -> dict[str, Any] | None:
    """Return `{"run_id", "pid", "since"}` of who holds `device`, `{}` if unknown, None if it is free."""
    fd = _open(_lock_path(folder, device))
    try:
        if _lock(fd):
            return None
        value = parse_json(os.pread(fd, 4096, 0) or b"{}")
        return value if isinstance(value, dict) else {}
    except ValueError:
        return {}
    finally:
        os.close(fd)


def _try_all(
    folder: Path, count: int, devices: Sequence[Device], run_id: str, ticket: _Ticket
) -> tuple[dict[str, int] | None, list[str]]:
    """Take all devices or none, one run at a time; also say what stands in the way."""
    mutex = _open(folder / "choosing.lock")
    try:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        return _try_locked(folder, count, devices, run_id, ticket.older())
    finally:
        os.close(mutex)


def _try_locked(
    folder: Path, count: int, devices: Sequence[Device], run_id: str, older: dict[str, str]
) -> tuple[dict[str, int] | None, list[str]]:
    got: dict[str, int] = {}
    free, blocked = [], []
    for device in devices:
        if device.sick:
            blocked.append(f"{device.id} is sick ({device.sick})")
        elif device.id in older:
            blocked.append(f"{device.id} is next for run {older[device.id]}")
        else:
            fd = _open(_lock_path(folder, device.id))
            if not _lock(fd):
                blocked.append(f"{device.id} is leased by {_describe(fd)}")
                os.close(fd)
            elif device.occupied:
                blocked.append(f"{device.id} is used without a lease by {device.occupied}")
                os.close(fd)
            else:
                got[device.id] = fd
                free.append(device)
    chosen = [device.id for device in choose(count, free)] if len(free) >= count else []
    for name in set(got) - set(chosen):
        os.close(got.pop(name))
    for fd in got.values():
        text = json.dumps({"run_id": run_id, "pid": os.getpid(), "since": time.time()})
        with contextlib.suppress(OSError):  # a full disk or another user's file: the lock is what counts
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
    return ({name: got[name] for name in chosen} if chosen else None), blocked


def _describe(fd: int) -> str:
    try:
        value = parse_json(os.pread(fd, 4096, 0))
        return f"run {value['run_id']} (process {value['pid']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "a run that did not say its name"


class _Ticket:
    """A place in the line: a locked file whose name sorts by time and whose text lists what it waits for."""

    def __init__(self, folder: Path, run_id: str, wanted: Sequence[str]) -> None:
        self._folder = folder
        self._path = folder / f"waiting-{time.time_ns():020d}-{os.getpid()}.lock"
        self._text = json.dumps({"run_id": run_id, "wanted": list(wanted)})

    def __enter__(self) -> _Ticket:
        self._fd = _open(self._path)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, self._text.encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._fd)

    def older(self) -> dict[str, str]:
        """Return devices that living, older waiters want, with the run's id; tickets of the dead go."""
        found: dict[str, str] = {}
        for path in sorted(self._folder.glob("waiting-*.lock")):
            if path.name >= self._path.name:
                break
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if _lock(fd):
                    path.unlink()
                else:
                    value = parse_json(os.pread(fd, 1 << 16, 0))
                    found |= {str(name): str(value["run_id"]) for name in value["wanted"]}
            os.close(fd)
        return found


def _lock_path(folder: Path, device: str) -> Path:
    return folder / f"{device.replace('/', '_')}.lock"


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(path: Path) -> int:
    """Open a lock file of any user; it is made with O_EXCL, since the folder may be sticky and shared.

    With `fs.protected_regular` the kernel refuses O_CREAT on files of others there (Documentation/admin-guide/
    sysctl/fs.rst).
    """
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except (FileNotFoundError, FileExistsError, PermissionError):
            continue
        if flags & os.O_CREAT:
            os.fchmod(fd, 0o666)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        break
    raise refuse(
        "LEASE001", "launcher.lease", f"cannot open the lock {path}", f"set {LEASE_DIR} to a folder of yours"
    )
