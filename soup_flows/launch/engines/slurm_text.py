"""The text that goes to Slurm and comes back from it: the batch script, and what its commands print."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from soup_flows.launch.engines import State
from soup_flows.launch.plan import PASSED_BY_VALUE, LaunchPlan
from soup_flows.units import whole

SCRIPT, LOG = "slurm.sh", "slurm.log"
"""Files in the run directory: what was submitted, and what the batch script printed."""

JOB_PROGRAM = "soup_flows.slurm_job"
"""What the batch script and each host run; it is named and not imported, since it comes after this package."""

QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
          "SUSPENDED")  # fmt: skip
RUNNING = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
ENDS: Mapping[str, State] = {
    "COMPLETED": "FAILED",  # unless the run directory says more
    "FAILED": "FAILED",
    "TIMEOUT": "FAILED",
    "DEADLINE": "FAILED",
    "OUT_OF_MEMORY": "FAILED",
    "NODE_FAIL": "FAILED",
    "BOOT_FAIL": "FAILED",
    "PREEMPTED": "CANCELLED",
    "REVOKED": "CANCELLED",
    "CANCELLED": "CANCELLED",
}
"""Job states in which nothing runs any more (`man 1 squeue`, JOB STATE CODES, 22.05), and what they are here."""


@dataclass(frozen=True)
class Job:
    """What Slurm says about a job."""

    state: str
    """In Slurm's words, such as `PENDING`."""
    reason: str = ""
    restarts: int = 0

    @property
    def here(self) -> State | None:
        """The state in the words of an engine; None for one that this version does not know."""
        if self.state in QUEUED:
            return "QUEUED"
        return "RUNNING" if self.state in RUNNING else ENDS.get(self.state)

    @property
    def text(self) -> str:
        """State and reason in one text."""
        return f"{self.state} ({self.reason})" if self.reason else self.state


_FIELDS = {
    name: re.compile(rf"(?:^|\s){name}=(\S*)") for name in ("JobState", "Reason", "Restarts", "ExitCode")
}


def parse_scontrol(text: str) -> Job | None:
    """Read `scontrol show job -o ID`; None if it is no job.

    The first mention of a field counts: paths, which may hold anything, come after all of them.
    """
    found = {name: match.group(1) for name, field in _FIELDS.items() if (match := field.search(text))}
    if "JobState" not in found:
        return None
    reason = found.get("Reason", "")
    restarts = whole(found.get("Restarts", ""))
    return Job(found["JobState"], "" if reason in ("None", "(null)") else reason, restarts or 0)


def parse_squeue(text: str) -> dict[str, str]:
    """Read `squeue --noheader --format=%i|%T`: job id to state."""
    return dict(line.strip().split("|", 1) for line in text.splitlines() if "|" in line)


def parse_sacct(text: str) -> Job | None:
    """Read `sacct --noheader --parsable2 --allocations --format=State,Reason`; the last line is the newest start.

    A cancelled job is written `CANCELLED by <uid>`; a reason that Slurm does not know is `None`.
    """
    lines = [line for line in text.splitlines() if "|" in line]
    if not lines:
        return None
    state, reason = lines[-1].split("|", 1)
    words = state.split()
    return (
        Job(words[0].rstrip("+"), "" if reason.strip() in ("None", "") else reason.strip()) if words else None
    )


@dataclass(frozen=True)
class NodeGroup:
    """Machines of one partition that are alike, as `sinfo` counts them."""

    partition: str
    """Its name, with `*` after it for the cluster's default."""
    nodes: int
    cpus: int
    memory_mib: int
    gpus: int
    limit_min: int | None
    """Longest job in minutes; None without a limit."""


SINFO_FORMAT = "%P|%D|%c|%m|%G|%l"


def parse_sinfo(text: str) -> list[NodeGroup]:
    """Read `sinfo --noheader --format=%P|%D|%c|%m|%G|%l`; lines that cannot be read are left out."""
    groups = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 6:
            continue
        name, nodes, cpus, memory, gres, limit = parts
        # `8+`: these differ, 8 is the least
        count, cores, mib = (whole(value.rstrip("+")) for value in (nodes, cpus, memory))
        if count is not None and cores is not None and mib is not None:
            groups.append(NodeGroup(name, count, cores, mib, _gpus(gres), minutes(limit)))
    return groups


def _gpus(gres: str) -> int:
    """Count the GPUs in `gpu:a100:4(S:0-1),gpu:2,shard:8`."""
    return sum(int(n) for n in re.findall(r"(?:^|,)gpu(?::[^,:()]+)?:([0-9]{1,9})", gres))


def minutes(limit: str) -> int | None:
    """Read a time limit as `sinfo` prints it, `[days-]hours:minutes:seconds` or `minutes:seconds`, in minutes."""
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?(?:([0-9]{1,9}):)?([0-9]{1,9}):([0-9]{1,9})", limit.strip())
    if match is None:
        return None
    days, hours, mins, _ = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + mins


