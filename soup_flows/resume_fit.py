"""Does a checkpoint fit what would run now: strategy, number of ranks, every setting that decides what is trained."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from soup_flows.errors import Problem
from soup_flows.manifest import Manifest, library_versions
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec

FREE_GROUPS = frozenset({"output_dir", "launcher", "recovery", "validation", "blocks", "gpus", "device",
                         "deepspeed", "fsdp", "deepspeed_config", "strategy", "nvme_path", "trust_remote_code",
                         "dataset"})  # fmt: skip
"""Settings that may differ when a run goes on, or are compared otherwise (strategy, data, world size)."""
FREE_FIELDS = frozenset({"training.per_device_train_batch_size", "training.gradient_checkpointing",
                         "training.logging_steps", "training.eval_steps", "training.dtype",
                         "training.early_stopping_patience", "training.early_stopping_threshold",
                         "training.load_best_model_at_end",
                         "data.eval_dataset", "data.cache_dir", "data.workers", "data.bad_rows",
                         "lora.merge_adapter"})  # fmt: skip
"""The same for fields of groups; micro batch and accumulation may change while their product is kept."""

SAME_STATE = (frozenset({"full_shard", "shard_grad"}), frozenset({"single", "ddp"}))
"""Strategies that write the same files, so that one resumes the other."""
ONE_WAY = frozenset({("zero2", "zero1")})
"""(saved under, resumed under): bit-exact in this direction (deepspeed 0.19.8, tried with real runs)."""
UNIVERSAL = frozenset({"zero1", "zero2"})
"""Strategies whose checkpoints are converted for another number of ranks (deepspeed 0.19.8, tried with real runs)."""
DEEPSPEED = "deepspeed 0.19.8 runtime/engine.py, ZeRORuntimeException"


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


def converts(manifest: Manifest, plan: ShardingPlan) -> bool:
    """Say whether the checkpoint is read through DeepSpeed's universal form: another number of ranks wrote it.

    Not for a user's own JSON, which is used byte for byte and would have to ask for that form; not for ZeRO-3
    full fine-tunes, whose universal checkpoints of deepspeed 0.19.8 make Adam count double and decay norms.
    """
    same = manifest.strategy == plan.strategy
    return converts_any(plan, manifest.adapters) and same and manifest.world_size != plan.world_size


def converts_any(plan: ShardingPlan, adapters: bool) -> bool:
    """Say whether DeepSpeed checkpoints of a plan can be converted for another number of ranks.

    Args:
        plan: what writes them.
        adapters: whether the weights of the model stay frozen.
    """
    known = plan.strategy in UNIVERSAL or (plan.strategy == "zero3" and adapters)
    return known and plan.config_source.startswith("preset ")


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
    if plan.engine == "deepspeed" and not converts(manifest, plan):
        return [_problem("RES001", "error", "gpus", f"{change}: {_no_conversion(plan)}", manifest, DEEPSPEED)]
    how = ", through DeepSpeed's universal form" if plan.engine == "deepspeed" else ""
    message = f"{change}{how}: losses agree to about 1e-6 in fp32, dropout draws other numbers"
    return [
        _problem("RES003", "warning", "gpus", message, manifest, "tried with real runs, 2 -> 1 and 1 -> 2")
    ]


def _no_conversion(plan: ShardingPlan) -> str:
    """Say why a DeepSpeed checkpoint cannot be read by another number of ranks."""
    if not plan.config_source.startswith("preset "):
        return "DeepSpeed keeps one optimizer file per rank, and your own JSON is not changed to convert them"
    if plan.strategy == "zero3":
        return "a converted ZeRO-3 checkpoint counts Adam's steps twice and decays norms"
    return f"DeepSpeed keeps one optimizer file per rank, and their conversion was not proven for {plan.strategy}"


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
