"""The policy after a failure, the ledger, and requests to stop: decisions as values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from soup_flows.attempts import check_restarts, reconcile
from soup_flows.errors import FailureClass, Refused, TrainingFailed
from soup_flows.ledger import Attempt, Change, append, read_ledger
from soup_flows.paths import RunPaths, write_json
from soup_flows.recovery import (
    POLICY,
    begin,
    decide,
    find_equal,
    move_weights,
    wait,
)
from soup_flows.report import TrainReport
from soup_flows.resume import Orders, data_hash, work_hash
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import RecoverySettings
from soup_flows.stop import requested, stop
from tests.core.checkpoint_files import make_spec, plan_of, write_checkpoint


def row(number: int = 1, cause: FailureClass = "rank_killed", **fields: Any) -> Attempt:
    return Attempt(number=number, started=0, state="failed", failure_class=cause, **fields)


def plan(tmp_path: Path, **values: Any) -> ShardingPlan:
    return plan_of(make_spec(tmp_path, **{"strategy": "ddp", **values}))


@pytest.mark.parametrize("cause", get_args(FailureClass))
def test_every_class_has_a_rule(tmp_path: Path, cause: FailureClass) -> None:
    decision = decide(RecoverySettings(), plan(tmp_path), [row(cause=cause)])
    assert decision.retry == (cause in POLICY or cause == "cuda_oom")
    assert decision.reason


def test_retries_are_bounded_per_cause_and_wait_longer_each_time(tmp_path: Path) -> None:
    settings = RecoverySettings(max_retries=2, backoff_s=10)
    rows: list[Attempt] = []
    waits = []
    for number in range(1, 4):
        rows.append(row(number))
        waits.append((decision := decide(settings, plan(tmp_path), rows)).wait_s)
    assert waits == [10, 20, 0]
    assert not decision.retry
    assert decide(settings, plan(tmp_path), [*rows, row(4, "stalled")]).retry, (
        "another cause has its own count"
    )
    assert decide(settings, plan(tmp_path), [row(n, "nccl_timeout") for n in (1, 2)]).wait_s == 20
    assert not decide(settings, plan(tmp_path), [row(1, "unknown"), row(2, "unknown")]).retry
    assert not decide(RecoverySettings(max_retries=0), plan(tmp_path), [row()]).retry
    assert not decide(RecoverySettings(max_retries=0), plan(tmp_path), [row(cause="cuda_oom")]).retry


def ladder(tmp_path: Path, **settings: Any) -> list[tuple[str, int, int, bool]]:
    """Run out of memory until there is no retry; return what each attempt ran."""
    spec = make_spec(tmp_path, strategy="ddp", recovery=settings)
    change, found, rows = Change(), [], []
    while True:
        now = change.apply(spec)
        made = plan_of(now)
        batch = made.batch
        assert batch.global_batch_size == 16
        found.append(
            (
                made.strategy,
                batch.per_device_train_batch_size,
                batch.gradient_accumulation_steps,
                made.gradient_checkpointing,
            )
        )
        rows.append(row(len(rows) + 1, "cuda_oom", change=change, good_step=4))
        decision = decide(spec.recovery, made, rows)
        if not decision.retry:
            return found
        assert len(decision.change.path) == len(change.path) + 1
        change = decision.change


def test_after_oom_the_plan_shrinks_exactly_first(tmp_path: Path) -> None:
    exact = [("ddp", 8, 1, False), ("ddp", 4, 2, False), ("ddp", 2, 4, False), ("ddp", 1, 8, False)]
    exact.append(("ddp", 1, 8, True))
    assert ladder(tmp_path) == exact
    more = [("zero2", 1, 8, True), ("zero3", 1, 8, True), ("zero3_offload", 1, 8, True)]
    assert ladder(tmp_path, on_oom="shard_more") == exact + more
    assert ladder(tmp_path, on_oom="stop") == exact[:1]


def test_a_new_strategy_starts_from_the_weights(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, strategy="ddp", recovery={"on_oom": "shard_more"})
    paths = RunPaths.of(tmp_path, "run")
    for step in (2, 4):
        write_checkpoint(paths.checkpoints, spec, step)
    change = Change(per_device_train_batch_size=1, gradient_checkpointing=True)
    rows = [row(cause="cuda_oom", change=change, good_step=4)]
    decision = move_weights(paths, decide(spec.recovery, plan_of(change.apply(spec)), rows), 10)
    assert decision.change.max_steps == 6
    assert decision.change.weights == str(paths.checkpoints / "weights-4")
    assert "weights of step 4" in decision.change.path[-1]
    assert decision.change.apply(spec).deepspeed == "zero2"
    assert not list(paths.checkpoints.glob("checkpoint-*"))


def test_a_users_batch_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8}))
    made = plan(tmp_path, strategy="auto", deepspeed_config=str(file))
    first = decide(RecoverySettings(on_oom="shard_more"), made, [row(cause="cuda_oom")])
    assert first.change == Change(gradient_checkpointing=True, path=first.change.path)
    second = decide(RecoverySettings(on_oom="shard_more"), made, [row(cause="cuda_oom", change=first.change)])
    assert not second.retry


def test_after_a_nan(tmp_path: Path) -> None:
    bad = Attempt(
        number=1, started=0, state="failed", failure_class="nan_loss", good_step=4, last_step=6,
        cause="the loss is nan, not finite in steps 6 to 7",
    )  # fmt: skip
    assert not decide(RecoverySettings(), plan(tmp_path), [bad]).retry
    lower = decide(RecoverySettings(on_nan="lower_learning_rate"), plan(tmp_path), [bad])
    assert (lower.retry, lower.change.learning_rate_scale, lower.change.max_step) == (True, 0.5, None)
    again = bad.model_copy(update={"number": 2, "from_step": 4, "change": lower.change})
    back = decide(RecoverySettings(on_nan="lower_learning_rate"), plan(tmp_path), [bad, again])
    assert (back.change.learning_rate_scale, back.change.max_step) == (0.25, 3)
    skip = decide(RecoverySettings(on_nan="skip_batch"), plan(tmp_path), [bad])
    assert skip.change.skip_steps == (6, 7)


# -- the ledger ------------------------------------------------------------------------------------


def test_the_ledger_survives_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "attempts.jsonl"
    append(file, row(1))
    with file.open("a") as opened:
        opened.write('{"number": 2, "sta')
    append(file, row(2, "stalled"))
    append(file, row(2, "nccl_timeout"))
    assert [(r.number, r.failure_class) for r in read_ledger(file)] == [
        (1, "rank_killed"),
        (2, "nccl_timeout"),
    ]
    assert read_ledger(tmp_path / "none") == ()


def test_attempts_whose_flow_died_get_their_line(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path, "run")
    change = Change(per_device_train_batch_size=1)
    for number in (1, 2, 3):
        paths.attempt(number).root.mkdir(parents=True)
    append(paths.attempts, row(1, change=change))
    write_json(
        paths.attempt(2).receipt,
        {"reason": "holder_gone", "detail": "the flow process ended", "seconds": 36.0},
    )
    rows = reconcile(paths, RecoverySettings(gpu_hour_price=100.0))
    assert [(r.state, r.failure_class) for r in rows] == [
        ("failed", "rank_killed"),
        ("lost", "preempted"),
        ("lost", "node_lost"),
    ]
    assert rows[1].gpu_hours == pytest.approx(0.01)
    assert rows[1].cost == pytest.approx(1.0)
    assert rows[2].change == change, "what was changed before is not forgotten"
    assert read_ledger(paths.attempts) == rows == reconcile(paths, RecoverySettings())
    check_restarts(rows, RecoverySettings(max_retries=2), paths.root)
    with pytest.raises(TrainingFailed, match="lost 2 times"):
        check_restarts(rows, RecoverySettings(max_retries=1), paths.root)


# -- the same work twice ---------------------------------------------------------------------------


def finish(tmp_path: Path, run_id: str, state: str) -> None:
    spec = make_spec(tmp_path, strategy="ddp")
    paths = RunPaths.of(tmp_path, run_id).create()
    paths.model.mkdir()
    orders = Orders(work_hash=work_hash(spec, data_hash(spec)))
    paths.orders.write_text(orders.model_dump_json())
    write_checkpoint(paths.checkpoints, spec, 4, run_id)
    TrainReport(run_id=run_id, run_dir=str(paths.root), state=state, model=str(paths.model)).save()


def test_equal_work_is_reused_only_when_asked(tmp_path: Path) -> None:
    finish(tmp_path, "done", "completed")
    finish(tmp_path, "begun", "failed")

    def find(reuse: str, **values: Any) -> tuple[str | None, str | None]:
        spec = make_spec(tmp_path, strategy="ddp", recovery={"reuse": reuse}, **values)
        report, unfinished = find_equal(spec, "new")
        return report.run_id if report else None, unfinished

    assert find("never") == (None, None)
    assert find("finished") == ("done", None)
    assert find("any", training={"seed": 1}) == (None, None)
    RunPaths.of(tmp_path, "done").model.rmdir()
    assert find("finished") == (None, None)
    assert find("any") == (None, "begun")
    spec, report = begin(
        make_spec(tmp_path, strategy="ddp", recovery={"reuse": "any"}), RunPaths.of(tmp_path, "new")
    )
    assert (spec.recovery.resume, report) == ("begun", None)
    Path(spec.dataset).write_text("other rows\n")
    assert find("any") == (None, None)


def test_a_finished_flow_run_does_not_train_again(tmp_path: Path) -> None:
    finish(tmp_path, "done", "completed")
    _, report = begin(make_spec(tmp_path, strategy="ddp"), RunPaths.of(tmp_path, "done"))
    assert report is not None
    assert report.run_id == "done"


# -- stop ------------------------------------------------------------------------------------------


def test_stop_writes_a_request_that_is_seen_and_forgotten(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path, "run").create()
    with pytest.raises(Refused, match="holds no run"):
        stop(paths.root)
    paths.launch.write_text("{}")
    stop(paths.root, save=True)
    assert (requested(paths) or {})["save"] is True
    assert wait(60, paths) is not None, "no retry after a request to stop"
    begin(make_spec(tmp_path, strategy="ddp"), paths)
    assert requested(paths) is None
    assert wait(0.0, paths) is None
    paths.report.write_text("{}")
    with pytest.raises(Refused, match="has ended"):
        stop(paths.root)
