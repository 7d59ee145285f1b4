"""Starts ranks as torch elastic does, but imports the training stack once and forks: `forking.py RANKS RUN_DIR`.

Only the start is shorter; ranks, sessions, signals and the supervisor above are the real ones.
"""

import os
import signal
import socket
import sys
import threading

import deepspeed  # noqa: F401
import peft  # noqa: F401

import soup_flows.training.run  # noqa: F401
from soup_flows.training.__main__ import main

ranks, run_dir = int(sys.argv[1]), sys.argv[2]
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
assert threading.active_count() == 1, "a fork would lose threads"

pids: dict[int, int] = {}
for number in range(ranks):
    pid = os.fork()
    if not pid:
        os.setsid()
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        sys.argv = ["soup_flows.training", run_dir]
        sys.exit(main())
    pids[pid] = number


def end(*_: object) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)


signal.signal(signal.SIGTERM, end)
failed = False
while pids:
    pid, status = os.wait()
    number, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
    if code and not failed:
        failed = True
        print(f"failed (exitcode: {code}) local_rank: {number} (pid: {pid})", flush=True)
        end()
sys.exit(int(failed))
