"""What a run asks Slurm for; see `soup_flows.launch.engines.slurm`."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from soup_flows.errors import nearest
from soup_flows.group import Group

OPTIONS = (
    "begin", "comment", "cores-per-socket", "dependency", "exclude",
    "exclusive", "gpu-bind", "gpus-per-node", "gres", "gres-flags", "licenses", "mail-type", "mail-user", "nice",
    "nodelist", "priority", "qos", "reservation", "switches", "tmp", "wckey",
)  # fmt: skip
"""Options of sbatch (`man 1 sbatch`, 22.05) that say where and when a job runs and change nothing else about it."""

VALUE = re.compile(r"[\w.,:=+@\[\]&|()*/%-]{0,200}", re.ASCII)
"""What a value may be made of: a line of the batch script is one option, and no text may begin another."""


def _checked(name: str, value: str) -> str:
    if not VALUE.fullmatch(value):
        raise ValueError(f"{name} may hold letters, digits and .,:=+@[]&|()*/%-_ alone, found {value!r}")
    return value


class SlurmSettings(Group):
    """What the job asks Slurm for, with `launcher.engine=slurm`."""

    nodes: int = Field(1, ge=1, le=1024, title="Machines")
    """Machines with `gpus` ranks each."""
    partition: str | None = Field(None, min_length=1, title="Partition")
    """Partition or comma-separated partitions; the cluster's default when empty."""
    account: str | None = Field(None, min_length=1, title="Account")
    """Account that is charged; the user's default when empty."""
    constraint: str | None = Field(None, min_length=1, title="Constraint")
    """Features that a machine must have, such as `a100&nvlink`."""
    time_min: int | None = Field(None, ge=3, le=525_600, title="Time limit of the job (minutes)")
    """The job is saved, requeued and continued before it; the partition's limit when empty."""
    signal_s: int = Field(120, ge=30, le=3600, title="Save before the time limit (seconds)")
    """How long before the time limit the ranks are told to save; Slurm may be up to a minute early."""
    cpus_per_node: int | None = Field(None, ge=1, le=4096, title="CPU cores per machine")
    """Cores on each machine; the threads of its ranks when empty."""
    memory_gib: int | None = Field(None, ge=1, le=65_536, title="Memory per machine (GiB)")
    """Host memory on each machine; the partition's default when empty."""
    hardware: str | None = Field(None, min_length=1, title="Recorded machine")
    """JSON that `soup-flows doctor --json` printed on a machine of the partition; plans for this machine when
    empty."""
    options: dict[str, str] = Field(default_factory=dict, title="More options of sbatch")
    """Further options by their long names, such as `{"qos": "high"}`; an empty text is an option without a value."""

    @field_validator("partition", "account", "constraint")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        return None if value is None else _checked("the value", value)

    @field_validator("options")
    @classmethod
    def _known(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if name not in OPTIONS:
                raise ValueError(
                    f"{name!r} is not an option that can be given here; {nearest(name, OPTIONS) or ''} "
                    f"known are {', '.join(OPTIONS)}"
                )
            _checked(name, text)
        return value
