"""Model folders: config.json, safetensors headers, index, tokenizer files; any content gives shapes or a refusal."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from soup_flows.architecture import from_folder
from soup_flows.architecture.files import folder_shapes, index_parameters
from soup_flows.hardware import imagined
from soup_flows.safetensors_header import elements, read_header
from soup_flows.sharding import make_plan
from soup_flows.spec import parse_spec
from soup_flows.validation import validate
from soup_flows.validation.facts import ModelFacts, look_at_model
from tests.fuzz.spoil import clear_problems, documents, fuzz, little_memory, put, spoilt, value_or_refusal
from tests.validation.world import LLAMA, TENSORS, model_folder, rows_file

MODELS = sorted((Path(__file__).parents[1] / "data" / "models").glob("*/config.json"))
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "model.layers.0.q_proj.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
    "model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [64, 80]},
    "lm_head.bias": {"dtype": "I64", "shape": [], "data_offsets": [80, 88]},
}


TOKENIZER = {"chat_template": "{{ messages }}", "added_tokens_decoder": {"1": {"content": "<s>"}}}
ODD_TOKENIZER = {"added_tokens_decoder": {"\N{SUPERSCRIPT TWO}": {"content": "x"}}}
INDEX = {"metadata": {"total_parameters": 5, "total_size": 9}, "weight_map": {"a": "a.safetensors"}}


def entry(value: dict[str, Any]) -> bytes:
    return json.dumps({"a": value}).encode()


def packed(header: bytes, length: int | None, data: int) -> bytes:
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + b"\0" * data


@fuzz(300)
@given(
    header=documents(HEADER),
    length=st.none() | st.sampled_from((0, 1, 7, 99_999_999, 2**32, 2**63, 2**64 - 1)),
    data=st.sampled_from((88, 0, 87, 200)),
)
@example(header=b"[" * 100_000, length=None, data=0)
@example(header=entry({"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}), length=None, data=4)
@example(header=entry({"dtype": "X", "shape": [2**62] * 60, "data_offsets": [0, 4]}), length=None, data=4)
@example(header=entry({"dtype": "F32", "shape": [-1, -1], "data_offsets": [4, 0]}), length=None, data=4)
@example(header=entry({"dtype": "F32", "shape": "12", "data_offsets": [0, 8]}), length=None, data=8)
@example(header=b'{"a": 1', length=2**63, data=0)
def test_safetensors_headers(header: bytes, length: int | None, data: int, tmp_path: Path) -> None:
    file = put(tmp_path / "model.safetensors", packed(header, length, data))
    found = value_or_refusal(lambda: read_header(file), ValueError)
    if found is not None:
        assert all(elements(shape) >= 0 for _, shape in found.values())
    shapes = value_or_refusal(lambda: folder_shapes(tmp_path), ValueError)
    assert found is None or shapes is not None
    facts = ModelFacts("m", dict(LLAMA), tmp_path)
    with little_memory():
        assert facts.parameters is None or facts.parameters >= 0
        assert len(facts.head_of("model.layers.0.q_proj.weight") or b"") <= 4096
        facts.stated_size("model.safetensors")


def test_every_reader_of_a_header_reads_the_same(tmp_path: Path) -> None:
    """Three readers once had three notions of what a sound header is."""
    file = put(tmp_path / "model.safetensors", packed(json.dumps(HEADER).encode(), None, 88))
    facts = ModelFacts("m", dict(LLAMA), tmp_path)
    assert (
        {name: shape for name, (_, shape) in read_header(file).items()}
        == folder_shapes(tmp_path)
        == facts.shapes
    )
    assert facts.stated_size("model.safetensors") == file.stat().st_size
    assert facts.head_of("lm_head.bias") == b"\0" * 8
    assert facts.parameters == 32 + 4 + 1


@fuzz(100)
@given(content=documents(INDEX))
@example(content=json.dumps({"weight_map": {"a": "\0"}}).encode())
@example(content=json.dumps({"weight_map": {"a": "x" * 5000}}).encode())
@example(content=json.dumps({"weight_map": {"a": ["x"]}}).encode())
@example(content=json.dumps({"weight_map": {"a": "/dev/zero"}}).encode())
@example(content=json.dumps({"weight_map": {"a": "../../../../../etc/passwd"}}).encode())
def test_indices(content: bytes, tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors.index.json", content)
    value_or_refusal(lambda: folder_shapes(tmp_path), ValueError, OSError)
    with little_memory():
        index_parameters(tmp_path)
        facts = ModelFacts("m", dict(LLAMA), tmp_path)
        assert facts.shapes == {}
        facts.head_of("a")


@pytest.mark.parametrize("model", MODELS[:: max(1, len(MODELS) // 8)], ids=lambda file: file.parent.name)
def test_configs(model: Path, tmp_path: Path) -> None:
    good = json.loads(model.read_text())

    @fuzz(40)
    @given(content=documents(good), weights=st.booleans())
    def check(content: bytes, weights: bool) -> None:
        put(tmp_path / "config.json", content)
        file = put(tmp_path / "model.safetensors", packed(json.dumps(HEADER).encode(), None, 88))
        if not weights:
            file.unlink()
        value_or_refusal(lambda: from_folder(tmp_path, count_unknown=False))

    check()


@fuzz(100)
@given(
    config=spoilt(LLAMA),
    weights=spoilt(LLAMA),
    tokenizer=documents(TOKENIZER),
)
@example(config=LLAMA, weights=LLAMA, tokenizer=json.dumps(ODD_TOKENIZER).encode())
def test_runs_of_odd_models_are_planned_or_refused(
    config: Any, weights: Any, tokenizer: bytes, tmp_path: Path
) -> None:
    if not (tmp_path / "d.jsonl").exists():
        model_folder(tmp_path / "m", tensors={name: name.encode().ljust(64) for name in TENSORS})
        rows_file(tmp_path / "d.jsonl")
    put(tmp_path / "m" / "config.json", json.dumps(config).encode())
    put(tmp_path / "m" / "tokenizer_config.json", tokenizer)
    put(tmp_path / "m" / "tokenizer.json", tokenizer)
    put(tmp_path / "m" / "generation_config.json", json.dumps(weights).encode())
    named = {"model": str(tmp_path / "m"), "dataset": str(tmp_path / "d.jsonl")}
    spec = parse_spec({**named, "training": {"dtype": "bf16"}})
    facts = value_or_refusal(lambda: look_at_model(spec.model))
    if facts is not None:
        with little_memory():
            assert all(isinstance(key, int) for key in facts[0].added_tokens)

    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in (LLAMA["model_type"], None):  # counted by importing transformers, in a child
        return

    def plan_and_validate() -> None:
        machine = imagined("a100-80gb", 2)
        clear_problems(validate(spec, machine, make_plan(spec, machine, 64), environ={}))

    value_or_refusal(plan_and_validate)
