"""Imports the training stack once and forks the ranks of many attempts: `zygote.py SOCKET`.

Importing takes most of a short run's time. Ranks, their signals, files and the supervisor above are the real
ones; only the start is shorter. `zygote_launcher.py` takes torch elastic's place in a launch. A script named by
SOUP_FLOWS_TEST_HOOK is run in each rank before it trains.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading

import deepspeed  # noqa: F401
import peft  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401

import soup_flows.training.run  # noqa: F401
from soup_flows.launch.proc import PR_SET_PDEATHSIG, prctl
from soup_flows.training.__main__ import main


def serve(path: str) -> None:
    """Fork an agent for each connection; an attempt is one line of JSON."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = server.accept()
            assert threading.active_count() == 1, "a fork would lose threads"
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                agent(connection)
            connection.close()


def agent(connection: socket.socket) -> None:
    """Run one attempt; what torch elastic would print goes to the launcher, and the exit code last."""
    request = json.loads(connection.makefile().readline())
    os.environ.clear()
    os.environ.update(request["environment"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = request["ranks"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    pids = {}
    for number in range(ranks):
        pid = os.fork()
        if not pid:
            connection.close()
            os.setsid()
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            sys.argv = ["soup_flows.training", request["run_dir"]]
            if hook := os.environ.get("SOUP_FLOWS_TEST_HOOK"):
                runpy.run_path(hook)
            leave(main())
        pids[pid] = number
    failed = False
    while pids:
        if select.select([connection], [], [], 0.02)[0]:
            word = connection.recv(1)  # T: end them, nothing: the launcher is gone
            for pid in pids:
                os.kill(pid, signal.SIGTERM if word else signal.SIGKILL)
            if not word:
                os._exit(1)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            continue
        number, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = True
            connection.sendall(f"failed (exitcode: {code}) local_rank: {number} (pid: {pid})\n".encode())
            for other in pids:
                os.kill(other, signal.SIGTERM)
    connection.sendall(f"exit {int(failed)}\n".encode())
    os._exit(0)


def leave(code: int) -> None:
    """End this process as Python would, without taking its heap apart: that takes seconds in a fork."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.freeze()  # or every collection in a fork copies the pages of all modules
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    serve(sys.argv[1])
