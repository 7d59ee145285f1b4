"""`soup-flows plan`: what it prints, for this machine and for machines that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from soup_flows.cli import GOOD, REFUSED, main
from soup_flows.errors import Refused
from soup_flows.report import RankMemory, TrainReport
from soup_flows.sharding import ShardingPlan, read_model_config

MODELS = Path(__file__).parents[1] / "data" / "models"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "one", "completion": "two"}\n' * 40)
    return ["--dataset", str(data), "--output-dir", str(tmp_path / "out")]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_one_object_with_everything(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(MODELS / "llama-8b")]
    code, value = run(capsys, *model, *arguments, "--gpu", "h100-80gb", "--gpus", "8")
    assert code == GOOD
    assert set(value) == {"plan", "memory", "candidates", "problems", "launch"}
    assert value["plan"]["strategy"] == value["candidates"][0]["strategy"] == "shard_grad"
    assert value["memory"]["allocated_bytes"] == value["candidates"][0]["allocated_bytes"]
    assert value["launch"]["nproc_per_node"] == 8
    assert "soup_flows.training" in value["launch"]["argv"]
    assert not (tmp_path / "out").exists()


def test_several_nodes_and_a_terminal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(MODELS / "llama-8b"), "--set", "training.global_batch_size=32"]
    code, value = run(capsys, *model, *arguments, "--gpu", "a100", "--gpus", "8", "--nodes", "2")
    assert code == GOOD
    assert (value["plan"]["world_size"], value["plan"]["nodes"], value["launch"]) == (16, 2, None)
    assert main(["plan", *model, *arguments, "--gpu", "a100", "--fit"]) == GOOD
    assert "longest rows" in capsys.readouterr().out


def test_a_run_that_cannot_fit_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(MODELS / "llama-8b")]
    code, value = run(capsys, *model, *arguments, "--gpu", "rtx-4090", "--gpus", "1", "--strategy", "single")
    assert code == REFUSED
    assert [p["id"] for p in value["problems"] if p["severity"] == "error"] == ["PLAN020"]
    assert not value["candidates"][0]["fits"]
    code, value = run(capsys, *model, *arguments, "--gpu", "h10", "--gpus", "1")
    assert code == REFUSED
    assert "h100" in value["problems"][0]["fix"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"zero_optimisation": {"stage": 2}, "train_batch_size": -1, "gradient_accumulation_steps": 0},
            {
                ("DS030", "deepspeed_config.gradient_accumulation_steps"),
                ("DS020", "deepspeed_config.zero_optimisation"),
                ("DS029", "deepspeed_config.zero_optimization"),
                ("DS030", "deepspeed_config.train_batch_size"),
            },
        ),
        ({"zero_optimization": [1]}, {("DS029", "deepspeed_config.zero_optimization")}),
        ({"zero_optimization": {"stage": "three"}}, {("DS029", "deepspeed_config.zero_optimization.stage")}),
        ({"zero_optimization": {"stage": 9}}, {("DS029", "deepspeed_config.zero_optimization.stage")}),
        (
            {"zero_optimization": {"stage": 0}, "bf16": 1, "gradient_cliping": 1.0},
            {
                ("DS026", "deepspeed_config.bf16"),
                ("DS020", "deepspeed_config.gradient_cliping"),
                ("PLAN007", "deepspeed_config"),
            },
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": ["cpu"]}}},
            {("DS026", "deepspeed_config.zero_optimization.offload_param.device")},
        ),
    ],
)
def test_everything_wrong_in_a_json_comes_at_once(
    config: dict[str, Any],
    expected: set[tuple[str, str]],
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "own.json"
    batch = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    file.write_text(json.dumps({**batch, "gradient_accumulation_steps": "auto", **config}))
    own = ["--model", str(MODELS / "llama-8b"), "--deepspeed-config", str(file)]
    code, value = run(capsys, *own, *arguments, "--gpu", "h100-80gb", "--gpus", "4")
    assert code == REFUSED
    errors = [p for p in value["problems"] if p["severity"] == "error"]
    found = {(p["id"], p["field"]) for p in errors}
    about_json = {pair for pair in found if pair[0] in ("DS020", "DS026", "DS029", "DS030", "PLAN007")}
    assert about_json == expected
    assert errors[0]["field"].startswith("deepspeed_config.")  # PLAN007 does not stand before the reason
    if "zero_optimisation" in config:
        assert "zero_optimization" in next(p["fix"] for p in errors if p["id"] == "DS020")


def test_the_report_holds_the_prediction_against_the_measurement(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from soup_flows.pages import report_page

    _, value = run(capsys, "--model", str(MODELS / "qwen2-0.5b"), *arguments, "--gpu", "h100", "--gpus", "1")
    plan = ShardingPlan.model_validate(value["plan"] | {k: value[k] for k in ("memory", "candidates")})
    assert plan.memory is not None
    measured = RankMemory(
        rank=0, host_peak_bytes=1, device_peak_allocated_bytes=round(plan.memory.allocated_bytes / 1.25)
    )
    report = TrainReport(run_id="r", run_dir="d", state="completed", plan=plan, memory=(measured,))
    assert "(+25%)" in report_page(report)


ABSENT = object()
LLAMA = json.loads((MODELS / "llama-8b" / "config.json").read_text())


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": True},
        {"num_attention_heads": 8192},
        {"hidden_size": float("inf")},
        {"hidden_size": float("nan")},
        {"hidden_size": -256},
        {"hidden_size": "256"},
        {"hidden_size": 256.5},
        {"hidden_size": [256]},
        {"hidden_size": None},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**7},
        {"vocab_size": 10**18},
        {"model_type": ["llama"]},
        {"model_type": "\x1b[31mnew"},
        {"model_type": "mixtral", "num_local_experts": -3},
        {"model_type": "mixtral", "num_local_experts": 0},
        {"model_type": "qwen3_moe", "mlp_only_layers": ["\x1b[2J"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [None]},
        {"architectures": ["\x1b]0;title\x07"]},
        {"torch_dtype": 5},
        {"dtype": "\x1b[2Jfloat32"},
        {"quantization_config": "x"},
        {"quantization_config": {"quant_method": "\x1b[2J"}},
        {"rope_scaling": 7, "max_position_embeddings": "long"},
        {"tie_word_embeddings": "false"},
        {"text_config": 3},
        {"text_config": {"hidden_size": -1, "num_hidden_layers": 0}},
        {"hidden_size": -1, "vocab_size": 0, "torch_dtype": [], "rope_scaling": "yarn", "head_dim": 1.5},
    ],
    ids=lambda wrong: ascii(wrong),
)
def test_impossible_configs_are_refused_with_every_wrong_key(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | wrong))
    with pytest.raises(Refused) as refused:
        read_model_config(str(tmp_path))
    (problem,) = refused.value.problems
    assert (problem.id, problem.field) == ("PLAN011", "model")
    inner = wrong.get("text_config")
    keys = inner if isinstance(inner, dict) else wrong
    assert all(key in problem.message for key in keys if keys[key] not in ("mixtral", "qwen3_moe"))
    assert problem.message.isprintable()


def test_an_impossible_config_is_the_one_error_of_a_plan(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"model_type": "\x1b[31mnew", "hidden_size": float("nan"), "num_attention_heads": 0}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | wrong))
    given = ["--model", str(tmp_path), *arguments, "--gpu", "h100-80gb", "--gpus", "4"]
    code, value = run(capsys, *given)
    (problem,) = [p for p in value["problems"] if p["severity"] == "error"]
    assert (code, problem["id"], problem["field"]) == (REFUSED, "PLAN011", "model")
    assert all(key in problem["message"] for key in wrong)
    assert main(["plan", *given]) == REFUSED
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert run(capsys, *given, "--fit")[1]["problems"][0]["id"] == "PLAN011"


@pytest.mark.parametrize(
    "unusual",
    [
        {"model_type": "llava", "text_config": LLAMA, "hidden_size": None},
        {"model_type": "gemma3n_text", "intermediate_size": [16384] * 32},
        {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0},
        {"max_position_embeddings": 10_485_760, "rope_scaling": None, "head_dim": None},
        {"torch_dtype": None, "architectures": None, "quantization_config": {"quant_method": "mxfp4"}},
        dict.fromkeys(("vocab_size", "num_attention_heads", "model_type", "architectures"), ABSENT),
    ],
    ids=lambda unusual: ascii(list(unusual)),
)
def test_unusual_configs_are_read(unusual: dict[str, Any], tmp_path: Path) -> None:
    config = {key: value for key, value in (LLAMA | unusual).items() if value is not ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(str(tmp_path)) == config


SOUP = """\
base: {model}
data:
  train: {rows}
  max_length: 512
