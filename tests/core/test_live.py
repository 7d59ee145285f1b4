"""The live page and the choice of devices, from plain values."""

from __future__ import annotations

import re
from typing import Any

import pytest

from soup_flows.charts import curve
from soup_flows.errors import refuse
from soup_flows.hardware.values import Gpu
from soup_flows.launch.devices import choose, gpu_devices
from soup_flows.launch.kernel import memory_kill
from soup_flows.launch.outcome import classify, warn_of_exit
from soup_flows.launch.stacks import stall_cause
from soup_flows.live_state import LiveState, duration, live_page, summary
from soup_flows.pages import report_page
from soup_flows.paths import AttemptPaths
from soup_flows.report import Point, TrainReport
from tests.charts import without_table

STACK = """Thread 0x1 (most recent call first):
  File "/x/threading.py", line 9 in wait

Current thread 0x2 (most recent call first):
  File "{file}", line 12 in {function}
  File "/x/main.py", line 3 in <module>
"""


def step(rank: int, number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "rank": rank, "step": number, "seconds": 0.5, "tokens": 100} | fields


def test_progress_speed_and_time_left() -> None:
    state = LiveState()
    state.update([{"kind": "data", "total_steps": 100}])
    state.update(step(rank, n) for n in range(1, 11) for rank in (0, 1))
    state.update([{"kind": "metrics", "rank": 0, "step": 10, "loss": 2.5, "learning_rate": 1e-4}])
    assert state.percent == 10
    assert state.tokens_per_second == pytest.approx(400)
    assert state.eta_s == pytest.approx(45)
    assert summary(state) == "step 10 of 100, loss 2.5, 400 tokens/s, 45 s left"
    assert duration(7384) == "2 h 03 min"


def test_page_has_curves_ranks_and_names_the_straggler() -> None:
    state = LiveState()
    for n in range(1, 200):
        state.update([{"kind": "metrics", "rank": 0, "step": n, "loss": 3 / n, "learning_rate": 1e-4}])
        state.update(step(r, n, work_seconds=0.4 if r == 2 else 0.1, host_bytes=2**30) for r in range(4))
    assert state.stragglers() == [2]
    page = live_page(state)
    assert page.count("```mermaid") == 2
    assert len(page.split("line [", 1)[1].split("]")[0].split(",")) == 40
    assert 'x-axis "optimizer step" 1 --> 199' in page
    assert without_table(page) == []
    steps = re.findall(r"^\| (\d+) \| [\d.]+ \| 0.0001 \| – \|$", page, re.MULTILINE)
    assert (len(steps), steps[0], steps[-1]) == (12, "1", "199")
    assert "rank 2" in page
    assert page.count("straggler") == 1
    assert "1.00 GiB" in page


def test_charts_hold_numbers_that_mermaid_reads() -> None:
    """Mermaid's grammar knows no exponents: `1e-05` is "Failed to render", and one point is an empty chart."""
    chart = curve("Learning rate", [(1, 0.0), (2, 1e-5), (3, 2.5e-7), (4, 12345678.0)])
    line = chart.split("line [", 1)[1].split("]")[0].split(", ")
    assert line == ["0", "0.00001", "0.00000025", "12345700"]
    assert all(re.fullmatch(r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)", number) for number in line)
    state = LiveState()
    state.update([{"kind": "metrics", "rank": 0, "step": 1, "loss": 3.0, "learning_rate": 1e-5}])
    assert "mermaid" not in live_page(state)
    assert "| 1 | 3 | 1e-05 | – |" in live_page(state)
    state.update([{"kind": "metrics", "rank": 0, "step": 2, "loss": None, "learning_rate": 1e-5}])
    assert "| 2 | – | 1e-05 | – |" in live_page(state)  # not finite: no chart can show it


def test_a_long_report_stays_short() -> None:
    points = tuple(Point(step=n, loss=3 / n, learning_rate=1e-4, grad_norm=1.0) for n in range(1, 5001))
    report = TrainReport(
        run_id="run", run_dir="r", state="completed", steps=5000, train=points, evaluations=points[::5]
    )
    page = report_page(report)
    assert without_table(page) == []
    assert page.count("| 5000 |") == 1
    assert page.count("\n") < 100


def test_an_attempt_that_ended_is_not_shown_as_training() -> None:
    state = LiveState()
    state.update([{"kind": "data", "total_steps": 100}, *(step(r, 7) for r in (0, 1))])
    assert live_page(state).startswith("# Training: step 7 of 100")
    state.ended_early = True
    title = live_page(state).splitlines()[0]
    assert title == "# Ended early: step 7 of 100, 400 tokens/s"


def test_equal_ranks_have_no_straggler() -> None:
    state = LiveState()
    state.update(step(r, n, work_seconds=0.1 + 0.001 * r) for n in range(30) for r in range(4))
    assert state.stragglers() == []


def test_strange_events_change_nothing() -> None:
    state = LiveState()
    state.update([{"kind": "step"}, {"kind": "step", "rank": "x", "step": None, "seconds": {}}])
    state.update([{"kind": "data", "total_steps": None}, {"kind": "metrics", "loss": 1.0}, {"kind": "new"}])
    assert state == LiveState()
    assert live_page(state) == "# Training: step 0\n"


def test_bounded_for_long_runs() -> None:
    state = LiveState()
    for n in range(20_000):
        state.update([{"kind": "metrics", "rank": 0, "step": n, "loss": 1.0}])
    assert len(state.points) <= 2000
    assert (state.points[0].step, state.points[-1].step) == (0, 19_999)


def gpu(index: int, *links: int, name: str = "H100") -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", name=name, memory_total_bytes=1, memory_free_bytes=1,
               nvlinks=links)  # fmt: skip


