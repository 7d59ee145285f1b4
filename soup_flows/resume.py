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
from soup_flows.errors import Problem, Refused, nearest, refuse
from soup_flows.ledger import Change
from soup_flows.manifest import MANIFEST, Manifest, library_versions, read_manifest
from soup_flows.paths import RunPaths
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec

logger = logging.getLogger(__name__)

Note = Callable[[Path, list[str]], None]

FREE_GROUPS = frozenset({"output_dir", "launcher", "recovery", "validation", "blocks", "gpus", "device",
                         "deepspeed", "fsdp", "deepspeed_config", "strategy", "nvme_path", "trust_remote_code",
                         "dataset"})  # fmt: skip
"""Settings that may differ when a run goes on, or are compared otherwise (strategy, data, world size)."""
FREE_FIELDS = frozenset({"training.per_device_train_batch_size", "training.gradient_checkpointing",
                         "training.logging_steps", "training.eval_steps", "training.dtype",
                         "data.eval_dataset", "data.cache_dir", "data.workers", "data.bad_rows",
                         "lora.merge_adapter"})  # fmt: skip
"""The same for fields of groups; micro batch and accumulation may change while their product is kept."""

SAME_STATE = (frozenset({"full_shard", "shard_grad"}), frozenset({"single", "ddp"}))
"""Strategies that write the same files, so that one resumes the other."""
ONE_WAY = frozenset({("zero2", "zero1")})
"""(saved under, resumed under): bit-exact in this direction (deepspeed 0.19.8, tried with real runs)."""


