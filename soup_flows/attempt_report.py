"""How an attempt ended, as a report and as an exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soup_flows.attempts import where_stopped
from soup_flows.errors import FailureClass, Refused, TrainingFailed
from soup_flows.launch.advice import ADVICE, match_text
from soup_flows.launch.outcome import Verdict, classify, tails, warn_of_exit
from soup_flows.launch.receipt import read_receipt_file
from soup_flows.launch.run import Outcome
from soup_flows.own_run import cancel_was_asked
from soup_flows.paths import AttemptPaths, RunPaths
from soup_flows.report import RunState, TrainReport
from soup_flows.run_events import read_run


def report_of(paths: RunPaths, number: int, outcome: Outcome, base: dict[str, Any]) -> TrainReport:
    """Judge the attempt by what it wrote, never by an exit code alone."""
    found = base | read_run(paths, number) | {"seconds": outcome.seconds}
    proof = found.get("proof")
    if found.get("saved") and proof is not None and not proof.failures:
        found["problems"] += warn_of_exit(outcome.receipt)
        return TrainReport(state="completed", **found)
    stopped = found.get("stopped_at")
    if stopped is not None and outcome.reason == "exited":
        advice = f"Go on with recovery.resume={paths.root.name}."
        return _failed(Verdict("cancelled", "stopped on request", advice), found)
    return _failed(_verdict(paths.attempt(number), outcome.receipt), found)


def failure_of(report: TrainReport) -> TrainingFailed:
    """Return the exception that tells what the report tells."""
    return TrainingFailed(
        report.failure_class or "unknown",
        report.cause,
        report.advice,
        report.run_dir,
        step=report.steps,
        tried=report.ledger[-1].change.path if report.ledger else (),
    )


def _verdict(attempt: AttemptPaths, receipt: dict[str, Any]) -> Verdict:
    """Classify; a scheduler's signal and that of Prefect's own cancellation look alike, so ask about the second."""
    verdict = classify(attempt, receipt)
    if verdict.failure_class == "preempted" and cancel_was_asked():
        return Verdict("cancelled", "the run was cancelled in Prefect", ADVICE["cancelled"])
    return verdict


def report_of_stop(paths: RunPaths, number: int, stopped: BaseException, base: dict[str, Any]) -> TrainReport:
    """Say why the task itself was ended while it waited for the attempt, or before it began."""
    found = base | read_run(paths, number)
    if isinstance(stopped, TrainingFailed):
        return _failed(Verdict(stopped.failure_class, stopped.cause, stopped.advice), found)
    if isinstance(stopped, Refused):
        report = {"failure_class": "bad_config", "cause": str(stopped), "problems": stopped.problems}
        return TrainReport(state="refused", **(found | report))
    receipt = read_receipt_file(paths.attempt(number).receipt)
    found["seconds"] = receipt.get("seconds", found["seconds"])
    verdict = _verdict(paths.attempt(number), receipt)
    if verdict.failure_class == "unknown":
        kind: FailureClass = "cancelled"
        if isinstance(stopped, Exception):  # a fault of the launch, such as a full disk, and no signal
            kind = match_text(str(stopped)) or "unknown"
        verdict = Verdict(kind, f"stopped by {type(stopped).__name__}: {stopped}", ADVICE[kind])
    return _failed(verdict, found)


def _failed(verdict: Verdict, found: dict[str, Any]) -> TrainReport:
    failure_class, cause, advice = verdict
    state: RunState = "cancelled" if failure_class in ("cancelled", "preempted") else "failed"
    if state == "cancelled":
        cause = f"{cause}; {where_stopped(found)}"
    found = found | {"last_lines": tails(RunPaths(Path(found["run_dir"])).attempt(found["attempts"]))}
    return TrainReport(state=state, failure_class=failure_class, cause=cause, advice=advice, **found)
