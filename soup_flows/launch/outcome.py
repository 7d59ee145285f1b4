"""Say why an attempt ended, from its folder and the supervisor's receipt: class, cause, advice.

Evidence, strongest first: what was asked (a stop, the time limit, a stall), unless a rank had failed before;
the error file of the first failing rank by time; a rank that died without one, by its signal; the text of the
logs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from soup_flows.errors import FailureClass, Problem
from soup_flows.json_text import parse_object
from soup_flows.launch.advice import ADVICE, STOPPED, match_text, match_types
from soup_flows.launch.events import last_lines, strip_ansi
from soup_flows.launch.hosts import missing
from soup_flows.launch.kernel import memory_kill
from soup_flows.launch.proc import signal_name
from soup_flows.launch.stacks import stall_cause
from soup_flows.paths import AttemptPaths

TAIL_LINES = 40
TAIL_LINE_CHARACTERS = 1000
PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "remote process exited or there was a network",
)
"""What gloo (transport/tcp/pair.cc) and NCCL (src/misc/socket.cc, ncclRemoteError) say of a rank that is gone."""


class Verdict(NamedTuple):
    """Why an attempt ended, in words for a person."""

    failure_class: FailureClass
    cause: str
    advice: str


@dataclass(frozen=True)
class RankError:
    """The error that ended one rank."""

    rank: int
    type: str
    types: tuple[str, ...]
    message: str
    traceback: str
    time: float
    failure_class: FailureClass | None
    advice: str | None


def read_errors(attempt: AttemptPaths) -> list[RankError]:
    """Return the errors of all ranks, the earliest first; unreadable files are left out."""
    errors = []
    for path in sorted(attempt.errors.glob("rank_*.json")):
        try:
            value = parse_object(path.read_bytes())
            known, advice = value.get("failure_class"), value.get("advice")
            errors.append(
                RankError(
                    rank=int(value["rank"]),
                    type=str(value["type"]),
                    types=tuple(map(str, value["types"])),
                    message=str(value["message"]),
                    traceback=str(value["traceback"]),
                    time=float(value["time"]),
                    failure_class=known if known in get_args(FailureClass) else None,
                    advice=advice if isinstance(advice, str) else None,
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(errors, key=lambda error: error.time)


def warn_of_exit(receipt: dict[str, Any]) -> tuple[Problem, ...]:
    """Return a warning for a run that saved its verified result and whose processes did not end cleanly.

    Aborts at exit are common (a communicator or a driver that is torn down in the wrong order) and say nothing
    about the result, which was read back from disk before.
    """
    code, first = receipt.get("exit_code"), receipt.get("first_failure")
    if code == 0 and receipt.get("reason") == "exited":
        return ()
    what = f"the launcher ended with {code}, reason {receipt.get('reason')!r}"
    if first:
        number = first["exit_code"]
        how = signal_name(-number) if number < 0 else f"exit code {number}"
        what = f"rank {first['rank']} ended with {how}"
    return (
        Problem(
            id="EXIT001",
            severity="warning",
            field="launcher",
            message=f"{what} after the model had been saved and verified",
            fix="nothing is lost; logs/ has what it said",
        ),
    )


def tails(attempt: AttemptPaths, count: int = TAIL_LINES) -> dict[str, list[str]]:
    """Return the last `count` lines of the launcher and of every rank, by file name without suffix.

    As text to show: without escape sequences, and cut after `TAIL_LINE_CHARACTERS`.
    """
    found = {path.stem: last_lines(path, count) for path in sorted(attempt.logs.glob("*.log"))}
    return {
        name: [strip_ansi(line)[:TAIL_LINE_CHARACTERS] for line in lines]
        for name, lines in found.items()
        if lines
    }


def classify(attempt: AttemptPaths, receipt: dict[str, Any]) -> Verdict:
    """Return why the attempt in folder `attempt` ended.

    Only for an attempt that failed: whether one succeeded is decided by its verified result, not here.

    Args:
        attempt: the attempt's files.
        receipt: `Outcome.receipt`, or the content of `receipt.json`.
    """
    stop_time = receipt.get("stop_time") or float("inf")
    errors = [error for error in read_errors(attempt) if error.time <= stop_time]
    if receipt.get("reason") == "supervisor_died":  # it read what the ranks printed
        errors = [error for error in errors if "broken pipe" not in error.message.lower()]
    death = _death(receipt, errors)
    rules: Iterable[Callable[[], Verdict | None]] = (
        # what the other ranks say of a machine that went away is that they lost a peer
        lambda: _from_stop(attempt, receipt) if receipt.get("reason") == "node_lost" else None,
        lambda: _from_missing(attempt, errors) if errors and all(map(_peer_gone, errors)) else None,
        lambda: _from_death(attempt, death, receipt) if death and not _error_before(death, errors) else None,
        lambda: _from_error(min(errors, key=lambda e: (_peer_gone(e), e.time))) if errors else None,
        lambda: _from_stop(attempt, receipt),
        lambda: _from_text(attempt),
        lambda: _from_exit(receipt),
    )
    for rule in rules:
        verdict = rule()
        if verdict is not None:
            return verdict
    return Verdict("unknown", "the attempt ended and left no trace of a cause", ADVICE["unknown"])


def _verdict(kind: FailureClass, cause: str, advice: str | None = None) -> Verdict:
    return Verdict(kind, cause, advice or ADVICE[kind])


# -- a rank died without saying why ----------------------------------------------------------------


def _death(receipt: dict[str, Any], errors: list[RankError]) -> dict[str, Any] | None:
    """Return `{"rank", "exit_code", "time"}` of the rank that died first without a word and not by us."""
    own = {
        entry["pid"] for entry in receipt.get("signalled", ()) if entry["signal"] in ("SIGKILL", "SIGTERM")
    }
    first = receipt.get("first_failure")
    spoke = {error.rank for error in errors}
    dead = [d for d in receipt.get("dead_ranks", ()) if d["pid"] not in own and d["rank"] not in spoke]
    if first and first["exit_code"] < 0 and first["pid"] not in own and first["rank"] not in spoke:
        when = next((d["time"] for d in dead if d["pid"] == first["pid"]), None)
        return {"rank": first["rank"], "exit_code": first["exit_code"], "time": when}
    if receipt.get("reason") == "rank_died" and dead:
        code = dead[0].get("exit_code")
        if code is None and first and first["pid"] == dead[0]["pid"]:
            code = first["exit_code"]
        return {"rank": dead[0]["rank"], "exit_code": code, "time": dead[0]["time"]}
    return None


def _error_before(death: dict[str, Any], errors: list[RankError]) -> bool:
    return death["time"] is not None and any(e.time < death["time"] and not _peer_gone(e) for e in errors)


def _peer_gone(error: RankError) -> bool:
    """A rank that lost its peer may say so before the supervisor has seen that peer die."""
    return any(words in error.message.lower() for words in PEER_GONE)


def _from_death(attempt: AttemptPaths, death: dict[str, Any], receipt: dict[str, Any]) -> Verdict:
    rank, code = death["rank"], death["exit_code"]
    killed_for_memory = (receipt.get("oom_kills_after") or 0) - (receipt.get("oom_kills_before") or 0)
    pids = {d["pid"] for d in receipt.get("dead_ranks", ())} | {
        (receipt.get("first_failure") or {}).get("pid")
    }
    said = memory_kill(receipt.get("kernel", ()), pids)
    if code in (None, -signal.SIGKILL) and said:
        return _verdict(
            "host_oom", f"rank {rank} was killed for memory; the kernel's log says: {_short(said)}"
        )
    if code in (None, -signal.SIGKILL) and killed_for_memory > 0:
        return _verdict(
            "host_oom",
            f"rank {rank} was killed by the kernel because the host's memory limit was reached "
            f"(oom_kill of the cgroup rose by {killed_for_memory})",
        )
    if code is None or code > 0:
        how = "died" if code is None else f"ended with exit code {code}"
        return _verdict(
            "rank_killed", f"rank {rank} {how} without a Python error and the others were stopped"
        )
    name = signal_name(-code)
    if -code == signal.SIGBUS:
        return _verdict("shm_full", f"rank {rank} ended by SIGBUS, which is what a full /dev/shm causes")
    if -code == signal.SIGTERM:
        return _verdict("cancelled", f"somebody sent SIGTERM to rank {rank}")
    if -code == signal.SIGKILL:
        return _verdict(
            "rank_killed",
            f"rank {rank} was killed by SIGKILL, not by us, and not for memory as far as its cgroup shows",
        )
    for line in reversed(last_lines(attempt.rank_log(rank), TAIL_LINES)):  # what it said before it aborted
        kind = match_text(line)
        if kind is not None:
            return _verdict(kind, f"rank {rank} ended by {name}: {_short(line)}")
    return _verdict("rank_killed", f"rank {rank} crashed with {name}")


def _from_missing(attempt: AttemptPaths, errors: list[RankError]) -> Verdict | None:
    """All that ranks say is that a peer is gone, and a host left not even a receipt."""
    gone, says = missing(attempt.root), f"rank {errors[0].rank} says: {_short(errors[0].message)}"
    cause = f"{STOPPED['node_lost'][1]}: {', '.join(gone)}; {says}"
    return _verdict("node_lost", cause) if gone else None


# -- a rank raised ---------------------------------------------------------------------------------


def _from_error(error: RankError) -> Verdict:
    name = error.type.removeprefix("builtins.")
    where = f"rank {error.rank} failed first, with {name}: {_short(error.message)}"
    kind = error.failure_class or match_types(error.types) or match_text(error.message) or "code_error"
    return _verdict(kind, where, error.advice)


def _short(text: str, limit: int = 500) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# -- it was stopped --------------------------------------------------------------------------------


def _from_stop(attempt: AttemptPaths, receipt: dict[str, Any]) -> Verdict | None:
    reason, detail = receipt.get("reason"), receipt.get("detail", "")
    if reason == "stalled":
        return _verdict("stalled", stall_cause(attempt.root, receipt.get("stall") or {}))
    by_signal = reason == "signal" or "TerminationSignal" in detail
    if by_signal and receipt.get("scheduler"):
        reason, detail = (
            "preempted",
            f"{receipt['scheduler']} sent a signal and nobody asked Prefect to cancel",
        )
    if "Timeout" in detail:  # a time limit of the task or flow itself, raised while it waited
        reason = "timeout"
    if reason == "supervisor_died" and (said := match_text(detail)):  # it could not start, and said why
        return _verdict(said, detail)
    if reason in STOPPED:
        kind, sentence = STOPPED[reason]
        return _verdict(kind, f"{sentence}: {detail}" if detail else sentence)
    return None


# -- only text and an exit code are left -----------------------------------------------------------


def _from_text(attempt: AttemptPaths) -> Verdict | None:
    """Judge by the logs: ranks first, then the launcher, which has what ranks said before they attached."""
    logs = tails(attempt)
    for name in sorted(logs, key=lambda name: (name == "launcher", name)):
        for line in reversed(logs[name]):
            kind = match_text(line)
            if kind is not None:
                return _verdict(kind, f"{name.replace('_', ' ')} said: {_short(line)}")
    return None


def _from_exit(receipt: dict[str, Any]) -> Verdict | None:
    code, first = receipt.get("exit_code"), receipt.get("first_failure")
    if first:
        return _verdict(
            "unknown", f"rank {first['rank']} ended with exit code {first['exit_code']} and no traceback"
        )
    if code is not None and code < 0:
        return _verdict("rank_killed", f"the launcher was ended by {signal_name(-code)}, not by us")
    if code == 127:
        return _verdict("import_error", "the launcher could not be started; see logs/launcher.log")
    if code:
        return _verdict("unknown", f"the launcher ended with exit code {code}")
    if dead := receipt.get("dead_ranks"):
        return _verdict(
            "unknown", f"rank {dead[0]['rank']} left before training had finished, without an error"
        )
    return None
