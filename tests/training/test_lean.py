"""What is left unimported: only what the run cannot need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soup_flows.spec import parse_spec
from soup_flows.training.lean import leave_out_of_rank, unneeded

ASK = "import sys; from transformers.utils import is_peft_available as p, is_datasets_available as d; print(p(), d())"


def spec(**values: Any) -> dict[str, Any]:
    return parse_spec({"model": "m", "dataset": "d"} | values).model_dump(mode="json")


@pytest.mark.parametrize(
    ("values", "engine", "wanted"),
    [
        ({}, "ddp", {"deepspeed", "datasets", "peft"}),
        ({"training": {"task": "pretrain"}}, "fsdp", {"deepspeed", "datasets", "peft"}),
        ({}, "deepspeed", {"datasets", "peft"}),
        ({"training": {"method": "lora"}}, "single", {"deepspeed", "datasets"}),
        ({"training": {"method": "qlora"}}, "deepspeed", {"datasets"}),
        ({"training": {"task": "dpo"}}, "fsdp", {"deepspeed"}),
        ({"training": {"task": "kto", "method": "lora"}}, "deepspeed", set()),
        ({"trust_remote_code": True}, "ddp", set()),
    ],
)
def test_what_a_run_cannot_need(values: dict[str, Any], engine: str, wanted: set[str]) -> None:
    assert set(unneeded(spec(**values), engine)) == wanted


def test_a_rank_leaves_out_what_its_files_say(tmp_path: Path) -> None:
    before = dict(sys.modules)
    leave_out_of_rank(tmp_path)  # without files the run's own words come later
    assert sys.modules == before
    (tmp_path / "spec.json").write_text(json.dumps(spec()))
    (tmp_path / "plan.json").write_text(json.dumps({"engine": "ddp"}))
    lean = "from pathlib import Path; from soup_flows.training.lean import leave_out_of_rank as leave"
    argv = [sys.executable, "-c", f"import sys; {lean}; leave(Path(sys.argv[1])); {ASK}", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
