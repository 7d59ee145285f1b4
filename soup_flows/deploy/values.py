"""What `soup-flows deploy` is asked, and what it did, as values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PoolType = Literal["process", "docker", "kubernetes"]
Action = Literal["create", "update", "keep", "leave out"]

ZOMBIE_S = 600.0
"""Seconds without a heartbeat after which a run counts as lost. Runs beat every 30 s; heartbeats are dropped while
the server is down, and a run that outlives an outage must not be taken for dead."""
STALL_S = 1800.0
"""Seconds without progress after which somebody is told; `launcher.stall_floor_s` ends a run long before."""


class DeployRequest(BaseModel):
    """What to register."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: str = Field("gpu", min_length=1)
    """Name of the work pool."""
    pool_type: PoolType = "process"
    image: str | None = None
    """Image of a docker or kubernetes pool."""
    limit: int | None = Field(None, ge=1)
    """Most runs of the pool at once, over all hosts; None keeps what the pool has."""
    reset_pool: bool = False
    """Replace the base job template of a pool that exists."""
    schedule: str | None = None
    """Cron line that switches `soup-train/nightly` on."""
    timezone: str = "UTC"
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of `soup-train/nightly`; empty keeps what it has."""
    blocks: str | None = None
    """Folder of documents that are kept as blocks."""
    automations: bool = False
    notify: str | None = None
    """Notification block, `<block type slug>/<name>`."""
    zombie_s: float = Field(ZOMBIE_S, ge=10)
    """Seconds without a heartbeat after which a run counts as lost."""
    stall_s: float = Field(STALL_S, ge=10)
    """Seconds without progress after which somebody is told."""


class Step(BaseModel):
    """One thing that was done, or would be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["work pool", "block type", "block", "deployment", "automation"]
    name: str
    action: Action
    detail: str = ""
