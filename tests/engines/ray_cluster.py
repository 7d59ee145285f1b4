"""A real Ray of two machines, a head with its dashboard and a raylet, on loopback addresses or pretend hosts."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.engines.cluster import free_ports
from tests.engines.pretend_hosts import Host

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

    def __init__(
        self, root: Path, hosts: Sequence[Host] = (), token: str | None = None, notices: bool = True
    ) -> None:
        self.root = root
        self.hosts = {host.address: host for host in hosts}
        self.head, self.second = list(self.hosts) or (HEAD, SECOND)
        self.port = free_ports(40, above=20000)  # below are those of Ray's workers
        self.dashboard = self.head if hosts else "127.0.0.1"
        self.address = f"http://{self.dashboard}:{self.port + 1}"
        self.machines: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SOUP_FLOWS_"))},
            "PATH": _path(),
            "RAY_AUTH_MODE": "token" if token else "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(root),
        }
        if notices:
            self.environment |= {
                "RAY_health_check_initial_delay_ms": "1000",
                "RAY_health_check_period_ms": "1000",
                "RAY_health_check_timeout_ms": "2000",
                "RAY_health_check_failure_threshold": "3",
            }
        self.token = token
        if token:
            self.environment["RAY_AUTH_TOKEN"] = token

    def start(self, address: str) -> None:
        """Start a machine."""
        first = self.port + (0 if address == self.head else 20)
        argv = ["ray", "start", "--block", f"--node-ip-address={address}", f"--num-cpus={CPUS}",
                "--disable-usage-stats", "--object-store-memory=100000000"]  # fmt: skip
        if address == self.head:
            argv += ["--head", f"--port={self.port}", f"--dashboard-host={self.dashboard}"]
            argv += [f"--dashboard-port={first + 1}"]
        else:
            argv.append(f"--address={self.head}:{self.port}")
        if not self.hosts:  # else each has all ports of its own
            names = ("node-manager-port", "object-manager-port", "dashboard-agent-listen-port",
                     "dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port")  # fmt: skip
            argv += [f"--{name}={first + 2 + number}" for number, name in enumerate(names)]
        with (self.root / f"{address}.out").open("ab") as output:
            self.machines[address] = subprocess.Popen(
                self.hosts[address].command(*argv) if self.hosts else argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def alive(self) -> set[str]:
        """Addresses of the machines that the head knows to be alive; empty while it does not answer."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(f"{self.address}/api/v0/nodes?detail=1", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
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
        if self.hosts:
            self.hosts[address].power_off()
            machine.wait()
            return
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
def cluster(
    hosts: Sequence[Host] = (),
    root: Path | None = None,
    token: str | None = None,
    notices: bool = True,
) -> Iterator[RayCluster]:
    """Start the cluster and wait until its machines are there.

    Args:
        hosts: pretend hosts that are its machines; two on this machine without them.
        root: an empty folder that exists on every host; it is removed.
        token: turns token authentication on, on the head alone.
        notices: a machine that is gone is noticed in some seconds, and not in a minute as by default.
    """
    root = root or Path(tempfile.mkdtemp(prefix="soup-ray-", dir="/tmp"))
    found = RayCluster(root, hosts, token, notices)
    try:
        found.start(found.head)
        found.until_alive(found.head)
        if token is None:
            found.start(found.second)
            found.until_alive(found.head, found.second)
        yield found
    finally:
        found.stop()
        shutil.rmtree(root, ignore_errors=True)
