"""What an attempt needed corrects the prediction: of the next attempt, and of the next run of the same work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soup_flows.attempts import record
from soup_flows.hardware import Hardware, RecordedProbe, detect
from soup_flows.ledger import Attempt, Change, Measured
from soup_flows.measured import LEAST_FACTOR, needed_at_oom, recall, remember
from soup_flows.memory.estimate import correction_from
from soup_flows.paths import RunPaths, write_atomic, write_json
from soup_flows.plan_page import plan_page
from soup_flows.recovery import decide
from soup_flows.report import RankMemory, TrainReport
from soup_flows.sharding import Correction, ShardingPlan, make_plan
from soup_flows.spec import TrainingSpec, parse_spec
from soup_flows.tasks import plan_or_explain

DATA = Path(__file__).parents[1] / "data"
GIB = 1 << 30
MESSAGE = (
    "CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 0 has a total capacity of 23.65 GiB of which "
    "1.10 GiB is free. Including non-PyTorch memory, this process has 22.40 GiB memory in use. Of the allocated "
    "memory {held:.2f} GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


@pytest.fixture(scope="module")
def gpus() -> Hardware:
    return detect("auto", probe=RecordedProbe(DATA / "hardware/2xrtx4090.json"), environ={})


def spec_of(tmp_path: Path, **values: Any) -> TrainingSpec:
    rows = tmp_path / "rows.jsonl"
    if not rows.exists():
        rows.write_text('{"text": "one"}\n' * 64)
    base = {
        "model": str(DATA / "models/qwen2-0.5b"),
        "dataset": str(rows),
        "output_dir": str(tmp_path / "out"),
    }
    settings = {"method": "lora", "global_batch_size": 16, "gradient_checkpointing": False}
    settings |= {"per_device_train_batch_size": 8, **values.pop("training", {})}
    return parse_spec({**base, "strategy": "ddp", "training": settings, **values})


def predicted(plan: ShardingPlan) -> int:
    assert plan.memory is not None
    return plan.memory.allocated_bytes


def ran(spec: TrainingSpec, gpus: Hardware, plan: ShardingPlan, run_id: str, **fields: Any) -> Attempt:
    """Write what an attempt leaves behind, and record it as the launch does."""
    paths = RunPaths.of(spec.output_dir, run_id).create()
    write_atomic(paths.spec, spec.model_dump_json())
    write_atomic(paths.hardware, gpus.model_dump_json())
    if error := fields.pop("error", None):
        paths.attempt(1).errors.mkdir(parents=True)
        write_json(paths.attempt(1).errors / "rank_0.json", {"message": "a consequence"})
        write_json(paths.attempt(1).errors / "rank_1.json", {"message": error})
    report = TrainReport(run_id=run_id, run_dir=str(paths.root), plan=plan, **fields)
    return record(paths, 1, report, 0.0).ledger[-1]


def test_the_need_is_read_from_torchs_message() -> None:
    assert needed_at_oom(MESSAGE.format(tried=2, held=20)) == 22.5 * GIB
    private = (
        "Tried to allocate 20.00 MiB. 1.00 GiB is allocated by PyTorch, with 1.00 KiB allocated in pools"
    )
    assert needed_at_oom(private) == GIB + 20 * (1 << 20)
    assert needed_at_oom("CUDA out of memory. Tried to allocate 2.00 GiB.") is None
    assert needed_at_oom("NCCL Error 1") is None


@pytest.mark.parametrize("measured_gib", [2.0, 6.0, 18.0])
def test_a_corrected_prediction_says_what_was_measured(
    tmp_path: Path, gpus: Hardware, measured_gib: float
) -> None:
    """And the correction of a corrected one is that of the plain one; weights and optimizer stay exact."""
    spec = spec_of(tmp_path)
    plain = make_plan(spec, gpus)
    assert plain.memory is not None
    factor = correction_from(plain.memory, int(measured_gib * GIB))
    once = make_plan(spec, gpus, correction=Correction(factor=factor, reason="measured"))
    assert once.memory is not None
    assert predicted(once) == pytest.approx(measured_gib * GIB, rel=0.02)
    assert correction_from(once.memory, int(measured_gib * GIB)) == pytest.approx(1, rel=0.05)
    assert (once.memory.step["weights"], once.memory.load) == (
        plain.memory.step["weights"],
        plain.memory.load,
    )


def test_a_finished_run_corrects_the_next_of_the_same_work(tmp_path: Path, gpus: Hardware) -> None:
    spec = spec_of(tmp_path)
    plan = plan_or_explain(spec, gpus, 64)
    assert plan.correction is None
    peak = int(predicted(plan) * 1.25)
    memory = tuple(
        RankMemory(rank=r, host_peak_bytes=1, device_peak_allocated_bytes=peak - r) for r in (0, 1)
    )
    row = ran(spec, gpus, plan, "first", state="completed", memory=memory)
    assert row.memory is not None
    assert (row.memory.peak_bytes, row.memory.out_of_memory) == (peak, False)
    again = plan_or_explain(spec, gpus, 64)
    assert predicted(again) == pytest.approx(peak, rel=0.02)
    assert again.correction is not None
    assert "ddp, micro batch 8 needed" in again.correction.reason
    assert "in an earlier attempt" in plan_page(again)
    # the rows are longer, or it is another machine: nothing is known of that
    assert recall(spec_of(tmp_path, data={"max_length": 2048}), gpus) is None
    assert recall(spec, detect("auto", probe=RecordedProbe(DATA / "hardware/t4.json"), environ={})) is None
    other = spec.model_copy(update={"deepspeed": "zero2", "strategy": "auto"})
    assert recall(other, gpus) == again.correction


def test_short_rows_do_not_make_the_next_run_bold(tmp_path: Path, gpus: Hardware) -> None:
    spec = spec_of(tmp_path)
    low = Measured(peak_bytes=1, predicted_bytes=GIB, factor=0.0, out_of_memory=False, settings="ddp")
    remember(spec, gpus, low)
    found = recall(spec, gpus)
    assert found is not None
    assert found.factor == LEAST_FACTOR
    remember(spec, gpus, low.model_copy(update={"factor": 0.9, "out_of_memory": True}))
    assert recall(spec, gpus) == found, "running out of memory says nothing that lowers a prediction"
    remember(spec, gpus, low.model_copy(update={"factor": 1.5, "out_of_memory": True}))
    remember(spec, gpus, low.model_copy(update={"factor": 1.1}))
    found = recall(spec, gpus)
    assert found is not None
    assert found.factor == 1.5, (
        "a smaller plan that finished does not take back that a larger one did not fit"
    )


def oom(spec: TrainingSpec, gpus: Hardware, need_gib: float) -> tuple[ShardingPlan, Attempt]:
    plan = plan_or_explain(spec, gpus, 64)
    text = MESSAGE.format(tried=1.5, held=need_gib - 2)
    return plan, ran(spec, gpus, plan, "run", state="failed", failure_class="cuda_oom", error=text)


def test_after_oom_what_cannot_fit_is_not_tried(tmp_path: Path, gpus: Hardware) -> None:
    spec = spec_of(tmp_path)
    free = gpus.gpus[0].memory_free_bytes / GIB

    def replan(change: Change) -> ShardingPlan:
        return plan_or_explain(change.apply(spec), gpus, 64)

    plan, row = oom(spec, gpus, need_gib=2.6 * free)
    assert row.memory is not None
    assert row.memory.peak_bytes == pytest.approx(2.6 * free * GIB, rel=0.01)
    blind = decide(spec.recovery, plan, [row])
    assert blind.change.per_device_train_batch_size == 4
    decision = decide(spec.recovery, plan, [row], replan)
    assert decision.retry
    assert decision.change.per_device_train_batch_size == 2
    assert "micro batch 8 -> 4" in decision.change.path[0]
    assert "not tried, it needs at least" in decision.change.path[0]
    assert "micro batch 4 -> 2" in decision.change.path[1]
    made = replan(decision.change)
    assert made.correction is not None
    assert made.memory is not None
    assert made.room is not None
    assert made.memory.low_bytes + made.memory.context_bytes <= made.room.device


def test_the_next_run_begins_with_what_fits(tmp_path: Path, gpus: Hardware) -> None:
    free = gpus.gpus[0].memory_free_bytes / GIB
    asked = spec_of(
        tmp_path, training={"per_device_train_batch_size": None, "gradient_checkpointing": "auto"}
    )
    plan, _ = oom(asked, gpus, need_gib=1.5 * free)
    again = plan_or_explain(asked, gpus, 64)
    assert again.correction is not None
    assert plan.chosen is not None
    assert again.chosen is not None
    assert again.chosen.label != plan.chosen.label
    assert again.chosen.fits
    failed = [c for c in again.candidates if c.label == plan.chosen.label]
    assert failed
    assert not any(c.fits for c in failed)


def test_nothing_is_tried_when_nothing_can_fit(tmp_path: Path, gpus: Hardware) -> None:
    spec = spec_of(tmp_path)
    plan, row = oom(spec, gpus, need_gib=5000)
    decision = decide(
        spec.recovery, plan, [row], lambda change: plan_or_explain(change.apply(spec), gpus, 64)
    )
    assert not decision.retry
    assert "no smaller plan is left" in decision.reason
    assert "by what was measured" in decision.reason
