"""Hosts of a job that tell each other what they are, before ranks start on them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from soup_flows import cluster_hosts
from soup_flows.cluster_hosts import HostSeen, data_digest, differences, forget_meetings, meet_others
from soup_flows.cluster_job import meeting
from soup_flows.data.prepare import PreparedData, PreparedSource
from soup_flows.data.report import report_on
from soup_flows.launch.elastic import Rendezvous
from soup_flows.launch.outcome import classify
from soup_flows.launch.plan import LaunchPlan, build_launch_plan
from soup_flows.launch.receipt import collect_receipts
from soup_flows.paths import RunPaths
from soup_flows.slurm_job import end, node
from soup_flows.slurm_settings import SlurmSettings
from tests.validation.world import rows_file


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths.of(tmp_path, "run-1").create()
    found.temp.mkdir()
    return found


def prepared(paths: RunPaths, rows: bytes) -> Path:
    """Write prepared rows of `rows`, and name them as the run's data."""
    entry = paths.root / "rows"
    entry.mkdir(exist_ok=True)
    (entry / "ids.bin").write_bytes(rows)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    report = report_on(rows_file(paths.root / "rows.jsonl", [chat]))
    source = PreparedSource(entry=str(entry), rows=1, report=report)
    paths.data.write_text(PreparedData(train=source, train_rows=1, eval_rows=0).model_dump_json())
    return entry


def test_hosts_hear_each_other(paths: RunPaths) -> None:
    heard: list[Any] = [None, None]

    def meet(number: int) -> None:
        heard[number] = meet_others(paths, "7.0", number, 2, lambda: False)

    other = threading.Thread(target=meet, args=(1,))
    other.start()
    meet(0)
    other.join()
    assert heard[0] == heard[1]
    assert differences(heard[0], 0.0)[0] == []
    forget_meetings(paths)
    assert not list(paths.temp.iterdir())


def test_a_host_that_is_not_heard_is_named(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_hosts, "SHARED_S", 0.3)
    meet_others(paths, "7.0", 1, 3, lambda: True)  # of another start: not to be taken for this one
    why = meet_others(paths, "7.1", 0, 3, lambda: False)
    assert isinstance(why, str)
    assert "nothing of machine 1, 2 of 3" in why
    assert "storage that all machines share" in why


def test_one_torn_copy_of_the_rows_is_seen(paths: RunPaths) -> None:
    assert data_digest(paths) == ""
    entry = prepared(paths, bytes(3 << 20))
    whole = data_digest(paths)
    assert len(whole) == 64
    for torn in (bytes((3 << 20) - 1), bytes((3 << 20) - 1) + b"x", b"x" + bytes((3 << 20) - 1)):
        prepared(paths, torn)
        assert data_digest(paths) != whole
    prepared(paths, bytes(3 << 20))
    assert data_digest(paths) == whole
    entry.rename(entry.with_name("elsewhere"))
    assert data_digest(paths) == f"{entry} is not there"


def test_a_job_whose_hosts_differ_ends_with_that_cause(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host is a file that it could have written; this one is the entry point of the job itself."""
    launch: LaunchPlan = build_launch_plan(
        paths=paths, run_id="run-1", attempt=1, nproc_per_node=1, device="cpu", config_path=None,
        omp_num_threads=1, stop_budget_s=5.0, timeout_s=None, nodes=2, cluster=SlurmSettings(nodes=2),
    )  # fmt: skip
    paths.launch.write_text(launch.model_dump_json())
    meet = Rendezvous(id="7.0", host="localhost", port=1, nodes=2)
    meeting(paths).write_text(meet.model_dump_json())
    other = HostSeen.here(paths, address="n2").model_copy(update={"name": "n2", "versions": {"torch": "1.0"}})
    (paths.temp / "host-7.0-1.json").write_text(other.model_dump_json())
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert node(paths) == 1
    verdict = classify(launch.attempt_paths, collect_receipts(launch.attempt_paths))
    assert verdict.failure_class == "bad_config"
    assert "torch is 2." in verdict.cause
    assert "1.0 on n2" in verdict.cause
    assert end(paths) == 1
    assert not list(paths.temp.glob("host-*"))
