"""Every way an attempt can end leaves no process, and the receipt and the verdict say what happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from soup_flows.launch import proc
from soup_flows.launch.outcome import classify, tails
from soup_flows.launch.plan import StallSettings
from soup_flows.launch.run import run
from soup_flows.launch.supervised import sweep
from tests.launch.conftest import HOLDER, Launch, until

pytestmark = pytest.mark.ranks

FOREVER = "ready()\nwhile True: time.sleep(0.2)\n"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER
STRAY = """
if me == 0:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        os._exit(0)
    os.wait()
"""


def receipt_of(launch: Launch) -> dict[str, Any]:
    until(launch.attempt.receipt.exists, "a receipt")
    return json.loads(launch.attempt.receipt.read_text())


def test_normal_end_under_elastic(launch: Launch) -> None:
    body = """
assert attached
print("out of rank", me); print("err of rank", me, file=sys.stderr)
w = rank.EventWriter(attempt / "events.jsonl", me)
for step in range(1, 4):
    rank.heartbeat(step); w.write("step", step=step, loss=float("nan") if step == 2 else 1.5)
import torch.distributed as dist
dist.init_process_group("gloo"); dist.barrier(); dist.destroy_process_group()
"""
    lines: list[str] = []
    events: list[dict[str, Any]] = []
    outcome = run(launch.plan(body, elastic=True), on_lines=lines.extend, on_events=events.extend)
    assert (outcome.exit_code, outcome.reason) == (0, "exited")
    assert outcome.receipt["survivors"] == []
    assert outcome.receipt["dead_ranks"] == []
    assert outcome.receipt == receipt_of(launch)
    assert "out of rank 0" in lines
    assert "err of rank 0" in lines
    assert "out of rank 1" not in lines
    assert "out of rank 1" in launch.attempt.rank_log(1).read_text()
    assert sorted((e["rank"], e["step"]) for e in events) == [(r, s) for r in (0, 1) for s in (1, 2, 3)]
    assert {e["loss"] for e in events if e["step"] == 2} == {"nan"}


def test_first_failing_rank_is_the_cause(launch: Launch) -> None:
    body = """
