"""Two runners of one run: the second waits, and is refused without touching anything."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from soup_flows import flows, tasks
from soup_flows.errors import Refused
from soup_flows.paths import RunPaths
from soup_flows.run_lock import run_lock
from tests.core.checkpoint_files import make_spec, plan_of

HOLD = """
import sys, time
from pathlib import Path
from soup_flows.paths import RunPaths
from soup_flows.run_lock import run_lock
with run_lock(RunPaths(Path(sys.argv[1])), 0):
    print("held", flush=True)
    time.sleep(600)
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run_training_as(run_id: str, values: dict[str, Any]) -> None:
    """Begin the flow under a given run id, outside a flow run."""
    with contextlib.ExitStack() as held:
        flows._run_attempts(values, run_id, held)


def test_a_second_runner_is_refused_and_follows_after_the_first_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "CLEANING_S", 0.0)
    spec = make_spec(tmp_path, strategy="ddp", launcher={"stop_budget_s": 1})
    plan, hardware = plan_of(spec), tasks.detect_hardware.fn("cpu")
    paths = RunPaths.of(tmp_path, "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(paths.root)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    before = files(paths.root)
    with pytest.raises(Refused, match=f"is being run by process {holder.pid}"), run_lock(paths, 0.5):
        pass
    assert files(paths.root) == before
    with pytest.raises(
        Refused, match="RUN001"
    ):  # the whole flow: nothing of the running run is written or removed
        run_training_as("run", {**spec.model_dump(), "output_dir": str(tmp_path)})
    assert files(paths.root) == before
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    launch = tasks.write_temp_config.fn(spec, hardware, plan, "run")
    assert launch.attempt == 1


def test_a_task_inside_the_holder_goes_on(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path, "run")
    with run_lock(paths, 0) as outer:
        with run_lock(paths, 0) as inner:
            assert inner == outer
        with run_lock(RunPaths.of(tmp_path, "other"), 0) as other:
            assert other != outer
    with run_lock(paths, 0):
        pass


def test_a_run_that_started_nothing_leaves_nothing_and_the_next_one_gets_a_lock_of_its_own(
    tmp_path: Path,
) -> None:
    """The lock that the waiting one has opened goes with the directory."""
    paths = RunPaths.of(tmp_path, "run")
    argv = [sys.executable, "-c", HOLD, str(paths.root)]
    with run_lock(paths, 0):
        next_one = subprocess.Popen(
            [*argv[:2], HOLD.replace(", 0):", ", 600):"), argv[3]], stdout=subprocess.PIPE
        )
        links = Path(f"/proc/{next_one.pid}/fd")
        lock = str(paths.root / "lock")
        while not any(os.path.realpath(link) == lock for link in links.iterdir()):
            assert next_one.poll() is None
            time.sleep(0.05)
    assert next_one.stdout is not None
    assert next_one.stdout.readline() == b"held\n"
    with pytest.raises(Refused, match="RUN001"), run_lock(paths, 0):
        pass
    next_one.terminate()  # killed, it removes nothing
    next_one.wait()
    with run_lock(paths, 0):
        assert paths.root.exists()
    assert not paths.root.exists()


@pytest.mark.parametrize("kind", ["a file is in the way", "a link for the lock"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, kind: str) -> None:
    paths = RunPaths.of(tmp_path, "run")
    if kind == "a file is in the way":
        (tmp_path / "runs").write_text("")
    else:
        paths.create()
        (paths.root / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="cannot be written") as refused, run_lock(paths, 0):
        pass
    assert [problem.id for problem in refused.value.problems] == ["RUN002"]
    assert not (tmp_path / "elsewhere").exists()
