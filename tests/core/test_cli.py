"""The command as a user types it: exit codes, --json, and the same refusals as the flow's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from soup_flows.cli import main
from soup_flows.errors import Problem
from soup_flows.terminal import problems_text

ROWS = "".join(f'{{"prompt": "a {i}", "completion": "b {i}"}}\n' for i in range(40))


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    # As much as the rules look at: an index of weights, a tokenizer.
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return [
        "--model",
        str(model),
        "--dataset",
        str(tmp_path / "rows.jsonl"),
        "--device",
        "cpu",
        "--gpus",
        "2",
    ]


def json_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def test_plan_says_what_would_run(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", *asked, "--deepspeed", "zero2", "--set", "training.global_batch_size=8", "--json"]) == 0
    )
    plan = json_of(capsys)["plan"]
    assert (plan["strategy"], plan["world_size"]) == ("zero2", 2)
    assert plan["config"]["train_batch_size"] == 8
    assert plan["steps"]["total_steps"] == 5


def test_dash_and_underscore_are_the_same(asked: list[str], tmp_path: Path) -> None:
    for flag in ("--output-dir", "--output_dir"):
        assert main(["plan", *asked, flag, str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out").exists()


def test_a_spec_file_and_flags_that_win_over_it(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("deepspeed: zero1\ntraining:\n  global_batch_size: 4\n  seed: 7\n")
    flags = ["--deepspeed", "zero3", "--set", "training.global_batch_size=6"]
    assert main(["plan", *asked, "--spec", str(spec), *flags, "--json"]) == 0
    plan = json_of(capsys)["plan"]
    assert plan["strategy"] == "zero3"
    assert plan["batch"]["global_batch_size"] == 6


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--deepspeed", "zero9"], "deepspeed"),
        (["--deepspeed", "zero2", "--fsdp", "full_shard"], "deepspeed"),
        (["--set", "training.lr=1"], "training.lr"),
        (["--set", "nonsense"], "--set"),
        (["--spec", "/nowhere.yaml"], "--spec"),
        (["--hardware", "/nowhere.json"], "--hardware"),
        (["--dataset", "/nowhere.jsonl"], "dataset"),
    ],
)
def test_refusals_exit_with_2(
    asked: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], field: str
) -> None:
    assert main(["plan", *asked, *flags]) == 2
    shown = capsys.readouterr()
    assert field in shown.out + shown.err
    assert main(["plan", *asked, *flags, "--json"]) == 2
    assert field in {problem["field"] for problem in json_of(capsys)["problems"]}


def test_a_recorded_machine(asked: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from soup_flows.hardware import RecordedProbe, detect

    recorded = Path(__file__).parents[1] / "data" / "hardware" / "4xa100-pcie.json"
    hardware = detect("auto", probe=RecordedProbe(recorded), environ={})
    hardware = hardware.model_copy(update={"torch_cuda": "12.8"})  # the rest is this machine's
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"hardware": hardware.model_dump(mode="json")}))
    flags = [*asked[:4], "--gpus", "4", "--hardware", str(file), "--fsdp", "full_shard", "--json"]
    assert main(["plan", *flags]) == 0
    plan = json_of(capsys)["plan"]
    assert (plan["device"], plan["world_size"], plan["dtype"]) == ("cuda", 4, "bf16")


def test_presets_are_listed_shown_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json"]) == 0
    names = {row["name"] for row in json_of(capsys)["presets"]}
    assert {"zero1", "zero3_nvme", "zero++", "full_shard", "hybrid_shard", "ddp", "single"} <= names
    assert main(["presets", "zero3"]) == 0
    assert json_of(capsys)["zero_optimization"]["stage"] == 3
    assert main(["presets", "zero3", "--diff", "zero2"]) == 0
    assert "stage" in capsys.readouterr().out
    assert main(["presets", "zero9"]) == 2


def test_doctor_prints_a_machine_that_plan_reads(
    asked: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--json"]) in (0, 1)
    file = tmp_path / "machine.json"
    file.write_text(capsys.readouterr().out)
    assert main(["plan", *asked, "--hardware", str(file)]) == 0


def test_demo_names_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "zero9"]) == 2
    assert "zero3" in capsys.readouterr().err


def test_explain_knows_rules_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "DS014"]) == 0
    assert "DS014" in capsys.readouterr().out
    assert main(["explain", "DS9999"]) == 2
    assert "DS" in capsys.readouterr().err


def test_data_reports_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS + '{"prompt": "a", "completion": ""}\n')
    assert main(["data", str(tmp_path / "rows.jsonl"), "--json"]) == 0
    report = json_of(capsys)
    assert (report["rows_read"], report["rows_kept"]) == (41, 40)
    assert report["dropped"][0]["line"] == 41
    assert main(["data", str(tmp_path / "none.jsonl")]) == 2


def test_an_accelerate_file_gives_the_same_plan(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\nmixed_precision: 'no'\n"
        "num_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
    )
    assert main(["plan", *asked[:4], "--accelerate-config", str(file), "--json"]) == 0
    plan = json_of(capsys)["plan"]
    assert (plan["strategy"], plan["world_size"], plan["device"]) == ("zero2", 2, "cpu")


def test_every_command_takes_json_and_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for code, meaning in ((0, "good"), (1, "failed"), (2, "refused"), (3, "stopped"), (4, "nothing")):
        assert any(str(code) in line and meaning in line for line in text.splitlines()), meaning
    commands = (
        text[text.index("{") + 1 : text.index("}")].split(",")
        if "{" in text
        else re.findall(r"^    (\w+) ", text, re.MULTILINE)
    )
    assert {"train", "plan", "data", "deploy", "doctor", "stop", "drill"} <= set(commands)
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--json" in capsys.readouterr().out, command


def test_problems_fit_the_terminal() -> None:
    problem = Problem(
        id="BT001", severity="error", field="training.seed", message="word " * 40, fix="do " * 40
    )
    text = problems_text([problem, problem], 60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("error    BT001    training.seed") == text.count("fix: do") == 2
    assert " ".join(text.split()).count("word") == 80


@pytest.mark.ranks  # imports torch in a process of its own
def test_plan_builds_what_the_demo_names(tmp_path: Path) -> None:
    demo = ["--model", "demo://tiny-llama", "--dataset", "demo://stdlib-qa", "--output_dir", str(tmp_path)]
    assert main(["plan", *demo, "--deepspeed", "zero2", "--gpus", "2", "--set", "device=cpu"]) == 0


@pytest.mark.parametrize("argv", ["plan --bogus", "plan --nodes x", "nothing", "plan --nodes 99999"])
def test_a_wrong_command_line_is_one_object_too(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*argv.split(), "--json"])
    assert ended.value.code == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["id"] == "CLI005"


def test_an_unknown_preset_names_the_nearest_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "full_shart", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["field"], problem["fix"]) == ("preset", "did you mean 'full_shard'?")


def test_what_cannot_be_written_is_refused_before_prefect_starts(asked: list[str], tmp_path: Path) -> None:
    assert main(["train", *asked, "--output-dir", str(tmp_path / "rows.jsonl")]) == 2
    assert main(["train", *asked, "--output-dir", str(tmp_path / "rows.jsonl" / "below")]) == 2


def test_nothing_drives_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "nope\x1b[31m"]) == 4
    (tmp_path / "spec.yaml").write_text('"\\e[31mmodel\\e]0;x\\a": 1\n')
    assert main(["plan", "--spec", str(tmp_path / "spec.yaml")]) == 2
    assert "\x1b" not in capsys.readouterr().err
