"""The batch arithmetic holds for every batch, GPU count and number of nodes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from soup_flows.batch import (
    DEFAULT_MICRO_BATCH,
    Batch,
    Steps,
    batch_arithmetic,
    count_nodes,
    divisors,
    steps,
)
from soup_flows.errors import Refused

small = st.integers(1, 64)


@given(share=st.integers(1, 2000), gpus=st.integers(1, 16), nodes=st.integers(1, 8), wish=st.none() | small)
def test_global_batch_is_kept_and_micro_batch_is_the_largest_that_divides(
    share: int, gpus: int, nodes: int, wish: int | None
) -> None:
    world = gpus * nodes
    batch = batch_arithmetic(share * world, world, wish)
    micro = batch.per_device_train_batch_size
    assert micro * batch.gradient_accumulation_steps * world == batch.global_batch_size == share * world
    limit = DEFAULT_MICRO_BATCH if wish is None else wish
    assert micro == max(d for d in range(1, limit + 1) if share % d == 0)


@given(batch=st.integers(1, 500), world=st.integers(1, 64))
def test_impossible_batches_are_refused_with_possible_ones(batch: int, world: int) -> None:
    if batch % world == 0:
        assert batch_arithmetic(batch, world).global_batch_size == batch
        return
    with pytest.raises(ValueError, match="cannot be split evenly") as caught:
        batch_arithmetic(batch, world)
    assert isinstance(caught.value, Refused)
    (problem,) = caught.value.problems
    batches, worlds = problem.fix.removeprefix("use a global batch of ").split(", or ")
    for text in batches.split(" or "):
        assert abs(batch_arithmetic(int(text), world).global_batch_size - batch) < world
    for text in worlds.removesuffix("s").removesuffix(" rank").split(" or "):
        assert batch_arithmetic(batch, int(text)).world_size == int(text)


@pytest.mark.parametrize(
    ("batch", "world", "fix"),
    [
        (12, 5, "use a global batch of 10 or 15, or 4 or 6 ranks"),
        (3, 8, "use a global batch of 8, or 3 ranks"),
        (7, 2, "use a global batch of 6 or 8, or 1 or 7 ranks"),
    ],
)
def test_the_nearest_possible_numbers_are_named_and_no_others(batch: int, world: int, fix: str) -> None:
    with pytest.raises(Refused) as caught:
        batch_arithmetic(batch, world)
    assert caught.value.problems[0].fix == fix


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "8", None])
def test_what_is_no_positive_whole_number_is_refused(wrong: object) -> None:
    with pytest.raises(Refused, match="global_batch_size"):
        batch_arithmetic(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="gpus"):
        batch_arithmetic(8, wrong)  # type: ignore[arg-type]


def test_a_batch_that_contradicts_itself_cannot_exist() -> None:
    with pytest.raises(ValidationError, match="the product is 16"):
        Batch(
            per_device_train_batch_size=8, gradient_accumulation_steps=1, world_size=2, global_batch_size=17
        )


@given(rows=st.integers(1, 5000), share=st.integers(1, 40), world=st.integers(1, 8), wish=small)
def test_steps_per_epoch_are_those_of_trainer(rows: int, share: int, world: int, wish: int) -> None:
    batch = batch_arithmetic(share * world, world, wish)
    # Trainer: batches per rank of the sharded loader, then updates including a last partial one.
    loader = math.ceil(math.ceil(rows / batch.per_device_train_batch_size) / world)
    updates = loader // batch.gradient_accumulation_steps
    updates += int(loader % batch.gradient_accumulation_steps > 0)
    assert steps(rows, batch).steps_per_epoch == updates


@given(share=st.integers(1, 30), rows=st.integers(1, 3000))
def test_steps_do_not_depend_on_the_number_of_gpus(share: int, rows: int) -> None:
    batch = share * 12
    found = {steps(rows, batch_arithmetic(batch, world), 3, None, 0.1) for world in (1, 2, 3, 4, 6, 12)}
    assert len(found) == 1


def test_steps_by_example() -> None:
    batch = batch_arithmetic(16, 2)
    assert steps(100, batch, 2, None, 0.03) == Steps(steps_per_epoch=7, total_steps=14, warmup_steps=1)
    assert steps(100, batch, 0.5) == Steps(steps_per_epoch=7, total_steps=4, warmup_steps=0)
    assert steps(100, batch, 9, 50, 0.1) == Steps(steps_per_epoch=7, total_steps=50, warmup_steps=5)
    assert steps(1, batch).total_steps == 1


def test_steps_without_rows_or_with_wrong_numbers_are_refused() -> None:
    batch = batch_arithmetic(16, 2)
    for arguments in ((0, batch), (10, batch, 0), (10, batch, math.nan), (10, batch, 1, 0)):
        with pytest.raises(Refused):
            steps(*arguments)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="warmup_ratio"):
        steps(10, batch, warmup_ratio=2)


def test_nodes_are_full_or_refused() -> None:
    assert count_nodes(16, 8) == (2, 8)
    assert count_nodes(4, None) == (1, 4)
    for world, local in ((12, 8), (4, 8)):
        with pytest.raises(Refused, match="ranks_per_node"):
            count_nodes(world, local)


@given(st.integers(1, 3000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
