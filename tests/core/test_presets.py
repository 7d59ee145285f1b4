"""The table and the differences say what the configs say."""

from __future__ import annotations

import pytest

from soup_flows.deepspeed import DEEPSPEED_PRESETS
from soup_flows.fsdp import FSDP_PRESETS
from soup_flows.presets import _WHY, _config, _flat, explain_difference, presets_table


def test_the_table_has_every_strategy_once() -> None:
    names = [row.name for row in presets_table()]
    assert names == ["single", "ddp", *DEEPSPEED_PRESETS, *FSDP_PRESETS]


def test_the_table_tells_what_is_sharded_and_where_it_goes() -> None:
    rows = {row.name: row for row in presets_table()}
    assert rows["zero1"].shards == "optimizer state"
    assert rows["zero2_offload"].shards == "gradients, optimizer state"
    assert rows["zero2_offload"].offload == "optimizer state to CPU"
    assert rows["zero3_offload"].offload == "parameters, optimizer state to CPU"
    assert rows["zero3_nvme"].offload == "parameters, optimizer state to NVMe"
    assert rows["full_shard"].shards == rows["zero3"].shards == "parameters, gradients, optimizer state"
    assert rows["full_offload"].offload.endswith("CPU")
    assert rows["hybrid_shard"].shards.endswith("inside each node")


def test_every_key_of_every_preset_is_explained_and_no_other() -> None:
    keys = {key for row in presets_table() for key in _flat(_config(row))}
    assert keys == set(_WHY)


def test_zero3_against_zero2() -> None:
    text = explain_difference("zero3", "zero2")
    assert text.startswith("zero3 against zero2\n")
    assert "  zero_optimization.stage: 2 -> 3  (1 shards the optimizer state" in text
    assert "  zero_optimization.overlap_comm: false -> true  (" in text
    assert "stage3_gather_16bit_weights_on_model_save: not set -> true" in text
    assert "allgather_bucket_size: 200000000 -> not set" in text
    assert "contiguous_gradients" not in text  # the same in both
    assert "train_batch_size" not in text


def test_presets_of_two_engines_and_a_preset_with_itself() -> None:
    across = explain_difference("zero3", "full_shard")
    assert "zero3 (deepspeed) shards parameters" in across
    assert "cannot be compared" in across
    assert explain_difference("zero_pp", "zero++").endswith("No key differs.")
    assert "reshard_after_forward: true -> false" in explain_difference("shard_grad", "full_shard")


def test_an_unknown_preset_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'zero3'"):
        explain_difference("zero33", "zero2")
