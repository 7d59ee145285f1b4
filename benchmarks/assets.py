"""The model and the rows that all trainers are measured on: `python -m benchmarks.assets FOLDER ROWS`.

A random Llama of 5 million parameters (hidden 256, 4 layers, tied, 8,192 tokens) and questions and answers of very
different length, as instruction data has them: log-normal, a few longer than `MAX_LENGTH`. The words are those of
the standard library's documentation strings, so nothing is downloaded, and the rows are the same for one Python.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from soup_flows.training.demo_model import CHAT_TEMPLATE, END_OF_TURN, PAD, SPECIAL_TOKENS, START_OF_TURN

MAX_LENGTH = 512
VOCABULARY = 8192
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
TEXT_CHARACTERS = 4_000_000
SEED = 7


def make_assets(folder: Path, rows: int) -> dict[str, Any]:
    """Write `model/`, `messages.jsonl`, `sharegpt.jsonl` and `dataset_info.json`, unless they are there.

    Args:
        folder: created when missing.
        rows: questions with their answers.

    Returns:
        `rows`, `tokens` after the cut at `MAX_LENGTH`, and the quartiles of the lengths before it.
    """
    stats = folder / "stats.json"
    if not stats.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "benchmarks.assets", str(folder), str(rows)],
            check=True, cwd=Path(__file__).parents[1], env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
    found: dict[str, Any] = json.loads(stats.read_text())
    return found


def _texts() -> list[str]:
    """Return documentation strings of the standard library, shuffled."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if "site-packages" in path.parts or any(part.startswith("test") for part in path.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [
            " ".join(doc.split()) for doc in re.findall(r'"""(.*?)"""', text, re.DOTALL) if len(doc) > 80
        ]
        if sum(map(len, found)) > TEXT_CHARACTERS:
            break
    random.Random(SEED).shuffle(found)
    return found


def _pairs(words: list[str], rows: int) -> list[tuple[str, str]]:
    """Return questions and answers; a question has 4 to 80 words, an answer 2 to 520."""
    draw = random.Random(SEED)

    def some(mean: float, deviation: float, least: int, most: int) -> str:
        count = max(least, min(most, int(draw.lognormvariate(mean, deviation))))
        start = draw.randrange(len(words) - count)
        return " ".join(words[start : start + count])

    return [(some(2.6, 0.6, 4, 80), some(3.6, 1.0, 2, 520)) for _ in range(rows)]


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_model(folder: Path, texts: list[str]) -> Any:
    """Write a random model with a tokenizer of its own; returns the tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END_OF_TURN,
        additional_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=SHAPE["max_position_embeddings"],
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        dtype="float32",
        **SHAPE,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return tokenizer


def main() -> None:
    """Write what `make_assets` promises."""
    folder, rows = Path(sys.argv[1]), int(sys.argv[2])
    texts = _texts()
    tokenizer = _write_model(folder / "model", texts)
    pairs = _pairs(" ".join(texts).split(), rows)
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    _write_lines(folder / "messages.jsonl", ({"messages": chat} for chat in chats))
    turns = ([{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in pairs)
    _write_lines(folder / "sharegpt.jsonl", ({"conversations": pair} for pair in turns))
    form = {"file_name": "sharegpt.jsonl", "formatting": "sharegpt", "columns": {"messages": "conversations"}}
    (folder / "dataset_info.json").write_text(json.dumps({"messages": form}))
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    lengths = sorted(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    stats = {
        "rows": rows,
        "tokens": sum(min(length, MAX_LENGTH) for length in lengths),
        "median": lengths[rows // 2],
        "p90": lengths[9 * rows // 10],
        "longest": lengths[-1],
        "cut": sum(length > MAX_LENGTH for length in lengths),
    }
    (folder / "stats.json").write_text(json.dumps(stats))


if __name__ == "__main__":
    main()
