"""The second line of defence: what Prefect calls, often in another process, when a run was cancelled or crashed.

The first line is the supervisor. A hook comes some seconds late and ends only what has no living supervisor;
one that is still at work is left to it.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from soup_flows.artifacts import load_run_config
from soup_flows.attempt import engine, running_elsewhere
from soup_flows.block_use import credentials
from soup_flows.diagnose import diagnose
from soup_flows.launch.outcome import tails
from soup_flows.launch.proc import marked
from soup_flows.launch.supervised import sweep
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.run_events import read_attempt
from soup_flows.spec import TrainingSpec

logger = logging.getLogger(__name__)


def sweep_run(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook for `on_cancellation` and `on_crashed`: end what is left of the run and write how it ended.

    Works in any process on the run's host and never raises, since an error would hide the other hooks.

    Args:
        flow: the flow; not used.
        flow_run: the run; its id is the marker of its processes.
        state: the state it came to; its name is in the report.
    """
    del flow
    run_id = str(flow_run.id)
    try:
        if _goes_on_elsewhere(_named(flow_run), state):
            return
        # The same run may have been started again by now; what came after the state is not ours to end.
        when = state.timestamp.timestamp()
        swept = sweep(run_id, before=when)
        if swept:
            logger.warning("run %s: ended %d processes that nobody supervised", run_id, len(swept))
        paths = _paths(flow_run)
        if paths is not None and set(marked(run_id)) <= set(marked(run_id, before=when)):
            _write_end(paths, f"{state.name} in Prefect; {len(swept)} processes had to be swept")
    except Exception:
        logger.warning("the sweep of run %s failed", run_id, exc_info=True)


def _goes_on_elsewhere(paths: RunPaths, state: Any) -> bool:
    """Whether a job goes on without its flow; one whose flow was cancelled is ended, one of a crashed flow stays."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ValueError):
            held.enter_context(credentials(TrainingSpec.model_validate_json(paths.spec.read_bytes())))
        return _job_goes_on(paths, state)


def _job_goes_on(paths: RunPaths, state: Any) -> bool:
    launch = running_elsewhere(paths)
    if launch is None:
        return False
    if not state.is_cancelled():
        logger.warning("run %s: its job goes on, and its next start attaches to it", launch.run_id)
        return True
    found = engine(launch)
    handle = found.attach(paths)
    if handle is not None:
        found.cancel(handle, "the run was cancelled in Prefect")
    return False


def _paths(flow_run: Any) -> RunPaths | None:
    """Find the run directory: where the parameters say, else where the run's own artifact says."""
    paths = _named(flow_run)
    if paths.root.is_dir():
        return paths
    try:
        return RunPaths(Path(load_run_config(flow_run.id).launch.run_dir))
    except LookupError:  # it was refused, or ended before it had a folder
        return None


def _named(flow_run: Any) -> RunPaths:
    """Return the run directory that the parameters name."""
    output_dir = (flow_run.parameters or {}).get("output_dir", "outputs")
    return RunPaths.of(str(output_dir), str(flow_run.id))


def _write_end(paths: RunPaths, how: str) -> None:
    """Write a report for a run whose flow could not, from its folder."""
    if not paths.root.is_dir():
        return
    try:
        TrainReport.load(paths.root)
        return
    except (OSError, ValueError):
        pass
    for path in paths.temp.glob("*"):
        path.unlink(missing_ok=True)
    try:
        found = diagnose(paths.root)
    except FileNotFoundError:
        return
    attempt = paths.attempt(len(found.attempts))
    TrainReport(
        run_id=paths.root.name,
        run_dir=str(paths.root),
        state=found.state or "cancelled",
        failure_class=found.failure_class or (None if found.state == "completed" else "cancelled"),
        cause=f"{found.cause or 'the flow ended before it could say why'} ({how})",
        advice=found.advice,
        attempts=len(found.attempts),
        last_lines=tails(attempt),
        **read_attempt(attempt),
    ).save()
