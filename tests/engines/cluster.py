"""A real Slurm of two nodes: munged and slurmctld on this machine, and two slurmd here or on pretend hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.engines.pretend_hosts import Host

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
NODES = ("n1", "n2")
CPUS, GPUS = 2, 2
GENEROUS_S = 60.0

CONFIG = """\
ClusterName=soup
SlurmctldHost=localhost({controller})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmctldTimeout=60
SlurmdTimeout={silence_s}
MinJobAge=600
KillWait=30
SchedulerParameters=sched_min_interval=200000,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes={names} MaxTime=30 State=UP
"""


def why_not() -> str | None:
    """Say why no cluster can be started here; None if one can."""
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Daemons:
    """The processes of the cluster, ended in the order in which that is quiet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(root / "slurm.conf")}

    def start(self, *argv: str, host: Host | None = None) -> subprocess.Popen[bytes]:
        """Start a daemon in the foreground, with its output in the cluster's folder."""
        with (self.root / f"{argv[0]}.out").open("ab") as output:
            daemon = subprocess.Popen(
                host.command(*argv) if host else argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        if host is None:
            self.started.append(daemon)
        return daemon

    def start_node(self, host: Host) -> None:
        """Start the daemon of a pretend host, with which it ends."""
        self.start("slurmd", "-D", "-f", str(self.root / "slurm.conf"), host=host)

    def call(self, *argv: str) -> str:
        """Run a command of Slurm and return what it printed."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def until(self, argv: tuple[str, ...], words: str) -> None:
        """Wait until a command prints `words`."""
        end = time.monotonic() + GENEROUS_S
        while words not in (said := self.call(*argv)):
            dead = [daemon.args for daemon in self.started if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.root.glob("*.log"))
                raise AssertionError(f"{argv} never said {words!r}, but {said!r}; ended: {dead}\n{logs}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End every daemon; the last to start is the first to go."""
        for daemon in reversed(self.started):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()


def _write_config(root: Path, port: int, hosts: Sequence[Host], silence_s: int) -> None:
    lines = []
    gres = []
    names = [host.name for host in hosts] or list(NODES)
    for number, name in enumerate(names):
        (root / f"spool-{name}").mkdir()
        devices = [root / f"gpu-{name}-{n}" for n in range(GPUS)]
        for device in devices:
            device.touch()
        gres.append(f"NodeName={name} Name=gpu File={root}/gpu-{name}-[0-{GPUS - 1}]")
        where = f"NodeAddr={hosts[number].address}" if hosts else "NodeHostname=localhost NodeAddr=127.0.0.1"
        lines.append(
            f"NodeName={name} {where} Port={port + 1 + number} CPUs={CPUS} RealMemory=8000 Gres=gpu:{GPUS}"
        )
    (root / "state").mkdir()
    (root / "gres.conf").write_text("\n".join(gres) + "\n")
    (root / "cgroup.conf").write_text("CgroupAutomount=no\n")
    controller = hosts[0].network.gateway if hosts else "127.0.0.1"
    text = CONFIG.format(root=root, port=port, nodes="\n".join(lines), names=",".join(names),
                         controller=controller, silence_s=silence_s)  # fmt: skip
    (root / "slurm.conf").write_text(text)


def free_ports(count: int, above: int = 16000) -> int:
    """Return the first of `count` free ports in a row, outside those that the kernel hands out."""
    for first in range(above + os.getpid() % 1000 * 10, 31000, 10):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


@contextlib.contextmanager
def cluster(hosts: Sequence[Host] = (), root: Path | None = None, silence_s: int = 60) -> Iterator[Daemons]:
    """Start the cluster and wait until both nodes are idle.

    Args:
        hosts: pretend hosts that are the nodes; two nodes on this machine without them.
        root: an empty folder, which the hosts share; it is removed.
        silence_s: seconds after which Slurm takes a node that does not answer for down (SlurmdTimeout).
    """
    port = free_ports(1 + len(NODES))
    root = root or Path(tempfile.mkdtemp(prefix="soup-slurm-", dir="/tmp"))
    root.chmod(0o755)
    _write_config(root, port, hosts, silence_s)
    daemons = Daemons(root)
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    try:
        daemons.start(
            "munged", "--foreground", f"--socket={root}/munge.socket", f"--key-file={key}",
            f"--log-file={root}/munged.log", f"--pid-file={root}/munged.pid", f"--seed-file={root}/munged.seed",
            "--force",
        )  # fmt: skip
        end = time.monotonic() + GENEROUS_S
        while not (root / "munge.socket").exists() and time.monotonic() < end:
            time.sleep(0.05)
        daemons.start("slurmctld", "-D", "-f", str(root / "slurm.conf"))
        for host in hosts:
            daemons.start_node(host)
        for name in () if hosts else NODES:
            daemons.start("slurmd", "-D", "-N", name, "-f", str(root / "slurm.conf"))
        daemons.until(("sinfo", "--noheader", "--partition=debug", "--format=%D %T"), f"{len(NODES)} idle")
        yield daemons
    finally:
        daemons.stop()
        shutil.rmtree(root, ignore_errors=True)
