"""The process between the flow and the training: it starts the launcher, watches it, and cleans up.

Run as `python -I -S -c ... SPEC.json` with the standard library alone. Its stdin is the *lease*: a pipe whose
other end the flow holds. A line in it asks to stop and says why; its end means that the holder is gone, even
by SIGKILL.

How everything below is found again, whatever it does:
- this process is a child subreaper, so every orphan comes back to it and parent links lead to all of them;
- each process inherits `SOUP_FLOWS_RUN=<run id>`, which stays readable in `/proc`, and prints into a FIFO of the run;
- the launcher has SIGKILL as parent-death signal, and so has each rank (`rank.attach`), in case this process
  is killed itself.
This process stays in the flow's process group to hear the signals that Prefect sends to it, and leaves it on
the first one, because SIGKILL to the group follows 30 s later (prefect 3.9.1, runner).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from soup_flows.launch import layout, proc
from soup_flows.launch.hosts import Hosts
from soup_flows.launch.kernel import kernel_lines
from soup_flows.launch.pump import Pump, RotatingLog, make_fifo
from soup_flows.launch.receipt import (
    announce_stop,
    first_failure,
    new_receipt,
    remove_temporary,
    write_receipt,
)
from soup_flows.launch.watchdog import Watchdog

TICK_S = 0.5
STOPPING_TICK_S = 0.05
LEFTOVERS_S = 1.0
"""Seconds that helpers of ranks get to end once the launcher has ended."""
RANK_DEATH_S = 8.0
"""Seconds the launcher gets to stop the other ranks when one died; alone it waits 30 (torch 2.13)."""
STACKS_S = 2.0
"""Seconds the ranks get to write their stacks before a stalled run is stopped."""
TIDYING_S = 1.0
"""Seconds from the first SIGKILL that processes get which remove the shared memory of those that are gone."""
UNKILLABLE_S = 5.0
"""Seconds from the first SIGKILL until what is still there (stuck in a driver) is a survivor."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One attempt: the launcher, its tree, their output, and the reason why it ended."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.run_id: str = spec["run_id"]
        self.ranks: int = spec["nproc_per_node"]
        self.node: int = spec["node"]
        self.numbers = {local: local for local in range(self.ranks)} if spec["nodes"] == 1 else {}
        """Global rank by local rank; with several hosts each is known once the rank has attached."""
        self.attempt, self.channel = Path(spec["attempt_dir"]), Path(spec["channel"])
        self.budget_s: float = spec["stop_budget_s"]
        self.started = time.monotonic()
        self.receipt = new_receipt(self.run_id)
        self.status: int | None = None
        """Wait status of the launcher once it has ended."""
        self.kill_at: float | None = None
        """When SIGKILL begins; None as long as nothing is being stopped."""
        self.asked_s = 0.0
        self.told: set[int] = set()
        self.stacks_until: float | None = None
        self.death_until: float | None = None
        self.rank_pids: dict[int, int] = {}
        self.poll = select.poll()
        self.pumps: dict[int, Pump] = {}
        self.rank_pumps: dict[int, Pump] = {}
        self.rank_fds: dict[int, int] = {}
        self.gone: set[int] = set()
        self.watchdog = Watchdog(self.attempt, self.ranks * spec["nodes"], **spec["stall"])
        self.hosts = Hosts(self.attempt, self.node, spec["nodes"], self.watchdog.floor_s)

    def start(self) -> None:
        """Become a subreaper, open every pipe, and start the launcher."""
        self.receipt["subreaper"] = proc.prctl(proc.PR_SET_CHILD_SUBREAPER, 1)
        for fd in self.spec["lease_fds"]:
            os.set_inheritable(fd, False)  # the ranks must not keep a lease
        self.wake_fd, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)  # the number arrives through the wake-up pipe
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for local in range(self.ranks):
            log = layout.rank_log(self.attempt, local)
            if not self.numbers:
                log = layout.unplaced_log(self.attempt, self.node, local)
            self.rank_pumps[local] = self._add_pump(make_fifo(layout.fifo(self.channel, local)), log)
        output, agent_output = os.pipe2(os.O_CLOEXEC)
        self.agent_pump = self._add_pump(output, layout.launcher_log(self.attempt, self.node))
        self.agent = self._start_agent(agent_output)
        os.close(agent_output)
        for fd in (0, self.wake_fd):
            self.poll.register(fd, select.POLLIN)

    def _add_pump(self, fd: int, path: Path) -> Pump:
        pump = Pump(fd, RotatingLog(path, self.spec["log_limit_bytes"]))
        self.pumps[fd] = pump
        self.poll.register(fd, select.POLLIN)
        return pump

    def _start_agent(self, output: int) -> int:
        environment = {key: value for key, value in os.environ.items() if key != proc.SUPERVISOR_MARKER}
        environment[layout.SUPERVISOR_PID] = str(os.getpid())
        return proc.spawn(self.spec["argv"], environment, output)

    def run(self) -> None:
        """Serve pipes, signals and clocks until nothing of the run is left."""
        checked = 0.0
        while self._reap() or self._living():
            ready = self.poll.poll(1000 * (TICK_S if self.kill_at is None else STOPPING_TICK_S))
            now = time.monotonic()
            for fd, _ in ready:
                self._serve(fd, now)
            if self.kill_at is not None:
                self._sweep(now)
                if now > self.kill_at + UNKILLABLE_S:
                    break
            elif now - checked >= TICK_S:
                checked = now
                self._check(now)

    def _reap(self) -> bool:
        """Collect every dead child, adopted ones included; False when there is no child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.agent:
                self.status = status
                self._stop("exited", "the launcher ended", LEFTOVERS_S)

    def _serve(self, fd: int, now: float) -> None:
        if fd in self.pumps:
            data = self.pumps[fd].drain(now)
            if fd == self.agent_pump.fd:
                if not data:
                    self.poll.unregister(fd)
                elif b" closing signal " in data:  # torch elastic has begun to stop the ranks: one has failed
                    self._rank_died()
        elif fd in self.rank_fds:
            self.poll.unregister(fd)
            os.close(fd)
            self._rank_gone(self.rank_fds.pop(fd))
        elif fd == self.wake_fd:
            numbers = set(os.read(fd, 4096)) & set(STOP_SIGNALS)
            if numbers:
                self._stop("signal", proc.signal_name(min(numbers)), self._grace_s())
        elif fd == 0:
            text = os.read(0, 4096).decode("utf-8", "replace").strip()
            self.poll.unregister(0)
            self._stop(
                "stopped" if text else "holder_gone", text or "the flow process ended", self._grace_s()
            )

    def _check(self, now: float) -> None:
        """What is looked at twice a second: new ranks, deadlines, heartbeats, moving progress bars."""
        for pump in self.pumps.values():
            pump.tick(now)
        self._find_ranks()
        self.hosts.beat(now)
        lost = self.hosts.lost(now, self.watchdog.quiet_s(now))
        timeout_s = self.spec["timeout_s"]
        if os.getppid() != self.spec["holder_pid"]:  # a fork of the flow may keep the lease open
            self._stop("holder_gone", "the flow process ended", self._grace_s())
        elif timeout_s is not None and now - self.started > timeout_s:
            self._stop("timeout", f"the time limit of {timeout_s:g} s has passed", self._grace_s())
        elif lost is not None:
            self._stop("node_lost", lost, min(5.0, self._grace_s()))
        elif self.death_until is not None and now > self.death_until:
            self._stop("rank_died", "a rank died and the launcher did not stop the others", LEFTOVERS_S)
        elif self.stacks_until is not None:
            if now > self.stacks_until:
                self._stop("stalled", "no rank made a step", min(5.0, self._grace_s()))
        else:
            ended = {n for rank, n in self.numbers.items() if layout.clean_mark(self.channel, rank).exists()}
            stall = self.watchdog.check(now, ended)
            if stall is not None:
                self.receipt["stall"] = stall
                self._signal(list(self.rank_pids.values()), signal.SIGUSR1)
                self.stacks_until = now + STACKS_S

    def _find_ranks(self) -> None:
        for rank in set(range(self.ranks)) - set(self.rank_pids):
            try:
                pid, number = map(int, layout.pid_file(self.channel, rank).read_text().split())
            except (OSError, ValueError):
                continue
            self.rank_pids[rank] = pid
            if self.numbers.get(rank) != number:
                self.numbers[rank] = number
                self.rank_pumps[rank].log.move(layout.rank_log(self.attempt, number))
            fd = proc.pidfd(pid)
            if fd >= 0:
                self.rank_fds[fd] = rank
                self.poll.register(fd, select.POLLIN)
        for rank in set(self.rank_pids) - self.gone - set(self.rank_fds.values()):
            if proc.parent_of(self.rank_pids[rank]) is None:
                self._rank_gone(rank)

    def _rank_gone(self, rank: int) -> None:
        """A rank's process ended; without its clean mark that is a death and the others have to follow."""
        self.gone.add(rank)
        if not layout.clean_mark(self.channel, rank).exists():
            pid = self.rank_pids[rank]
            dead = {
                "rank": self.numbers[rank],
                "pid": pid,
                "exit_code": proc.ended_with(pid),
                "time": time.time(),
            }
            self.receipt["dead_ranks"].append(dead)
            self._rank_died()

    def _rank_died(self) -> None:
        if self.kill_at is None and self.death_until is None:
            self.death_until = time.monotonic() + RANK_DEATH_S

    def _grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL, so that all is over within the budget."""
        return self.budget_s - min(2.0, 0.2 * self.budget_s)

    def _stop(self, reason: str, detail: str, grace_s: float) -> None:
        """Begin to stop everything; the first reason stays."""
        if self.kill_at is not None:
            if reason == "exited":  # asked to end, and it did: what is left gets a moment
                self.kill_at = min(self.kill_at, time.monotonic() + max(LEFTOVERS_S, 0.2 * self.budget_s))
            return
        self.asked_s = time.monotonic()
        self.kill_at = self.asked_s + grace_s
        self.receipt.update(reason=reason, detail=detail, stop_time=time.time())
        with contextlib.suppress(PermissionError):  # already a group leader
            os.setsid()
        if self.status is None:
            announce_stop(self.attempt, reason, grace_s)
            self._signal([self.agent], signal.SIGTERM)

    def _sweep(self, now: float) -> None:
        """Ask what the launcher left behind, once each; after the grace kill all that is there."""
        assert self.kill_at is not None
        if self.status is None and now < self.kill_at:
            return
        left = self._living()
        if now < self.kill_at + TIDYING_S:
            left = [pid for pid in left if not proc.tidies_up(pid)]
        if now >= self.kill_at:
            self._signal(left, signal.SIGKILL)
        else:
            self._signal([pid for pid in left if pid not in self.told], signal.SIGTERM)

    def _living(self) -> list[int]:
        return list(dict.fromkeys(proc.descendants(os.getpid()) + proc.marked(self.run_id)))

    def _signal(self, pids: list[int], number: signal.Signals) -> None:
        ranks = {pid: self.numbers[rank] for rank, pid in self.rank_pids.items()}
        for pid in proc.send(pids, number):
            self.told.add(pid)
            entry = {"pid": pid, "signal": number.name, "rank": ranks.get(pid)}
            if entry not in self.receipt["signalled"]:
                self.receipt["signalled"].append(entry)

    def finish(self) -> int:
        """Empty the pipes, remove the temporary files, write the receipt; return the exit code to pass on."""
        now = time.monotonic()
        for pump in self.pumps.values():
            pump.finish(now)
        code = os.waitstatus_to_exitcode(self.status) if self.status is not None else -signal.SIGKILL
        remove_temporary(self.channel, self.spec["config_path"])
        self.receipt.update(
            exit_code=code,
            first_failure=first_failure(layout.launcher_log(self.attempt, self.node), self.numbers),
            survivors=self._living(),
            oom_kills_after=proc.oom_kills(),
            kernel=kernel_lines(self.started) if self.receipt["dead_ranks"] or code else [],
            log_bytes_lost=sum(pump.log.lost_bytes for pump in self.pumps.values()),
            supervisor_peak_bytes=proc.peak_bytes(),
            supervisor_cpu_s=round(time.process_time(), 3),
            seconds=round(now - self.started, 3),
            seconds_to_clean=round(now - self.asked_s, 3),
            ended=time.time(),
        )
        write_receipt(self.attempt, self.receipt, self.node)
        self.hosts.end()
        if self.receipt["reason"] == "holder_gone":
            for fd in self.spec["lease_fds"]:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a fork of the dead flow may still have a copy
        return code if code >= 0 else 128 - code


def main() -> None:
    """Supervise the attempt described by the JSON file named in the last argument."""
    with open(sys.argv[-1], encoding="utf-8") as file:
        supervisor = Supervisor(json.load(file))
    supervisor.start()
    supervisor.run()
    sys.exit(supervisor.finish())
