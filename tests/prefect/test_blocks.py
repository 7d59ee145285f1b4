"""The block type: kept and loaded whole by a real server, strict inside."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pydantic import ValidationError

from soup_flows.blocks import SoupTrainingJob
from soup_flows.flows import soup_train
from soup_flows.spec import parse_spec

ROOT = Path(__file__).parents[2]
SPEC = {"model": "m", "dataset": "d", "fsdp": "full_shard", "gpus": 4, "training": {"learning_rate": 1e-4}}


@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_a_job_is_kept_whole() -> None:
    SoupTrainingJob(spec=parse_spec(SPEC)).save("nightly", overwrite=True)
    loaded = SoupTrainingJob.load("nightly")
    assert isinstance(loaded, SoupTrainingJob)
    assert loaded.spec == parse_spec(SPEC)
    assert set(loaded.parameters()) == set(inspect.signature(soup_train.fn).parameters)


def test_a_job_is_strict_inside() -> None:
    with pytest.raises(ValidationError, match="lr"):
        SoupTrainingJob.model_validate({"spec": SPEC | {"training": {"lr": 1}}})


def test_the_documents_are_right() -> None:
    program = [sys.executable, str(ROOT / "blocks" / "register_blocks.py"), "--check"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "checked demo-job" in done.stdout


def test_prefect_finds_the_types() -> None:
    found = [entry for entry in entry_points(group="prefect.collections") if entry.name == "soup_flows"]
    if not found:
        pytest.skip("the package is not installed here")
    assert found[0].load().SoupTrainingJob is SoupTrainingJob
