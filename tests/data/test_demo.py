"""The demo: the same data each time, nothing held out is trained, and a model that opens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from soup_flows import demo
from soup_flows.data.formats import load_examples
from soup_flows.demo import build_demo_data, build_demo_model


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[Path, Path]:
    return build_demo_data(tmp_path_factory.mktemp("demo"))


def pairs(path: Path) -> list[tuple[str, str]]:
    examples = load_examples(path, policy="refuse").examples
    assert all([m["role"] for m in e.messages] == ["user", "assistant"] for e in examples)
    return [(e.messages[0]["content"], e.messages[1]["content"]) for e in examples]


def test_about_2000_rows_and_5_percent_held_out_disjoint(data: tuple[Path, Path]) -> None:
    train, held_out = pairs(data[0]), pairs(data[1])
    assert 1500 <= len(train) + len(held_out) <= 2000
    assert 0.02 < len(held_out) / len(train) < 0.1
    for side in (0, 1):
        assert not {pair[side] for pair in train} & {pair[side] for pair in held_out}
    assert max(len(answer) for _, answer in train + held_out) <= demo.ANSWER_CHARACTERS
    assert len({question.split(" ")[0] for question, _ in train}) >= 5


def test_same_bytes_in_another_process(data: tuple[Path, Path], tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from soup_flows.demo import build_demo_data as b; b(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-X", "utf8=0", "-c", program, str(tmp_path)], check=True)
    for path in data:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_complete_data_is_left_alone_and_damaged_data_made_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "DEMO_ROWS", 40)
    monkeypatch.setattr(demo, "_sources", lambda: [Path(json.__file__)])
    train, _ = build_demo_data(tmp_path)
    before = (train.read_bytes(), train.stat().st_ino)
    build_demo_data(tmp_path)
    assert (train.read_bytes(), train.stat().st_ino) == before
    train.write_bytes(before[0][:-10])
    build_demo_data(tmp_path)
    assert train.read_bytes() == before[0]


@pytest.mark.ranks
def test_model_opens_and_its_template_marks_answers(data: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from soup_flows.training.demo_model import write_demo_model

    folder = build_demo_model(tmp_path / "model", data[0])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == 2048
    assert str(model.dtype) == "torch.float32"
    assert not model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    question = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    chat = tokenizer.apply_chat_template(
        [*question, {"role": "assistant", "content": "Hello"}],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert chat["input_ids"][: len(prompt)] == prompt
    marked = [i for i, bit in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if bit]
    assert tokenizer.decode(marked) == "Hello<|im_end|>"
    weights = (folder / "model.safetensors").read_bytes()
    again = write_demo_model(tmp_path / "again", data[0])
    assert (again / "model.safetensors").read_bytes() == weights
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
