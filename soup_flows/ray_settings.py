"""What a run asks a Ray cluster for; see `soup_flows.launch.engines.ray`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from soup_flows.group import Group

RESOURCE = re.compile(r"[\w.:-]{1,100}", re.ASCII)
"""What the name of a resource may be made of."""
OWN = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that have a setting of their own, or that a training has no use for."""


class RaySettings(Group):
    """What the job asks a Ray cluster for, with `launcher.engine=ray`."""

    address: str | None = Field(None, min_length=1, title="Dashboard")
    """Address of the cluster's dashboard, such as `http://head:8265`; the variable RAY_API_SERVER_ADDRESS when
    empty."""
    nodes: int = Field(1, ge=1, le=1024, title="Machines")
    """Machines with `gpus` ranks each."""
    min_nodes: int | None = Field(None, ge=1, le=1024, title="Fewest machines")
    """Goes on with this many when machines are lost, and grows back when they return; the global batch is kept.
    Waits for all of them when empty."""
    patience_s: float = Field(60.0, ge=1, title="Wait for missing machines (seconds)")
    """How long to wait for all machines before going on with fewer, where `min_nodes` allows that, and for how long
    there has to be room for more before the run stops to use it."""
    cpus_per_node: int | None = Field(None, ge=1, le=4096, title="CPU cores per machine")
    """Cores that are reserved on each machine; the threads of its ranks when empty."""
    memory_gib: int | None = Field(None, ge=1, le=65_536, title="Memory per machine (GiB)")
    """Host memory that is reserved on each machine; none when empty."""
    resources: dict[str, float] = Field(default_factory=dict, title="More resources per machine")
    """Further resources of each machine by Ray's names, such as `{"accelerator_type:H100": 0.001}`."""
    grows: bool = Field(False, title="The cluster grows by itself")
    """The cluster starts machines when they are asked for: more than it has at present is not refused."""
    python: str | None = Field(None, min_length=1, title="Python on the cluster")
    """The interpreter that runs the job; the one that the flow was started with when empty."""
    hardware: str | None = Field(None, min_length=1, title="Recorded machine")
    """JSON that `soup-flows doctor --json` printed on a machine of the cluster; plans for this machine when
    empty."""

    def wanted(self, cpus: int, gpus: int) -> dict[str, float]:
        """Return what is reserved on each machine, by Ray's names; memory in bytes.

        Args:
            cpus: cores that its ranks use.
            gpus: GPUs that they use; 0 on CPUs.
        """
        found: dict[str, float] = {"CPU": self.cpus_per_node or cpus}
        if gpus:
            found["GPU"] = gpus
        if self.memory_gib:
            found["memory"] = self.memory_gib * 2**30
        return found | self.resources

    @field_validator("address")
    @classmethod
    def _plain_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        url = urlsplit(value)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"give the address of the dashboard, such as http://head:8265, found {value!r}")
        if url.username or url.password or url.query or url.fragment:
            raise ValueError(
                "the address holds no user, password or token: set RAY_AUTH_TOKEN, or name a block"
            )
        return value.rstrip("/")

    @field_validator("min_nodes")
    @classmethod
    def _no_more_than_all(cls, value: int | None, info: ValidationInfo) -> int | None:
        nodes = info.data.get("nodes")
        if value is not None and nodes is not None and value > nodes:
            raise ValueError(f"min_nodes={value} is more than nodes={nodes}")
        return value

    @field_validator("resources")
    @classmethod
    def _named(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in OWN or not RESOURCE.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot be given here; known by settings of their own: {', '.join(OWN)}"
                )
            if not 0 < amount < 1e9:
                raise ValueError(f"{name} must be above 0, found {amount}")
        return value
