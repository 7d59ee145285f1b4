"""Two hosts on this machine: namespaces for network, processes, names and mounts, joined by a bridge.

Each has an address, a host name, a process tree and a `/tmp` of its own; they share the folders that are named, as
over a file server. The machine itself is the bridge's address. Power-off is a link that goes down and then every
process killed at once, so that peers hear nothing, not even the end of a connection.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

NEEDED = ("ip", "unshare", "nsenter")
COUNT = 2

# The first argument is the host's name, the second a folder with its hosts file, the others are shared. It ends with
# its standard input, which the test process holds: nothing outlives that.
INIT = """
set -e
name=$1 etc=$2; shift 2
hostname "$name"
mount --make-rprivate /
mount --bind "$etc/hosts" /etc/hosts
mount --bind "$etc/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs none /dev/shm
mount -t tmpfs none /mnt
number=0
for folder; do mkdir "/mnt/$number"; mount --rbind "$folder" "/mnt/$number"; number=$((number + 1)); done
mount -t tmpfs -o mode=1777 none /tmp
number=0
for folder; do mkdir -p "$folder"; mount --rbind "/mnt/$number" "$folder"; number=$((number + 1)); done
echo up
read -r _ || true
"""


def why_not() -> str | None:
    """Say why no hosts can be made here; None if they can."""
    if os.geteuid() != 0:
        return "hosts made of namespaces need root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install iproute2 util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    if tried.returncode != 0:
        return f"namespaces are refused here: {tried.stderr.strip()}"
    bridge = f"sft{os.getpid()}"
    tried = subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"a network bridge is refused here: {tried.stderr.strip()}"
    _ip("link", "delete", bridge)
    return None


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True, text=True, timeout=60)


class Host:
    """One host; `command` is how something is run on it."""

    def __init__(self, network: Network, number: int) -> None:
        self.network, self.number = network, number
        self.name = f"soup-{os.getpid()}-{number}"
        self.address = f"{network.prefix}.{number}"
        self._link = f"{network.bridge}v{number}"
        self._unshare: subprocess.Popen[str] | None = None
        self._init = 0

    @property
    def on(self) -> bool:
        """Whether it has power."""
        return self._unshare is not None

    def boot(self) -> None:
        """Switch it on, with nothing running."""
        assert self._unshare is None
        shared = [str(folder) for folder in self.network.shared]
        self._unshare = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child",
             "--mount-proc", "bash", "-c", INIT, "init", self.name, str(self.network.etc), *shared],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.network.log.open("a"), text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "up\n", self.network.log.read_text()
        leader = self._unshare.pid
        self._init = int(Path(f"/proc/{leader}/task/{leader}/children").read_text().split()[0])
        # kept over a boot
        card = f"02:00:0a:{int(self.network.prefix.split('.')[1]):02x}:00:{self.number:02x}"
        peer = ["peer", "name", "eth0", "address", card, "netns", str(self._init)]
        _ip("link", "add", self._link, "type", "veth", *peer)
        _ip("link", "set", self._link, "master", self.network.bridge, "up")
        for words in (
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
            f"route add default via {self.network.gateway}",
        ):
            inside = ["nsenter", "--target", str(self._init), "--net", "ip", *words.split()]
            subprocess.run(inside, check=True, capture_output=True, timeout=60)

    def command(self, *argv: str) -> list[str]:
        """Return the argv that runs another one on this host, in the present folder."""
        where = ["--target", str(self._init), "--mount", "--uts", "--ipc", "--net", "--pid"]
        # not `nsenter --wd`, which keeps the folder of the old mount namespace
        return ["nsenter", *where, "bash", "-c", 'cd -- "$0" && exec "$@"', os.getcwd(), *argv]

    def power_off(self) -> None:
        """Cut it off the network, then end everything on it at once."""
        if self._unshare is None:
            return
        machine, self._unshare = self._unshare, None
        with contextlib.suppress(subprocess.CalledProcessError):  # it never had one
            _ip("link", "set", self._link, "down")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init or machine.pid, signal.SIGKILL)
        machine.wait()
        self._init = 0
        for pipe in (machine.stdin, machine.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.CalledProcessError):  # mostly it went with the namespace
            _ip("link", "delete", self._link)


class Network:
    """The bridge, and what all hosts are told."""

    def __init__(self, etc: Path, shared: Sequence[Path]) -> None:
        number = os.getpid()
        self.bridge = f"sf{number}"
        self.prefix = f"10.{100 + number // 250 % 150}.{number % 250}"
        self.gateway = f"{self.prefix}.254"
        self.etc, self.shared, self.log = etc, shared, etc / "boot.log"
        self.hosts = [Host(self, 1 + n) for n in range(COUNT)]
        names = [f"{host.address} {host.name}" for host in self.hosts]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, f"{self.gateway} flow", ""]))
        (etc / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")  # no wait for a DNS

    def off(self) -> None:
        """Remove everything."""
        for host in self.hosts:
            host.power_off()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self.bridge)


def _remove_old_bridges() -> None:
    """Remove the bridges of test processes that were killed; their hosts ended with them."""
    for path in Path("/sys/class/net").glob("sf[0-9]*"):
        number = path.name.removeprefix("sf")
        if number.isdecimal() and (path / "bridge").is_dir() and not Path(f"/proc/{number}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "delete", path.name)


@contextlib.contextmanager
def network(*shared: Path) -> Iterator[Network]:
    """Make the bridge and boot both hosts; nothing of them is there afterwards.

    Args:
        shared: folders below `/tmp` that all hosts see; elsewhere they see what this machine has.
    """
    _remove_old_bridges()
    etc = Path(tempfile.mkdtemp(prefix="soup-hosts-", dir="/tmp"))
    found = Network(etc, [etc, *(folder for folder in shared if Path("/tmp") in folder.parents)])
    try:
        _ip("link", "add", found.bridge, "type", "bridge")
        _ip("addr", "add", f"{found.gateway}/24", "dev", found.bridge)
        _ip("link", "set", found.bridge, "up")
        for host in found.hosts:
            host.boot()
        yield found
    finally:
        found.off()
        shutil.rmtree(etc, ignore_errors=True)
