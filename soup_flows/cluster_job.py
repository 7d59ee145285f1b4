"""What runs inside a job of a cluster, whichever that is: the next attempt of a job that starts again, and one host.

No Prefect and no torch is imported.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from soup_flows.attempts import reconcile
from soup_flows.launch.elastic import Rendezvous, elastic_argv
from soup_flows.launch.hosts import missing
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.receipt import collect_receipts, new_receipt
from soup_flows.ledger import Change
from soup_flows.paths import AttemptPaths, RunPaths, write_atomic, write_json
from soup_flows.resume import Orders, find_start
from soup_flows.run_config import write_config
from soup_flows.run_events import read_attempt
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.stop import StopRequest


def read_launch(paths: RunPaths) -> LaunchPlan:
    """Return the launch that the flow, or an earlier start of the job, wrote.

    Raises:
        OSError: if there is none.
        pydantic.ValidationError: if it is of another version.
    """
    return LaunchPlan.model_validate_json(paths.launch.read_bytes())


def next_attempt(
    paths: RunPaths,
    launch: LaunchPlan,
    title: str,
    plan: ShardingPlan | None = None,
    receipt: dict[str, Any] | None = None,
) -> LaunchPlan:
    """Write the files of the attempt after one that the cluster ended.

    Args:
        paths: the run's files.
        launch: the attempt that ended.
        title: what people call the cluster.
        plan: what is computed from here on, where that differs, such as on fewer hosts.
        receipt: how the attempt ended, where that is known; a host that was cut off may write over it later.

    Returns:
        Its launch plan.

    Raises:
        Refused: if the run's own checkpoint does not fit any more.
    """
    if launch.attempt_paths.root.exists():
        write_json(launch.attempt_paths.receipt, receipt or _why(launch, title))
    spec = TrainingSpec.model_validate_json(paths.spec.read_bytes())
    old = Orders.model_validate_json(paths.orders.read_bytes())
    reconcile(paths, spec.recovery, state="cancelled")
    if plan is None:
        plan = ShardingPlan.model_validate_json(paths.plan.read_bytes())
    else:
        write_atomic(paths.plan, plan.model_dump_json(indent=2))
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
    changed = {"attempt": number, "config_path": config_path, "nodes": plan.nodes}
    again = launch.model_copy(update=changed)
    write_atomic(paths.launch, again.model_dump_json(indent=2))
    return again


def _why(launch: LaunchPlan, title: str) -> dict[str, Any]:
    """Return the ended attempt's receipt, which says that it was the cluster that ended it."""
    receipt = collect_receipts(launch.attempt_paths)
    if not receipt:
        words = f"{title} started the job again, and no host had left a receipt"
        return new_receipt(launch.run_id) | {"reason": "node_lost", "detail": words, "survivors": []}
    if receipt["reason"] not in ("signal", "holder_gone", "stopped"):
        return receipt
    if gone := missing(launch.attempt_paths.root):
        words = f"{', '.join(gone)} left no receipt, and {title} started the job again"
        return receipt | {"reason": "node_lost", "detail": words}
    return receipt | {"reason": "preempted", "detail": f"{title} ended the job and started it again"}


def ask_to_save(paths: RunPaths) -> None:
    """Have the ranks save a checkpoint at the end of their step and end."""
    request = StopRequest(run_dir=str(paths.root), save=True, time=time.time())
    write_json(paths.stop_request, request.model_dump())


def new_step(attempt: AttemptPaths) -> int | None:
    """Return the step that an attempt saved when it was stopped, if it made any."""
    found = read_attempt(attempt)
    stopped = found.get("stopped_at")
    saved = None if stopped is None else stopped.last_saved
    return saved if saved is not None and saved > found.get("started_from", 0) else None


def saved_more(attempt: AttemptPaths) -> bool:
    """Whether an attempt made a checkpoint, so that another goes on from a later step."""
    return bool(read_attempt(attempt)["checkpoints"])


def free_port() -> int:
    """Return a port that nothing listens on at present."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def on_host(launch: LaunchPlan, meet: Rendezvous, local_addr: str | None = None) -> LaunchPlan:
    """Return the plan of one host of several.

    It runs as one host of its own: what it leaves is found by its own marker, so that the end of one host does
    not touch another that shares the machine.

    Args:
        launch: the attempt.
        meet: where the hosts meet, and which of them this is.
        local_addr: the address by which the others reach this host, where it is known; else its name is used.

    Raises:
        OSError: if the hosts could not meet, since a name stands for the loopback device.
    """
    address = socket.gethostbyname(meet.host)
    if local_addr is None and meet.host != socket.gethostname() and address.startswith("127."):
        raise OSError(
            f"{meet.host}, the first host, is {address} on {socket.gethostname()}: correct /etc/hosts or the DNS"
        )
    program = ("-m", "soup_flows.training", launch.run_dir)
    argv = elastic_argv(
        launch.run_id, launch.nproc_per_node, launch.stop_budget_s, *program, meet=meet, local_addr=local_addr
    )
    return launch.model_copy(
        update={
            "run_id": f"{launch.run_id}.{meet.node}",
            "node": meet.node,
            "argv": argv,
        }
    )


def meeting(paths: RunPaths) -> Path:
    """The file that says where the hosts of an attempt meet."""
    return paths.temp / "rendezvous.json"
