"""Output, heartbeats and the callbacks of a running attempt."""

from __future__ import annotations

import contextvars
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from soup_flows.attempt import run_attempt
from soup_flows.launch import layout
from soup_flows.launch.outcome import classify
from soup_flows.launch.plan import StallSettings
from soup_flows.launch.run import run
from tests.launch.conftest import Launch, until

pytestmark = pytest.mark.ranks


def test_flood_with_bars_is_complete_in_the_files_and_sampled_for_prefect(launch: Launch) -> None:
    body = """
for i in range(20000):
    print(f"\\x1b[31mline {i}\\x1b[0m of {me}")
    if i % 100 == 0:
        for step in range(50):
            sys.stdout.write(f"\\rbar {step}/50")
        sys.stdout.write("\\n")
sys.stdout.write("no line end")
"""
    batches: list[list[str]] = []
    outcome = run(launch.plan(body), on_lines=batches.append)
    assert outcome.exit_code == 0
    assert outcome.receipt["log_bytes_lost"] == 0
    for rank in (0, 1):
        text = launch.attempt.rank_log(rank).read_text()
        assert len(re.findall(r"^\x1b\[31mline \d+", text, re.M)) == 20000
        assert text.count("bar 49/50") == 200
        assert text.count("bar 48/50") == 0
        assert "\r" not in text
        assert text.endswith("no line end\n")
    assert max(map(len, batches)) <= 101
    shown = [line for batch in batches for line in batch]
    assert "\x1b" not in "".join(shown)
    assert shown[-1] == "no line end"
    left_out = sum(int(line.split()[1]) for line in shown if "left out here" in line)
    total = 20000 + 200 + 1
    assert left_out > 0
    assert left_out + sum("left out here" not in line for line in shown) == total


def test_rotation_keeps_one_older_file(launch: Launch) -> None:
    body = "for i in range(5000): print('x' * 50, i)\n"
    run(launch.plan(body, log_limit_bytes=1 << 16))
    names = sorted(path.name for path in launch.attempt.logs.iterdir() if path.name.startswith("rank_0"))
    assert names == ["rank_0.log", "rank_0.log.1"]
    assert "4999" in launch.attempt.rank_log(0).read_text().splitlines()[-1]


def test_blocked_callbacks_do_not_hold_the_ranks(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
w = rank.EventWriter(attempt / "events.jsonl", me)
for i in range(20000):
    print("x" * 100); w.write("step", step=i)
(attempt / f"finished_{me}").touch()
"""
    outage_over = threading.Event()
    context = contextvars.ContextVar("context", default="lost")
    context.set("kept")
    seen: list[dict[str, Any]] = []
    contexts: set[str] = set()

    def on_events(events: list[dict[str, Any]]) -> None:
        contexts.add(context.get())
        outage_over.wait()
        seen.extend(events)

    def end_outage() -> None:
        until(lambda: all((launch.attempt.root / f"finished_{r}").exists() for r in (0, 1)), "ranks finished")
        outage_over.set()

    threading.Thread(target=end_outage, daemon=True).start()
    outcome = run(launch.plan(body), on_events=on_events)
    assert outcome.exit_code == 0
    assert len(seen) == 40000
    assert contexts == {"kept"}


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_failing_callback_is_no_reason_to_stop(launch: Launch, kind: type[BaseException]) -> None:
    body = """
w = rank.EventWriter(attempt / "events.jsonl", me)
w.write("first"); time.sleep(1); w.write("second")
"""
    seen: list[str] = []

    def on_events(events: list[dict[str, Any]]) -> None:
        seen.extend(event["kind"] for event in events)
        raise kind("a bug in a callback, or a worker that is gone")

    assert run(launch.plan(body, ranks=1), on_events=on_events, poll_s=0.1).exit_code == 0
    assert seen == ["first", "second"]


def test_errors_of_every_rank_are_passed_on(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    body = """
ready()
while not (attempt / "ready_1").exists(): time.sleep(0.05)
if me == 1: fail(ValueError("row 7 has no text"))
time.sleep(600)
"""
    with caplog.at_level(logging.INFO):
        run_attempt(launch.plan(body), logging.getLogger("run"), lambda: None)
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "rank 1: Traceback" in error.getMessage()
    assert error.getMessage().endswith("rank 1: ValueError: row 7 has no text")


def test_long_saving_is_no_stall(launch: Launch) -> None:
    body = """
rank.heartbeat(1); time.sleep(0.1); rank.heartbeat(2)
if me == 0:
    rank.heartbeat(2, "save")
time.sleep(6)
"""
    outcome = run(launch.plan(body, stall=StallSettings(floor_s=1, factor=1, startup_s=100)))
    assert (outcome.exit_code, outcome.reason, outcome.receipt["stall"]) == (0, "exited", None)


def test_silent_start_is_a_stall(launch: Launch) -> None:
    outcome = run(
        launch.plan(
            "time.sleep(600)\n", stall=StallSettings(floor_s=1, factor=1, startup_s=2), stop_budget_s=2
        )
    )
    assert outcome.reason == "stalled"
    assert outcome.receipt["stall"]["phase"] == "start"


def test_environment_of_the_ranks(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("PREFECT_API_KEY", "secret-of-the-orchestrator")
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    plan = launch.plan("(attempt / f'env_{me}').write_text(json.dumps(dict(os.environ)))\n")
    assert plan.secrets == ("HF_TOKEN",)
    assert "secret" not in plan.model_dump_json().replace('"secrets"', "")
    run(plan)
    text = (launch.attempt.root / "env_0").read_text()
    for name in ("ACCELERATE_USE_FSDP", "MASTER_PORT", "PREFECT_API_KEY", 'SOUP_FLOWS_SUPERVISOR"'):
        assert name not in text
    assert '"HF_TOKEN": "secret-token"' in text
    assert launch.run_id in text


def test_private_files(launch: Launch) -> None:
    run(launch.plan("rank.heartbeat(1)\n"))
    for path in [
        *launch.attempt.logs.iterdir(),
        launch.attempt.receipt,
        layout.heartbeat(launch.attempt.root, 0),
    ]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_supervisor_is_small_and_free_of_packages(launch: Launch) -> None:
    holder = launch.hold(launch.plan("ready()\ntime.sleep(600)\n"))
    launch.ranks_ready()
    supervisor = launch.supervisor()
    proc = Path(f"/proc/{supervisor}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 40 * 1024  # kB
    assert "site-packages" not in (proc / "maps").read_text()
    holder.kill()
    holder.wait()


def test_a_silent_host_ends_the_ranks_of_the_others(launch: Launch) -> None:
    """The supervisor of one of two hosts; the other has shown itself once."""
    beats = launch.attempt.root / "heartbeat"
    beats.mkdir(parents=True)
    (beats / "node_1").write_text("deimos runs\n")
    stall = StallSettings(floor_s=3, startup_s=600)
    outcome = run(launch.plan("ready()\ntime.sleep(600)\n", nodes=2, engine="slurm", stall=stall))
    assert outcome.reason == "node_lost"
    assert "deimos has given no sign of life" in outcome.receipt["detail"]
    assert (beats / "node_0").read_text().split()[1] == "ended"
    verdict = classify(launch.attempt, outcome.receipt)
    assert verdict.failure_class == "node_lost"
    assert "deimos" in verdict.cause
