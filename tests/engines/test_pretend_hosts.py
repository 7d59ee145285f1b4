"""The pretend hosts themselves: they speak, fall silent, come back, and leave nothing, also after a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.pretend_hosts import Host, Network, network, why_not

SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
kept = [server.accept() for _ in range(2)]
server.accept()
"""


def on(host: Host, *argv: str) -> str:
    return subprocess.run(host.command(*argv), capture_output=True, text=True, check=True, timeout=60).stdout


def speak_to(host: Host) -> str:
    return f"import socket; socket.create_connection(('{host.address}', 7000), 2)"


@pytest.fixture
def hosts() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network(Path(sys.prefix)) as found:
        yield found


def test_a_host_falls_silent_and_comes_back(hosts: Network) -> None:
    first, second = hosts.hosts
    assert {on(host, "hostname").strip() for host in hosts.hosts} == {first.name, second.name}
    on(first, "touch", "/tmp/mine")
    assert "mine" not in on(second, "ls", "/tmp")
    with subprocess.Popen(
        second.command(sys.executable, "-c", SERVE), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        on(first, sys.executable, "-c", speak_to(second))
        subprocess.run([sys.executable, "-c", speak_to(second)], check=True)  # from where the flow is
        second.power_off()
        assert server.wait() != 0
    with pytest.raises(subprocess.CalledProcessError):
        on(first, sys.executable, "-c", speak_to(second))
    second.boot()
    assert on(second, "hostname").strip() == second.name
    assert "up" in on(first, sys.executable, "-c", PING.format(second.address))


# a port that nobody listens on is refused by a host that is there
PING = """
import socket
try:
    socket.create_connection(("{}", 7000), 20)
except ConnectionRefusedError:
    print("up")
"""


def test_nothing_is_left_after_a_failure(hosts: Network) -> None:
    hosts.off()

    def fail() -> None:
        with network() as found:
            kept.append(found)
            sleeps.append(subprocess.Popen(found.hosts[0].command("sleep", "600")))
            raise RuntimeError("in the middle of a test")

    kept: list[Network] = []
    sleeps: list[subprocess.Popen[bytes]] = []
    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert sleeps[0].wait(60) != 0
    assert not kept[0].etc.exists()
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert f"sf{os.getpid()}" not in links
