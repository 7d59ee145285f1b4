"""The end of an attempt: its receipt (what the supervisor saw and did), and its temporary files removed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soup_flows.json_text import parse_object
from soup_flows.launch import layout, proc
from soup_flows.paths import AttemptPaths, write_json

# torch 2.13, distributed/elastic/multiprocessing/api.py, SubprocessContext._poll
_FAILED = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")

SAVING_REASONS = ("signal", "stopped", "preempted", "holder_gone", "timeout")
"""Ends in which the ranks are well and may save a checkpoint first."""


def new_receipt(run_id: str) -> dict[str, Any]:
    """Return the receipt of an attempt that begins now."""
    return {
        "v": layout.PROTOCOL_VERSION,
        "run_id": run_id,
        "reason": "",
        "detail": "",
        "started": time.time(),
        "stop_time": None,
        "exit_code": None,
        "signalled": [],
        "dead_ranks": [],
        "stall": None,
        "oom_kills_before": proc.oom_kills(),
        "scheduler": proc.scheduler(),
    }


def first_failure(launcher_log: Path, numbers: Mapping[int, int]) -> dict[str, int] | None:
    """Return `{"exit_code", "rank", "pid"}` of the rank that torch elastic saw failing first, or None.

    Args:
        launcher_log: what torch elastic printed on this host; it names the local rank.
        numbers: global rank by local rank.
    """
    try:
        found = _FAILED.search(launcher_log.read_bytes()[-(1 << 20) :])
    except OSError:
        return None
    if found is None:
        return None
    code, local, pid = map(int, found.groups())
    return {"exit_code": code, "rank": numbers.get(local, local), "pid": pid}


def announce_stop(attempt: Path, reason: str, grace_s: float) -> None:
    """Tell the ranks, before they are asked to end, how long they have; only where they may save first."""
    if reason in SAVING_REASONS:
        with contextlib.suppress(OSError):
            write_json(layout.stopping(attempt), {"reason": reason, "deadline": time.time() + grace_s})


def write_receipt(attempt: Path, receipt: dict[str, Any], node: int = 0) -> None:
    """Write the receipt to its file and to stdout, where the flow reads it even if the disk is full."""
    with contextlib.suppress(OSError):
        write_json(AttemptPaths(attempt).receipt_of(node), receipt)
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(receipt).encode() + b"\n")


_TEXT, _NUMBER, _WHOLE = (str,), (int, float), (int,)
_RANK_END = {"rank": _WHOLE, "pid": _WHOLE}
_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("run_id", "reason", "detail", "scheduler"), _TEXT),
    **dict.fromkeys(("started", "stop_time", "seconds", "log_bytes_lost"), _NUMBER),
    **dict.fromkeys(("v", "exit_code", "oom_kills_before", "oom_kills_after"), _WHOLE),
    "stall": (dict,),
}
_ITEMS: dict[str, tuple[type, ...]] = {"survivors": _WHOLE, "kernel": _TEXT}
_ENTRIES: dict[str, dict[str, tuple[type, ...]]] = {
    "dead_ranks": {**_RANK_END, "time": _NUMBER},
    "signalled": {"pid": _WHOLE, "signal": _TEXT},
}
"""What readers of a receipt rely on: fields, items of lists, and fields of the objects in lists."""


def sound_receipt(value: object) -> dict[str, Any]:
    """Return a receipt without what is not of its type: a full disk or a crash may have left anything."""
    if not isinstance(value, dict):
        return {}
    found = {
        name: item
        for name, item in value.items()
        if name not in _FIELDS or item is None or _is(item, _FIELDS[name])
    }
    for name, types in _ITEMS.items():
        if name in found:
            found[name] = [item for item in _list(found[name]) if _is(item, types)]
    for name, fields in _ENTRIES.items():
        if name in found:
            found[name] = [item for item in _list(found[name]) if _has(item, fields)]
    if "first_failure" in found and not _has(found["first_failure"], {**_RANK_END, "exit_code": _WHOLE}):
        found["first_failure"] = None
    return found


def _is(item: object, types: tuple[type, ...]) -> bool:
    return isinstance(item, types) and not isinstance(item, bool)


def _has(item: object, fields: Mapping[str, tuple[type, ...]]) -> bool:
    return isinstance(item, dict) and all(_is(item.get(name), types) for name, types in fields.items())


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def read_receipt(text: str) -> dict[str, Any]:
    """Return the receipt that the supervisor printed; empty if it was killed before it could."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            return sound_receipt(parse_object(line))
    return {}


def read_receipt_file(path: Path) -> dict[str, Any]:
    """Return the receipt in a file; empty if there is none that can be read."""
    try:
        return sound_receipt(parse_object(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def write_no_start(
    attempt: AttemptPaths, run_id: str, detail: str, reason: str = "unfit", node: int = 0
) -> None:
    """Write the receipt of an attempt that could not begin; nothing of it was started.

    Args:
        attempt: its files.
        run_id: the run.
        detail: why.
        reason: `unfit`, or what ended it while it waited.
        node: the host that says so.
    """
    receipt = new_receipt(run_id) | {"reason": reason, "detail": detail, "stop_time": time.time()}
    attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(attempt.receipt_of(node), receipt | {"survivors": []})


def collect_receipts(attempt: AttemptPaths) -> dict[str, Any]:
    """Put the receipts of all hosts together; empty if no host wrote one.

    The reason is that of the host that stopped first: the others followed it.
    """
    receipts = [read_receipt_file(path) for path in sorted(attempt.root.glob("receipt*.json"))]
    found = [receipt for receipt in receipts if receipt.get("reason")]
    if not found:
        return {}
    found.sort(key=lambda receipt: receipt.get("stop_time") or float("inf"))
    whole = dict(found[0])
    failures = [receipt.get("first_failure") for receipt in found]
    whole["first_failure"] = next(filter(None, failures), None)
    whole["exit_code"] = next((r["exit_code"] for r in found if r.get("exit_code")), whole.get("exit_code"))
    for name in ("dead_ranks", "signalled", "kernel", "survivors"):
        parts = [part for receipt in found for part in receipt.get(name, ())]
        whole[name] = [part for n, part in enumerate(parts) if part not in parts[:n]]
    whole["dead_ranks"].sort(key=lambda dead: dead["time"])
    return whole


def remove_temporary(channel: Path, config_path: str | None) -> None:
    """Remove the channel folder and the run's temporary sharding config; what is gone already is fine."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(channel)):
            os.unlink(entry.path)
        os.rmdir(channel)
    if config_path is not None:
        with contextlib.suppress(OSError):
            os.unlink(config_path)
