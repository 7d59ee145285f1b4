"""Which checkpoint a run starts from, and which ones are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soup_flows.errors import Refused
from soup_flows.ledger import Change
from soup_flows.manifest import read_manifest
from soup_flows.paths import RunPaths
from soup_flows.resume import Orders, data_hash, find_start, work_hash
from soup_flows.resume_fit import check_resume
from tests.core.checkpoint_files import make_spec, plan_of, write_checkpoint

PRESETS: dict[str, dict[str, Any]] = {
    "single": {"gpus": 1, "strategy": "single"},
    "ddp": {"strategy": "ddp"},
    **{name: {"deepspeed": name} for name in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")},
    **{name: {"fsdp": name} for name in ("full_shard", "shard_grad", "full_offload")},
}
EXACT = {("zero2", "zero1"), ("full_shard", "shard_grad"), ("shard_grad", "full_shard")}
WITH_WARNING = {("single", "ddp"), ("ddp", "single")}


def problems(tmp_path: Path, saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str]]:
    folder = write_checkpoint(tmp_path / "c", make_spec(tmp_path, **saved), 4)
    spec = make_spec(tmp_path, **now)
    found = check_resume(read_manifest(folder), plan_of(spec), spec)
    assert all(p.fix for p in found if p.severity == "error")
    return [(p.id, p.severity, p.field) for p in found]


@pytest.mark.parametrize("now", PRESETS)
@pytest.mark.parametrize("saved", ["single", "ddp", "zero1", "zero2", "zero3", "full_shard", "shard_grad"])
def test_strategy_matrix(tmp_path: Path, saved: str, now: str) -> None:
    found = problems(tmp_path, PRESETS[saved], PRESETS[now])
    if saved == now or (saved, now) in EXACT:
        assert found == []
    elif (saved, now) in WITH_WARNING:
        assert found == [("RES003", "warning", "gpus")]
    else:
        assert ("RES002", "error", "strategy") in found


@pytest.mark.parametrize(
    ("preset", "method", "severity"),
    [
        ("ddp", "full", "warning"),
        ("full_shard", "full", "warning"),
        ("zero1", "full", "warning"),
        ("zero2", "full", "warning"),
        ("zero2", "lora", "warning"),
        ("zero3", "lora", "warning"),
        ("zero3", "full", "error"),
        ("zero2_offload", "full", "error"),
    ],
)
def test_other_world_size(tmp_path: Path, preset: str, method: str, severity: str) -> None:
    saved = {**PRESETS[preset], "training": {"method": method}}
    ((_, found, field),) = problems(tmp_path, saved, {**saved, "gpus": 4})
    assert (found, field) == (severity, "gpus")


def test_a_users_own_json_is_not_changed_for_another_number_of_ranks(tmp_path: Path) -> None:
    """What reads a converted checkpoint is a key of that JSON."""
    file = tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    own = {"deepspeed_config": str(file)}
    ((rule, found, _),) = problems(tmp_path, own, {**own, "gpus": 4})
    assert (rule, found) == ("RES001", "error")
    same = {"deepspeed": "zero2"}
    folder = write_checkpoint(tmp_path / "d", make_spec(tmp_path, **same), 4)
    for gpus, universal in ((2, False), (4, True)):
        spec = make_spec(tmp_path, **same, gpus=gpus, recovery={"resume": str(folder)})
        assert find_start(spec, plan_of(spec), RunPaths.of(tmp_path, "new")).universal is universal


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("training", "seed", 7),
        ("training", "learning_rate", 1e-3),
        ("training", "lr_scheduler_type", "linear"),
        ("training", "warmup_ratio", 0.5),
        ("training", "weight_decay", 0.1),
        ("training", "optimizer", "adamw_torch"),
        ("training", "max_grad_norm", 0.5),
        ("training", "global_batch_size", 8),
        ("training", "max_steps", 100),
        ("training", "method", "lora"),
        ("lora", "r", 8),
        ("data", "max_length", 64),
        ("data", "eval_split", 0.5),
    ],
)
def test_settings_that_would_be_ignored_or_reorder_the_rows(
    tmp_path: Path, group: str, name: str, value: object
) -> None:
    found = problems(tmp_path, PRESETS["ddp"], {**PRESETS["ddp"], group: {name: value}})
    assert found == [("RES004", "error", f"{group}.{name}")]


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"per_device_train_batch_size": 2}},
        {"training": {"gradient_checkpointing": True}},
        {"training": {"logging_steps": 5, "eval_steps": 5}},
        {"recovery": {"save_steps": 5}},
        {"launcher": {"stop_budget_s": 5}},
    ],
)
def test_settings_that_may_change(tmp_path: Path, change: dict[str, Any]) -> None:
    assert problems(tmp_path, PRESETS["ddp"], {**PRESETS["ddp"], **change}) == []


def test_changed_rows_and_versions_are_noticed(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, **PRESETS["ddp"])
    versions = {"torch": "0.1", "deepspeed": "none of this"}
    folder = write_checkpoint(tmp_path / "c", spec, 4, data_hash=data_hash(spec), versions=versions)
    manifest = read_manifest(folder)
    Path(spec.dataset).write_text("another row\n")
    found = check_resume(manifest, plan_of(spec), spec, data_hash(spec))
    assert {(p.id, p.severity) for p in found} == {("RES005", "error"), ("RES006", "warning")}


# -- where a run starts ----------------------------------------------------------------------------


def start(tmp_path: Path, resume: str = "auto", change: Change | None = None, run_id: str = "run") -> Orders:
    spec = make_spec(tmp_path, strategy="ddp", recovery={"resume": resume})
    return find_start(spec, plan_of(spec), RunPaths.of(tmp_path, run_id), change)


def fill(tmp_path: Path, run_id: str = "run", steps: tuple[int, ...] = (2, 4)) -> Path:
    folder = RunPaths.of(tmp_path, run_id).checkpoints
    spec = make_spec(tmp_path, strategy="ddp")
    for step in steps:
        write_checkpoint(folder, spec, step, run_id)
    return folder


def test_auto_takes_the_newest_of_its_own_run(tmp_path: Path) -> None:
    assert start(tmp_path).checkpoint is None
    folder = fill(tmp_path)
    fill(tmp_path, "other", (8,))
    orders = start(tmp_path)
    assert (orders.checkpoint, orders.step) == (str(folder / "checkpoint-4"), 4)


@pytest.mark.parametrize("form", ["id", "run directory", "folder", "checkpoint"])
def test_another_run_is_named_in_any_form(tmp_path: Path, form: str) -> None:
    folder = fill(tmp_path, "other", (2, 8))
    forms = {
        "id": "other",
        "run directory": str(folder.parent),
        "folder": str(folder),
        "checkpoint": str(folder / "checkpoint-2"),
    }
    assert start(tmp_path, forms[form]).step == (2 if form == "checkpoint" else 8)
    fill(tmp_path, "run", (3,))
    assert start(tmp_path, forms[form]).step == 3, "a retry goes on from its own checkpoint"


def test_never_starts_over_and_keeps_the_files(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    orders = start(tmp_path, "never")
    assert orders.checkpoint is None
    assert sorted(p.name for p in (folder / "broken").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_bad_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    folder = fill(tmp_path, "spring-run")
    with pytest.raises(Refused, match="did you mean 'spring-run'"):
        start(tmp_path, "sprng-run")
    (folder / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(Refused, match=r"checkpoint-4 is broken: optimizer.pt has 0 bytes.*checkpoint-2"):
        start(tmp_path, str(folder / "checkpoint-4"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match="holds no checkpoint"):
        start(tmp_path, str(tmp_path / "empty"))


def test_weights_alone_are_taken_when_nothing_newer_is_there(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    weights = folder / "weights-4"
    (folder / "checkpoint-4").rename(weights)
    (folder / "checkpoint-2").rename(folder / "before-checkpoint-2")
    change = Change(weights=str(weights), strategy="zero2")
    orders = start(tmp_path, change=change)
    assert (orders.checkpoint, orders.weights_only) == (str(weights), True)
    fill(tmp_path, steps=(1,))
    assert not start(tmp_path, change=change).weights_only


def test_work_hash_is_that_of_settings_and_content(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, strategy="ddp")
    same = spec.model_copy(update={"output_dir": "elsewhere"})
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(Path(spec.dataset).read_bytes())
    assert data_hash(spec.model_copy(update={"dataset": str(copy)})) == data_hash(spec)
    assert work_hash(spec, "x") == work_hash(same, "x") != work_hash(spec, "y")
    other = make_spec(tmp_path, strategy="ddp", training={"seed": 1})
    assert work_hash(spec, "x") != work_hash(other, "x")
