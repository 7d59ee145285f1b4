"""Shots at random moments, saves included: the benchmark with fewer of them, and once under torch elastic."""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import pytest

from benchmarks.kill_resume import kill_and_compare, make_attempt, make_spec, passed
from benchmarks.preloaded import forked
from soup_flows.launch.plan import LaunchPlan
from tests.recovery.conftest import kill_a_rank, wait_for

pytestmark = pytest.mark.ranks


@pytest.mark.long
def test_six_kills(tmp_path: Path, zygote: Path) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    spec = make_spec("zero2", tmp_path, steps=10)
    found = kill_and_compare(spec, 6, seed, lambda plan: forked(plan, zygote))
    assert found["kills"] == 6
    assert passed(found), found


def test_a_kill_under_torch_elastic(tmp_path: Path) -> None:
    """The start that users have; the other tests fork their ranks."""
    import threading

    def shoot(launch: LaunchPlan) -> threading.Thread:
        def run() -> None:
            wait_for(launch, "checkpoint", 3)
            kill_a_rank(launch)

        thread = threading.Thread(target=run, daemon=True)
        thread.hit = "after a checkpoint"  # type: ignore[attr-defined]
        return thread

    spec, run_id = make_spec("ddp", tmp_path, steps=6), f"test-{uuid.uuid4().hex[:8]}"
    killed, _, _ = make_attempt(spec, run_id, lambda plan: plan, shoot)  # type: ignore[arg-type]
    assert killed.failure_class == "rank_killed"
    resumed, _, verified = make_attempt(spec, run_id, lambda plan: plan)
    assert verified
    assert (resumed.state, resumed.started_from, resumed.steps) == ("completed", 3, 6)
    assert [row.state for row in resumed.ledger] == ["failed", "completed"]
