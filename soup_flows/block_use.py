"""Blocks at work: what a run's parameter `blocks` names, loaded and handed to where it belongs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TypeVar

from prefect.blocks.core import Block
from prefect.client.orchestration import get_client

from soup_flows.blocks import (
    CheckpointStore,
    ExperimentTracker,
    HuggingFaceCredentials,
    Placement,
    RayCluster,
)
from soup_flows.errors import nearest, refuse
from soup_flows.lent import lend
from soup_flows.paths import RunPaths
from soup_flows.spec import TrainingSpec
from soup_flows.store import Store

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Block)


def load_block(kind: type[B], name: str, field: str) -> B:
    """Return a stored block.

    Args:
        kind: its type.
        name: its name.
        field: the setting that names it, for the message.

    Raises:
        Refused: if there is none of this type and name; the nearest name is in the message.
    """
    try:
        return kind.load(name, _sync=True)  # type: ignore[call-arg,return-value]
    except ValueError as error:
        if "Unable to find block document" not in str(error):
            raise refuse("BLOCK002", field, f"the block {name!r} cannot be used: {error}") from None
    slug = kind.get_block_type_slug()
    message = f"there is no block {name!r} of the type {kind.get_block_type_name()}"
    fix = (
        nearest(name, _names(slug))
        or f"create it in Prefect's page Blocks; `prefect block ls` shows {slug}/..."
    )
    raise refuse("BLOCK001", field, message, fix)


def _names(slug: str) -> list[str]:
    """Return the names of the blocks of a type."""
    with get_client(sync_client=True) as client:
        return [str(b.name) for b in client.read_block_documents_by_type(slug, include_secrets=False)]


def apply_blocks(spec: TrainingSpec) -> TrainingSpec:
    """Return `spec` with what its blocks `placement` and `tracker` say; the other two act when a run starts.

    Raises:
        Refused: for a block that is not there or cannot be used.
    """
    names = spec.blocks
    if names.placement is not None:
        spec = load_block(Placement, names.placement, "blocks.placement").apply(spec)
    if names.tracker is not None:
        kind = load_block(ExperimentTracker, names.tracker, "blocks.tracker").kind
        trackers = list(dict.fromkeys([*spec.training.report_to, kind]))
        spec = spec.model_copy(update={"training": spec.training.model_copy(update={"report_to": trackers})})
    return spec


@contextlib.contextmanager
def credentials(spec: TrainingSpec) -> Iterator[None]:
    """Lend what the blocks `hugging_face` and `tracker` hold to the processes started inside the block.

    What `ray_cluster` holds is lent to the engine, for runs on Ray alone; ranks never get it.

    Raises:
        Refused: for a block that is not there or cannot be used.
    """
    found: dict[str, str] = {}
    kinds: tuple[tuple[str, type[HuggingFaceCredentials | ExperimentTracker | RayCluster]], ...] = (
        ("hugging_face", HuggingFaceCredentials),
        ("tracker", ExperimentTracker),
        ("ray_cluster", RayCluster),
    )
    for field, kind in kinds:
        name = getattr(spec.blocks, field)
        if name is None or (field == "ray_cluster" and spec.launcher.engine != "ray"):
            continue
        block = load_block(kind, name, f"blocks.{field}")
        try:
            found |= block.environment()
        except ValueError as error:
            raise refuse(
                "BLOCK002", f"blocks.{field}", f"the block {name!r} cannot be used: {error}"
            ) from None
    with lend(found):
        yield


def checkpoint_store(spec: TrainingSpec) -> Store | None:
    """Return the store that the block `checkpoint_store` describes; None if none is named.

    Raises:
        Refused: for a block that is not there, or a URL that fsspec cannot open.
    """
    name = spec.blocks.checkpoint_store
    return None if name is None else load_block(CheckpointStore, name, "blocks.checkpoint_store").open()


def bring_back(spec: TrainingSpec, paths: RunPaths) -> None:
    """Download the newest checkpoint that the store has and this machine has not, for the run that will go on.

    That is this flow run's own, for one that comes back on another machine, or the run that `recovery.resume`
    names. What is downloaded is verified like any other checkpoint.

    Args:
        spec: what is asked.
        paths: the run's files.

    Raises:
        Refused: for a block that cannot be used, or a store that does not answer.
    """
    asked = spec.recovery.resume
    store = None if asked == "never" or "/" in asked else checkpoint_store(spec)
    if store is None:
        return
    run_ids = [paths.root.name, *([] if asked == "auto" else [asked])]
    for run_id in run_ids:
        folder = RunPaths.of(spec.output_dir, run_id).checkpoints
        try:
            found = store.fetch_newest(run_id, folder)
        except Exception as error:  # file systems raise what they like
            message = f"{store.url} does not give the checkpoints of {run_id}: {store.words(error)}"
            fix = "correct the block, or go on without the store: leave blocks.checkpoint_store empty"
            raise refuse("STORE002", "blocks.checkpoint_store", message, fix) from None
        if found is not None:
            logger.info("Brought %s back from %s", found, store.url)
