"""Slurm's commands, and what is asked of them. Every argv is a list; nothing goes through a shell."""

from __future__ import annotations

import subprocess
import time

from soup_flows.launch.engines.cluster import Unanswered
from soup_flows.launch.engines.slurm_text import (
    SINFO_FORMAT,
    Job,
    NodeGroup,
    command_environment,
    first_line,
    parse_sacct,
    parse_scontrol,
    parse_sinfo,
)

ANSWER_S = 30.0
"""Longest wait for one of Slurm's commands."""
KILL_WAIT_S = 120.0
"""Seconds beyond the stop budget that a cancelled job gets: KillWait is 30 s by default (`man 5 slurm.conf`)."""


def partitions(names: str | None) -> list[NodeGroup] | None:
    """Return the machines of the partitions that a job may use; None if Slurm does not say.

    Args:
        names: comma-separated partitions; None for the cluster's default.
    """
    asked = [f"--partition={names}"] if names else []
    try:
        done = call("sinfo", "--noheader", f"--format={SINFO_FORMAT}", *asked)
    except Unanswered:
        return None
    if done.returncode != 0:
        return None
    found = parse_sinfo(done.stdout)
    default = {group.partition.rstrip("*") for group in found if group.partition.endswith("*")}
    return found if names or not default else [g for g in found if g.partition.rstrip("*") in default]


def settled(job: str) -> Job | None:
    """Return what Slurm says about a job; one that is just ending is waited for."""
    end = time.monotonic() + KILL_WAIT_S
    found = ask(job)
    while found is not None and found.state == "COMPLETING" and time.monotonic() < end:
        time.sleep(0.5)
        found = ask(job)
    return found


def ask(job: str) -> Job | None:
    """Return what Slurm says about a job, or None if it knows none.

    Raises:
        Unanswered: if the controller cannot be reached.
    """
    done = call("scontrol", "show", "job", "-o", job)
    found = parse_scontrol(done.stdout)
    if found is not None:
        return found
    if "Invalid job id" not in done.stderr:
        raise Unanswered(f"Slurm does not answer: {first_line(done.stderr)}")
    try:
        past = call(
            "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State,Reason"
        )
    except Unanswered:
        return None
    return parse_sacct(past.stdout) if past.returncode == 0 else None


def call(*argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands.

    Raises:
        Unanswered: if it is not installed or takes too long.
    """
    try:
        return subprocess.run(
            argv,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            env=command_environment(),
            check=False,
        )
    except FileNotFoundError:
        raise Unanswered(f"there is no {argv[0]} on this machine") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unanswered(f"{argv[0]} does not answer: {error}") from None
