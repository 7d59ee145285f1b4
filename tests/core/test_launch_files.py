"""The launch's files read and written without processes: events, logs, heartbeats, plans, verdicts."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from soup_flows.attempt import error_lines
from soup_flows.errors import FAILURES, FailureClass, TrainingFailed
from soup_flows.launch import layout, proc
from soup_flows.launch.advice import ADVICE, match_text, match_types
from soup_flows.launch.events import LineTail, last_lines, sample_lines, strip_ansi, tail_events
from soup_flows.launch.hosts import Hosts, missing
from soup_flows.launch.outcome import classify, tails
from soup_flows.launch.plan import LaunchPlan, build_launch_plan
from soup_flows.launch.pump import Pump, RotatingLog
from soup_flows.launch.rank import EventWriter, write_error
from soup_flows.launch.receipt import first_failure
from soup_flows.launch.watchdog import Watchdog
from soup_flows.pages import report_page
from soup_flows.paths import RunPaths, write_json
from soup_flows.report import TrainReport

RECEIPT: dict[str, Any] = {
    "reason": "exited",
    "detail": "",
    "stop_time": None,
    "exit_code": 1,
    "signalled": [],
    "dead_ranks": [],
    "first_failure": None,
    "oom_kills_before": 3,
    "oom_kills_after": 3,
}


def test_events_survive_torn_lines_truncation_and_other_versions(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = tail_events(path)
    assert tail.poll() == []
    writer = EventWriter(path, 3)
    writer.write("step", step=1, loss=float("inf"), path=Path("/x"), v=99)
    (event,) = tail.poll()
    assert (event["v"], event["rank"], event["kind"], event["loss"]) == (1, 3, "step", "inf")
    with path.open("a") as file:
        file.write('{"v": 1, "kind": "st')
        file.flush()
        assert tail.poll() == []
        file.write(
            'ep", "n": 2}\n{"v": 1, "ki\n[1]\n\n{"v": 2, "kind": "step"}\n{"v": 1, "kind": "new to us"}\n'
        )
    assert [event["kind"] for event in tail.poll()] == ["step", "new to us"]
    assert tail.skipped == 3
    path.write_text('{"v": 1, "kind": "after truncation"}\n')
    assert [event["kind"] for event in tail.poll()] == ["after truncation"]


def test_line_tail_loses_nothing_over_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    tail = LineTail(path)
    path.write_bytes(b"one\ntw")
    assert tail.poll() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    path.rename(tmp_path / "rank_0.log.1")
    path.write_bytes(b"four \xff\nfive")
    assert [line for _ in range(3) for line in tail.poll()] == ["two", "three", "four \ufffd"]
    assert tail.finish() == ["five"]


@pytest.mark.parametrize(
    "pieces", [[b"a\r", b"\nb\rc\n"], [b"a\r\nb\rc\n"], [b"a", b"\r\nb", b"\r", b"c", b"\n"]]
)
def test_pump_shows_what_a_terminal_would(tmp_path: Path, pieces: list[bytes]) -> None:
    read, write = os.pipe()
    pump = Pump(read, RotatingLog(tmp_path / "log", 1 << 20))
    for piece in pieces:
        os.write(write, piece)
        pump.drain(0.0)
    os.close(write)
    pump.finish(0.0)
    os.close(read)
    assert (tmp_path / "log").read_bytes() == b"a\nc\n"


def test_pump_writes_a_moving_bar_now_and_then(tmp_path: Path) -> None:
    read, write = os.pipe()
    pump = Pump(read, RotatingLog(tmp_path / "log", 1 << 20))
    os.write(write, b"\r10%")
    pump.drain(0.0)
    assert (tmp_path / "log").read_bytes() == b""
    pump.tick(1e9)
    pump.tick(2e9)
    assert (tmp_path / "log").read_bytes() == b"10%\n"
    os.close(write)
    os.close(read)


def test_log_on_a_full_disk_counts_and_goes_on() -> None:
    log = RotatingLog(Path("/dev/full"), 1 << 20)
    log.write(b"12345\n")
    assert log.lost_bytes == 6


def test_sampling_says_how_many_were_left_out() -> None:
    lines = [str(n) for n in range(1000)]
    shown = sample_lines(lines, 10, "the file")
    assert shown[:5] == lines[:5]
    assert shown[6:] == lines[-5:]
    assert "990 lines" in shown[5]
    assert "the file" in shown[5]
    assert sample_lines(lines[:10], 10, "") == lines[:10]


def test_ansi_and_last_lines(tmp_path: Path) -> None:
    assert strip_ansi("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07") == "red link"
    (tmp_path / "l.1").write_text("1\n2\n")
    (tmp_path / "l").write_text("3\n4\n")
    assert last_lines(tmp_path / "l", 3) == ["2", "3", "4"]
    assert last_lines(tmp_path / "missing") == []


def beat(attempt: Path, rank: int, step: int, phase: str, at_s: float) -> None:
    path = layout.heartbeat(attempt, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{step} {phase}\n")
    os.utime(path, ns=(int(at_s * 1e9), int(at_s * 1e9)))


def test_watchdog_threshold_follows_the_longest_step(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path, 2, floor_s=10, factor=5, startup_s=1000)
    assert dog.check(0, set()) is None
    assert dog.threshold_s() == 1000
    for rank in (0, 1):
        beat(tmp_path, rank, 1, "train", 1)
    assert dog.check(5, set()) is None
    assert dog.threshold_s() == 10
    for rank in (0, 1):
        beat(tmp_path, rank, 3, "train", 13 + rank)
    assert dog.check(14, set()) is None
    assert dog.longest_step_s == 6.5
    assert dog.threshold_s() == 32.5
    for now in range(15, 46):
        assert dog.check(now, set()) is None
    stall = dog.check(47, set())
    assert stall is not None
    assert (stall["rank"], stall["step"], stall["quiet_s"]) == (0, 3, 33)
    assert dog.check(47, {0, 1}) is None


def test_watchdog_does_not_wait_long_for_an_exit(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path, 2, floor_s=10, factor=2, startup_s=1000)
    dog.check(0, set())
    for rank, phase in ((0, "verify"), (1, "train")):
        beat(tmp_path, rank, 5, phase, 1)
    assert dog.check(1, set()) is None
    assert dog.threshold_s() == 1000
    beat(tmp_path, 0, 5, "end", 2)
    assert dog.check(2, {1}) is None
    assert [dog.check(now, {1}) is None for now in (11, 13)] == [True, False]


def test_watchdog_forgives_a_paused_machine(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path, 1, floor_s=10, factor=2, startup_s=100)
    dog.check(0, set())
    beat(tmp_path, 0, 1, "train", 1)
    assert dog.check(1, set()) is None
    assert dog.check(5000, set()) is None
    assert [dog.check(5000 + s, set()) is None for s in (5, 12)] == [True, False]


def test_plan_refuses_a_config_that_is_not_its_own(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    common: dict[str, Any] = {
        "paths": paths, "run_id": "r", "attempt": 1, "nproc_per_node": 2, "device": "cuda",
        "omp_num_threads": None, "stop_budget_s": 20, "timeout_s": None,
    }  # fmt: skip
    with pytest.raises(ValidationError, match="pass a copy below"):
        build_launch_plan(**common, config_path="/home/me/ds.json")
    plan = build_launch_plan(
        **common, config_path=str(paths.temp / "ds.json"), cuda_visible_devices="GPU-1,GPU-2"
    )
    assert LaunchPlan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.env["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert "29500" not in " ".join(plan.argv)


@pytest.fixture
def attempt_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(layout.ATTEMPT_DIR, str(tmp_path / "attempt-1"))
    return monkeypatch


def failed(monkeypatch: pytest.MonkeyPatch, rank: int, error: BaseException, time_s: float) -> None:
    monkeypatch.setenv("RANK", str(rank))
    path = write_error(error)
    assert path is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), "time": time_s}))


class Torn(Exception):
    failure_class = "bad_data"
    advice = "Mend row 7."


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("no"), "host_oom"),
        (ModuleNotFoundError("No module named 'peft'"), "import_error"),
        (OSError(28, "No space left on device"), "disk_full"),
        (RuntimeError("unable to write to file </torch_12_3_4>: No space left on device (28)"), "shm_full"),
        (RuntimeError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL"), "nccl_timeout"),
        (OSError("You are trying to access a gated repo."), "auth"),
        (OSError("404 Client Error. Entry Not Found"), "not_found"),
        (KeyError("messages"), "code_error"),
        (Torn("row 7"), "bad_data"),
    ],
)
def test_errors_become_classes(
    tmp_path: Path, attempt_env: pytest.MonkeyPatch, error: BaseException, expected: FailureClass
) -> None:
    failed(attempt_env, 1, error, 10.0)
    failed(attempt_env, 0, ConnectionError("Connection closed by peer"), 10.2)
    verdict = classify(RunPaths(tmp_path).attempt(1), RECEIPT)
    assert verdict.failure_class == expected
    assert "rank 1" in verdict.cause
    assert verdict.advice
    assert pickle.loads(pickle.dumps(verdict)) == verdict


def test_cause_of_an_error_counts(tmp_path: Path, attempt_env: pytest.MonkeyPatch) -> None:
    try:
        try:
            import no_such_module_here  # noqa: F401
        except ImportError as cause:
            raise RuntimeError("cannot load the trainer") from cause
    except RuntimeError as error:
        failed(attempt_env, 0, error, 1.0)
    assert classify(RunPaths(tmp_path).attempt(1), RECEIPT).failure_class == "import_error"


@pytest.mark.parametrize(
    ("code", "oom_after", "expected"),
    [
        (-9, 4, "host_oom"),
        (-9, 3, "rank_killed"),
        (-7, 3, "shm_full"),
        (-11, 3, "rank_killed"),
        (-15, 3, "cancelled"),
    ],
)
def test_signals_become_classes(
    tmp_path: Path, attempt_env: pytest.MonkeyPatch, code: int, oom_after: int, expected: FailureClass
) -> None:
    failed(attempt_env, 1, ConnectionError("Connection closed by peer"), 10.2)
    receipt = {
        **RECEIPT,
        "oom_kills_after": oom_after,
        "first_failure": {"exit_code": code, "rank": 0, "pid": 7},
        "dead_ranks": [{"rank": 0, "pid": 7, "time": 10.0}],
    }
    verdict = classify(RunPaths(tmp_path).attempt(1), receipt)
    assert verdict.failure_class == expected
    assert "rank 0" in verdict.cause


@pytest.mark.parametrize(
    ("code", "oom_after", "expected", "cause"),
    [
        (-9, 3, "rank_killed", "killed by SIGKILL"),
        (-9, 4, "host_oom", "memory limit"),
        (-7, 3, "shm_full", "SIGBUS"),
        (7, 3, "rank_killed", "exit code 7"),
        (None, 3, "rank_killed", "died without a Python error"),
        (None, 4, "host_oom", "memory limit"),
    ],
)
def test_a_death_that_the_supervisor_saw_first_is_judged_alike(
    tmp_path: Path, code: int | None, oom_after: int, expected: FailureClass, cause: str
) -> None:
    """The launcher is stopped before it could say how the rank ended; the supervisor saw it."""
    dead = {"rank": 1, "pid": 7, "time": 10.0, "exit_code": code}
    receipt = {**RECEIPT, "reason": "rank_died", "oom_kills_after": oom_after, "dead_ranks": [dead]}
    verdict = classify(RunPaths(tmp_path).attempt(1), receipt)
    assert verdict.failure_class == expected
    assert "rank 1" in verdict.cause
    assert cause in verdict.cause


@pytest.mark.parametrize(("program", "code"), [("kill -9 $$", -9), ("exit 7", 7), ("exit 0", None)])
def test_the_end_of_a_process_is_read_before_its_parent_collects_it(program: str, code: int | None) -> None:
    child = subprocess.Popen(["sh", "-c", program])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays to be collected
    assert proc.ended_with(child.pid) == code
    child.wait()
    assert proc.ended_with(child.pid) is None
    assert proc.ended_with(os.getpid()) is None


def test_a_death_that_torch_elastic_has_collected_is_read_from_its_log(tmp_path: Path) -> None:
    attempt = RunPaths(tmp_path).attempt(1)
    attempt.logs.mkdir(parents=True)
    said = "failed (exitcode: -7) local_rank: 1 (pid: 7) of binary: python\n"
    attempt.launcher_log.write_text(said + said.replace("-7", "-9").replace("pid: 7", "pid: 70"))
    dead = {"rank": 1, "pid": 7, "time": 10.0, "exit_code": None}
    first = first_failure(attempt.launcher_log, {})
    receipt = {**RECEIPT, "reason": "rank_died", "dead_ranks": [dead], "first_failure": first}
    assert classify(attempt, receipt).failure_class == "shm_full"


def test_an_abort_is_judged_by_what_the_rank_said(tmp_path: Path) -> None:
    attempt = RunPaths(tmp_path).attempt(1)
    attempt.logs.mkdir(parents=True)
    attempt.rank_log(0).write_text(
        "E ProcessGroupNCCL: Watchdog caught collective operation timeout: x\nbye\n"
    )
    receipt = {**RECEIPT, "first_failure": {"exit_code": -6, "rank": 0, "pid": 7}}
    assert classify(attempt, receipt).failure_class == "nccl_timeout"


def test_what_happened_before_a_stop_is_the_cause_and_what_follows_is_not(
    tmp_path: Path, attempt_env: pytest.MonkeyPatch
) -> None:
    stopped = {**RECEIPT, "reason": "signal", "detail": "SIGTERM", "stop_time": 20.0}
    failed(attempt_env, 0, KeyError("after"), 21.0)
    assert classify(RunPaths(tmp_path).attempt(1), stopped).failure_class == "cancelled"
    failed(attempt_env, 1, KeyError("before"), 19.0)
    assert "before" in classify(RunPaths(tmp_path).attempt(1), stopped).cause


def test_a_rank_that_nobody_reads_any_more_is_not_the_cause(
    tmp_path: Path, attempt_env: pytest.MonkeyPatch
) -> None:
    failed(attempt_env, 0, BrokenPipeError(32, "Broken pipe"), 10.0)
    died = {**RECEIPT, "reason": "supervisor_died", "detail": "killed by SIGKILL", "stop_time": 11.0}
    attempt = RunPaths(tmp_path).attempt(1)
    assert classify(attempt, died).failure_class == "rank_killed"
    assert classify(attempt, RECEIPT).failure_class == "code_error"
    failed(attempt_env, 1, KeyError("messages"), 9.0)
    assert "KeyError" in classify(attempt, died).cause


def test_a_peer_that_is_gone_with_its_host_is_a_lost_host(
    tmp_path: Path, attempt_env: pytest.MonkeyPatch
) -> None:
    """What the others say, connection reset, is no fault of theirs; a real error of one of them is."""
    attempt = RunPaths(tmp_path).attempt(1)
    here, there = Hosts(attempt.root, 0, 2, 300), Hosts(attempt.root, 1, 2, 300)
    here.beat(0.0)
    there.beat(0.0)
    write_json(attempt.receipt, RECEIPT)
    failed(attempt_env, 0, ConnectionError("Connection reset by peer"), 10.0)
    verdict = classify(attempt, RECEIPT)
    assert verdict.failure_class == "node_lost"
    assert os.uname().nodename in verdict.cause
    write_json(attempt.receipt_of(1), RECEIPT)
    assert missing(attempt.root) == []
    assert classify(attempt, RECEIPT).failure_class == "code_error"
    attempt.receipt_of(1).unlink()
    failed(attempt_env, 2, KeyError("messages"), 11.0)
    assert "messages" in classify(attempt, RECEIPT).cause
    there.end()
    assert missing(attempt.root) == []


def test_a_host_is_lost_when_it_and_all_ranks_are_silent(tmp_path: Path) -> None:
    here, there = Hosts(tmp_path, 0, 2, floor_s=20), Hosts(tmp_path, 1, 2, floor_s=20)
    here.beat(0.0)
    assert here.lost(0.0, 0.0) is None  # it has not begun: torch elastic waits for it
    there.beat(0.0)
    assert [here.lost(now, now) for now in (10.0, 20.0, 30.0)] == [None] * 3  # first seen at 10
    assert here.lost(31.0, 1.0) is None  # ranks make steps
    words = here.lost(31.0, 31.0)
    assert words == f"{os.uname().nodename} has given no sign of life for 21 s"
    os.utime(tmp_path / "heartbeat" / "node_1", (1, 1))  # its clock may say anything
    assert here.lost(32.0, 32.0) is None
    assert here.lost(40.0, 40.0) is None
    assert here.lost(100.0, 100.0) is None  # this host itself was paused
    assert here.lost(110.0, 110.0) is None
    assert here.lost(121.0, 121.0) is not None
    there.end()
    assert here.lost(122.0, 122.0) is None
    alone = Hosts(tmp_path / "alone", 0, 1, floor_s=20)
    alone.beat(0.0)
    alone.end()
    assert alone.lost(500.0, 500.0) is None
    assert not (tmp_path / "alone").exists()


def test_every_class_has_advice_and_every_row_is_reachable() -> None:
    assert set(ADVICE) == set(FailureClass.__args__)  # type: ignore[attr-defined]
    assert match_text("all is well") is None
    assert match_types(["builtins.KeyError"]) is None


@pytest.mark.parametrize("failure_class", FailureClass.__args__)  # type: ignore[attr-defined]
def test_every_class_is_an_exception_that_pickles_and_gives_the_advice_first(
    failure_class: FailureClass,
) -> None:
    error = TrainingFailed(failure_class, "rank 1 failed", ADVICE[failure_class], "/runs/r")
    assert type(error) is FAILURES[failure_class] is not TrainingFailed
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (again.failure_class, again.cause, again.run_dir) == (failure_class, "rank 1 failed", "/runs/r")
    assert str(again) == str(error)
    assert str(error).startswith(f"What to do: {ADVICE[failure_class]}")


def test_an_error_of_a_rank_is_an_event_too(tmp_path: Path, attempt_env: pytest.MonkeyPatch) -> None:
    failed(attempt_env, 1, ValueError("row 7 has no text"), 1.0)
    (event,) = tail_events(tmp_path / "attempt-1" / "events.jsonl").poll()
    assert (event["kind"], event["rank"]) == ("error", 1)
    assert event["message"] == "builtins.ValueError: row 7 has no text"
    assert error_lines([event, event | {"rank": 0}, event | {"kind": "step"}]) == [
        "rank 1: ValueError: row 7 has no text"
    ]


def test_warnings_become_events_once(tmp_path: Path) -> None:
    program = """
