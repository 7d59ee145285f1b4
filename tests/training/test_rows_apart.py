"""Rows laid end to end give the logits and the loss they give alone, for every kind of attention; or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from soup_flows.training import attention
from soup_flows.training.batches import IGNORED, TokenRow, flatten, pad
from soup_flows.training.model import UnsuitableModel, refuse_mixing, refuse_signature

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama, grouped heads": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral, window 8": MistralConfig(**SIZES, sliding_window=8),
    "gemma2, softcap and window": Gemma2Config(**SIZES, sliding_window=8, attn_logit_softcapping=2.0),
    "gpt-oss, sinks and window": GptOssConfig(
        **SIZES, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
}
ROWS = [
    TokenRow(list(range(2, 2 + length)), [IGNORED] * (length // 2) + list(range(2 + length // 2, 2 + length)))
    for length in (21, 3, 12, 9)
]


def build(config: PretrainedConfig, implementation: str) -> Any:
    attention.register()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    for parameter in model.parameters():  # large weights, so that a wrong mask is far from right
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def alone(model: Any, rows: Sequence[TokenRow]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row.input_ids]), use_cache=False).logits[0] for row in rows])


def packed(model: Any, rows: Sequence[TokenRow], **changes: Any) -> torch.Tensor:
    given = flatten(rows) | changes
    del given["shift_labels"]
    with torch.no_grad():
        return model(**given, use_cache=False).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_each_row_alone(name: str) -> None:
    wanted = alone(build(CONFIGS[name], "eager"), ROWS)
    model = build(CONFIGS[name], attention.NAME)
    torch.testing.assert_close(packed(model, ROWS), wanted, rtol=0, atol=2e-5 * wanted.abs().max().item())
    seen = packed(model, ROWS, row_borders=[0, sum(len(row.input_ids) for row in ROWS)])
    assert (
        seen - wanted
    ).abs().max() > 0.1  # without borders the rows see each other, and this test would say so


@pytest.mark.parametrize("name", ["mistral, window 8", "gemma2, softcap and window"])
def test_gradients_are_those_of_each_row_alone(name: str) -> None:
    found = []
    for implementation in ("eager", attention.NAME):
        model = build(CONFIGS[name], implementation)
        if implementation == "eager":
            for row in ROWS:
                model(torch.tensor([row.input_ids]), use_cache=False).logits.float().logsumexp(
                    -1
                ).sum().backward()
        else:
            given = flatten(ROWS)
            del given["shift_labels"]
            model(**given, use_cache=False).logits.float().logsumexp(-1).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4 * found[0].abs().max().item())


@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_is_that_of_each_row_alone(packing: bool, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from soup_flows.batch import batch_arithmetic
    from soup_flows.training.trainer import SoupTrainer

    class Tokenizer:
        pad_token_id = 0

    model = build(CONFIGS["llama, grouped heads"], attention.NAME if packing else "sdpa")
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = SoupTrainer(
        model=model, args=arguments, batch=batch_arithmetic(4, 1), eval_tokens=64, packing=packing,
        processing_class=Tokenizer(),
    )  # fmt: skip
    with torch.no_grad():
        loss, tokens = trainer.token_loss(model, trainer.collate(ROWS))
    wanted = count = 0.0
    for row in ROWS:
        logits, labels = alone(model, [row])[:-1], torch.tensor(row.labels[1:])
        wanted += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != IGNORED).sum())
    assert int(tokens) == count
    assert loss.item() / count == pytest.approx(wanted / count, abs=1e-5)


def test_padding_is_not_trained_though_it_is_the_end_token() -> None:
    batch = pad(ROWS, pad_id=ROWS[0].labels[-1])
    trained = sum(label != IGNORED for row in ROWS for label in row.labels[1:])
    assert int((batch["shift_labels"] != IGNORED).sum()) == trained
    assert batch["attention_mask"].sum(1).tolist() == [len(row.input_ids) for row in ROWS]


@pytest.mark.parametrize(
    "config",
    [BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4),
     FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
     MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1),
     Qwen3NextConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4),
     Llama4TextConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4)],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_models_that_would_mix_rows_are_refused(config: PretrainedConfig) -> None:
    def accept() -> None:
        refuse_mixing(config)
        with torch.device("meta"):
            refuse_signature(AutoModelForCausalLM.from_config(config))

    with pytest.raises(UnsuitableModel) as caught:
        accept()
    assert caught.value.failure_class == "bad_config"
    assert "data.packing=false" in caught.value.advice


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_keep_rows_apart_are_accepted(name: str) -> None:
    refuse_mixing(CONFIGS[name])
    with torch.device("meta"):
        refuse_signature(AutoModelForCausalLM.from_config(CONFIGS[name]))
