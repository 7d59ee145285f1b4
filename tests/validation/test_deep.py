"""The deep look: model class, tokenizer and encoded rows, seen in a child process without torch in this one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from soup_flows.spec import parse_spec
from soup_flows.validation import seen as seen_module
from soup_flows.validation import validate
from soup_flows.validation.deep import RULES, Sight, check_deep
from soup_flows.validation.seen import Seen, look, looking, seen_file
from tests.models import changed_model
from tests.validation.deep_pairs import SEEN, SEEN_PAIRS
from tests.validation.world import CHAT, machine, rows_file, run

BY_ID = {rule.id: rule for rule in RULES}


@pytest.mark.parametrize("rule_id", SEEN_PAIRS)
def test_pair(rule_id: str) -> None:
    bad, good = SEEN_PAIRS[rule_id]
    spec = parse_spec({"model": "m", "dataset": "d"})
    assert BY_ID[rule_id].apply(Sight(Seen(**{**SEEN, **bad}), spec, "fsdp"))
    assert not BY_ID[rule_id].apply(Sight(Seen(**{**SEEN, **good}), spec, "fsdp"))


@pytest.fixture
def spec_of(assets: dict[str, str], tmp_path: Path) -> Any:
    def build(**values: Any) -> Any:
        rows = rows_file(tmp_path / "rows.jsonl", values.pop("rows", 20))
        return parse_spec({"model": assets["model"], "dataset": str(rows)} | values)

    return build


@pytest.mark.ranks
def test_a_good_model_is_seen_whole(spec_of: Any) -> None:
    seen = look(spec_of(training={"method": "lora"}))
    assert isinstance(seen, Seen)
    assert not seen.tokenizer_error
    assert not seen.model_error
    assert seen.kept == seen.stop_trained == 20
    assert seen.adapters
    assert seen.wrap_found == ("LlamaDecoderLayer",)
    assert seen.embedding_rows == seen.tokens


@pytest.mark.ranks
def test_rows_beyond_the_length_and_wrong_targets(spec_of: Any) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "A"}]}
    spec = spec_of(
        rows=[CHAT, long],
        data={"max_length": 64},
        training={"method": "lora"},
        lora={"target_modules": ["no_such_module"]},
    )
    problems = {problem.id: problem for problem in check_deep(spec, "ddp")}
    assert set(problems) == {"DP004", "DP008"}
    assert "1 of the first 2 rows" in problems["DP008"].message


@pytest.mark.ranks
def test_a_tokenizer_of_another_model(assets: dict[str, str], tmp_path: Path) -> None:
    folder = changed_model(assets["model"], tmp_path / "model", vocab_size=100)
    spec = parse_spec({"model": str(folder), "dataset": str(rows_file(tmp_path / "rows.jsonl", 5))})
    assert [problem.id for problem in check_deep(spec, "ddp")] == ["DP003"]
    (folder / "tokenizer.json").write_text("{}")
    assert [problem.id for problem in check_deep(spec, "ddp")] == ["DP001"]


@pytest.mark.ranks
def test_a_look_that_takes_too_long_is_said(spec_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_module, "TIMEOUT_S", 0.01)  # no process imports torch in that time
    problems = check_deep(spec_of(), "ddp")
    assert [(problem.id, problem.severity) for problem in problems] == [("DP009", "warning")]
    assert "it took more than" in problems[0].message


def test_a_look_ends_with_what_it_ran_beside(spec_of: Any, tmp_path: Path) -> None:
    spec = spec_of(output_dir=str(tmp_path))
    before = psutil.Process().children()
    children: list[psutil.Process] = []

    def fail() -> None:
        with looking(spec):
            children.extend(set(psutil.Process().children()) - set(before))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [child.is_running() for child in children] == [False]
    assert seen_file(spec, "model") is not None
    assert not list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.ranks
def test_other_rows_are_no_other_model(spec_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(output_dir=str(tmp_path), training={"method": "lora"})
    assert isinstance(look(spec), Seen)
    looked = {"rows": seen_file(spec, "rows"), "model": seen_file(spec, "model")}
    assert all(file is not None and file.is_file() for file in looked.values())
    rows_file(tmp_path / "rows.jsonl", 7)
    assert seen_file(spec, "rows") != looked["rows"]
    started: list[list[str]] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, argv: list[str], **more: Any) -> None:
            started.append(argv)
            super().__init__(argv, **more)

    monkeypatch.setattr("subprocess.Popen", Started)
    seen = look(spec)
    assert isinstance(seen, Seen)
    assert (seen.kept, bool(seen.adapters), started[0][3:]) == (7, True, ["rows"])
    for change in (
        {"data": {"packing": False}},
        {"training": {"method": "full"}},
        {"lora": {"use_dora": True}},
    ):
        other = spec_of(**{"output_dir": str(tmp_path), "training": {"method": "lora"}, **change})
        assert seen_file(other, "model") != looked["model"], change


@pytest.mark.ranks
def test_a_model_that_cannot_keep_rows_apart(assets: dict[str, str], tmp_path: Path, spec_of: Any) -> None:
    folder = tmp_path / "model"
    shutil.copytree(assets["model"], folder)
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 2048, "hidden_size": 32,
              "num_hidden_layers": 2}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert "DP010" in {problem.id for problem in check_deep(spec_of(model=str(folder)), "ddp")}


@pytest.mark.ranks
def test_tokens_that_the_model_never_learnt(assets: dict[str, str], tmp_path: Path, spec_of: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(assets["model"], folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][3] = 0  # <|im_end|>
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    problems = {p.id: p for p in check_deep(spec_of(model=str(folder), training={"method": "lora"}), "ddp")}
    assert "1 token(s)" in problems["DP011"].message
    assert "<|im_end|>" in problems["DP011"].message


@pytest.mark.ranks
def test_validate_looks_only_when_asked(assets: dict[str, str], tmp_path: Path) -> None:
    values = {"model": assets["model"], "data": {"max_length": 16}}
    context = run(tmp_path, spec=values, on=machine())
    fast = validate(context.spec, context.hardware, context.plan, environ={})
    deep = validate(context.spec, context.hardware, context.plan, environ={}, deep=True)
    assert not [problem for problem in fast if problem.id.startswith("DP")]
    assert [problem for problem in deep if problem.id.startswith("DP")]
