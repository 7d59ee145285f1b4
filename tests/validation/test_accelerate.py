"""What an accelerate YAML says that this package does not do, or that accelerate does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soup_flows.accelerate_config import read_accelerate_config
from tests.validation.good_setups import ACCELERATE_HEAD, FSDP2, fsdp_yaml, zero_yaml


def read(tmp_path: Path, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    values, problems = read_accelerate_config(file)
    return values, {problem.field.removeprefix("accelerate_config."): problem for problem in problems}


DDP = ACCELERATE_HEAD + "distributed_type: MULTI_GPU\n"
FSDP = fsdp_yaml(*FSDP2)


@pytest.mark.parametrize(
    ("text", "field", "rule", "hint"),
    [
        (DDP + "num_proceses: 8\n", "num_proceses", "AC002", "'num_processes'"),
        (zero_yaml(2, more="  zero_stages: 3\n"), "deepspeed_config.zero_stages", "AC002", "'zero_stage'"),
        (FSDP + "  fsdp_offload: true\n", "fsdp_config.fsdp_offload", "AC002", "'fsdp_"),
        (DDP.replace("num_machines: 1", "num_machines: 2"), "num_machines", "AC004", "1"),
        (DDP.replace("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "compute_environment", "AC004", "LOCAL_MACHINE"),
        (DDP.replace("bf16\n", "bf61\n", 1), "mixed_precision", "AC005", "'bf16'"),
        (DDP.replace("mixed_precision: bf16", "mixed_precision: fp8"), "mixed_precision", "AC005", "fp16"),
        (DDP.replace("MULTI_GPU", "MULTI_GPUS"), "distributed_type", "AC004", "'MULTI_GPU'"),
        (DDP.replace("MULTI_GPU", "MEGATRON_LM"), "distributed_type", "AC004", "use"),
        (ACCELERATE_HEAD, "distributed_type", "AC005", "FSDP"),
        (DDP.replace("num_processes: 8", "num_processes: many"), "num_processes", "AC005", "whole number"),
        (DDP + "dynamo_config:\n  dynamo_backend: INDUCTOR\n", "dynamo_config", "AC004", "remove"),
        (zero_yaml(2).replace("zero_stage: 2", "zero_stage: 4"), "deepspeed_config.zero_stage", "AC005", "3"),
        (zero_yaml(3, "disk"), "deepspeed_config.offload_param_device", "AC005", "nvme"),
        (
            zero_yaml(2).replace("offload_param_device: none", "offload_param_device: cpu"),
            "deepspeed_config.offload_param_device",
            "AC006",
            "zero_stage: 3",
        ),
        (
            FSDP + "  fsdp_sharding_strategy: HYBRID_SHARD_ZERO2\n",
            "fsdp_config.fsdp_sharding_strategy",
            "AC005",
            "HYBRID",
        ),
    ],
)
def test_errors(tmp_path: Path, text: str, field: str, rule: str, hint: str) -> None:
    _, problems = read(tmp_path, text)
    assert (problems[field].id, problems[field].severity) == (rule, "error")
    assert hint in problems[field].fix


@pytest.mark.parametrize(
    ("text", "field", "severity"),
    [
        (DDP + "main_process_port: 29501\n", "main_process_port", "note"),
        (DDP + "gpu_ids: 0,1\n", "gpu_ids", "warning"),
        (FSDP.replace("FULL_STATE", "SHARDED_STATE"), "fsdp_config.fsdp_state_dict_type", "note"),
        (FSDP.replace("version: 2", "version: 1"), "fsdp_config.fsdp_version", "note"),
        (FSDP.replace("TRANSFORMER_BASED", "SIZE_BASED"), "fsdp_config.fsdp_auto_wrap_policy", "warning"),
        (zero_yaml(1, "cpu"), "deepspeed_config.offload_optimizer_device", "warning"),
        (
            zero_yaml(3).replace("offload_param_device: none", "offload_param_device: cpu"),
            "deepspeed_config.offload_param_device",
            "warning",
        ),
    ],
)
def test_differences_are_told(tmp_path: Path, text: str, field: str, severity: str) -> None:
    _, problems = read(tmp_path, text)
    assert problems[field].severity == severity
    assert [p for p in problems.values() if p.severity == "error"] == []


def test_a_deepspeed_file_is_found_beside_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    text = (
        ACCELERATE_HEAD + "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    values, problems = read(tmp_path, text)
    assert values["deepspeed_config"] == str(tmp_path / "ds.json")
    assert not problems


@pytest.mark.parametrize(
    ("stage", "offload", "more", "wanted"),
    [
        (0, "none", "", {"strategy": "ddp"}),
        (2, "cpu", "", {"deepspeed": "zero2_offload"}),
        (3, "nvme", "  offload_param_nvme_path: /nvme\n", {"deepspeed": "zero3_nvme", "nvme_path": "/nvme"}),
    ],
)
def test_presets_of_zero(tmp_path: Path, stage: int, offload: str, more: str, wanted: dict[str, Any]) -> None:
    values, _ = read(tmp_path, zero_yaml(stage, offload, more))
    assert values.items() >= wanted.items()


def test_cpu(tmp_path: Path) -> None:
    values, _ = read(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: no\n")
    assert values == {"strategy": "ddp", "device": "cpu", "gpus": 2, "training": {"dtype": "fp32"}}
