"""What the rules claim is what the installed libraries do: a release that heals a fault turns a test red."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soup_flows.accelerate_keys import TOP_KEYS
from soup_flows.validation.deepspeed_keys import LENIENT, REMOVED, TOP
from soup_flows.validation.deepspeed_rules_optimizer import (
    ADAM_PARAMS,
    OPTIMIZERS,
    REMOVED_OPTIMIZERS,
    SCHEDULER_PARAMS,
)
from soup_flows.validation.fsdp_config import KEYS, V1_KEYS

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("installed")
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.validation.installed", str(folder / "out.json")]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_key_tables(installed: dict[str, Any]) -> None:
    assert installed["strict differences"] == {}
    assert installed["lenient"] == {name: sorted(keys) for name, keys in LENIENT.items()}
    # Read in another place: DeepSpeedConfig asks the caller's dict, and only inside a process group.
    assert set(TOP) - set(installed["top"]) == {"sequence_parallel_size"}
    assert set(installed["top"]) - set(TOP) == set()
    assert installed["removed"] == sorted(REMOVED)


def test_accelerate_keys(installed: dict[str, Any]) -> None:
    assert set(installed["accelerate"]) == set(TOP_KEYS) - {"dynamo_backend", "fp16"}


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ("DS020", "unknown top key"),
        ("DS022", "unknown aio key"),
        ("DS027", "auto stage"),
        ("DS060", "offload_param at 2"),
    ],
)
def test_accepted_in_silence(installed: dict[str, Any], rule: str, what: str) -> None:
    assert installed["behaviour"][what] == "", f"{rule} may no longer be needed"


@pytest.mark.parametrize(
    ("rule", "what", "answer"),
    [
        ("DS021", "unknown zero key", "Extra inputs are not permitted"),
        ("DS023", "removed key", "has been removed"),
        ("DS025", "two names", "Cannot provide deprecated parameter"),
        ("DS026", "text number", "valid integer"),
        ("DS028", "device", "'none', 'cpu' or 'nvme'"),
        ("DS028", "communication", "Invalid communication_data_type"),
        ("DS030", "product", "Check batch related parameters"),
        ("DS031", "no batch", "needs to be provided"),
        ("DS041", "both dtypes", "cannot be simultaneously enabled"),
        ("DS072", "norm at 3", "only with ZeRO Stage 1 or 2"),
        ("DS073", "ratio at 2", "only supported for ZeRO Stage 3"),
        ("DS085", "sum at 3", "not supported with ZeRO stage 3"),
    ],
)
def test_refused_by_deepspeed(installed: dict[str, Any], rule: str, what: str, answer: str) -> None:
    assert answer in installed["behaviour"][what], rule


def test_values_that_differ_from_what_one_expects(installed: dict[str, Any]) -> None:
    found = installed["behaviour"]
    assert found["clipping"] == 1.0  # DS043
    assert found["auto bucket"] == "1000000000"  # DS027: "auto" became the default
    assert found["nvme without path"] == "None"  # DS062: noticed only when the engine starts
    assert found["overlap default"] == [False, False, True]  # DS063


@pytest.mark.parametrize(
    ("rule", "what", "answer"),
    [
        ("DS040", "dtype", "bf16.enabled=True vs hf"),
        ("DS042", "clipping", "gradient_clipping=0.5 vs hf max_grad_norm=1.0"),
        ("DS044", "optimizer", "optimizer.params.lr=0.001 vs hf learning_rate"),
        ("DS029", "no zero", "specify the ZeRO optimization config"),
        ("DS032", "no accumulation", "Check batch related parameters"),
    ],
)
def test_refused_by_transformers(installed: dict[str, Any], rule: str, what: str, answer: str) -> None:
    assert installed["trainer"]["good"] == ""
    assert answer in installed["trainer"][what], rule


def test_optimizers(installed: dict[str, Any]) -> None:
    assert installed["optimizers"]["built"] == sorted(name.lower() for name in OPTIMIZERS)
    assert installed["optimizers"]["one bit"] == []
    assert not set(installed["optimizers"]["built"]) & set(REMOVED_OPTIMIZERS)
    assert installed["optimizers"]["norm refused"]  # DS052


def test_parameters_of_optimizers_and_schedules(installed: dict[str, Any]) -> None:
    found = dict(installed["parameters"])
    # DeepSpeed's CPU Adam spells it without a line; the JSON's word is adam_w_mode.
    assert set(found.pop("adam")) - {"adamw_mode"} == set(ADAM_PARAMS) - {"torch_adam", "max_grad_norm"}
    assert found == {name: sorted(params) for name, params in SCHEDULER_PARAMS.items()}


def test_fsdp_config_is_not_checked(installed: dict[str, Any]) -> None:
    found = installed["fsdp"]
    assert found["unknown"] == found["good"]  # FS001
    assert found["version 1 key"] == found["good"]  # FS002
    assert "use_orig_params" in found["version 3"]  # FS003: the FSDP1 path
    assert "invalid truth value" in found["text"]["error"]  # FS004
    assert found["false as text"]["cpu_offload"] == "True"  # FS004
    assert "must be one of" in found["lower case"]["error"]  # FS005
    assert found["checkpointing"]["activation_checkpointing"] == "True"  # FS008


def test_fsdp_keys(installed: dict[str, Any]) -> None:
    read = set(
        re.findall(
            r"""(?<!xla_)fsdp_config(?:\.get\(|\.setdefault\(|\[)["'](\w+)""", installed["fsdp"]["source"]
        )
    )
    read |= set(re.findall(r"""["'](\w+)["'] in self\.fsdp_config""", installed["fsdp"]["source"]))
    assert read == {*KEYS, *V1_KEYS}