ready()
if me == 1:
    fail(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
signal.signal(signal.SIGTERM, lambda *_: fail(ConnectionError("Connection closed by peer")))
while True: time.sleep(0.2)
"""
    outcome = run(launch.plan(body, elastic=True))
    assert outcome.exit_code != 0
    verdict = classify(launch.attempt, outcome.receipt)
    assert verdict.failure_class == "cuda_oom"
    assert "rank 1" in verdict.cause
    assert "2 GiB" in verdict.cause
    assert "RuntimeError" in "\n".join(tails(launch.attempt)["rank_1"])


def test_killed_rank_ends_deaf_ones_before_elastic_would(launch: Launch) -> None:
    plan = launch.plan(DEAF, elastic=True, stop_budget_s=28)  # elastic alone would wait 28 s
    pids: list[int] = []

    def kill_one() -> None:
        pids.extend(launch.ranks_ready())
        os.kill(pids[1], signal.SIGKILL)

    threading.Thread(target=kill_one, daemon=True).start()
    outcome = run(plan)
    dead = outcome.receipt["dead_ranks"]
    assert next((d["rank"], d["pid"]) for d in dead) == (1, pids[1])
    assert outcome.reason == "rank_died"
    assert {"pid": pids[0], "signal": "SIGKILL", "rank": 0} in outcome.receipt["signalled"]
    verdict = classify(launch.attempt, outcome.receipt)
    assert verdict.failure_class == "rank_killed"
    assert "rank 1" in verdict.cause


def test_killed_rank_is_told_by_its_signal(launch: Launch) -> None:
    body = "ready()\nif me == 0: time.sleep(1); os.kill(os.getpid(), 9)\nwhile True: time.sleep(0.2)\n"
    outcome = run(launch.plan(body, elastic=True))
    assert outcome.receipt["first_failure"]["exit_code"] == -9
    verdict = classify(launch.attempt, outcome.receipt)
    assert verdict.failure_class == "rank_killed"
    assert "rank 0 was killed by SIGKILL" in verdict.cause


def test_agent_killed(launch: Launch) -> None:
    plan = launch.plan(FOREVER, elastic=True)

    def kill() -> None:
        agent = proc.parent_of(launch.ranks_ready()[0])
        assert agent is not None
        os.kill(agent, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    outcome = run(plan)
    assert (outcome.exit_code, outcome.reason) == (-9, "exited")
    verdict = classify(launch.attempt, outcome.receipt)
    assert verdict.failure_class == "rank_killed"
    assert "launcher" in verdict.cause


@pytest.mark.parametrize("body", [FOREVER, DEAF, STRAY + DEAF], ids=["polite", "deaf", "stray"])
def test_kill_9_of_the_flow(launch: Launch, body: str) -> None:
    holder = launch.hold(launch.plan(body))
    launch.ranks_ready()
    holder.kill()
    holder.wait()
    launch.assert_clean()
    receipt = receipt_of(launch)
    assert receipt["reason"] == "holder_gone"
    assert receipt["survivors"] == []
    assert classify(launch.attempt, receipt).failure_class == "cancelled"


@pytest.mark.parametrize("group", [False, True], ids=["flow only", "whole group"])
def test_sigterm_of_the_flow(launch: Launch, group: bool) -> None:
    holder = launch.hold(launch.plan(STRAY + DEAF))
    launch.ranks_ready()
    (os.killpg if group else os.kill)(holder.pid, signal.SIGTERM)
    holder.wait()
    launch.assert_clean()
    assert receipt_of(launch)["reason"] in ({"signal", "holder_gone"} if group else {"holder_gone"})


def test_supervisor_leaves_the_group_before_its_sigkill(launch: Launch) -> None:
    holder = launch.hold(launch.plan(DEAF))
    launch.ranks_ready()
    supervisor = launch.supervisor()
    os.killpg(holder.pid, signal.SIGTERM)
    until(lambda: os.getsid(supervisor) == supervisor, "a session of its own")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()
    launch.assert_clean()
    assert receipt_of(launch)["survivors"] == []


def test_kill_9_of_the_supervisor(launch: Launch) -> None:
    plan = launch.plan(STRAY + DEAF)

    def kill() -> None:
        launch.ranks_ready()
        os.kill(launch.supervisor(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    outcome = run(plan)
    assert (outcome.exit_code, outcome.reason) == (None, "supervisor_died")
    assert "SIGKILL" in outcome.receipt["detail"]
    assert outcome.receipt["survivors"] == []
    assert receipt_of(launch) == outcome.receipt
    assert classify(launch.attempt, outcome.receipt).failure_class == "rank_killed"


def test_kill_9_of_flow_and_supervisor_ends_the_ranks_by_parent_death(launch: Launch) -> None:
    plan = launch.plan(DEAF).model_copy(update={"config_path": None})
    (launch.paths.temp / "ds_config.json").unlink()
    holder = launch.hold(plan)
    launch.ranks_ready()
    os.kill(holder.pid, signal.SIGSTOP)
    supervisor = launch.supervisor()
    os.kill(holder.pid, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    holder.wait()
    until(lambda: not proc.marked(launch.run_id), "ranks dead without anybody to sweep")
    assert len(launch.channels()) == 1
    assert sweep(launch.run_id) == []
    assert launch.channels() == []


@pytest.mark.parametrize("victim", ["flow", "supervisor", "group"])
def test_killed_at_random_moments(launch: Launch, victim: str) -> None:
    moments = random.Random(7)
    for _ in range(6):
        holder = launch.hold(launch.plan(STRAY + DEAF, stop_budget_s=2))
        until(lambda: proc.marked(launch.run_id), "a start")
        time.sleep(moments.uniform(0, 0.6))
        if victim == "supervisor":
            proc.send(proc.marked(launch.run_id, proc.SUPERVISOR_MARKER), signal.SIGKILL)
        elif victim == "flow":
            holder.kill()
        else:
            os.killpg(holder.pid, signal.SIGTERM)
        holder.wait()
        launch.assert_clean()


def test_a_fork_of_the_flow_does_not_keep_the_lease(launch: Launch) -> None:
    forking = """
import os, pathlib, sys, time
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import run
plan = LaunchPlan.model_validate_json(pathlib.Path(sys.argv[1]).read_text())
mark = plan.attempt_paths.root / "forked"
def fork_once():
    if not mark.exists():
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        mark.write_text(str(pid))
run(plan, should_stop=fork_once)
"""
    holder = launch.hold(launch.plan(DEAF), forking)
    launch.ranks_ready()
    forked = launch.attempt.root / "forked"
    until(lambda: forked.exists() and forked.read_text(), "a fork that holds the lease's descriptor")
    holder.kill()
    holder.wait()
    launch.assert_clean()
    os.kill(int(forked.read_text()), signal.SIGKILL)


def test_interrupted_caller_leaves_nothing(launch: Launch) -> None:
    class Termination(BaseException):
        pass

    def handler(*_: Any) -> None:
        raise Termination

    old = signal.signal(signal.SIGALRM, handler)
    try:
        threading.Thread(
            target=lambda: (launch.ranks_ready(), os.kill(os.getpid(), signal.SIGALRM)), daemon=True
        ).start()
        with pytest.raises(Termination):
            run(launch.plan(DEAF))
    finally:
        signal.signal(signal.SIGALRM, old)
    assert proc.marked(launch.run_id) == []
    receipt = receipt_of(launch)
    assert (receipt["reason"], receipt["detail"]) == ("stopped", "interrupted by Termination")


def test_stop_on_request_lets_ranks_save(launch: Launch) -> None:
    body = (
        """
def save(*_):
    time.sleep(1); (attempt / f"saved_{me}").touch(); sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
        + FOREVER
    )
    plan = launch.plan(body, stop_budget_s=20)

    def should_stop() -> str | None:
        return "server says Cancelling" if (launch.attempt.root / "ready_1").exists() else None

    outcome = run(plan, should_stop=should_stop)
    assert (outcome.reason, outcome.receipt["detail"]) == ("stopped", "server says Cancelling")
    assert all((launch.attempt.root / f"saved_{r}").exists() for r in (0, 1))
    assert "SIGKILL" not in {entry["signal"] for entry in outcome.receipt["signalled"]}
    assert classify(launch.attempt, outcome.receipt).cause.endswith("server says Cancelling")


