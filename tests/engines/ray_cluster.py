"""A real Ray of two machines on this one: a head with its dashboard, and a raylet on another loopback address."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.engines.cluster import free_ports

HEAD, SECOND = "127.0.0.2", "127.0.0.3"
CPUS = 4
GENEROUS_S = 240.0


def why_not() -> str | None:
    """Say why no cluster can be started here; None if one can."""
    if importlib.util.find_spec("ray") is None or shutil.which("ray", path=_path()) is None:
        return "not installed: ray (pip install 'soup-flows[ray]')"
    return None


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"


class RayCluster:
    """The processes of the cluster, each machine in a session of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_ports(40, above=20000)  # below are those of Ray's workers
        self.address = f"http://127.0.0.1:{self.port + 1}"
        self.machines: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SOUP_FLOWS_"))},
            "PATH": _path(),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(root),
            # a machine that is gone is noticed in some seconds, not in a minute
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
        }

    def start(self, address: str) -> None:
        """Start a machine."""
        first = self.port + (0 if address == HEAD else 20)
        where = [f"--address={HEAD}:{self.port}"]
        if address == HEAD:
            where = [
                "--head",
                f"--port={self.port}",
                "--dashboard-host=127.0.0.1",
                f"--dashboard-port={first + 1}",
            ]
        with (self.root / f"{address}.out").open("ab") as output:
            self.machines[address] = subprocess.Popen(
                ["ray", "start", *where, "--block", f"--node-ip-address={address}", f"--num-cpus={CPUS}",
                 "--disable-usage-stats", "--object-store-memory=100000000", f"--node-manager-port={first + 2}",
                 f"--object-manager-port={first + 3}", f"--dashboard-agent-listen-port={first + 4}",
                 f"--dashboard-agent-grpc-port={first + 5}", f"--runtime-env-agent-port={first + 6}",
                 f"--metrics-export-port={first + 7}"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def alive(self) -> set[str]:
        """Addresses of the machines that the head knows to be alive; empty while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.address}/api/v0/nodes?detail=1", timeout=20) as answer:
                found = json.load(answer)["data"]["result"]["result"]
        except (OSError, ValueError, KeyError, TypeError):
            return set()
        return {node["node_ip"] for node in found if node["state"] == "ALIVE"}

    def until_alive(self, *addresses: str) -> None:
        """Wait until exactly these machines are alive."""
        end = time.monotonic() + GENEROUS_S
        while (found := self.alive()) != set(addresses):
            dead = [name for name in addresses if self.machines[name].poll() is not None]
            if dead or time.monotonic() > end:
                said = "\n".join(p.read_text(errors="replace")[-3000:] for p in self.root.glob("*.out"))
                raise AssertionError(f"alive are {found}, not {addresses}; ended: {dead}\n{said}")
            time.sleep(0.3)

    def power_off(self, address: str) -> None:
        """End a machine at once, with everything on it."""
        machine = self.machines.pop(address)
        pids = _session(machine.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        machine.wait()

    def stop(self) -> None:
        """End every machine."""
        for address in list(self.machines):
            self.power_off(address)


def _session(leader: int) -> list[int]:
    """Every process of the sessions below a process: Ray's workers stay in their raylet's."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]
    return []


@contextlib.contextmanager
def cluster() -> Iterator[RayCluster]:
    """Start the cluster and wait until both machines are there."""
    root = Path(tempfile.mkdtemp(prefix="soup-ray-", dir="/tmp"))
    found = RayCluster(root)
    try:
        found.start(HEAD)
        found.until_alive(HEAD)
        found.start(SECOND)
        found.until_alive(HEAD, SECOND)
        yield found
    finally:
        found.stop()
        shutil.rmtree(root, ignore_errors=True)
