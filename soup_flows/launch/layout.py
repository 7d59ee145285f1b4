"""Names that the supervisor, the ranks and the flow share: environment variables and files. Standard library.

The *channel* is a private folder (0700) on local disk that lives as long as an attempt: one FIFO per rank for
its output, its PID, and a mark when it ended cleanly.
"""

from __future__ import annotations

from pathlib import Path

ATTEMPT_DIR = "SOUP_FLOWS_ATTEMPT_DIR"
CHANNEL = "SOUP_FLOWS_CHANNEL"
SUPERVISOR_PID = "SOUP_FLOWS_SUPERVISOR_PID"
PROTOCOL_VERSION = 1
"""Version of the events and of the receipt; readers skip what is newer."""


def fifo(channel: Path, local_rank: int) -> Path:
    """The FIFO that takes the stdout and stderr of this host's rank `local_rank`."""
    return channel / f"rank_{local_rank}.out"


def pid_file(channel: Path, local_rank: int) -> Path:
    """Holds `<PID> <global rank>` of this host's rank `local_rank`."""
    return channel / f"rank_{local_rank}.pid"


def clean_mark(channel: Path, local_rank: int) -> Path:
    """Exists when this host's rank `local_rank` ended without an uncaught exception."""
    return channel / f"rank_{local_rank}.done"


def heartbeat(attempt: Path, rank: int) -> Path:
    """Holds `<step> <phase>` of rank `rank`; its time is that of the last step."""
    return attempt / "heartbeat" / f"rank_{rank}"


HOST_BEATS = "heartbeat/node_*"
"""Where `host_beat` is, for all hosts."""


def host_beat(attempt: Path, node: int) -> Path:
    """Holds `<host name> runs`, or `ended`, of one of several hosts; its time is that of its last sign of life."""
    return attempt / "heartbeat" / f"node_{node}"


def stopping(attempt: Path) -> Path:
    """Written before the ranks are asked to end: `{"reason", "deadline"}`, Unix seconds until SIGKILL, JSON."""
    return attempt / "stopping.json"


def stacks(attempt: Path, rank: int) -> Path:
    """Takes the Python stacks of rank `rank` when it is stuck."""
    return attempt / "stacks" / f"rank_{rank}.txt"


def error(attempt: Path, rank: int) -> Path:
    """The error that ended rank `rank`, JSON."""
    return attempt / "errors" / f"rank_{rank}.json"


def rank_log(attempt: Path, rank: int) -> Path:
    """Everything rank `rank` printed."""
    return attempt / "logs" / f"rank_{rank}.log"


def unplaced_log(attempt: Path, node: int, local_rank: int) -> Path:
    """What a rank of one of several hosts printed before its global rank was known; then it is its `rank_log`."""
    return attempt / "logs" / f"node_{node}_local_{local_rank}.log"


def launcher_log(attempt: Path, node: int = 0) -> Path:
    """Everything a host's elastic agent printed, and ranks before they attached."""
    return attempt / "logs" / f"launcher{f'_node_{node}' if node else ''}.log"


def supervisor_log(attempt: Path, node: int = 0) -> Path:
    """Errors of a host's supervisor itself; normally empty."""
    return attempt / "logs" / f"supervisor{f'_node_{node}' if node else ''}.log"
