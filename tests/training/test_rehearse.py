"""The rehearsal: real ranks on CPU, a small copy of the model, and nothing left unless it failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soup_flows.cli import GOOD, REFUSED, main
from soup_flows.errors import Refused
from soup_flows.rehearse import rehearse
from soup_flows.sharding import make_plan
from soup_flows.spec import parse_spec
from tests.models import changed_model
from tests.validation.world import GOOD_JSON, edited, machine, rows_file

Command = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def plan(
    assets: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Return what runs `soup-flows plan --rehearse --json` with a temporary folder of its own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        asked = [
            "--model",
            assets["model"],
            "--dataset",
            assets["dataset"],
            "--output-dir",
            str(tmp_path / "out"),
        ]
        code = main(["plan", *asked, *arguments, "--rehearse", "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def said(value: dict[str, Any], rule: str) -> list[str]:
    return [problem["message"] for problem in value["problems"] if problem["id"] == rule]


@pytest.mark.ranks
def test_plan_rehearses_a_good_run_and_leaves_nothing(plan: Command, tmp_path: Path) -> None:
    lora = [f"--set={key}" for key in ("training.method=lora", "training.learning_rate=1e-4")]
    code, value = plan("--gpu", "h100-80gb", "--gpus", "4", "--deepspeed", "zero2", *lora)
    assert code == GOOD
    done, left = said(value, "RH001"), said(value, "RH002")
    words = ("LlamaForCausalLM", "num_hidden_layers 4 -> 2", "laid end to end", "zero2 on 2 CPU rank(s)",
             "2 steps of sft", "LoRA on all-linear", "has the same loss", "read back")  # fmt: skip
    assert [word for word in words if not any(word in text for text in done)] == []
    unseen = (
        "GPU kernels",
        "NCCL",
        "4 ranks: 2 ran",
        "adamw_torch_fused",
        "rows of 1024 tokens",
        "own weights",
    )
    assert [word for word in unseen if not any(word in text for text in left)] == []
    assert {problem["severity"] for problem in value["problems"] if problem["id"].startswith("RH")} == {
        "note"
    }
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpu", "a100", "--gpus", "8", "--fsdp", "full_shard"),
        ("--gpu", "t4", "--gpus", "1", "--strategy", "single", "--set", "data.eval_split=0.1",
         "--set", "training.eval_steps=1"),
        ("--device", "cpu", "--gpus", "2", "--deepspeed", "zero3", "--set", "data.packing=false",
         "--set", "training.task=pretrain"),
    ],
    ids=["full_shard", "single in fp16", "zero3 on CPU"],
)  # fmt: skip
def test_other_strategies(plan: Command, arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, value = plan(*arguments)
    assert code == GOOD, value["problems"]
    assert any("has the same loss" in text for text in said(value, "RH001"))
    assert any("fp16" in text for text in said(value, "RH002")) == ("t4" in arguments)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.ranks
@pytest.mark.long
def test_your_own_json_is_rehearsed_without_what_cpu_ranks_lack(plan: Command, tmp_path: Path) -> None:
    changes = {"fp16": {"enabled": False}, "zero_optimization.zero_hpz_partition_size": 4,
               "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
               "gradient_accumulation_steps": 2}  # fmt: skip
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(edited(GOOD_JSON, changes)))
    code, value = plan("--gpu", "h100-80gb", "--gpus", "4", "--deepspeed-config", str(file))
    assert code == GOOD, value["problems"]
    assert any("4 rows x 2 passes x 2 rank(s)" in text for text in said(value, "RH001"))


@pytest.mark.ranks
@pytest.mark.long
def test_what_fails_in_training_is_refused_and_kept(assets: dict[str, str], tmp_path: Path) -> None:
    """A token that the tokenizer has and the embedding has not, in the last row alone."""
    rows = [{"input_ids": [5 + i, 6, 7, 8]} for i in range(31)] + [{"input_ids": [5, 6, 1_000, 8]}]
    spec = parse_spec(
        {
            "model": str(changed_model(assets["model"], tmp_path / "model", vocab_size=100)),
            "dataset": str(rows_file(tmp_path / "rows.jsonl", rows)),
            "deepspeed": "zero2",
            "gpus": 2,
        }
    )
    run_plan = make_plan(spec, machine(), 32)
    folder = tmp_path / "rehearsal"
    with pytest.raises(Refused) as refused:
        rehearse.fn(spec, run_plan, folder, "rehearsal-test")
    (problem,) = refused.value.problems
    assert (problem.id, problem.field) == ("RH003", "validation.rehearse")
    assert "index out of range" in problem.message
    assert str(folder) in problem.message
    assert problem.fix
    assert list(folder.glob("first/runs/*/attempt-1/errors/*.json"))


@pytest.mark.ranks
@pytest.mark.long
def test_a_model_without_a_small_copy_is_refused(
    plan: Command, assets: dict[str, str], tmp_path: Path
) -> None:
    model = changed_model(assets["model"], tmp_path / "model", hidden_act="no_such_function")
    code, value = plan("--device", "cpu", "--gpus", "2", "--model", str(model))
    assert code == REFUSED
    assert "no_such_function" in said(value, "RH004")[0]
    assert list((tmp_path / "tmp").iterdir()) == []