training:
  epochs: 2
  lr: 2e-4
  batch_size: 2
  gradient_accumulation_steps: 2
  quantization: none
  lora: {{r: 8, alpha: 16}}
  curriculum: true
"""


def test_a_config_of_another_tool_gives_the_plan_of_the_same_spec(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soup, saved = tmp_path / "soup.yaml", tmp_path / "spec.yaml"
    text = SOUP.format(model=MODELS / "llama-8b", rows=tmp_path / "rows.jsonl")
    soup.write_text(text.replace("  curriculum: true\n", ""))
    machine = ["--gpu", "h100-80gb"]
    # No --dataset: it comes from the file. The output folder comes from the command line, and wins.
    flags = [*arguments[2:], "--gpus", "4", "--fsdp", "full_shard", "--set", "training.seed=7"]
    code, brought = run(capsys, "--from-soup", str(soup), *flags, *machine, "--save", str(saved))
    assert code == GOOD
    spec = {
        "model": str(MODELS / "llama-8b"), "dataset": str(tmp_path / "rows.jsonl"), "output_dir": arguments[3],
        "fsdp": "full_shard", "gpus": 4,
        "training": {
            "method": "lora", "num_train_epochs": 2.0, "learning_rate": 2e-4, "per_device_train_batch_size": 2,
            "global_batch_size": 16, "seed": 7,
        },
        "lora": {"r": 8, "alpha": 16}, "data": {"max_length": 512},
    }  # fmt: skip
    assert brought["migration"]["spec"] == spec
    assert yaml.safe_load(brought["migration"]["spec_yaml"]) == spec == yaml.safe_load(saved.read_text())
    written = {m["field"]: m["keys"] for m in brought["migration"]["mapped"]}
    assert written["training.learning_rate"] == ["training.lr"]
    code, own = run(capsys, "--spec", str(saved), *machine)
    assert code == GOOD
    assert {key: brought[key] for key in ("plan", "memory", "candidates", "launch")} == {
        key: own[key] for key in ("plan", "memory", "candidates", "launch")
    }
    # A spec that is there is not written over.
    code, again = run(capsys, "--from-soup", str(soup), *flags, *machine, "--save", str(saved))
    assert (code, again["problems"][-1]["id"]) == (REFUSED, "MIG008")


def test_what_did_not_map_is_told_even_when_the_plan_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soup = tmp_path / "soup.yaml"
    soup.write_text(SOUP.format(model=MODELS / "llama-8b", rows="gone.jsonl") + '  "\\e[31mred": 1\n')
    given = ["--from-soup", str(soup), "--gpu", "h100-80gb"]
    code, value = run(capsys, *given)
    assert code == REFUSED
    found = {p["field"]: p for p in value["problems"] if p["severity"] == "error"}
    assert found["--from-soup.training.curriculum"]["id"] == "MIG002"
    assert "data.train in" in found["dataset"]["message"]
    assert value["migration"]["not_mapped"][0]["severity"] == "error"
    assert main(["plan", *given]) == REFUSED
    shown = "".join(capsys.readouterr())
    assert "\x1b" not in shown
    for words in (
        "taken over",
        "training.curriculum",
        "not in the file",
        "learning_rate: 0.0002",
        "gone.jsonl",
    ):
        assert words in shown
    assert shown.count("--from-soup.training.curriculum") == 1
    # What a spec refuses is said with the key of the file, beside the rest.
    soup.write_text(SOUP.format(model="m", rows="r").replace("r: 8", "r: 9999"))
    code, value = run(capsys, *given)
    assert code == REFUSED
    wrong = next(p for p in value["problems"] if p["field"] == "lora.r")
    assert "training.lora.r in" in wrong["message"]
    assert value["migration"]["spec"] is None
    assert "--from-soup.training.curriculum" in {p["field"] for p in value["problems"]}


def test_one_tool_at_a_time_and_accelerate_beside_it(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axolotl, accelerate = tmp_path / "config.yml", tmp_path / "accelerate.yaml"
    axolotl.write_text(f"base_model: {MODELS / 'llama-8b'}\nlearning_rate: 1e-5\nmicro_batch_size: 2\n")
    accelerate.write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfp16: true\nfsdp_config:\n  fsdp_version: 2\n"
    )
    with pytest.raises(SystemExit):
        main(["plan", "--from-soup", "a", "--from-axolotl", "b"])
    capsys.readouterr()
    given = ["--from-axolotl", str(axolotl), "--accelerate-config", str(accelerate), *arguments]
    code, value = run(capsys, *given, "--gpu", "h100-80gb")
    assert code == GOOD
    plan = value["plan"]
    assert (plan["strategy"], plan["world_size"], plan["dtype"]) == ("full_shard", 4, "fp16")
    assert plan["batch"]["global_batch_size"] == 8
    # What the files say is told beside --fit, and where the settings are refused.
    accelerate.write_text(accelerate.read_text() + "num_proces: 3\n")
    code, value = run(capsys, *given, "--gpu", "h100-80gb", "--fit")
    assert code == REFUSED
    assert "AC002" in {p["id"] for p in value["problems"]}
    code, value = run(capsys, *given, "--gpu", "h100-80gb", "--set", "training.seeds=1")
    assert {"AC002", "SPEC002"} <= {p["id"] for p in value["problems"]}
