"""What runs inside a Slurm job: `python -m soup_flows.slurm_job begin|node|leave|end RUN_DIR`.

The batch script (`soup_flows.launch.engines.slurm_text`) calls `begin` once on the first host, `node` on every host
through srun, `leave` when the time limit comes near, and `end`. A start that is not the job's first becomes the
run's next attempt, from its newest good checkpoint. No Prefect and no torch is imported.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from soup_flows.cluster_hosts import differences, forget_meetings, meet_others
from soup_flows.cluster_job import (
    ask_to_save,
    free_port,
    meeting,
    new_step,
    next_attempt,
    on_host,
    read_launch,
    saved_more,
)
from soup_flows.errors import Refused
from soup_flows.launch.elastic import Rendezvous
from soup_flows.launch.engines import finished
from soup_flows.launch.engines.local import ASKED
from soup_flows.launch.hosts import missing
from soup_flows.launch.outcome import classify
from soup_flows.launch.receipt import collect_receipts, write_no_start
from soup_flows.launch.run import run
from soup_flows.paths import RunPaths, write_atomic, write_json

SIGNAL_S = 2.0
"""Seconds in which the supervisor hears Slurm's SIGTERM itself; after that it is told."""


def begin(paths: RunPaths) -> int:
    """Make the next attempt of a job that Slurm starts again, and say where the hosts of several meet."""
    launch = read_launch(paths)
    if _leaving(paths).exists():
        _leaving(paths).unlink()
        paths.stop_request.unlink(missing_ok=True)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if restarts and launch.attempt_paths.root.exists():
        launch = next_attempt(paths, launch, "Slurm")
    if launch.nodes > 1:
        paths.temp.mkdir(mode=0o700, exist_ok=True)
        meet = Rendezvous(
            id=f"{os.environ['SLURM_JOB_ID']}.{restarts}",
            host=socket.gethostname(),
            port=free_port(),
            nodes=launch.nodes,
        )
        write_atomic(meeting(paths), meet.model_dump_json())
    print(f"attempt {launch.attempt} of {launch.run_id}, start {restarts + 1} of the job")  # noqa: T201
    return 0


def node(paths: RunPaths) -> int:
    """Run this host's ranks to their end; the exit code ends the other hosts only after a failure."""
    launch = read_launch(paths)
    heard: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(time.monotonic()))
    if launch.nodes > 1:
        meet = Rendezvous.model_validate_json(meeting(paths).read_bytes())
        meet = meet.model_copy(update={"node": int(os.environ["SLURM_NODEID"])})
        why = _why_not(paths, meet, lambda: heard)
        if not why:
            try:
                launch = on_host(launch, meet)
            except OSError as error:
                why = str(error)
        if why:
            print(why, file=sys.stderr)  # noqa: T201
            write_no_start(launch.attempt_paths, launch.run_id, why, node=meet.node)
            return 1

    def asked() -> str | None:
        late = heard and time.monotonic() - heard[0] > SIGNAL_S
        return "TerminationSignal: SIGTERM from Slurm" if late else None

    outcome = run(launch, should_stop=asked)
    return 0 if finished(launch.attempt_paths) or outcome.reason in ASKED else 1


def _why_not(paths: RunPaths, meet: Rendezvous, stopped: Callable[[], object]) -> str:
    """Return why the hosts of this start cannot run together; empty if they can. What is odd is printed once."""
    since = meeting(paths).stat().st_mtime
    seen = meet_others(paths, meet.id, meet.node, meet.nodes, stopped)
    if isinstance(seen, str):
        return seen
    faults, odd = differences(seen, since)
    if meet.node == 0:
        print(*odd, sep="\n", end="\n" if odd else "")  # noqa: T201
    return "; ".join(faults)


def leave(paths: RunPaths) -> int:
    """Ask the ranks to save at the end of their step, since the time limit is near."""
    paths.temp.mkdir(mode=0o700, exist_ok=True)
    _leaving(paths).touch()
    ask_to_save(paths)
    return 0


def end(paths: RunPaths) -> int:
    """Say how the job ended; with a new checkpoint, have it started again before a time limit or without a host."""
    forget_meetings(paths)
    attempt = read_launch(paths).attempt_paths
    receipt = collect_receipts(attempt)
    if receipt:
        write_json(attempt.receipt, receipt)
    if finished(attempt):
        return 0
    if classify(attempt, receipt).failure_class == "node_lost" and saved_more(attempt):
        if receipt["reason"] != "node_lost":  # all that the other ranks know is that a peer is gone
            detail = f"{', '.join(missing(attempt.root))} left no receipt"
            write_json(attempt.receipt, receipt | {"reason": "node_lost", "detail": detail})
        return _requeue()
    if not _leaving(paths).exists() or receipt.get("reason") != "exited":
        return 1
    step = new_step(attempt)
    if step is None:
        words = "the time limit of the job came near before a new step was saved"
        write_json(attempt.receipt, receipt | {"reason": "timeout", "detail": words})
        return 1
    words = f"the time limit of the job came near; saved at step {step}"
    write_json(attempt.receipt, receipt | {"reason": "preempted", "detail": words})
    return _requeue()


def _requeue() -> int:
    done = subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
    if done.returncode == 0:
        signal.pause()  # Slurm ends this process
    return 1


def _leaving(paths: RunPaths) -> Path:
    return paths.temp / "slurm-leaving"


ACTIONS: dict[str, Callable[[RunPaths], int]] = {"begin": begin, "node": node, "leave": leave, "end": end}


def main() -> int:
    """Do what the first argument says for the run directory in the second."""
    try:
        return ACTIONS[sys.argv[1]](RunPaths(Path(sys.argv[2])))
    except Refused as refused:
        print(refused, file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
