"""What a job of a cluster does when it starts again: the next attempt's files, from what the ended one left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soup_flows.cluster_job import next_attempt, on_host, read_launch
from soup_flows.launch.elastic import Rendezvous
from soup_flows.launch.hosts import Hosts
from soup_flows.launch.plan import LaunchPlan, build_launch_plan
from soup_flows.ledger import read_ledger
from soup_flows.paths import RunPaths, write_json
from soup_flows.ray_settings import RaySettings
from soup_flows.resume import Orders
from soup_flows.sharding import ShardingPlan, make_plan
from tests.validation.world import run


@pytest.fixture
def ended(tmp_path: Path) -> tuple[RunPaths, LaunchPlan, ShardingPlan]:
    """A run of two machines whose first attempt has ended; also returns a plan for one machine."""
    context = run(tmp_path, spec={"deepspeed": "zero2", "gpus": 2})
    paths = RunPaths.of(tmp_path, "run-1").create()
    plan, smaller = (make_plan(context.spec, context.hardware, 64, nodes) for nodes in (2, 1))
    launch = build_launch_plan(
        paths=paths,
        run_id="run-1",
        attempt=1,
        nproc_per_node=2,
        device="cuda",
        config_path=None,
        omp_num_threads=1,
        stop_budget_s=20,
        timeout_s=None,
        nodes=2,
        cluster=RaySettings(nodes=2),
    )
    values = (context.spec, plan, context.hardware, Orders(learning_rate_scale=0.5), launch)
    for path, value in zip(
        (paths.spec, paths.plan, paths.hardware, paths.orders, paths.launch), values, strict=True
    ):
        path.write_text(value.model_dump_json())
    launch.attempt_paths.root.mkdir()
    return paths, launch, smaller


@pytest.mark.parametrize(
    ("left", "seen", "failure_class", "words"),
    [
        (None, None, "node_lost", "Moon started the job again, and no host had left a receipt"),
        ("signal", None, "preempted", "Moon ended the job and started it again"),
        ("holder_gone", None, "preempted", "Moon ended the job and started it again"),
        ("stalled", None, "stalled", "no step"),
        # a machine that was cut off writes its own receipt late; what the job saw counts
        ("holder_gone", {"reason": "node_lost", "detail": "b is gone"}, "node_lost", "b is gone"),
    ],
)
def test_the_ledger_says_why_the_job_started_again(
    left: str | None,
    seen: dict[str, Any] | None,
    failure_class: str,
    words: str,
    ended: tuple[RunPaths, LaunchPlan, ShardingPlan],
) -> None:
    paths, launch, _ = ended
    if left is not None:
        write_json(launch.attempt_paths.receipt, {"reason": left, "detail": "", "stop_time": 1.0})
    again = next_attempt(paths, launch, "Moon", receipt=seen)
    assert (again.attempt, again.nodes) == (2, 2)
    assert read_launch(paths) == again
    (row,) = read_ledger(paths.attempts)
    assert (row.state, row.failure_class) == ("cancelled", failure_class)
    assert words in row.cause
    assert Orders.model_validate_json(paths.orders.read_bytes()).learning_rate_scale == 0.5


def test_a_host_without_a_receipt_is_what_the_job_lost(
    ended: tuple[RunPaths, LaunchPlan, ShardingPlan],
) -> None:
    """The others saw a signal of the cluster, as in a preemption, in which every host leaves its receipt."""
    paths, launch, _ = ended
    attempt = launch.attempt_paths
    for node in (0, 1):
        Hosts(attempt.root, node, 2, 300).beat(0.0)
    (attempt.root / "heartbeat" / "node_1").write_text("phobos runs\n")
    write_json(attempt.receipt, {"reason": "signal", "detail": "", "stop_time": 1.0})
    next_attempt(paths, launch, "Moon")
    (row,) = read_ledger(paths.attempts)
    assert (row.failure_class, "phobos left no receipt, and Moon started" in row.cause) == ("node_lost", True)


def test_another_size_is_another_plan_and_config(ended: tuple[RunPaths, LaunchPlan, ShardingPlan]) -> None:
    paths, launch, smaller = ended
    again = next_attempt(paths, launch, "Moon", smaller)
    assert again.nodes == smaller.nodes == 1
    assert ShardingPlan.model_validate_json(paths.plan.read_bytes()) == smaller
    assert smaller.batch.global_batch_size == 16
    assert again.config_path is not None
    assert Path(again.config_path).is_file()


def test_an_attempt_that_never_began_leaves_its_number(
    ended: tuple[RunPaths, LaunchPlan, ShardingPlan],
) -> None:
    paths, launch, _ = ended
    launch.attempt_paths.root.rmdir()
    assert next_attempt(paths, launch, "Moon").attempt == 1
    assert read_ledger(paths.attempts) == ()


def test_a_host_is_reached_by_the_address_that_is_known(
    ended: tuple[RunPaths, LaunchPlan, ShardingPlan],
) -> None:
    _, launch, _ = ended
    meet = Rendezvous(id="m", host="127.0.0.2", port=7, nodes=2, node=1)
    here = on_host(launch, meet, "127.0.0.3")
    assert (here.run_id, here.node) == ("run-1.1", 1)
    assert "--local-addr 127.0.0.3" in " ".join(here.argv)
    with pytest.raises(OSError, match="correct /etc/hosts"):
        on_host(launch, meet)
