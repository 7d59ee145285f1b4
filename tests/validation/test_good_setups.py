"""No false alarm: what the usual projects recommend gets not one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soup_flows.accelerate_config import read_accelerate_config
from soup_flows.errors import Problem
from soup_flows.spec import parse_spec
from soup_flows.validation import check_deepspeed_config, validate
from tests.validation.good_setups import JSONS, SPECS, YAMLS
from tests.validation.run_pairs import PAIRS
from tests.validation.world import install, machine, rows_file, run

BIG = {"config": {"hidden_size": 4096, "vocab_size": 128256, "max_position_embeddings": 131072}}


def errors(problems: list[Problem]) -> list[str]:
    return [str(problem) for problem in problems if problem.severity == "error"]


def test_there_are_enough() -> None:
    assert len(JSONS) + len(YAMLS) + len(SPECS) >= 50


@pytest.mark.parametrize("name", JSONS)
def test_deepspeed_json(name: str, tmp_path: Path) -> None:
    config, arguments = JSONS[name]
    assert errors(check_deepspeed_config(config)) == []
    if arguments is None:
        return
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    spec = {**arguments.get("spec", {}), "deepspeed_config": str(file)}
    context = run(tmp_path, spec=spec, model=BIG)
    assert errors(validate(context.spec, context.hardware, context.plan, environ={})) == []


@pytest.mark.parametrize("name", YAMLS)
def test_accelerate_yaml(name: str, tmp_path: Path) -> None:
    text, wanted = YAMLS[name]
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    values, problems = read_accelerate_config(file)
    assert errors(problems) == []
    assert values == {"gpus": 8, "training": {"dtype": "bf16"}, **wanted}
    spec: dict[str, Any] = {"model": "m", "dataset": str(rows_file(tmp_path / "rows.jsonl")), **values}
    parse_spec(spec)
    on = machine("A100", values["gpus"])
    context = run(tmp_path, spec=values, model=BIG, on=on)
    assert errors(validate(context.spec, context.hardware, context.plan, environ={})) == []


@pytest.mark.parametrize("name", SPECS)
def test_spec(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bitsandbytes", "trl"):
        install(tmp_path, monkeypatch, module)
    spec, rows = SPECS[name], 256 if SPECS[name].get("training", {}).get("task") != "dpo" else PAIRS
    context = run(tmp_path, spec=spec, model=BIG, on=machine("H100", spec["gpus"]), rows=rows)
    assert errors(validate(context.spec, context.hardware, context.plan, environ={})) == []


def test_a_model_of_a_realistic_size_is_not_too_much_for_a_realistic_host(tmp_path: Path) -> None:
    context = run(
        tmp_path,
        spec={"deepspeed": "zero3", "gpus": 8},
        model={"parameters": 70 * 10**9},
        on=machine(count=8),
    )
    assert errors(validate(context.spec, context.hardware, context.plan, environ={})) == []
