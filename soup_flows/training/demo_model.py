"""Write the demo model: `python -m soup_flows.training.demo_model FOLDER DATA`.

A Llama of about 1.4 million random weights (hidden 128, 4 layers) from a fixed seed, and a byte-level BPE
tokenizer trained on DATA, with a ChatML template whose answers carry generation markers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SEED = 20
VOCABULARY = 2048
MAX_POSITIONS = 2048
PAD, END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, END_OF_TEXT, START_OF_TURN, END_OF_TURN]
"""In the order of their ids, from 0."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}"""
"""ChatML; the answer and the token that ends it are marked as generated, the line end after it is not."""


def write_demo_model(folder: Path, data_path: Path) -> Path:
    """Write the model, its tokenizer and its generation settings into `folder`; all of it or nothing.

    Args:
        folder: the final name; replaced when it is there.
        data_path: chat rows as JSON lines.

    Returns:
        `folder`, ready for `AutoTokenizer` and `AutoModelForCausalLM`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=_bpe(data_path),
            pad_token=PAD,
            eos_token=END_OF_TURN,
            additional_special_tokens=[END_OF_TEXT, START_OF_TURN],
            chat_template=CHAT_TEMPLATE,
            model_max_length=MAX_POSITIONS,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.save_pretrained(beside)
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
        model = LlamaForCausalLM(config)
        model.generation_config.update(do_sample=False, max_new_tokens=128)
        model.save_pretrained(beside)
        (beside / "demo-model.json").write_text(json.dumps({"seed": SEED, "vocabulary": VOCABULARY}) + "\n")
        beside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _bpe(data_path: Path):  # type: ignore[no-untyped-def]  # tokenizers is imported here only
    """Train a byte-level BPE tokenizer of exactly `VOCABULARY` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(data_path), trainer)
    return tokenizer


def _texts(data_path: Path) -> Iterator[str]:
    with data_path.open(encoding="utf-8") as file:
        for line in file:
            for message in json.loads(line)["messages"]:
                yield message["content"]


def main(argv: list[str]) -> int:
    """Write the model named by the arguments FOLDER and DATA; return 0, or 2 when they are missing."""
    if len(argv) != 2:
        sys.stderr.write("usage: python -m soup_flows.training.demo_model FOLDER DATA\n")
        return 2
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    write_demo_model(Path(argv[0]), Path(argv[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