import logging, sys, warnings
from soup_flows.launch.rank import EventWriter, report_warnings
report_warnings(EventWriter(sys.argv[1], 0), ["lib"])
warnings.simplefilter("always")
for _ in range(3):
    warnings.warn("slow path")
    logging.getLogger("lib.part").warning("no\\nkernel for %s", "this")
logging.getLogger("other").warning("not ours")
"""
    path = tmp_path / "events.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True
    )
    assert [(e["kind"], e["message"]) for e in tail_events(path).poll()] == [
        ("warning", "UserWarning: slow path"),
        ("warning", "no kernel for this"),
    ]
    assert done.stderr.count("UserWarning: slow path") == 3


def test_the_last_lines_of_every_rank_are_in_a_failure(tmp_path: Path) -> None:
    attempt = RunPaths(tmp_path).attempt(1)
    attempt.logs.mkdir(parents=True)
    attempt.launcher_log.write_text("E launcher\n")
    for rank in (0, 1):
        lines = [f"\x1b[31m{n} of {rank}\x1b[0m" for n in range(100)] + ["y" * 5000]
        attempt.rank_log(rank).write_text("\n".join(lines) + "\n")
    found = tails(attempt)
    assert list(found) == ["launcher", "rank_0", "rank_1"]
    assert [len(found[f"rank_{r}"]) for r in (0, 1)] == [40, 40]
    assert found["rank_1"][:2] == ["61 of 1", "62 of 1"]
    assert found["rank_1"][-1] == "y" * 1000
    report = TrainReport(run_id="r", run_dir="/r", state="failed", failure_class="unknown", last_lines=found)
    page = report_page(report)
    assert "rank 1:\n\n    61 of 1\n" in page