@dataclass(frozen=True)
class Wanted:
    """What a job asks of each of its machines."""

    nodes: int
    gpus: int = 0
    cpus: int = 1
    memory_mib: int = 0
    time_min: int | None = None


def why_infeasible(groups: Sequence[NodeGroup], wanted: Wanted) -> str:
    """Say why no partition could ever run a job; empty if one could, or if nothing is known.

    Args:
        groups: machines of the partitions that the job may use.
        wanted: the job.
    """
    if not groups:
        return "there is no such partition"
    best = 0
    for partition in dict.fromkeys(group.partition for group in groups):
        fit = [
            group.nodes
            for group in groups
            if group.partition == partition
            and group.gpus >= wanted.gpus
            and group.cpus >= wanted.cpus
            and group.memory_mib >= wanted.memory_mib
            and (wanted.time_min is None or group.limit_min is None or wanted.time_min <= group.limit_min)
        ]
        best = max(best, sum(fit))
    if best >= wanted.nodes:
        return ""
    asked = [f"{wanted.gpus} GPU(s)"] if wanted.gpus else []
    asked += (
        [f"{wanted.cpus} core(s)", f"{wanted.memory_mib} MiB"]
        if wanted.memory_mib
        else [f"{wanted.cpus} core(s)"]
    )
    asked += [f"{wanted.time_min} min"] if wanted.time_min else []
    return (
        f"{wanted.nodes} machine(s) with {', '.join(asked)} are asked for, and at most {best} can give that"
    )


def options(launch: LaunchPlan) -> list[str]:
    """Return the options of sbatch for a launch, those that the user named last."""
    slurm, given = launch.slurm, launch.slurm.options
    wanted: dict[str, object] = {
        "job-name": launch.run_id,
        "nodes": launch.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": slurm.cpus_per_node or launch.cpus_per_node,
        "mem": f"{slurm.memory_gib}G" if slurm.memory_gib else None,
        "partition": slurm.partition,
        "account": slurm.account,
        "constraint": slurm.constraint,
        "time": slurm.time_min,
        "signal": f"B:TERM@{slurm.signal_s}",
    }
    if launch.uses_gpus and "gres" not in given:
        wanted["gpus-per-node"] = launch.nproc_per_node
    found = [f"--{name}={value}" for name, value in {**wanted, **given}.items() if value not in (None, "")]
    flags = [f"--{name}" for name, value in given.items() if value == ""]
    return [*found, *flags, "--requeue", "--open-mode=append", "--export=NONE", "--output=/dev/null"]


def batch_script(launch: LaunchPlan, cwd: str, environ: Mapping[str, str]) -> str:
    """Return the batch script of a launch.

    Every value of a user is either checked by `SlurmSettings` or quoted; no secret is in it. The job sees the
    user's log-in environment (`--export=NONE`, `man 1 sbatch`) and what is exported below.

    Args:
        launch: what to start.
        cwd: folder in which the ranks run, since the spec may hold relative paths.
        environ: the flow's environment, of which `PASSED_BY_VALUE` is taken.
    """
    values = {name: environ[name] for name in PASSED_BY_VALUE if name in environ}
    values |= {name: launch.env[name] for name in ("PYTHONPATH",) if name in launch.env}
    values["PYTHONUNBUFFERED"] = "1"
    quoted = {name: shlex.quote(value) for name, value in values.items()}
    run = shlex.quote(launch.run_dir)
    return "\n".join(
        (
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options(launch)),
            "umask 077",
            f"run={run}",
            f'exec >>"$run"/{LOG} 2>&1 </dev/null',
            f"cd -- {shlex.quote(cwd)} || exit 1",
            *(f"export {name}={value}" for name, value in quoted.items()),
            f"job=({shlex.quote(sys.executable)} -m {JOB_PROGRAM})",
            '"${job[@]}" begin "$run" || exit 1',
            "# Before the time limit Slurm tells this shell alone: the ranks save at the end of their step.",
            """trap '"${job[@]}" leave "$run"' TERM""",
            'srun --ntasks-per-node=1 --kill-on-bad-exit=1 --export=ALL "${job[@]}" node "$run" &',
            "step=$!",
            'while kill -0 "$step" 2>/dev/null; do wait "$step"; done',
            'exec "${job[@]}" end "$run"',
            "",
        )
    )


def command_environment() -> dict[str, str]:
    """Return the environment for Slurm's commands: without what another job or a user's defaults would add."""
    keep = ("SLURM_CONF", "SLURM_CONF_SERVER")
    return {
        name: value
        for name, value in os.environ.items()
        if name in keep or not name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SACCT_"))
    }


def first_line(text: str) -> str:
    """Return what a command complained about, without its own name."""
    lines = [line.removeprefix("sbatch: error: ").strip() for line in text.splitlines() if line.strip()]
    return "; ".join(_unique(lines))[:500]


def _unique(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
