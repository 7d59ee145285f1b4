"""A small real tokenizer, trained on the spot, and files written in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HARD_INPUTS = Path(__file__).parent / "hard_inputs"
TEMPLATE_TOKENS = ["<end_of_turn>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "<|eom_id|>", "<|Assistant|>"]
SPECIALS = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<think>",
    *TEMPLATE_TOKENS,
]

PLAIN_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_base() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        [p.read_text("utf-8", "replace") for p in HARD_INPUTS.glob("g*.jsonl")], trainer
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=SPECIALS[3:],
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def tokenizer(tokenizer_base: Any) -> Any:
    tokenizer_base.chat_template = PLAIN_CHATML
    return tokenizer_base


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines, or text or bytes as they are; return the path."""

    def write_file(content: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file