def test_timeout(launch: Launch) -> None:
    outcome = run(launch.plan(DEAF, timeout_s=3, stop_budget_s=3))
    assert outcome.reason == "timeout"
    assert classify(launch.attempt, outcome.receipt).failure_class == "timeout"


def test_stall_names_the_rank_and_dumps_stacks(launch: Launch) -> None:
    body = """
ready()
def waits_in_a_collective():
    while True: time.sleep(0.2)
for step in range(1, 6):
    if (me, step) == (1, 4):
        waits_in_a_collective()
    rank.heartbeat(step); time.sleep(0.05)
while True: time.sleep(0.2)
"""
    outcome = run(launch.plan(body, stall=StallSettings(floor_s=3, factor=2, startup_s=90)))
    assert outcome.reason == "stalled"
    assert (outcome.receipt["stall"]["rank"], outcome.receipt["stall"]["step"]) == (1, 3)
    assert "waits_in_a_collective" in (launch.attempt.root / "stacks" / "rank_1.txt").read_text()
    assert (launch.attempt.root / "stacks" / "rank_0.txt").read_text()
    verdict = classify(launch.attempt, outcome.receipt)
    assert verdict.failure_class == "stalled"
    assert "rank 1" in verdict.cause
    assert "waits_in_a_collective" in verdict.cause


def test_helpers_of_ranks_are_swept_after_a_normal_end(launch: Launch) -> None:
    outcome = run(launch.plan(STRAY + "print('done')\n"))
    assert (outcome.exit_code, outcome.reason) == (0, "exited")
    assert proc.marked(launch.run_id) == []
    assert {entry["signal"] for entry in outcome.receipt["signalled"]} == {"SIGTERM", "SIGKILL"}


def test_launcher_that_cannot_start(launch: Launch) -> None:
    outcome = run(launch.plan("", argv=("/no/such/program",)))
    assert outcome.exit_code == 127
    assert "/no/such/program" in launch.attempt.launcher_log.read_text()
    assert classify(launch.attempt, outcome.receipt).failure_class == "import_error"


def test_import_error_before_a_rank_attached(launch: Launch) -> None:
    plan = launch.plan("")
    (launch.folder / "rank.py").write_text("import no_such_module_here\n")
    outcome = run(plan)
    verdict = classify(launch.attempt, outcome.receipt)
    assert verdict.failure_class == "import_error"
    assert "no_such_module_here" in verdict.cause


def test_sweep_lets_a_living_supervisor_finish(launch: Launch) -> None:
    body = (
        """
def save(*_):
    time.sleep(1); (attempt / f"saved_{me}").touch(); os._exit(0)
signal.signal(signal.SIGTERM, save)
"""
        + FOREVER
    )
    holder = launch.hold(launch.plan(body, stop_budget_s=20))
    launch.ranks_ready()
    os.kill(holder.pid, signal.SIGSTOP)  # a flow that does not answer
    assert sweep(launch.run_id) == []
    assert all((launch.attempt.root / f"saved_{r}").exists() for r in (0, 1))
    holder.kill()
    holder.wait()


def test_sweep_before_a_launch_removes_the_leftovers_of_a_crash(launch: Launch) -> None:
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, proc.MARKER: launch.run_id}
    )
    until(lambda: proc.marked(launch.run_id) == [left.pid])
    run(launch.plan("print('hello')\n"))
    assert left.wait() == -signal.SIGKILL


