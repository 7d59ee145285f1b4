"""The lines of the ledger: made from what an attempt left behind, also when its flow died first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soup_flows.errors import FailureClass, TrainingFailed
from soup_flows.hardware import Hardware
from soup_flows.hardware.energy import used_joules
from soup_flows.launch.events import read_events
from soup_flows.launch.outcome import classify
from soup_flows.launch.receipt import read_receipt_file
from soup_flows.ledger import Attempt, AttemptState, Change, append, read_ledger
from soup_flows.measured import measure, remember
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.run_events import read_run
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import RecoverySettings, TrainingSpec


def record(
    paths: RunPaths, number: int, report: TrainReport, begun: float, change: Change | None = None
) -> TrainReport:
    """Write the ledger's line for an attempt that has ended, then the report, which holds the ledger.

    Args:
        paths: the run's files.
        number: the attempt.
        report: how it ended.
        begun: Unix time of its start.
        change: how it differed from what was asked.

    Returns:
        The report with the ledger.
    """
    spec = TrainingSpec.model_validate_json(paths.spec.read_bytes())
    world = report.plan.world_size if report.plan else 1
    row = attempt_row(paths, number, report, begun, change or Change(), spec.recovery, world)
    append(paths.attempts, row)
    if row.memory is not None:
        with contextlib.suppress(OSError, ValueError):
            remember(spec, Hardware.model_validate_json(paths.hardware.read_bytes()), row.memory)
    report = report.model_copy(update={"ledger": read_ledger(paths.attempts)})
    report.save()
    return report


def where_stopped(found: dict[str, Any]) -> str:
    """Say whether a stopped attempt was saved, and what it can go on from; `found` is what `read_run` returns."""
    if found.get("stopped_at") is not None:
        return str(found["stopped_at"])
    saved = [checkpoint.step for checkpoint in found["checkpoints"]] or [found.get("started_from", 0)]
    return f"not saved, last good step: {saved[-1]}"


def attempt_row(
    paths: RunPaths,
    number: int,
    report: TrainReport,
    started: float,
    change: Change,
    settings: RecoverySettings,
    world_size: int,
) -> Attempt:
    """Return the ledger's line for an attempt that has ended; `report` says how."""
    state: AttemptState = "failed" if report.state == "refused" else report.state
    first = report.started_from
    good = max([first, *(saved.step for saved in report.checkpoints)])
    last = max([first, good, *(point.step for point in report.train if point.step > first)])
    kept_s = sum(p.seconds or 0.0 for p in report.train if first < p.step <= good)
    hours = report.seconds * world_size / 3600
    done = state == "completed"
    attempt = paths.attempt(number)
    evidence = [p for p in (*sorted(attempt.errors.glob("*.json")), attempt.receipt) if p.exists()]
    return Attempt(
        number=number,
        started=started,
        state=state,
        failure_class=report.failure_class,
        cause=report.cause,
        evidence=", ".join(str(path.relative_to(paths.root)) for path in evidence),
        change=change,
        from_step=first,
        last_step=last,
        good_step=last if done else good,
        steps_lost=0 if done else last - good,
        seconds=report.seconds,
        gpu_hours=hours,
        gpu_hours_wasted=0.0 if done else max(0.0, report.seconds - kept_s) * world_size / 3600,
        cost=None if settings.gpu_hour_price is None else hours * settings.gpu_hour_price,
        memory=measure(report.plan, attempt, report.memory if done else ()),
        energy_joules=used_joules(attempt.energy),
    )


def reconcile(
    paths: RunPaths, settings: RecoverySettings, state: AttemptState = "lost", running: int | None = None
) -> tuple[Attempt, ...]:
    """Return the ledger, with a line for each attempt that ended and that no flow could write one for.

    Args:
        paths: the run's files.
        settings: the policy, for the costs.
        state: what such an attempt is: `lost` with its flow, or `cancelled` by an engine that goes on by itself.
        running: number of an attempt that outlived its flow; it gets its line when it ends.
    """
    rows = {row.number: row for row in read_ledger(paths.attempts)}
    number = 0
    while paths.attempt(number := number + 1).root.exists():
        if number in rows or number == running:
            continue
        row = _lost(paths, number, settings, rows.get(number - 1)).model_copy(update={"state": state})
        append(paths.attempts, row)
        rows[number] = row
    return tuple(rows[n] for n in sorted(rows))


def _lost(paths: RunPaths, number: int, settings: RecoverySettings, before: Attempt | None) -> Attempt:
    """Judge an attempt by its folder alone."""
    attempt = paths.attempt(number)
    found = read_run(paths, number)
    receipt = read_receipt_file(attempt.receipt)
    kind: FailureClass = "node_lost"
    cause = "the flow process and its supervisor were gone at once"
    if receipt.get("reason") in ("holder_gone", "signal"):
        kind, cause = "preempted", f"the flow process went away: {receipt.get('detail')}"
    elif receipt:
        kind, cause, _ = classify(attempt, receipt)
    world = 1
    with contextlib.suppress(OSError, ValueError):
        world = ShardingPlan.model_validate_json(paths.plan.read_bytes()).world_size
    times = [event["time"] for event in read_events(attempt.events) if "time" in event]
    started = times[0] if times else attempt.root.stat().st_mtime
    seconds = receipt.get("seconds") or max(0.0, times[-1] - started if times else 0.0)  # a clock may be set
    report = TrainReport(run_id=paths.root.name, run_dir=str(paths.root), state="failed", failure_class=kind,
                         cause=cause, **{**found, "seconds": seconds})  # fmt: skip
    change = before.change if before else Change()
    return attempt_row(paths, number, report, started, change, settings, world)


def check_restarts(rows: Sequence[Attempt], settings: RecoverySettings, run_dir: Path) -> None:
    """Bound the restarts of a flow run by whatever restarts crashed runs.

    Raises:
        TrainingFailed: when the run was lost more often than `recovery.max_retries`.
    """
    lost = [row for row in rows if row.state == "lost"]
    if lost and rows[-1].state == "lost" and len(lost) > settings.max_retries:
        raise TrainingFailed(
            lost[-1].failure_class or "unknown",
            f"the run was lost {len(lost)} times, recovery.max_retries is {settings.max_retries}; "
            f"last: {lost[-1].cause}",
            f"start a new run with recovery.resume={run_dir.name} when the cause is found",
            str(run_dir),
        )
