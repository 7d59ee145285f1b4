"""The same global batch gives the same losses, however it is split; every row once an epoch; equal step counts."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soup_flows.batch import Batch, batch_arithmetic
from soup_flows.training.batches import IGNORED, StepSampler, TokenRow, TokenRows, eval_batches, flatten
from tests.conftest import Runner


def losses(report: Any) -> list[float]:
    return [point.loss for point in report.train]


def batch_of(micro: int, accumulation: int, world: int) -> Batch:
    return Batch(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        world_size=world,
        global_batch_size=micro * accumulation * world,
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    split=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
    seed=st.integers(0, 5),
)
def test_every_row_comes_once_and_ranks_make_equal_steps(
    rows: int, split: tuple[int, int, int], seed: int
) -> None:
    lengths = [random.Random(seed + i).randint(2, 90) for i in range(rows)]
    batch = batch_of(*split)
    per_rank = [list(StepSampler(lengths, batch, rank, seed)) for rank in range(batch.world_size)]
    assert {len(micro) for micro in per_rank} == {len(StepSampler(lengths, batch, 0, seed))}
    seen = [row for micros in per_rank for micro in micros for row in micro if row != rows]
    assert sorted(seen) == list(range(rows))
    assert all(len(micro) <= split[0] for micros in per_rank for micro in micros)


@pytest.mark.parametrize("split", [(16, 1, 1), (1, 16, 1), (2, 4, 2), (4, 1, 4)])
def test_a_step_holds_the_same_rows_however_it_is_split(split: tuple[int, int, int]) -> None:
    lengths = [random.Random(i).randint(2, 90) for i in range(50)]

    def steps(batch: Batch) -> list[set[int]]:
        ranks = [list(StepSampler(lengths, batch, rank, 7)) for rank in range(batch.world_size)]
        size = batch.gradient_accumulation_steps
        return [
            {row for micros in ranks for micro in micros[at : at + size] for row in micro if row != 50}
            for at in range(0, len(ranks[0]), size)
        ]

    assert steps(batch_of(*split)) == steps(batch_of(4, 2, 2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(60, 200), st.integers(1, 4))
def test_held_out_rows_are_counted_once(lengths: list[int], most: int, world: int) -> None:
    per_rank = [eval_batches(lengths, most, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1
    seen = [row for row in itertools.chain(*itertools.chain(*per_rank)) if row != len(lengths)]
    assert sorted(seen) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in b if row < len(lengths)) <= most for r in per_rank for b in r)


def test_the_gradient_of_a_step_does_not_depend_on_its_split(assets: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, TrainingArguments

    from soup_flows.training import attention
    from soup_flows.training.trainer import SoupTrainer

    class Tokenizer:
        pad_token_id = 0

    attention.register()
    draw = random.Random(3)
    rows = []
    for _ in range(16):
        ids = [draw.randrange(5, 2000) for _ in range(draw.randint(4, 60))]
        rows.append(TokenRow(ids, [IGNORED, *(i if draw.random() < 0.5 else IGNORED for i in ids[1:])]))
    stored = TokenRows(rows)
    found = []
    for split, packing in itertools.product([(16, 1, 1), (1, 16, 1), (4, 2, 2)], [True, False]):
        model = AutoModelForCausalLM.from_pretrained(
            assets["model"], attn_implementation=attention.NAME if packing else "sdpa", dtype=torch.float32
        )
        batch = batch_of(*split)
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        trainer = SoupTrainer(
            model=model, args=arguments, batch=batch, eval_tokens=64, packing=packing,
            processing_class=Tokenizer(), train_dataset=stored,
        )  # fmt: skip
        micros = [m for r in range(batch.world_size) for m in StepSampler(stored.lengths, batch, r, 1)]
        inputs = [trainer.collate([stored[i] for i in micro]) for micro in micros]
        tokens = sum(int((i["shift_labels"] != IGNORED).sum()) for i in inputs)
        loss = 0.0
        for given_inputs in inputs:  # gradients are averaged over ranks
            part = trainer.compute_loss(model, given_inputs, num_items_in_batch=tokens) / batch.world_size
            part.backward()
            loss += part.item()
        found.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-5)
        torch.testing.assert_close(gradient, found[0][1], rtol=0, atol=1e-5 * found[0][1].abs().max().item())


def test_a_row_of_its_own_fills_an_empty_micro_batch() -> None:
    rows = TokenRows([TokenRow([5, 6, 7], [IGNORED, 6, 7])])
    batch = flatten([rows[len(rows)]])
    assert (batch["shift_labels"] == IGNORED).all()


@pytest.mark.ranks
@pytest.mark.long
def test_losses_are_equal_on_1_2_and_4_ranks(finished: Runner) -> None:
    one = losses(finished("single"))
    four = finished("ddp", ranks=4)
    assert len({row.pid for row in four.proof.ranks}) == 4
    assert losses(finished("ddp")) == pytest.approx(one, rel=1e-4)
    assert losses(four) == pytest.approx(one, rel=1e-4)


@pytest.mark.ranks
@pytest.mark.long
def test_losses_do_not_depend_on_the_micro_batch_and_a_second_run_is_equal(finished: Runner) -> None:
    assert losses(finished("ddp", per_device_train_batch_size=2)) == pytest.approx(
        losses(finished("ddp")), rel=1e-4
    )
    assert losses(finished("ddp", logging_steps=1)) == losses(finished("ddp"))
    assert losses(finished("ddp", seed=43)) != pytest.approx(losses(finished("ddp")), rel=1e-3)


def test_the_batch_is_kept_for_any_ranks() -> None:
    assert {batch_arithmetic(16, ranks).global_batch_size for ranks in (1, 2, 4)} == {16}
