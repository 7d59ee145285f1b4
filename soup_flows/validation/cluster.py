"""What the rules about jobs of a cluster have in common, whichever cluster it is."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.launch.plan import PASSED_SECRETS
from soup_flows.validation.checkpointing import LOCAL_DISKS, output_disk
from soup_flows.validation.environment import NETWORK
from soup_flows.validation.table import Context, Found


def unused_settings(run: Context, engine: str) -> Iterator[Found]:
    """Find settings for a cluster that the run does not go to."""
    given = getattr(run.spec.launcher, engine).model_dump(exclude_defaults=True)
    if run.spec.launcher.engine != engine and given:
        yield Found(f"launcher.{engine} has {', '.join(given)} and the engine is {run.spec.launcher.engine}")


def unproven_storage(run: Context) -> Iterator[Found]:
    """Find an output folder that is not known to be on a file system of the network."""
    disk = output_disk(run)
    kind = disk.filesystem if disk is not None else None
    if not (kind and kind.startswith(NETWORK)):
        known = f"on {kind}" if kind else "on an unknown file system"
        yield Found(
            f"{run.spec.output_dir} is {known}{', a disk of one machine' if kind in LOCAL_DISKS else ''}"
        )


def secrets_here(run: Context) -> Iterator[Found]:
    """Find secrets that ranks may need in the environment of the flow."""
    here = [name for name in PASSED_SECRETS if run.environ.get(name)]
    if here:
        yield Found(f"{', '.join(here)} is set here")
