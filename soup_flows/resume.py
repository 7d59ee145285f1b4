"""Where a run starts from: which checkpoint, whether it fits, and what the ranks are told about it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from soup_flows.checkpoints import list_checkpoints, newest_good, set_aside, verify
from soup_flows.data.reading import list_files
from soup_flows.errors import Refused, nearest, refuse
from soup_flows.ledger import Change
from soup_flows.manifest import MANIFEST, library_versions, read_manifest
from soup_flows.paths import RunPaths
from soup_flows.resume_fit import check_resume, converts
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.user_file import expanded

logger = logging.getLogger(__name__)

Note = Callable[[Path, list[str]], None]


class Orders(BaseModel):
    """What an attempt's ranks are told about where to start; `orders.json` in the run directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str | None = None
    """Folder to resume from; None starts from the model."""
    step: int = 0
    """Optimizer steps made in `checkpoint`."""
    weights_only: bool = False
    """Take the weights alone: optimizer, schedule and data order begin anew."""
    universal: bool = False
    """Convert the checkpoint to DeepSpeed's universal form first, since another number of ranks wrote it."""
    learning_rate_scale: float = Field(1.0, gt=0)
    """Factor on the learning rate of the spec."""
    skip_steps: tuple[int, ...] = ()
    """Optimizer steps whose rows are left out."""
    data_hash: str | None = None
    work_hash: str | None = None
    """Equal for runs that do the same work; see `work_hash`."""
    set_aside: tuple[str, ...] = ()
    """Checkpoints that did not verify: where each is now, and why."""


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def data_hash(spec: TrainingSpec) -> str | None:
    """Return the SHA-256 of the content of the training files, whatever their names; None for a Hub name."""
    total = hashlib.sha256()
    try:
        for file in list_files(spec.dataset):
            with Path(file).open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
    except (Refused, OSError):
        return None
    return total.hexdigest()


def work_hash(spec: TrainingSpec, content: str | None) -> str:
    """Return one hash of settings, data content and code: equal for two runs that do the same work."""
    code = hashlib.sha256()
    root = Path(__file__).parent
    for file in sorted(root.rglob("*.py")):
        code.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    settings = spec.model_dump(
        mode="json", exclude={"output_dir", "recovery", "launcher", "validation", "blocks"}
    )
    return digest([settings, content or spec.dataset, code.hexdigest(), library_versions()])


def find_start(
    spec: TrainingSpec, plan: ShardingPlan, paths: RunPaths, change: Change | None = None
) -> Orders:
    """Decide what the next attempt of a run starts from.

    The run's own newest good checkpoint comes first; without one, what `recovery.resume` names. `never` always
    starts from the model, and sets the run's own checkpoints aside.

    Args:
        spec: what is asked.
        plan: what would run.
        paths: the run's files.
        change: what earlier attempts changed.

    Raises:
        Refused: for a checkpoint that does not fit or does not verify, or a name that is not there.
    """
    change = change or Change()
    moved: list[str] = []

    def note(folder: Path, reasons: list[str]) -> None:
        moved.append(f"{folder}: {'; '.join(reasons)}")
        logger.warning("Set aside %s", moved[-1])

    content = data_hash(spec)
    found, weights_only = _choose(spec, paths, change, note)
    orders = Orders(
        checkpoint=str(found) if found else None,
        weights_only=weights_only,
        learning_rate_scale=change.learning_rate_scale,
        skip_steps=change.skip_steps,
        data_hash=content,
        work_hash=work_hash(spec, content),
        set_aside=tuple(moved),
    )
    if found is None:
        return orders
    manifest = read_manifest(found)
    problems = [] if weights_only else check_resume(manifest, plan, spec, content)
    for problem in problems:
        logger.warning("%s: %s", found.name, problem)
    if any(problem.severity == "error" for problem in problems):
        raise Refused(problems)
    universal = not weights_only and converts(manifest, plan)
    return orders.model_copy(update={"step": manifest.step, "universal": universal})


def _choose(spec: TrainingSpec, paths: RunPaths, change: Change, note: Note) -> tuple[Path | None, bool]:
    """Return the checkpoint to start from, and whether its weights alone are taken."""
    asked = spec.recovery.resume
    if asked == "never":
        for folder in list_checkpoints(paths.checkpoints):
            reasons = ["recovery.resume is never"]
            note(set_aside(folder, reasons), reasons)
        return None, False
    run_id = paths.root.name
    found = newest_good(paths.checkpoints, run_id=run_id, max_step=change.max_step, on_broken=note)
    if found is not None:
        return found, False
    if change.weights is not None:
        reasons = verify(Path(change.weights))
        if reasons:
            raise refuse("RES011", "recovery.on_oom", f"{change.weights} is broken: {'; '.join(reasons)}")
        return Path(change.weights), True
    return (None if asked == "auto" else _named(asked, spec, note)), False


def named_folder(asked: str, spec: TrainingSpec) -> Path:
    """Return the folder that a run id or a path stands for: a checkpoint, or one that holds checkpoints.

    Raises:
        Refused: `RES010` if there is none.
    """
    run = RunPaths.of(spec.output_dir, asked).root
    folder = run if "/" not in asked and run.is_dir() else expanded(asked).absolute()
    if not folder.is_dir():
        runs = [path.name for path in run.parent.iterdir()] if run.parent.is_dir() else []
        fix = nearest(asked, runs) or "give a run id, a checkpoint, a run directory, auto or never"
        raise refuse("RES010", "recovery.resume", f"there is no run and no folder {asked!r}", fix)
    inner = folder / "checkpoints"
    return inner if inner.is_dir() else folder


def _named(asked: str, spec: TrainingSpec, note: Note) -> Path:
    """Return the checkpoint that a run id or a path stands for."""
    folder = named_folder(asked, spec)
    if (folder / MANIFEST).is_file() or folder.name.startswith("checkpoint-"):
        reasons = verify(folder)
        if reasons:
            others = [f for f in list_checkpoints(folder.parent) if f != folder and not verify(f)]
            fix = f"use {others[0]}" if others else "no other checkpoint beside it verifies"
            raise refuse("RES011", "recovery.resume", f"{folder} is broken: {'; '.join(reasons)}", fix)
        return folder
    found = newest_good(folder, on_broken=note)
    if found is None:
        words = f"{folder} holds no checkpoint that verifies"
        raise refuse("RES012", "recovery.resume", words, "use recovery.resume=never")
    return found