class Orders(BaseModel):
    """What an attempt's ranks are told about where to start; `orders.json` in the run directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str | None = None
    """Folder to resume from; None starts from the model."""
    step: int = 0
    """Optimizer steps made in `checkpoint`."""
    weights_only: bool = False
    """Take the weights alone: optimizer, schedule and data order begin anew."""
    learning_rate_scale: float = Field(1.0, gt=0)
    """Factor on the learning rate of the spec."""
    skip_steps: tuple[int, ...] = ()
    """Optimizer steps whose rows are left out."""
    data_hash: str | None = None
    work_hash: str | None = None
    """Equal for runs that do the same work; see `work_hash`."""
    set_aside: tuple[str, ...] = ()
    """Checkpoints that did not verify: where each is now, and why."""


def identity(spec: TrainingSpec) -> dict[str, Any]:
    """Return every setting that decides what is trained, by dotted name; new settings belong to it."""
    found: dict[str, Any] = {}
    for name, value in spec.model_dump(mode="json").items():
        if name in FREE_GROUPS:
            continue
        if isinstance(value, dict):
            found.update({f"{name}.{k}": v for k, v in value.items() if f"{name}.{k}" not in FREE_FIELDS})
        else:
            found[name] = value
    return found


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


# -- does a checkpoint fit? ------------------------------------------------------------------------


def check_resume(
    manifest: Manifest, plan: ShardingPlan, spec: TrainingSpec, content: str | None = None
) -> list[Problem]:
    """Return what speaks against resuming the checkpoint of `manifest` under `plan`.

    Args:
        manifest: the checkpoint's.
        plan: what would run now.
        spec: what is asked now.
        content: `data_hash(spec)`, when it is known.

    Returns:
        Errors, where a library would fail or silently start over, and warnings, where it goes on but not
        bit for bit.
    """
    problems = [*_strategy_fits(manifest, plan), *_settings_fit(manifest, plan, spec)]
    if content is not None and manifest.data_hash is not None and content != manifest.data_hash:
        message = (
            "the content of the data set has changed since the checkpoint, so rows would come twice or never"
        )
        problems.append(
            _problem("RES005", "error", "dataset", message, manifest, "Trainer skips by position")
        )
    versions = library_versions()
    other = [f"{n} {v} -> {versions[n]}" for n, v in manifest.versions.items() if versions.get(n, v) != v]
    if other:
        message = f"written with other versions ({', '.join(other)})"
        problems.append(_problem("RES006", "warning", "recovery.resume", message, manifest, ""))
    return problems


def _strategy_fits(manifest: Manifest, plan: ShardingPlan) -> list[Problem]:
    saved, now = manifest.strategy, plan.strategy
    same = saved == now or any({saved, now} <= group for group in SAME_STATE) or (saved, now) in ONE_WAY
    if not same:
        message = f"saved under {saved}, and {now} cannot read that optimizer state"
        source = (
            "MakazhanAlpamys/Soup; deepspeed 0.19.8 and transformers 5.24 fail, or start the optimizer over"
        )
        return [_problem("RES002", "error", "strategy", message, manifest, source)]
    if manifest.world_size == plan.world_size:
        return []
    change = f"saved by {manifest.world_size} rank(s), {plan.world_size} would read it"
    if plan.engine == "deepspeed":
        message = f"{change}: DeepSpeed keeps one optimizer file per rank"
        source = "deepspeed 0.19.8 runtime/engine.py, ZeRORuntimeException"
        return [_problem("RES001", "error", "gpus", message, manifest, source)]
    message = f"{change}: losses agree to about 1e-7, dropout draws other numbers"
    return [
        _problem("RES003", "warning", "gpus", message, manifest, "tried with real runs, 4 -> 2 and 2 -> 4")
    ]


def _settings_fit(manifest: Manifest, plan: ShardingPlan, spec: TrainingSpec) -> list[Problem]:
    """Compare every setting that decides what is trained; the saved state would win without a word."""
    now, defaults = identity(spec), identity(spec.model_copy(update=_defaults(spec)))
    now["dtype"], saved = plan.dtype, {**manifest.identity, "dtype": manifest.dtype}
    problems = []
    for name, value in now.items():
        before = saved.get(name, defaults.get(name))
        if before == value:
            continue
        message = (
            f"is {value!r} now and was {before!r} when the checkpoint was saved; the saved state would win"
        )
        problems.append(
            _problem(
                "RES004", "error", name, message, manifest, "transformers 5.24, Trainer: state is loaded last"
            )
        )
    return problems


def _defaults(spec: TrainingSpec) -> dict[str, Any]:
    """Return every group at its defaults: what a checkpoint of an older version knew nothing about."""
    return {
        name: type(value)()
        for name in type(spec).model_fields
        if isinstance(value := getattr(spec, name), BaseModel)
    }


def _problem(rule: str, severity: Any, field: str, message: str, manifest: Manifest, source: str) -> Problem:
    fix = ""
    if severity == "error":
        start = (
            "start anew with recovery.resume=never"
            if manifest.adapters
            else "start a new run from the weights alone: model=<the checkpoint's folder>, recovery.resume=never"
        )
        fix = f"set it back, or {start}"
    return Problem(id=rule, severity=severity, field=field, message=message, fix=fix, source=source)


# -- where does a run start? -----------------------------------------------------------------------


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
    return orders.model_copy(update={"step": manifest.step})


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


def _named(asked: str, spec: TrainingSpec, note: Note) -> Path:
    """Return the checkpoint that a run id or a path stands for."""
    run = RunPaths.of(spec.output_dir, asked).root
    folder = run if "/" not in asked and run.is_dir() else Path(asked).expanduser().absolute()
    if not folder.is_dir():
        runs = [path.name for path in run.parent.iterdir()] if run.parent.is_dir() else []
        fix = nearest(asked, runs) or "give a run id, a checkpoint, a run directory, auto or never"
        raise refuse("RES010", "recovery.resume", f"there is no run and no folder {asked!r}", fix)
    if (folder / MANIFEST).is_file() or folder.name.startswith("checkpoint-"):
        reasons = verify(folder)
        if reasons:
            others = [f for f in list_checkpoints(folder.parent) if f != folder and not verify(f)]
            fix = f"use {others[0]}" if others else "no other checkpoint beside it verifies"
            raise refuse("RES011", "recovery.resume", f"{folder} is broken: {'; '.join(reasons)}", fix)
        return folder
    inner = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    found = newest_good(inner, on_broken=note)
    if found is None:
        raise refuse(
            "RES012",
            "recovery.resume",
            f"{folder} holds no checkpoint that verifies",
            "use recovery.resume=never",
        )
    return found
