"""Specs, flags, other tools' configs, DeepSpeed and FSDP configs, recorded machines: any file is read or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from soup_flows.accelerate_config import read_accelerate_config
from soup_flows.cli import _parser, read_spec
from soup_flows.deepspeed import resolve_deepspeed_config
from soup_flows.deepspeed_file import load_deepspeed_config
from soup_flows.hardware import imagined
from soup_flows.hardware.doctor import doctor
from soup_flows.hardware.recorded import read_recorded
from soup_flows.migrate.read import TOOLS, migration_text, read_config
from soup_flows.plan_page import plan_terminal
from soup_flows.sharding import make_plan
from soup_flows.spec import TrainingSpec, parse_spec
from soup_flows.spec_file import read_spec_file
from soup_flows.user_file import read_json
from soup_flows.user_yaml import read_yaml
from soup_flows.validation import check_deepspeed_config, check_fsdp_config, validate
from tests.fuzz.spoil import (
    PIECES,
    VALUES,
    WEIRD,
    clear_problems,
    damaged,
    documents,
    fuzz,
    put,
    spoilt,
    value_or_refusal,
)
from tests.validation.world import GOOD_JSON, machine, model_folder, rows_file

SPEC: dict[str, Any] = json.loads(
    TrainingSpec.model_validate(
        {"model": "m", "dataset": "d", "deepspeed": "zero3", "gpus": 2}
    ).model_dump_json()
)
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_machines": 1,
    "num_processes": 4,
    "mixed_precision": "bf16",
    "gpu_ids": "all",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False},
    "deepspeed_config": {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "gradient_accumulation_steps": 2,
    },
}
FSDP: dict[str, Any] = {
    "version": 2,
    "reshard_after_forward": True,
    "cpu_offload": False,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "FULL_STATE_DICT",
    "activation_checkpointing": False,
    "min_num_params": 0,
}
MIGRATE = Path(__file__).parents[1] / "data" / "migrate"


@fuzz(200)
@given(content=documents(SPEC) | damaged(b"model: m\ntraining:\n  max_steps: 3\n- a"))
@example(content=b"a: !!int ''")
@example(content=b"a: !!float ''")
@example(content=b"a: !!bool x")
@example(content=b"a: !!timestamp x")
@example(content=b"a: 0b")
def test_yaml_and_json(content: bytes, tmp_path: Path) -> None:
    file = put(tmp_path / "a", content)
    found = value_or_refusal(lambda: read_yaml(file, 1 << 16))
    assert found is None or all(isinstance(key, str) for key in found)
    strict = value_or_refusal(lambda: read_json(file, 1 << 20))
    if strict is not None:
        json.dumps(strict, allow_nan=False)
    value_or_refusal(lambda: read_json(file, 1 << 20, strict=False))


@fuzz(150)
@given(piece=st.lists(st.sampled_from(PIECES[:-4]), min_size=1, max_size=4))
def test_yaml_of_odd_pieces(piece: list[bytes], tmp_path: Path) -> None:
    file = put(tmp_path / "a", b"a: " + b" ".join(piece))
    value_or_refusal(lambda: read_yaml(file, 1 << 16))


@fuzz(200)
@given(content=documents(SPEC))
def test_specs(content: bytes, tmp_path: Path) -> None:
    file = put(tmp_path / "spec.yaml", content)
    spec = value_or_refusal(lambda: parse_spec(read_spec_file(str(file), "--spec")))
    if spec is not None:
        assert parse_spec(json.loads(spec.model_dump_json())) == spec


@fuzz(150)
@given(
    settings=st.lists(
        st.tuples(
            st.sampled_from(
                [*SPEC, *(f"training.{n}" for n in SPEC["training"]), "data", "a.b.c", "", ".", "gpus.x"]
            ),
            st.sampled_from(WEIRD) | VALUES.map(json.dumps),
        ).map("=".join)
        | st.sampled_from(WEIRD),
        max_size=4,
    )
)
@example(settings=["gpus=" + "[" * 100_000])
@example(settings=["training.learning_rate=1e999"])
def test_flags(settings: list[str]) -> None:
    argv = ["train", "--model", "m", "--dataset", "d", *(f"--set={text}" for text in settings)]
    value_or_refusal(lambda: parse_spec(read_spec(_parser().parse_args(argv))))


@fuzz(120)
@given(values=spoilt(SPEC, most=2))
def test_whatever_is_a_spec_is_planned_or_refused(
    values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if not (tmp_path / "m").exists():
        model_folder(tmp_path / "m")
        rows_file(tmp_path / "d")
    spec = value_or_refusal(lambda: parse_spec(values)) if isinstance(values, dict) else None
    if spec is None:
        return

    def plan_and_validate() -> None:
        hardware = imagined("h100", 4)
        made = make_plan(spec, hardware, 1000)
        plan_terminal(made)
        clear_problems(validate(spec, hardware, made, environ={}))

    value_or_refusal(plan_and_validate)


@fuzz(150)
@given(content=documents(GOOD_JSON), gpus=st.integers(1, 8))
def test_deepspeed_files(content: bytes, gpus: int, tmp_path: Path) -> None:
    file = put(tmp_path / "ds.json", content)
    config = value_or_refusal(lambda: load_deepspeed_config(file))
    if config is None:
        return
    clear_problems(check_deepspeed_config(config))
    value_or_refusal(lambda: resolve_deepspeed_config(config, gpu_count=gpus))


@fuzz(60)
@given(config=spoilt(GOOD_JSON))
def test_runs_with_a_deepspeed_file(config: Any, tmp_path: Path) -> None:
    if not (tmp_path / "m").exists():
        model_folder(tmp_path / "m")
        rows_file(tmp_path / "d.jsonl")
    file = put(tmp_path / "ds.json", json.dumps(config).encode())
    values = {
        "model": str(tmp_path / "m"),
        "dataset": str(tmp_path / "d.jsonl"),
        "deepspeed_config": str(file),
    }

    def plan_and_validate() -> None:
        spec = parse_spec(values)
        made = make_plan(spec, machine(), 64)
        clear_problems(validate(spec, machine(), made, environ={}))

    value_or_refusal(plan_and_validate)


@fuzz(150)
@given(config=spoilt(FSDP) | spoilt({f"fsdp_{name}": value for name, value in FSDP.items()}))
def test_fsdp_configs(config: Any) -> None:
    if isinstance(config, dict):
        clear_problems(check_fsdp_config(config))


@fuzz(150)
@given(content=documents(ACCELERATE) | documents(ACCELERATE | {"distributed_type": "DEEPSPEED"}))
def test_accelerate_files(content: bytes, tmp_path: Path) -> None:
    file = put(tmp_path / "accelerate.yaml", content)
    found = value_or_refusal(lambda: read_accelerate_config(file))
    if found is not None:
        clear_problems(found[1])
        value_or_refusal(lambda: parse_spec({"model": "m", "dataset": "d", **found[0]}))


@pytest.mark.parametrize("tool", TOOLS, ids=[tool.name for tool in TOOLS])
def test_files_of_other_tools(tool: Any, tmp_path: Path) -> None:
    goods = [
        read_yaml(file, 1 << 16)
        for file in sorted(MIGRATE.rglob(f"*{tool.option.removeprefix('--from-')}*.y*ml"))
    ]
    goods.append(dict.fromkeys(list(tool.keys)[:12], 1))

    @fuzz(120)
    @given(content=st.sampled_from(goods).flatmap(documents))
    def check(content: bytes) -> None:
        file = put(tmp_path / "config.yaml", content)
        found = value_or_refusal(lambda: read_config(tool, file, {}))
        if found is None:
            return
        clear_problems(found.not_mapped)
        found.model_dump_json()
        spec = value_or_refusal(lambda: parse_spec({"model": "m", "dataset": "d", **found.values}))
        migration_text(found, {}, spec).encode()

    check()


@fuzz(150)
@given(content=documents(json.loads(machine().model_dump_json())))
def test_recorded_machines(content: bytes, tmp_path: Path) -> None:
    file = put(tmp_path / "hardware.json", content)
    hardware = value_or_refusal(lambda: read_recorded(str(file), "--hardware"))
    if hardware is None:
        return
    clear_problems(doctor(hardware))
    spec = parse_spec({"model": "m", "dataset": "d"})
    value_or_refusal(lambda: plan_terminal(make_plan(spec, hardware, 1000)))
