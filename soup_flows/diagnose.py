"""Explain an old run from its folder alone: how it ended, why, and what its ranks did last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from soup_flows.errors import FailureClass
from soup_flows.launch import layout, proc
from soup_flows.launch.advice import ADVICE
from soup_flows.launch.outcome import Verdict, classify, read_errors, tails
from soup_flows.launch.receipt import read_receipt_file
from soup_flows.paths import AttemptPaths, RunPaths
from soup_flows.report import RunState, TrainReport
from soup_flows.run_events import read_attempt
from soup_flows.user_file import expanded


class RankEnd(BaseModel):
    """The last of one rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    step: int | None = None
    """Last optimizer step of its heartbeat."""
    phase: str = ""
    error: str = ""
    """Exception that ended it: type and message."""
    signalled: tuple[str, ...] = ()
    """Signals that the supervisor sent to it."""
    last_lines: tuple[str, ...] = ()


class AttemptEnd(BaseModel):
    """How one attempt ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: int
    state: RunState | None
    """None while it is running."""
    failure_class: FailureClass | None = None
    cause: str = ""
    advice: str = ""
    seconds: float | None = None
    steps: int = 0
    survivors: tuple[int, ...] = ()
    """Processes of the run that were left at its end, according to the supervisor."""
    evidence: tuple[str, ...] = ()
    ranks: tuple[RankEnd, ...] = ()


class Diagnosis(BaseModel):
    """What a run's folder tells."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    run_dir: str
    state: RunState | None
    """None while it is running."""
    failure_class: FailureClass | None = None
    cause: str = ""
    advice: str = ""
    living: tuple[int, ...] = ()
    """Processes of the run that live on this host now."""
    attempts: tuple[AttemptEnd, ...] = ()


def diagnose(run_dir: str | Path) -> Diagnosis:
    """Read a run's folder and say how the run ended and why; nothing is changed there.

    Args:
        run_dir: `<output_dir>/runs/<run id>`.

    Raises:
        FileNotFoundError: if the folder holds neither a report nor an attempt.
    """
    paths = RunPaths(expanded(run_dir).absolute())
    report = _report(paths)
    numbers = sorted(
        int(found.name.removeprefix("attempt-"))
        for found in paths.root.glob("attempt-*")
        if found.name.removeprefix("attempt-").isdecimal()
    )
    if report is None and not numbers:
        raise FileNotFoundError(f"{paths.root} holds no run: no report.json and no attempt-<n>")
    living = tuple(proc.marked(paths.root.name))
    attempts = tuple(_attempt(paths.attempt(n), n, bool(living) and n == numbers[-1]) for n in numbers)
    if report is not None:
        end: Any = report
    elif attempts:
        end = attempts[-1]
    else:
        raise AssertionError("either a report or an attempt is there")
    return Diagnosis(
        run_id=paths.root.name,
        run_dir=str(paths.root),
        living=living,
        attempts=attempts,
        **{name: getattr(end, name) for name in ("state", "failure_class", "cause", "advice")},
    )


def _report(paths: RunPaths) -> TrainReport | None:
    """Return the report, unless a newer attempt began after it was written."""
    try:
        report = TrainReport.load(paths.root)
    except (OSError, ValueError):
        return None
    return None if paths.attempt(report.attempts + 1).root.exists() else report


def _attempt(attempt: AttemptPaths, number: int, running: bool) -> AttemptEnd:
    receipt = read_receipt_file(attempt.receipt)
    found = read_attempt(attempt)
    proof = found.get("proof")
    good = bool(found.get("saved")) and proof is not None and not proof.failures
    verdict: Verdict | None = None
    if not good and found.get("stopped_at") is not None and receipt.get("reason") == "exited":
        verdict = Verdict("cancelled", f"stopped on request; {found['stopped_at']}", ADVICE["cancelled"])
    elif not good and (receipt or not running):
        verdict = classify(attempt, receipt or {"reason": "supervisor_died", "detail": "it left no receipt"})
    state: RunState | None = "completed" if good else None
    if verdict is not None:
        state = "cancelled" if verdict.failure_class in ("cancelled", "preempted") else "failed"
    return AttemptEnd(
        attempt=number,
        state=state,
        seconds=receipt.get("seconds"),
        steps=max([found.get("steps", 0), *(step for step, _ in _beats(attempt).values())]),
        survivors=tuple(receipt.get("survivors", ())),
        evidence=tuple(_evidence(receipt)),
        ranks=tuple(_ranks(attempt, receipt)),
        **({} if verdict is None else dict(zip(Verdict._fields, verdict, strict=True))),
    )