def kill_flow_or_supervisor(launch: Launch, holder: subprocess.Popen[bytes], victim: str) -> None:
    if victim == "flow":
        holder.kill()
    else:
        os.kill(launch.supervisor(), signal.SIGKILL)
    holder.wait()


SHARED_MEMORY = """
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=1 << 16)
(attempt / f"shm_{me}").write_text(block.name)
"""


@pytest.mark.parametrize("victim", ["flow", "supervisor"])
def test_shared_memory_of_killed_ranks_is_given_back(launch: Launch, victim: str) -> None:
    """Python's resource tracker removes it once its rank is gone; it must not be killed before."""
    holder = launch.hold(launch.plan(SHARED_MEMORY + DEAF, stop_budget_s=2))
    launch.ranks_ready()
    kill_flow_or_supervisor(launch, holder, victim)
    launch.assert_clean()
    blocks = [Path("/dev/shm") / (launch.attempt.root / f"shm_{r}").read_text() for r in (0, 1)]
    assert [block for block in blocks if block.exists()] == []


BARE_HELPER = """
if me == 0:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    helper = subprocess.Popen([sys.executable, "-c", deaf], env={}, start_new_session=True)
    (attempt / "helper").write_text(str(helper.pid))
"""


@pytest.mark.parametrize("victim", ["flow", "supervisor"])
def test_a_helper_without_the_marker_is_found(launch: Launch, victim: str) -> None:
    holder = launch.hold(launch.plan(BARE_HELPER + DEAF, stop_budget_s=2))
    launch.ranks_ready()
    helper = int((launch.attempt.root / "helper").read_text())
    assert proc.MARKER not in Path(f"/proc/{helper}/environ").read_text()
    assert helper in proc.marked(launch.run_id)
    kill_flow_or_supervisor(launch, holder, victim)
    launch.assert_clean()
    assert proc.parent_of(helper) is None


STRICT_CONTAINER = """
import ctypes, errno, os, platform, struct, sys
def instruction(code, yes, no, value): return struct.pack("HBBI", code, yes, no, value)
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h, as seccomp (2) takes them
PRCTL, PIDFD_OPEN = {"x86_64": (157, 434), "aarch64": (167, 434)}[platform.machine()]
REFUSE, ALLOW = 0x00050000 | errno.EPERM, 0x7fff0000
rules = b"".join([
    instruction(LOAD, 0, 0, 0),                # the system call's number
    instruction(EQUALS, 4, 0, PIDFD_OPEN),
    instruction(EQUALS, 0, 2, PRCTL),
    instruction(LOAD, 0, 0, 16),               # prctl's option
    instruction(EQUALS, 1, 0, 36),             # PR_SET_CHILD_SUBREAPER
    instruction(RETURN, 0, 0, ALLOW),
    instruction(RETURN, 0, 0, REFUSE),
])
memory = ctypes.create_string_buffer(rules)
program = struct.pack("HxxxxxxQ", len(rules) // 8, ctypes.addressof(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0     # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
assert libc.prctl(36, 1, 0, 0, 0) == -1
"""


@pytest.mark.parametrize("victim", ["flow", "rank", "nobody"])
def test_a_container_without_subreaper_and_pidfd(launch: Launch, victim: str) -> None:
    body = STRAY + ("print('done')\n" if victim == "nobody" else DEAF)
    holder = launch.hold(launch.plan(body, stop_budget_s=2), STRICT_CONTAINER + HOLDER)
    if victim != "nobody":
        ranks = launch.ranks_ready()
        os.kill(holder.pid if victim == "flow" else ranks[1], signal.SIGKILL)
    holder.wait()
    launch.assert_clean()
    receipt = receipt_of(launch)
    assert receipt["subreaper"] is False
    assert receipt["survivors"] == []
    reasons = {"flow": "holder_gone", "rank": "rank_died", "nobody": "exited"}
    assert receipt["reason"] == reasons[victim]
    if victim == "rank":
        assert classify(launch.attempt, receipt).failure_class == "rank_killed"


def test_a_late_sweep_spares_what_was_started_again() -> None:
    run_id = f"again-{uuid.uuid4().hex[:8]}"
    environment = {"PATH": os.environ["PATH"], proc.MARKER: run_id}
    old = subprocess.Popen(["sleep", "600"], env=environment)
    time.sleep(0.1)
    crashed = time.time()
    time.sleep(0.1)
    new = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        until(lambda: len(proc.marked(run_id)) == 2, "both processes")
        assert sweep(run_id, before=crashed) == [old.pid]
        assert proc.marked(run_id) == [new.pid]
        assert sweep(run_id) == [new.pid]
    finally:
        for process in (old, new):
            process.kill()
            process.wait()
