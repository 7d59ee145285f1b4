"""Two pretend hosts, one of which loses its power in the middle of a training and comes back."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from soup_flows.launch.engines.cluster import SILENCE_S, ClusterEngine
from soup_flows.launch.engines.ray import RayEngine
from soup_flows.launch.plan import PACKAGE_ROOT, LaunchPlan
from soup_flows.launch.receipt import read_receipt_file
from soup_flows.report import TrainReport
from tests.engines import cluster as real_slurm
from tests.engines import pretend_hosts
from tests.engines import ray_cluster as real_ray
from tests.engines.conftest import Maker, Run, job_of, losses, marked, on_machines, until
from tests.engines.pretend_hosts import Network
from tests.engines.test_slurm import start_again_now

pytestmark = [pytest.mark.ranks, pytest.mark.long]

STEPS, EVERY = 60, 10
OURS_S, THEIRS_S = 15, 10
"""Seconds of silence after which the watchdog, and the cluster, are to notice it."""
LATE_S = 300
"""The same for whoever is not to be the first."""


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts that share what a run needs; the tests are skipped where there can be none."""
    reason = pretend_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    shared = tmp_path_factory.getbasetemp(), Path(sys.prefix), Path(PACKAGE_ROOT)
    with pretend_hosts.network(*shared) as found:
        yield found


@pytest.fixture(scope="module")
def wanted(make: Maker) -> TrainReport:
    """The run that nothing happened to."""
    report = make("local", steps=STEPS, every=EVERY).attempt()
    assert report.state == "completed", report.cause
    return report


def went_on(report: TrainReport, run: Run, wanted: TrainReport) -> None:
    """Assert that a run lost a machine, went on from its own checkpoint, and left nothing."""
    assert (report.state, report.attempts) == ("completed", 2), report.cause
    assert report.started_from >= EVERY
    assert losses(report) == losses(wanted)
    assert [(row.state, row.failure_class) for row in report.ledger] == [
        ("cancelled", "node_lost"),
        ("completed", None),
    ]
    assert not marked(run.run_id)


@pytest.mark.parametrize(("first", "number"), [("watchdog", 1), ("slurm", 1), ("slurm", 0)])
def test_a_silent_host_under_slurm(
    first: str,
    number: int,
    hosts: Network,
    make: Maker,
    wanted: TrainReport,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noticed by whoever is faster; either way Slurm starts the job again, once the host is back.

    The batch script, and the first rank, run on host 0.
    """
    reason = real_slurm.why_not()
    if reason is not None:
        pytest.skip(reason)
    lost = hosts.hosts[number]
    root = tmp_path_factory.mktemp("slurm")
    ours, theirs = (OURS_S, LATE_S) if first == "watchdog" else (LATE_S, THEIRS_S)
    with real_slurm.cluster(hosts.hosts, root, theirs) as slurm:
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, slurm.environment[name])
        monkeypatch.setattr(ClusterEngine.__init__, "__defaults__", (1.0, SILENCE_S))

        def power_off(run: Run, launch: LaunchPlan) -> None:
            run.wait_for(1, "checkpoint", EVERY)
            lost.power_off()
            receipt = run.paths.attempt(1).receipt_of(1 - number)
            until(lambda: read_receipt_file(receipt).get("reason"), "an end of the attempt")
            lost.boot()
            slurm.start_node(lost)
            start_again_now(slurm, job_of(run))

        launcher = {"slurm": {"nodes": 2}, "stall_floor_s": ours}
        run = on_machines(make("slurm", elastic=True, steps=STEPS, every=EVERY, **launcher))
        report = run.attempt(power_off)
        went_on(report, run, wanted)
        assert lost.name in report.ledger[0].cause
        assert (first == "watchdog") is ("no sign of life" in report.ledger[0].cause)


@pytest.mark.parametrize("first", ["watchdog", "ray"])
def test_a_silent_host_under_ray(
    first: str, hosts: Network, make: Maker, wanted: TrainReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noticed by whoever is faster; the job's entry waits for the host and makes the next attempt."""
    reason = real_ray.why_not()
    if reason is not None:
        pytest.skip(reason)
    lost = hosts.hosts[1]
    root = Path(tempfile.mkdtemp(prefix="soup-ray-", dir="/tmp"))
    with real_ray.cluster(hosts.hosts, root, notices=first == "ray") as ray:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.address)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        monkeypatch.setattr(RayEngine.__init__, "__defaults__", (1.0, SILENCE_S))

        def power_off(run: Run, launch: LaunchPlan) -> None:
            run.wait_for(1, "checkpoint", EVERY)
            lost.power_off()
            receipt = run.paths.attempt(1).receipt
            until(lambda: read_receipt_file(receipt).get("reason"), "an end of the attempt")
            lost.boot()
            ray.start(lost.address)

        launcher = {"ray": {"nodes": 2}, "stall_floor_s": OURS_S if first == "watchdog" else LATE_S}
        run = on_machines(make("ray", elastic=True, steps=STEPS, every=EVERY, **launcher))
        report = run.attempt(power_off)
        went_on(report, run, wanted)
        assert lost.name in report.ledger[0].cause
        assert (first == "watchdog") is ("no sign of life" in report.ledger[0].cause)
