"""One machine of a run on a Ray cluster, as the actor there does it: look, run to the end, stop. Without Ray."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from soup_flows.cluster_hosts import SHARED_S, HostSeen
from soup_flows.cluster_job import free_port, on_host
from soup_flows.launch.elastic import Rendezvous
from soup_flows.launch.engines import finished
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import run
from soup_flows.launch.supervised import sweep
from soup_flows.paths import RunPaths


class Seen(HostSeen):
    """What a machine of a Ray cluster says about itself."""

    node: str
    """Ray's id of it."""
    port: int
    """One that is free there."""


class Host:
    """One machine; its supervisor runs below the actor and ends with it."""

    def __init__(self, address: str, node: str) -> None:
        self.address, self.node = address, node
        self._reason: str | None = None

    def look(self, run_dir: str, word: str, markers: Sequence[str]) -> str:
        """Say what this machine is, after everything that is left here of the run has been ended.

        Args:
            run_dir: the run directory.
            word: stands in a file of it.
            markers: of the run's processes; a machine may have had another number in the attempt before.

        Returns:
            `Seen` as JSON.
        """
        for marker in markers:
            sweep(marker)
        paths = RunPaths(Path(run_dir))
        shares = _shares(paths.temp, word)
        port = free_port()
        seen = Seen.here(paths, node=self.node, address=self.address, port=port, shares=shares)
        return seen.model_dump_json()

    def run(self, launch_json: str, meet_json: str | None, cwd: str) -> tuple[bool, str, str]:
        """Run this machine's ranks to their end.

        Returns:
            Whether the run has finished, and reason and detail of the receipt.
        """
        os.chdir(cwd)
        launch = LaunchPlan.model_validate_json(launch_json)
        if meet_json is not None:
            launch = launch.model_copy(update={"env": launch.env | interface_variables(self.address)})
            launch = on_host(launch, Rendezvous.model_validate_json(meet_json), self.address)
        else:
            launch = launch.model_copy(update={"argv": (sys.executable, *launch.argv[1:])})
        outcome = run(launch, should_stop=lambda: self._reason)
        return finished(launch.attempt_paths), outcome.reason, str(outcome.receipt.get("detail", ""))

    def stop(self, reason: str) -> None:
        """Have the ranks save where they can, and end."""
        self._reason = reason


def leave_word(paths: RunPaths) -> str:
    """Leave a new word in the run directory, for the machines to find."""
    word = secrets.token_hex(16)
    paths.temp.mkdir(mode=0o700, exist_ok=True)
    _word_file(paths.temp, word).write_text(word)
    return word


def collect_word(paths: RunPaths, word: str) -> None:
    """Remove the word and the answers to it."""
    for path in paths.temp.glob(f"ray-word-{word}*"):
        path.unlink(missing_ok=True)


def interface_variables(address: str) -> dict[str, str]:
    """Name the network interface that has an address, for gloo and NCCL; what the user set stays.

    Gloo takes the one that the host's name resolves to, which is often the loopback device.
    """
    found = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(entry.address == address for entry in addresses)
    ]
    name = "lo" if address.startswith("127.") else next(iter(found), None)
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    return {key: value for key, value in wanted.items() if key not in os.environ}


def _shares(folder: Path, word: str) -> bool:
    end = time.monotonic() + SHARED_S
    while time.monotonic() < end:
        try:
            if _word_file(folder, word).read_text() == word:
                answer = folder / f"ray-word-{word}-{secrets.token_hex(4)}"
                answer.write_text(socket.gethostname())
                return True
        except OSError:
            pass
        time.sleep(0.5)
    return False


def _word_file(folder: Path, word: str) -> Path:
    return folder / f"ray-word-{word}"
