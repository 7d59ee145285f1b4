"""Small copies of models: every kind of layer, the ratios kept, the class built and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soup_flows.errors import Refused
from soup_flows.spec import parse_spec

transformers = pytest.importorskip("transformers")
from soup_flows.training.shrink import short_rows, shrink, smaller  # noqa: E402
from tests.validation.world import rows_file  # noqa: E402

VOCABULARY = {"vocab_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {},
    "gemma3_text": {},
    "gpt2": {"bos_token_id": 0, "eos_token_id": 0},
    "falcon": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "jamba": {},
    "mamba": {},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_copy_is_of_the_same_class_and_runs(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **VOCABULARY, pad_token_id=0, **FAMILIES[kind])
    config.save_pretrained(tmp_path / "model")
    spec = parse_spec({"model": str(tmp_path / "model"), "dataset": "rows.jsonl"})
    found = shrink(spec, tmp_path / "copy")
    assert found["parameters"] < 30_000_000
    copy = transformers.AutoConfig.from_pretrained(tmp_path / "copy")
    assert (copy.model_type, copy.vocab_size) == (config.model_type, 256)
    assert 2 <= copy.num_hidden_layers < config.num_hidden_layers
    kinds = [set(getattr(c, "layer_types", None) or ()) for c in (config, copy)]
    assert kinds[0] == kinds[1]
    assert (tmp_path / "copy/model.safetensors").exists()


def test_ratios_are_kept() -> None:
    config = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
              "intermediate_size": 28672, "vocab_size": 128256,
              "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
    small, changes = smaller(config, narrow=True)
    assert small["num_attention_heads"] // small["num_key_value_heads"] == 8
    assert small["hidden_size"] == small["num_attention_heads"] * 16
    assert (small["vocab_size"], small["num_hidden_layers"]) == (128256, 2)
    assert "quantization_config" not in small
    assert changes == ["num_hidden_layers 80 -> 2", "hidden_size 8192 -> 256"]
    only_layers, _ = smaller(config, narrow=False)
    assert (only_layers["hidden_size"], only_layers["num_hidden_layers"]) == (8192, 2)


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", vocab_size=20_000_000)
    config.save_pretrained(tmp_path / "model")
    spec = parse_spec({"model": str(tmp_path / "model"), "dataset": "rows.jsonl"})
    with pytest.raises(Refused, match=r"RH004.*parameters"):
        shrink(spec, tmp_path / "copy")


def test_rows_that_fit_few_tokens_come_first(assets: dict[str, str], tmp_path: Path) -> None:
    def row(words: int) -> dict[str, Any]:
        return {"prompt": "word " * words, "completion": f"answer {words}"}

    source = rows_file(tmp_path / "rows.jsonl", [row(900), row(3), row(400), row(4), row(100)])
    spec = parse_spec({"model": assets["model"], "dataset": str(source), "data": {"max_length": 2048}})
    into = tmp_path / "few.jsonl"
    assert short_rows(spec, str(source), 2, into) == (2, 128)
    assert [line.count("word") for line in into.read_text().splitlines()] == [3, 4]
    rows, length = short_rows(spec, str(source), 5, into)
    assert rows == 5
    assert 900 < length <= 2048