def test_the_best_connected_of_one_model_are_chosen() -> None:
    pairs = [gpu(0), gpu(1, 3), gpu(2, 5), gpu(3, 1), gpu(4, name="A100"), gpu(5, 2)]
    devices = gpu_devices(pairs)
    assert [d.id for d in choose(2, devices)] == ["GPU-1", "GPU-3"]
    assert [d.id for d in choose(4, devices)] == ["GPU-1", "GPU-2", "GPU-3", "GPU-5"]
    assert [d.id for d in choose(2, devices[:1] + devices[4:])] == ["GPU-0", "GPU-5"]


def receipt(**fields: Any) -> dict[str, Any]:
    return {"reason": "exited", "detail": "", "stop_time": 100.0, "exit_code": 1, "signalled": []} | fields


KILLED = "Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB"


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [(KILLED, "host_oom"), (KILLED.replace("4711", "4712"), "rank_killed"), ("", "rank_killed")],
)
def test_a_kill_in_the_kernel_log_is_host_memory(
    line: str, failure_class: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    attempt = AttemptPaths(tmp_path_factory.mktemp("attempt"))
    first = {"exit_code": -9, "rank": 1, "pid": 4711}
    assert classify(attempt, receipt(first_failure=first, kernel=[line])).failure_class == failure_class


def test_words_of_the_kernel_about_others_are_not_ours() -> None:
    assert memory_kill(["Out of memory: Killed process 17 (chrome)"], {4711, None}) is None


@pytest.mark.parametrize(
    ("scheduler", "reason", "detail", "failure_class"),
    [
        ("slurm", "signal", "SIGTERM", "preempted"),
        ("kubernetes", "stopped", "interrupted by TerminationSignal", "preempted"),
        ("slurm", "stopped", "the server says the run is Cancelling", "cancelled"),
        (None, "signal", "SIGTERM", "cancelled"),
        ("slurm", "timeout", "the time limit of 5 s has passed", "timeout"),
        ("slurm", "stopped", "interrupted by TaskRunTimeoutError", "timeout"),
        (None, "supervisor_died", "exit code 1\nOSError: [Errno 28] No space left on device", "disk_full"),
        (None, "supervisor_died", "killed by SIGKILL", "rank_killed"),
    ],
)
def test_preempted_is_a_signal_under_a_scheduler(
    scheduler: str | None, reason: str, detail: str, failure_class: str, tmp_path_factory: Any
) -> None:
    attempt = AttemptPaths(tmp_path_factory.mktemp("attempt"))
    found = classify(attempt, receipt(scheduler=scheduler, reason=reason, detail=detail))
    assert found.failure_class == failure_class


def test_a_rank_that_leaves_without_an_error_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    attempt = AttemptPaths(tmp_path_factory.mktemp("attempt"))
    dead = [{"rank": 1, "pid": 5, "time": 1.0}]
    found = classify(attempt, receipt(exit_code=0, dead_ranks=dead))
    assert found.failure_class == "unknown"
    assert "rank 1 left before training had finished" in found.cause


def test_an_abort_after_the_result_is_a_warning() -> None:
    assert warn_of_exit(receipt(exit_code=0)) == ()
    (warning,) = warn_of_exit(receipt(first_failure={"rank": 1, "exit_code": -6, "pid": 5}))
    assert warning.severity == "warning"
    assert "rank 1 ended with SIGABRT" in warning.message


def test_refused_in_a_rank_is_bad_data_or_bad_config() -> None:
    assert refuse("DATA020", "data", "no row is left").failure_class == "bad_data"
    assert refuse("DATA014", "model", "no chat template").failure_class == "bad_data"
    assert refuse("PLAN001", "gpus", "too many").failure_class == "bad_config"


def test_a_stall_names_the_rank_that_the_others_wait_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("attempt")
    (root / "stacks").mkdir()
    for rank, file, function in (
        (0, "/t/distributed_c10d.py", "all_reduce"),
        (1, "/x/reader.py", "read"),
        (2, "/t/distributed_c10d.py", "all_reduce"),
    ):
        (root / "stacks" / f"rank_{rank}.txt").write_text(STACK.format(file=file, function=function))
    beats = [{"rank": r, "step": 7, "phase": "train", "quiet_s": 9.0} for r in range(3)]
    stall = {**beats[0], "threshold_s": 8.0, "beats": beats}
    text = stall_cause(root, stall)
    assert "rank 1 is furthest behind, at step 7" in text
    assert "rank 1 in read (reader.py, line 12)" in text
    behind = [{**beats[0], "step": 6}, beats[1], beats[2]]
    assert "rank 0 is furthest behind, at step 6" in stall_cause(root, {**stall, "beats": behind})
    (root / "stacks" / "rank_1.txt").write_text(STACK.format(file="/t/distributed_c10d.py", function="recv"))
    assert "all 3 ranks made 7 steps and wait" in stall_cause(root, stall)
