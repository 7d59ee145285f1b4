"""Ask a running training to stop, from anywhere that sees its run directory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from soup_flows.errors import refuse
from soup_flows.json_text import parse_json
from soup_flows.paths import RunPaths, write_json
from soup_flows.user_file import expanded


class StopRequest(BaseModel):
    """A request as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_dir: str
    save: bool
    """Save a checkpoint at the end of the present step first, however long that takes."""
    time: float
    """Unix time of the request."""


def stop(run_dir: str | Path, save: bool = False) -> StopRequest:
    """Ask the run in `run_dir` to stop; it does within seconds, or after its present step with `save`.

    With `save` the ranks agree on the end of a step, save a checkpoint on all of them and end; without it the
    flow stops them as it does on a cancellation. A second request without `save` overrules one with it.

    Raises:
        Refused: if `run_dir` is no run directory, or its run has ended.
    """
    paths = RunPaths(expanded(run_dir).absolute())
    if not paths.launch.is_file():
        raise refuse("STOP001", "run_dir", f"{paths.root} holds no run", "give <output_dir>/runs/<run id>")
    if paths.report.exists():
        raise refuse("STOP002", "run_dir", f"the run in {paths.root} has ended", f"see {paths.report}")
    request = StopRequest(run_dir=str(paths.root), save=save, time=time.time())
    write_json(paths.stop_request, request.model_dump())
    return request


def requested(paths: RunPaths) -> dict[str, Any] | None:
    """Return the request of a run, or None."""
    with contextlib.suppress(OSError, ValueError):
        value = parse_json(paths.stop_request.read_text())
        return value if isinstance(value, dict) else None
    return None


def asked_to_stop(paths: RunPaths) -> str | None:
    """Return why the flow should stop a run now; with `save` the ranks see to it themselves."""
    request = requested(paths)
    return "on request" if request is not None and not request.get("save") else None
