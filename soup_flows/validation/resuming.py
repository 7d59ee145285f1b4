"""What can be said of a resume before anything is hashed: whether the checkpoint is there and fits the plan."""

from __future__ import annotations

from pathlib import Path

from soup_flows.checkpoints import list_checkpoints, step_of
from soup_flows.data.reading import list_files
from soup_flows.errors import Problem, Refused
from soup_flows.manifest import Manifest, read_manifest
from soup_flows.resume import data_hash, named_folder
from soup_flows.resume_fit import check_resume
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec

HASH_UP_TO_BYTES = 64 * 2**20
"""Larger data sets are compared with the checkpoint's when the run directory is written."""


def resume_problems(spec: TrainingSpec, plan: ShardingPlan) -> list[Problem]:
    """Return what speaks against `recovery.resume`; nothing is moved, and no checkpoint is hashed.

    Args:
        spec: what is asked.
        plan: what would run.
    """
    if spec.recovery.resume in ("auto", "never"):
        return []
    try:
        folder = named_folder(spec.recovery.resume, spec)
    except Refused as refused:
        # The run may have been another machine's: its checkpoints come from the store before they are looked at.
        return [] if spec.blocks.checkpoint_store else list(refused.problems)
    manifest, reasons = _newest([folder] if step_of(folder) is not None else list_checkpoints(folder))
    if manifest is None:
        message = f"{folder} holds no finished checkpoint" + (f" ({'; '.join(reasons)})" if reasons else "")
        fix = "name another run or checkpoint, or use recovery.resume=never"
        return [Problem(id="RES012", severity="error", field="recovery.resume", message=message, fix=fix)]
    return check_resume(manifest, plan, spec, data_hash(spec) if _is_small(spec) else None)


def _newest(folders: list[Path]) -> tuple[Manifest | None, list[str]]:
    """Return the first manifest that can be read, and why those before it cannot."""
    reasons: list[str] = []
    for folder in folders:
        try:
            return read_manifest(folder), reasons
        except ValueError as error:
            reasons.append(f"{folder.name}: {error}")
    return None, reasons


def _is_small(spec: TrainingSpec) -> bool:
    try:
        return sum(file.stat().st_size for file in list_files(spec.dataset)) <= HASH_UP_TO_BYTES
    except (Refused, OSError):
        return False
