"""The trace of the real model code, against the closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soup_flows.hardware import imagined
from soup_flows.sharding import make_plan
from soup_flows.sharding.trace import trace_plan
from soup_flows.spec import parse_spec

CONFIG = """{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2,
"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256}"""


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(
    "values",
    [
        {"fsdp": "full_shard", "training": {"gradient_checkpointing": True}},
        {"fsdp": "shard_grad"},
        {"strategy": "ddp", "training": {"method": "lora"}},
        {"fsdp": "full_shard", "training": {"method": "lora", "gradient_checkpointing": True}},
    ],
    ids=["full_shard", "shard_grad", "ddp-lora", "full_shard-lora"],
)
def test_trace_and_closed_form_agree(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    spec = parse_spec({"model": str(tmp_path), "dataset": "d", "gpus": 4, **values})
    machine = imagined("h100", 4)
    traced = trace_plan(spec, machine, make_plan(spec, machine))
    assert traced.allocated_bytes is not None, traced.verdict
    assert traced.predicted_bytes is not None
    assert 0.85 < traced.allocated_bytes / traced.predicted_bytes < 1.1
    assert traced.fits


def test_deepspeed_says_that_it_cannot_be_traced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    spec = parse_spec({"model": str(tmp_path), "dataset": "d", "gpus": 4, "deepspeed": "zero3"})
    machine = imagined("h100", 4)
    traced = trace_plan(spec, machine, make_plan(spec, machine))
    assert traced.allocated_bytes is None
    assert "zero3 cannot be traced" in traced.verdict