def _evidence(receipt: dict[str, Any]) -> list[str]:
    """List what the supervisor noted, in words."""
    found = [f"reason: {receipt['reason']}: {receipt.get('detail', '')}"] if receipt.get("reason") else []
    found += [f"rank {d['rank']} (process {d['pid']}) died" for d in receipt.get("dead_ranks", ())]
    if first := receipt.get("first_failure"):
        found.append(f"torch elastic saw rank {first['rank']} fail first, exit code {first['exit_code']}")
    before, after = receipt.get("oom_kills_before"), receipt.get("oom_kills_after")
    if before is not None and after is not None and after > before:
        found.append(f"the control group counted {after - before} kills for memory")
    found += [f"kernel: {line}" for line in receipt.get("kernel", ())]
    if receipt.get("log_bytes_lost"):
        found.append(f"{receipt['log_bytes_lost']} bytes of logs could not be written")
    return found


def _beats(attempt: AttemptPaths) -> dict[int, tuple[int, str]]:
    """Return each rank's last step and phase."""
    found = {}
    for path in (attempt.root / "heartbeat").glob("rank_*"):
        try:
            step, phase = path.read_text().split()[:2]
            found[int(path.name.removeprefix("rank_"))] = (int(step), phase)
        except (OSError, ValueError):
            continue
    return found


def _ranks(attempt: AttemptPaths, receipt: dict[str, Any]) -> list[RankEnd]:
    errors = {error.rank: error for error in read_errors(attempt)}
    beats, lines = _beats(attempt), tails(attempt, 10)
    named = {int(n.removeprefix("rank_")) for n in lines if n.removeprefix("rank_").isdecimal()}
    ends = []
    for rank in sorted({*errors, *beats, *named}):
        step, phase = beats.get(rank, (None, ""))
        signals = [e["signal"] for e in receipt.get("signalled", ()) if e.get("rank") == rank]
        error = errors.get(rank)
        ends.append(
            RankEnd(
                rank=rank,
                step=step,
                phase=phase,
                error=f"{error.type}: {error.message}"[:2000] if error else "",
                signalled=tuple(signals),
                last_lines=tuple(lines.get(layout.rank_log(attempt.root, rank).stem, ())),
            )
        )
    return ends


def diagnosis_text(found: Diagnosis) -> str:
    """Return the diagnosis for a terminal, advice first."""
    state = found.state or ("running" if found.living else "unknown")
    lines = [f"Run {found.run_id}: {state}" + (f" ({found.failure_class})" if found.failure_class else "")]
    if found.advice:
        lines.append(f"What to do  {found.advice}")
    if found.cause:
        lines.append(f"Cause       {found.cause}")
    if found.living:
        lines.append(f"Living      processes {', '.join(map(str, found.living))}")
    for attempt in found.attempts:
        lines.append(f"\nAttempt {attempt.attempt}: {attempt.state or 'running'}, {attempt.steps} steps")
        if attempt.cause and attempt.cause != found.cause:
            lines.append(f"  {attempt.failure_class}: {attempt.cause}")
        lines += [f"  {text}" for text in attempt.evidence]
        for rank in attempt.ranks:
            told = f", told {' '.join(rank.signalled)}" if rank.signalled else ""
            lines.append(f"  rank {rank.rank}: step {rank.step}, phase {rank.phase}{told}")
            lines += [f"    {rank.error}"] if rank.error else []
            lines += [f"    | {line}" for line in rank.last_lines[-3:]]
    lines.append(f"\nEverything about the run: {found.run_dir}")
    return "\n".join(lines)
