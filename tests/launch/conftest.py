"""Real process trees for the launch tests: tiny rank scripts under torch elastic or a small tree like it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from soup_flows.launch import proc
from soup_flows.launch.elastic import elastic_argv
from soup_flows.launch.plan import LaunchPlan, StallSettings, build_launch_plan
from soup_flows.paths import RunPaths

GENEROUS_S = 60

# Starts ranks as torch elastic does, each in a session of its own, and passes SIGTERM on, without the seconds
# that importing torch takes.
TREE = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: [p.terminate() for p in ranks])
ranks = [
    subprocess.Popen([sys.executable, sys.argv[2]], env=os.environ | {"RANK": str(r)}, start_new_session=True)
    for r in range(int(sys.argv[1]))
]
sys.exit(any([p.wait() for p in ranks]))
"""

PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
from soup_flows.launch import rank
attached = rank.attach()
me, attempt = rank.rank_number(), pathlib.Path(os.environ["SOUP_FLOWS_ATTEMPT_DIR"])
def ready():
    (attempt / f"ready_{me}").write_text(str(os.getpid()))
def fail(error):
    try:
        raise error
    except BaseException:
        rank.write_error(error)
        raise
"""

HOLDER = """
import pathlib, sys
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import run
run(LaunchPlan.model_validate_json(pathlib.Path(sys.argv[1]).read_text()))
"""


def until(condition: Callable[[], Any], what: str = "condition") -> Any:
    """Wait for `condition` to hold and return its value."""
    end = time.monotonic() + GENEROUS_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come true in {GENEROUS_S} s")


def parameters(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


class Launch:
    """One run of a rank script; everything is found again by its run id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_id = f"test-{uuid.uuid4().hex[:12]}"
        self.paths = RunPaths.of(folder, self.run_id).create()
        self.attempt = self.paths.attempt(1)

    def plan(
        self,
        body: str,
        *,
        ranks: int = 2,
        elastic: bool = False,
        stop_budget_s: float = 5.0,
        timeout_s: float | None = None,
        stall: StallSettings | None = None,
        **changes: Any,
    ) -> LaunchPlan:
        """Return a plan whose ranks run `body` after `PRELUDE`, under torch elastic if asked."""
        script, tree = self.folder / "rank.py", self.folder / "tree.py"
        script.write_text(PRELUDE + body)
        tree.write_text(TREE)
        self.paths.temp.mkdir(exist_ok=True)
        config = self.paths.temp / "ds_config.json"
        config.write_text("{}")
        plan = build_launch_plan(
            paths=self.paths,
            run_id=self.run_id,
            attempt=1,
            nproc_per_node=ranks,
            device="cpu",
            config_path=str(config),
            omp_num_threads=1,
            stop_budget_s=stop_budget_s,
            timeout_s=timeout_s,
            stall=stall,
        )
        argv = (sys.executable, str(tree), str(ranks), str(script))
        if elastic:
            argv = elastic_argv(self.run_id, ranks, stop_budget_s, str(script))
        self.temporary.mkdir(exist_ok=True)
        env = {**plan.env, "TMPDIR": str(self.temporary)}
        return plan.model_copy(update={"argv": argv, "env": env, **changes})

    @property
    def temporary(self) -> Path:
        """What launcher and ranks have as the folder of temporary files."""
        return self.folder / "temporary"

    def hold(self, plan: LaunchPlan, holder: str = HOLDER) -> subprocess.Popen[bytes]:
        """Run `plan` in a process of its own, a session leader like Prefect's flow process."""
        path = self.folder / "plan.json"
        path.write_text(plan.model_dump_json())
        return subprocess.Popen([sys.executable, "-c", holder, str(path)], start_new_session=True)

    def ranks_ready(self, ranks: int = 2) -> list[int]:
        """Wait until all ranks called `ready()` and return their PIDs."""
        files = [self.attempt.root / f"ready_{r}" for r in range(ranks)]
        until(lambda: all(f.exists() and f.read_text() for f in files), "ranks ready")
        return [int(f.read_text()) for f in files]

    def supervisor(self) -> int:
        (pid,) = until(lambda: proc.marked(self.run_id, proc.SUPERVISOR_MARKER), "a supervisor")
        return pid

    def survivors(self) -> list[str]:
        return [f"{pid}: {parameters(pid)}" for pid in proc.marked(self.run_id)]

    def assert_clean(self) -> None:
        until(lambda: not proc.marked(self.run_id), "no survivors")
        until(lambda: not list(self.paths.temp.iterdir()), "the temporary config is gone")
        until(lambda: not self.channels(), "the channel is gone")
        assert not list(self.temporary.glob("*"))

    def channels(self) -> list[Path]:
        """Channel folders of this run that are still there."""
        return list(Path(tempfile.gettempdir()).glob(f"soup-flows-{self.run_id}@*"))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A launch in a folder with a hostile name, which must leave nothing."""
    folder = tmp_path / 'it\'s a "bad" dir; echo $HOME'
    folder.mkdir()
    case = Launch(folder)
    yield case
    try:
        case.assert_clean()
    finally:
        proc.send(proc.marked(case.run_id), 9)
