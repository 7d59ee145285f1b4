"""The fault drills: what each does, how it must end, and what its tiny run looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STEPS = 12
"""Optimizer steps of a drill that is to end well."""
FOREVER = 1_000_000
"""Optimizer steps of a drill that has to be ended."""


@dataclass(frozen=True)
class Case:
    """One drill."""

    expected_class: str
    """Failure class, or `completed`."""
    text: str
    steps: int = FOREVER
    quick: bool = False
    """Whether ranks that only pretend to train will do, because it is about processes."""
    server: bool = False
    """Whether it needs a Prefect server and a worker, which it starts itself."""
    inside: bool = True
    """Whether the ranks bring it about, at a step, when the spec names it."""
    launcher: dict[str, Any] = field(default_factory=dict)


DRILLS: dict[str, Case] = {
    "kill_rank": Case("rank_killed", "SIGKILL to rank 1", quick=True),
    "kill_supervisor": Case("rank_killed", "SIGKILL to the supervisor", quick=True),
    "kill_flow": Case("cancelled", "SIGKILL to the flow process", quick=True),
    "kill_worker": Case(
        "cancelled",
        "SIGKILL to the Prefect worker; the run goes on until it is cancelled, with no worker to do it",
        server=True,
        inside=False,
    ),
    "cancel": Case("cancelled", "cancel the flow run in Prefect", server=True, inside=False),
    "sigterm": Case("cancelled", "SIGTERM to the flow process", quick=True),
    "ignore_sigterm": Case("cancelled", "the same, and the ranks ignore SIGTERM", quick=True),
    "hang_rank": Case("stalled", "rank 1 stops making steps", quick=True),
    "hang_collective": Case("stalled", "rank 1 waits in a collective that nobody else enters"),
    "cuda_oom": Case("cuda_oom", "rank 1 runs out of GPU memory; on CPU it raises torch's own exception"),
    "host_oom": Case("host_oom", "rank 1 reaches its limit of host memory (RLIMIT_AS)"),
    "disk_full": Case("disk_full", "the disk is full when the model is saved (a small tmpfs)", steps=STEPS),
    "nan_loss": Case("nan_loss", "a weight becomes NaN"),
    "bad_row": Case("completed", "a row of the data is broken; it is left out and named", STEPS, inside=False),
    "server_down_30s": Case(
        "completed", "the Prefect server is away for 30 s in mid-run", 250, server=True, inside=False
    ),
    "timeout": Case("timeout", "the run takes longer than launcher.timeout_min", quick=True, inside=False,
                    launcher={"timeout_min": 0.4}),
    "exit_abort": Case("completed", "rank 1 aborts at exit, after the model was saved and verified", STEPS),
    "log_flood": Case("completed", "every rank prints 50,000 lines within a step", STEPS),
}  # fmt: skip

QUICK_TIMEOUT_MIN = 0.15
"""Time limit of the drill `timeout` in seconds of a rehearsal, which needs no time to load torch's stack."""


def settings(name: str) -> dict[str, Any]:
    """Return the group `launcher` of the drill's run: small limits, so that a drill takes seconds."""
    case = DRILLS[name]
    inside = {"drill": name, "allow_drill": True} if case.inside else {}
    return {"stall_floor_s": 8.0, "stop_budget_s": 10.0, **inside, **case.launcher}
