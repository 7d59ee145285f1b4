"""Rules about a run that is a Slurm job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from soup_flows.launch.engines.slurm_commands import partitions
from soup_flows.launch.engines.slurm_text import Wanted, why_infeasible
from soup_flows.slurm_settings import SlurmSettings
from soup_flows.validation import cluster
from soup_flows.validation.checkpointing import checkpoint_bytes
from soup_flows.validation.table import Context, Found, rule, rules_in

SHARED_BYTES_PER_S = 500_000_000
"""What a shared file system is assumed to take from a run that saves; ours, on the cautious side."""
EARLY_S = 60
"""Slurm may send the signal this much earlier than asked (`man 1 sbatch`, --signal, 22.05)."""
SLURM = "slurm 22.05"


def _slurm(run: Context) -> SlurmSettings | None:
    """What the job asks for; None for a run that is no job."""
    return run.spec.launcher.slurm if run.spec.launcher.engine == "slurm" else None


@rule(
    "SL001",
    "error",
    "launcher.engine",
    "nothing can be submitted from here",
    fix="start the flow on a machine of the cluster that has Slurm's commands, or use launcher.engine=local",
    source="soup_flows/launch/engines/slurm.py",
    versions=SLURM,
    local=True,
)
def no_commands(run: Context) -> Iterator[Found]:
    """The engine slurm on a machine without sbatch, squeue, scontrol or scancel."""
    missing = [name for name in ("sbatch", "squeue", "scontrol", "scancel") if shutil.which(name) is None]
    if _slurm(run) is not None and missing:
        yield Found(f"{', '.join(missing)} cannot be found")


@rule(
    "SL002",
    "error",
    "launcher.slurm.time_min",
    "the job would be told to save before it could make a step",
    fix="raise launcher.slurm.time_min, or lower launcher.slurm.signal_s",
    source="man 1 sbatch, --signal",
    versions=SLURM,
)
def limit_before_start(run: Context) -> Iterator[Found]:
    """A time limit that is not longer than the time before it at which the ranks are told to save."""
    slurm = _slurm(run)
    if slurm is not None and slurm.time_min is not None and slurm.time_min * 60 <= slurm.signal_s + EARLY_S:
        yield Found(
            f"the limit is {slurm.time_min} min and the signal may come {slurm.signal_s + EARLY_S} s before"
        )


@rule(
    "SL003",
    "warning",
    "launcher.slurm.signal_s",
    "Slurm would end the job while it saves, and the steps since the checkpoint before would be lost",
    fix="raise launcher.slurm.signal_s",
    source="the time of a save at 500 MB/s, an assumption about shared storage",
    versions=SLURM,
)
def limit_before_saved(run: Context) -> Iterator[Found]:
    """A save that is predicted to take longer than the time between signal and limit."""
    slurm, size = _slurm(run), checkpoint_bytes(run)
    if slurm is None or slurm.time_min is None or size is None:
        return
    seconds = size / SHARED_BYTES_PER_S
    if seconds > slurm.signal_s:
        yield Found(
            f"a checkpoint of {size / 2**30:.0f} GiB takes about {seconds:.0f} s, {slurm.signal_s} s are left"
        )


@rule(
    "SL004",
    "error",
    "launcher.slurm",
    "the job would wait for ever",
    fix="ask for what `sinfo` lists, or name another partition",
    source="man 1 sinfo; a job over its partition's node count waits as PartitionConfig",
    versions=SLURM,
    local=True,
)
def infeasible(run: Context) -> Iterator[Found]:
    """More machines, GPUs, cores, memory or time than any partition asked for has."""
    slurm = _slurm(run)
    if slurm is None:
        return
    groups = partitions(slurm.partition)
    if groups is None:  # SL001, or a controller that is down: the submission says so
        return
    wanted = Wanted(
        nodes=run.plan.nodes,
        gpus=run.plan.ranks_per_node if run.plan.device == "cuda" else 0,
        cpus=slurm.cpus_per_node or 1,
        memory_mib=(slurm.memory_gib or 0) * 1024,
        time_min=slurm.time_min,
    )
    reason = why_infeasible(groups, wanted)
    if reason:
        yield Found(reason)


@rule(
    "SL005",
    "note",
    "output_dir",
    "the job's machine has to see this folder under the same name, which cannot be proven from here",
    fix="choose a folder on the cluster's shared file system",
    source="docs/multi-node.md",
    versions=SLURM,
)
def unproven_storage(run: Context) -> Iterator[Found]:
    """A job whose output folder is not known to be on a file system of the network."""
    if _slurm(run) is not None:
        yield from cluster.unproven_storage(run)


@rule(
    "SL006",
    "error",
    "launcher.engine",
    "none of it would be used",
    fix="set launcher.engine=slurm, or leave launcher.slurm out",
    source="soup_flows/slurm_settings.py",
)
def settings_without_engine(run: Context) -> Iterator[Found]:
    """Settings for Slurm, and another engine."""
    yield from cluster.unused_settings(run, "slurm")


@rule(
    "SL007",
    "warning",
    "launcher.engine",
    "the job does not get it: nothing secret is exported to Slurm, which keeps a job's environment",
    fix="log in once on the cluster, such as with `hf auth login`, so that the key is in your home folder",
    source="man 1 sbatch, --export; soup_flows/launch/engines/slurm_text.py",
    versions=SLURM,
)
def secret_stays_here(run: Context) -> Iterator[Found]:
    """A secret that ranks may need, in the environment of a flow that submits a job."""
    if _slurm(run) is not None:
        yield from cluster.secrets_here(run)


RULES = rules_in(globals())
