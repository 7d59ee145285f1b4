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

from soup_flows.attempts import reconcile
from soup_flows.errors import Refused
from soup_flows.launch.engines import finished
from soup_flows.launch.engines.local import ASKED
from soup_flows.launch.plan import LaunchPlan, Rendezvous, elastic_argv
from soup_flows.launch.receipt import collect_receipts, new_receipt
from soup_flows.launch.run import run
from soup_flows.ledger import Change
from soup_flows.paths import AttemptPaths, RunPaths, write_atomic, write_json
from soup_flows.resume import Orders, find_start
from soup_flows.run_config import write_config
from soup_flows.run_events import read_attempt
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.stop import StopRequest

SIGNAL_S = 2.0
"""Seconds in which the supervisor hears Slurm's SIGTERM itself; after that it is told."""


def begin(paths: RunPaths) -> int:
    """Make the next attempt of a job that Slurm starts again, and say where the hosts of several meet."""
    launch = _read(paths)
    if _leaving(paths).exists():
        _leaving(paths).unlink()
        paths.stop_request.unlink(missing_ok=True)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if restarts and launch.attempt_paths.root.exists():
        launch = next_attempt(paths, launch)
    if launch.nodes > 1:
        paths.temp.mkdir(mode=0o700, exist_ok=True)
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        meet = Rendezvous(
            id=f"{os.environ['SLURM_JOB_ID']}.{restarts}",
            host=socket.gethostname(),
            port=port,
            nodes=launch.nodes,
        )
        write_atomic(_meeting(paths), meet.model_dump_json())
    print(f"attempt {launch.attempt} of {launch.run_id}, start {restarts + 1} of the job")  # noqa: T201
    return 0


def next_attempt(paths: RunPaths, launch: LaunchPlan) -> LaunchPlan:
    """Write the files of the attempt after one that Slurm ended.

    Returns:
        Its launch plan.

    Raises:
        Refused: if the run's own checkpoint does not fit any more.
    """
    _say_why(launch)
    spec = TrainingSpec.model_validate_json(paths.spec.read_bytes())
    plan = ShardingPlan.model_validate_json(paths.plan.read_bytes())
    old = Orders.model_validate_json(paths.orders.read_bytes())
    reconcile(paths, spec.recovery, state="cancelled")
    change = Change(
        learning_rate_scale=old.learning_rate_scale,
        skip_steps=old.skip_steps,
        weights=old.checkpoint if old.weights_only else None,
    )
    orders = find_start(spec, plan, paths, change)
    number = launch.attempt
    while paths.attempt(number).root.exists():
        number += 1
    paths.temp.mkdir(mode=0o700, exist_ok=True)
    config_path = write_config(spec, plan, paths, orders.universal)
    write_atomic(paths.orders, orders.model_dump_json(indent=2))
    again = launch.model_copy(update={"attempt": number, "config_path": config_path})
    write_atomic(paths.launch, again.model_dump_json(indent=2))
    return again


def _say_why(launch: LaunchPlan) -> None:
    """Keep in the ended attempt's receipt that it was Slurm that ended it."""
    attempt = launch.attempt_paths
    receipt = collect_receipts(attempt)
    if not receipt:
        words = "Slurm started the job again, and no host had left a receipt"
        receipt = new_receipt(launch.run_id) | {"reason": "node_lost", "detail": words, "survivors": []}
    elif receipt["reason"] in ("signal", "holder_gone", "stopped"):
        receipt |= {"reason": "preempted", "detail": "Slurm ended the job and started it again"}
    write_json(attempt.receipt, receipt)


def node(paths: RunPaths) -> int:
    """Run this host's ranks to their end; the exit code ends the other hosts only after a failure."""
    launch = _read(paths)
    if launch.nodes > 1:
        meet = Rendezvous.model_validate_json(_meeting(paths).read_bytes())
        launch = on_host(launch, meet.model_copy(update={"node": int(os.environ["SLURM_NODEID"])}))
    heard: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(time.monotonic()))

    def asked() -> str | None:
        late = heard and time.monotonic() - heard[0] > SIGNAL_S
        return "TerminationSignal: SIGTERM from Slurm" if late else None

    outcome = run(launch, should_stop=asked)
    return 0 if finished(launch.attempt_paths) or outcome.reason in ASKED else 1


def on_host(launch: LaunchPlan, meet: Rendezvous) -> LaunchPlan:
    """Return the plan of one host of several.

    It runs as one host of its own: what it leaves is found by its own marker, so that the end of one host does
    not touch another that shares the machine.

    Raises:
        OSError: if the hosts could not meet, since a name stands for the loopback device.
    """
    address = socket.gethostbyname(meet.host)
    if meet.host != socket.gethostname() and address.startswith("127."):
        raise OSError(
            f"{meet.host}, the first host, is {address} on {socket.gethostname()}: correct /etc/hosts or the DNS"
        )
    program = ("-m", "soup_flows.training", launch.run_dir)
    argv = elastic_argv(launch.run_id, launch.nproc_per_node, launch.stop_budget_s, *program, meet=meet)
    return launch.model_copy(
        update={
            "run_id": f"{launch.run_id}.{meet.node}",
            "node": meet.node,
            "argv": argv,
        }
    )


def leave(paths: RunPaths) -> int:
    """Ask the ranks to save at the end of their step, since the time limit is near."""
    paths.temp.mkdir(mode=0o700, exist_ok=True)
    _leaving(paths).touch()
    request = StopRequest(run_dir=str(paths.root), save=True, time=time.time())
    write_json(paths.stop_request, request.model_dump())
    return 0


def end(paths: RunPaths) -> int:
    """Say how the job ended; before a time limit, with a new checkpoint, have it started again."""
    attempt = _read(paths).attempt_paths
    receipt = collect_receipts(attempt)
    if receipt:
        write_json(attempt.receipt, receipt)
    if finished(attempt):
        return 0
    if not _leaving(paths).exists() or receipt.get("reason") != "exited":
        return 1
    step = _new_step(attempt)
    if step is None:
        words = "the time limit of the job came near before a new step was saved"
        write_json(attempt.receipt, receipt | {"reason": "timeout", "detail": words})
        return 1
    words = f"the time limit of the job came near; saved at step {step}"
    write_json(attempt.receipt, receipt | {"reason": "preempted", "detail": words})
    done = subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
    if done.returncode == 0:
        signal.pause()  # Slurm ends this process
    return 1


def _new_step(attempt: AttemptPaths) -> int | None:
    """Return the step that an attempt saved when it was stopped, if it made any."""
    found = read_attempt(attempt)
    stopped = found.get("stopped_at")
    saved = None if stopped is None else stopped.last_saved
    return saved if saved is not None and saved > found.get("started_from", 0) else None


def _read(paths: RunPaths) -> LaunchPlan:
    return LaunchPlan.model_validate_json(paths.launch.read_bytes())


def _leaving(paths: RunPaths) -> Path:
    return paths.temp / "slurm-leaving"


def _meeting(paths: RunPaths) -> Path:
    return paths.temp / "rendezvous.json"


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
