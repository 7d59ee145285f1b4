"""The command of torch elastic, and where the hosts of a run meet."""

from __future__ import annotations

import os
import sys

from pydantic import BaseModel, ConfigDict


class Rendezvous(BaseModel):
    """Where the hosts of a run meet, and which of them this is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """Another one for every start, or hosts of an earlier one would be met."""
    host: str
    port: int
    nodes: int
    node: int = 0


def elastic_argv(
    run_id: str,
    nproc_per_node: int,
    stop_budget_s: float,
    *program: str,
    meet: Rendezvous | None = None,
    local_addr: str | None = None,
) -> tuple[str, ...]:
    """Return the torch elastic command that runs `program` (`-m module args` or `script args`) on this host.

    On one host the port is chosen by the kernel, never 29500. No restarts: an attempt is one try, and retries
    are decided by the flow, which may change the plan.

    Args:
        run_id: the run.
        nproc_per_node: ranks on this host.
        stop_budget_s: seconds from the request to stop until nothing is left.
        program: what each rank runs.
        meet: where several hosts meet.
        local_addr: address of this host for the others, where its name would not do.
    """
    here: tuple[str, ...] = (
        "--rdzv-endpoint",
        "localhost:0",
        "--local-addr",
        "localhost",
        "--rdzv-id",
        run_id,
    )
    if meet is not None:
        conf = f"is_host={int(meet.node == 0)}"
        here = ("--rdzv-endpoint", f"{meet.host}:{meet.port}", "--rdzv-conf", conf, "--rdzv-id", meet.id)
        here += ("--local-addr", local_addr) if local_addr else ()
    return (
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(meet.nodes if meet is not None else 1)),
        *("--nproc-per-node", str(nproc_per_node)),
        *("--rdzv-backend", "c10d"),
        *here,
        *(
            "--log-dir",
            os.devnull,
        ),  # ranks write their own logs; else a folder in /tmp is left by every start
        *("--max-restarts", "0"),
        *("--shutdown-timeout", str(max(1, int(stop_budget_s)))),
        *program,
    )
