"""`validate` as a whole: order, silencing, strictness, fixes, hostile files, and no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soup_flows.accelerate_config import read_accelerate_config
from soup_flows.cli import REFUSED, main
from soup_flows.deepspeed import load_deepspeed_config
from soup_flows.errors import Problem, Refused
from soup_flows.spec import parse_spec
from soup_flows.validation import apply_fixes, check_deepspeed_config, check_fsdp_config, check_spec, validate
from soup_flows.validation.table import Context
from tests.validation.run_pairs import offload_config
from tests.validation.world import GOOD_JSON, edited, machine, model_folder, rows_file, run

WARNED = {"training": {"learning_rate": 2e-3}}


def verdict(context: Context, **arguments: Any) -> list[Problem]:
    return validate(context.spec, context.hardware, context.plan, **{"environ": context.environ, **arguments})


def test_all_problems_at_once_errors_first(tmp_path: Path) -> None:
    changes = {"gradient_cliping": 1.0, "aio": {"thread_count": 1}, "wall_clock_breakdown": True}
    context = run(tmp_path, deepspeed_json=changes, spec={**WARNED, "lora": {"r": 8}})
    problems = verdict(context)
    assert {"DS020", "DS022", "DS082", "BT010", "PE001"} <= {problem.id for problem in problems}
    order = [problem.severity for problem in problems]
    assert order == sorted(order, key=("error", "warning", "note").index)
    unknown = next(problem for problem in problems if problem.id == "DS020")
    assert unknown.field == "deepspeed_config.gradient_cliping"
    assert "'gradient_clipping'" in unknown.fix


def test_a_good_run_is_silent(tmp_path: Path) -> None:
    assert verdict(run(tmp_path, spec={"deepspeed": "zero2"})) == []


def test_silenced_rules_become_notes_with_their_reason(tmp_path: Path) -> None:
    silence = {"BT010": "measured: it converges", "DS020": "an old DeepSpeed reads it"}
    spec = {**WARNED, "validation": {"silence": silence}}
    found = {p.id: p for p in verdict(run(tmp_path, spec=spec, deepspeed_json={"gradient_cliping": 1}))}
    assert found["BT010"].severity == "note"
    assert found["DS020"].severity == "note"
    assert "measured: it converges" in found["BT010"].message
    assert "a warning, silenced" in found["BT010"].message


def test_silencing_what_does_not_exist_is_an_error(tmp_path: Path) -> None:
    problems = verdict(run(tmp_path, spec={"validation": {"silence": {"BT011O": "typing"}}}))
    assert [(p.id, p.severity) for p in problems] == [("VA001", "error")]
    assert "BT011" in problems[0].fix


def test_silencing_needs_a_reason() -> None:
    with pytest.raises(Refused, match=r"validation\.silence"):
        parse_spec({"model": "m", "dataset": "d", "validation": {"silence": {"BT010": " "}}})


def test_strict_turns_warnings_into_errors(tmp_path: Path) -> None:
    strict = {"validation": {"strict": True}}
    assert [p.severity for p in verdict(run(tmp_path / "a", spec=WARNED))] == ["warning"]
    assert [p.severity for p in verdict(run(tmp_path / "b", spec={**WARNED, **strict}))] == ["error"]
    silenced = {"validation": {"strict": True, "silence": {"BT010": "known"}}}
    assert [p.severity for p in verdict(run(tmp_path / "c", spec={**WARNED, **silenced}))] == ["note"]


def test_another_machine_is_not_judged_by_this_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    context = run(tmp_path / "run", spec={"output_dir": str(tmp_path / "file/out")})
    assert "EN004" in {p.id for p in verdict(context)}
    assert "EN004" not in {p.id for p in verdict(context, local=False)}


def test_doctor_is_asked_about_the_gpus_of_the_run(tmp_path: Path) -> None:
    on = machine("A100", 2)
    sick = on.gpus[1].model_copy(update={"ecc_errors": 3})
    on = on.model_copy(update={"gpus": (on.gpus[0], sick)})
    assert "HW009" in {p.id for p in verdict(run(tmp_path / "a", on=on))}
    assert "HW009" not in {p.id for p in verdict(run(tmp_path / "b", on=on, spec={"gpus": 1}))}


def test_model_and_data_are_reported_without_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(edited(GOOD_JSON, {"zero_optimization.stage": 7, "gradient_cliping": 1})))
    spec = parse_spec(
        {"model": "./none", "dataset": str(tmp_path / "none.jsonl"), "deepspeed_config": str(file)}
    )
    assert {"PLAN009", "DATA001", "DS029", "DS020"} <= {problem.id for problem in check_spec(spec)}


def test_fixes_mend_presets_and_say_so(tmp_path: Path) -> None:
    plan = offload_config(nvme_path="/nvme", buffer_size=1000, pin_memory=True)
    context = run(tmp_path, plan=plan, on=machine(memlock=100))
    mended, notes = apply_fixes(context.spec, context.hardware, context.plan, environ={})
    block = mended.config["zero_optimization"]["offload_param"]
    assert block["buffer_size"] == 10_000_000
    assert block["pin_memory"] is False
    assert [note.split(":")[0] for note in notes] == ["DS005", "DS008"]
    assert len(mended.notes) == len(context.plan.notes) + len(notes)
    left = {p.id for p in validate(context.spec, context.hardware, mended, environ={})}
    assert left.isdisjoint({"DS005", "DS008"})
    assert apply_fixes(context.spec, context.hardware, mended, environ={}) == (mended, [])


def test_fixes_fill_bucket_sizes(tmp_path: Path) -> None:
    context = run(tmp_path, spec={"deepspeed": "zero3"}, model={"config": {"hidden_size": None}})
    mended, notes = apply_fixes(context.spec, context.hardware, context.plan, environ={})
    assert "auto" not in mended.config["zero_optimization"].values()
    assert len(notes) == 1


def test_a_users_json_is_never_changed(tmp_path: Path) -> None:
    changes = {"zero_optimization.stage3_prefetch_bucket_size": "auto"}
    context = run(tmp_path, deepspeed_json=changes, model={"config": {"hidden_size": None}})
    assert "DS007" in {p.id for p in verdict(context)}
    assert apply_fixes(context.spec, context.hardware, context.plan) == (context.plan, [])


def test_no_torch_is_imported(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    rows_file(tmp_path / "rows.jsonl")
    script = (
        "import sys; from soup_flows.validation import validate, count_rows; "
        "from soup_flows.spec import parse_spec; from soup_flows.sharding import make_plan; "
        "from soup_flows.hardware import detect; "
        "spec = parse_spec({'model': 'model', 'dataset': 'rows.jsonl', 'gpus': 2, "
        "'device': 'cpu', 'fsdp': 'full_shard'}); "
        "hw = detect('cpu'); validate(spec, hw, make_plan(spec, hw, count_rows(spec))); "
        "print(sorted({'torch', 'transformers', 'prefect', 'deepspeed', 'yaml'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def _deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def _write_hostile(folder: Path, kind: str) -> Path:
    path = folder / "file.json"
    texts = {
        "10 MB": json.dumps({"zero_optimization": {"stage": 2}, "x": "y" * 10_000_000}),
        "depth": _deep(10_000),
        "NaN": '{"zero_optimization": {"stage": 2}, "gradient_clipping": NaN}',
        "twice": '{"gradient_clipping": 1, "gradient_clipping": 2}',
        "list": "[1, 2]",
        "empty": "",
        "long number": '{"train_batch_size": ' + "9" * 5000 + "}",
    }
    if kind in texts:
        path.write_text(texts[kind])
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "not UTF-8":
        path.write_bytes(b'{"a": "\xff\xfe"}')
    else:
        assert kind == "missing"
    return path


HOSTILE = [
    *("10 MB", "depth", "NaN", "twice", "list", "empty", "long number", "FIFO", "loop", "directory"),
    *("not UTF-8", "missing"),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_deepspeed_json(kind: str, tmp_path: Path) -> None:
    path = _write_hostile(tmp_path, kind)
    spec = parse_spec(
        {
            "model": str(model_folder(tmp_path / "m")),
            "dataset": str(rows_file(tmp_path / "r.jsonl")),
            "deepspeed_config": str(path),
        }
    )
    problems = check_spec(spec)
    assert len(problems) == 1
    assert problems[0].field == "deepspeed_config"
    assert str(path) in problems[0].message
    assert len(problems[0].message) < 500


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [k for k in HOSTILE if k not in ("long number",)])
def test_hostile_accelerate_yaml(kind: str, tmp_path: Path) -> None:
    path = _write_hostile(tmp_path, kind)
    if kind == "NaN":
        path.write_text("num_processes: .nan\ndistributed_type: MULTI_GPU\n")
        _, problems = read_accelerate_config(path)
        assert [(p.id, p.field) for p in problems] == [("AC005", "accelerate_config.num_processes")]
        return
    with pytest.raises(Refused) as refused:
        read_accelerate_config(path)
    assert [problem.id for problem in refused.value.problems] == ["AC001"]
    assert len(str(refused.value)) < 600


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["plan", *arguments, "--device", "cpu", "--gpus", "2", "--json"])
    return code, json.loads(capsys.readouterr().out)["problems"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_spec_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write_hostile(tmp_path, kind)
    code, problems = _plan(capsys, "--spec", str(path))
    assert code == REFUSED
    if kind in ("NaN", "long number"):  # YAML has them; the settings they are given to do not
        assert {problem["id"] for problem in problems} <= {"SPEC002", "SPEC003", "CLI002"}
        return
    assert [problem["id"] for problem in problems] == ["CLI002"]
    assert str(path) in problems[0]["message"]
    assert len(problems[0]["message"]) < 500


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_hardware_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write_hostile(tmp_path, kind)
    model = str(model_folder(tmp_path / "m"))
    rows = str(rows_file(tmp_path / "r.jsonl"))
    code, problems = _plan(capsys, "--model", model, "--dataset", rows, "--hardware", str(path))
    assert code == REFUSED
    assert [(problem["id"], problem["field"]) for problem in problems] == [("CLI003", "--hardware")]
    assert str(path) in problems[0]["message"]
    assert len(problems[0]["message"]) < 500


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [k for k in HOSTILE if k != "missing"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_hostile_model_folder(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folder(tmp_path / "m")
    (model / name).unlink(missing_ok=True)
    _write_hostile(tmp_path, kind).rename(model / name)
    if kind == "loop":
        (model / name).unlink()
        (model / name).symlink_to(name)
    rows = str(rows_file(tmp_path / "r.jsonl"))
    code, problems = _plan(capsys, "--model", str(model), "--dataset", rows)
    errors = [problem for problem in problems if problem["severity"] == "error"]
    if name == "config.json" and kind not in ("NaN", "twice"):
        assert code == REFUSED
        assert len(errors) == 1
        assert errors[0]["field"] == "model"
    elif name == "config.json":  # it can be read, and says nothing
        assert {problem["field"] for problem in errors} <= {"model", "trust_remote_code"}
    else:
        assert len(errors) <= 1, errors  # no template, or a weight file that is not there


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_hostile_data_file(
    kind: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"rows.{ending}"
    _write_hostile(tmp_path, kind)
    if kind == "loop":
        path.symlink_to(path)
    elif kind != "missing":
        (tmp_path / "file.json").rename(path)
    code, problems = _plan(capsys, "--model", str(model_folder(tmp_path / "m")), "--dataset", str(path))
    errors = [problem for problem in problems if problem["severity"] == "error"]
    assert code == REFUSED
    assert [problem["field"] for problem in errors] == ["dataset"]
    assert len(errors[0]["message"]) < 700


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1, 1]\nb: *a\n",
        "!!python/object/apply:os.system ['true']\n",
        "distributed_type: MULTI_GPU\ndistributed_type: NO\n",
        "a: [\n",
        "a: " + "[" * 3000 + "\n",
    ],
    ids=["reference", "object", "twice", "open", "deep"],
)
def test_odd_yaml(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(Refused) as refused:
        read_accelerate_config(file)
    assert [problem.id for problem in refused.value.problems] == ["AC001"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "value", [None, True, 7, -1, 1e308, "auto", "x" * 1000, [], [1], {}, {"a": {"b": {}}}], ids=repr
)
def test_any_value_anywhere_is_a_finding_at_most(value: Any) -> None:
    """Wrong kinds in every place must never end in an exception."""
    from soup_flows.validation.deepspeed_keys import LENIENT, STRICT, TOP

    paths = [*TOP, *(f"{block}.{key}" for block, keys in {**STRICT, **LENIENT}.items() for key in keys)]
    paths += ["optimizer.params.lr", "scheduler.params.warmup_num_steps", "optimizer.params.betas"]
    for path in paths:
        *parents, key = path.split(".")
        config: dict[str, Any] = edited(GOOD_JSON, {})
        block = config
        for parent in parents:
            block = block.setdefault(parent, {})
        block[key] = value
        for problem in check_deepspeed_config(config):
            assert problem.message
    for key in ("version", "auto_wrap_policy", "state_dict_type", "cpu_offload", "min_num_params"):
        check_fsdp_config({key: value})


@pytest.mark.timeout(20)
def test_many_wrong_keys_are_summed_up(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**GOOD_JSON, **{f"k{i}": i for i in range(60_000)}}))
    problems = check_deepspeed_config(load_deepspeed_config(file))
    assert [problem.id for problem in problems] == ["DS020"] * 21
    assert "59980 more" in problems[-1].message
