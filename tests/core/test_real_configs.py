"""Every key of every preset is read by the installed DeepSpeed, transformers and accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import soup_flows
from soup_flows.deepspeed import DEEPSPEED_PRESETS, get_deepspeed_config
from soup_flows.fsdp import FSDP_PRESETS, get_fsdp_config

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the libraries made of the presets, in a clean process without a compiler."""
    pytest.importorskip("deepspeed")
    tmp = tmp_path_factory.mktemp("real")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_configs.py"))],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp,
        env={
            "HOME": str(tmp),
            "PATH": "",
            "CXX": "/nonexistent/c++",
            "TORCH_EXTENSIONS_DIR": str(tmp),
            "PYTHONPATH": os.path.dirname(os.path.dirname(soup_flows.__file__)),
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_no_key_is_unknown_ignored_or_deprecated(real: dict[str, Any]) -> None:
    for preset in DEEPSPEED_PRESETS:
        found = real["deepspeed"][preset]
        assert (found["unread"], found["lenient"], found["deprecated"]) == ([], [], []), preset
        assert found["autos_left"] == [], preset
    for preset in FSDP_PRESETS:
        assert real["fsdp"][preset]["unread"] == [], preset
    assert real["complaints"] == []


def test_the_check_sees_unknown_and_deprecated_keys(real: dict[str, Any]) -> None:
    wrong = real["deepspeed"]["wrong"]
    assert wrong["unread"] == ["gradient_cliping", "aio.thread_count"]
    assert wrong["deprecated"] == ["stage3_gather_fp16_weights_on_model_save"]
    assert real["fsdp"]["wrong"]["unread"] == ["limit_all_gathers"]
    assert real["complaints_about_wrong"]


def test_deepspeed_understands_what_the_preset_means(real: dict[str, Any]) -> None:
    for preset in DEEPSPEED_PRESETS:
        found, zero = real["deepspeed"][preset], get_deepspeed_config(preset)["zero_optimization"]
        assert found["stage"] == zero["stage"]
        assert found["overlap_comm"] is (zero["stage"] == 3)
        assert found["gather_on_save"] is (zero["stage"] == 3)
        for block in ("offload_optimizer", "offload_param"):
            assert found[block] == zero.get(block, {"device": "none"})["device"]
        assert (found["clipping"], found["bf16"], found["grad_accum_dtype"]) == (0.5, True, "fp32")
        assert found["queue_depth"] == (16 if "offload_param" in zero else 8)


def test_accelerate_understands_what_the_preset_means(real: dict[str, Any]) -> None:
    for preset in FSDP_PRESETS:
        found, fsdp = real["fsdp"][preset], get_fsdp_config(preset)["fsdp"]
        assert found["version"] == 2
        assert found["reshard_after_forward"] is (fsdp["sharding_strategy"] != "SHARD_GRAD_OP")
        assert found["cpu_offload"] == ("CPUOffloadPolicy" if fsdp["offload_params"] else "OffloadPolicy")
        assert found["state_dict_type"] == "FULL_STATE_DICT"
        assert found["policy"] == "transformer_auto_wrap_policy"
        assert found["activation_checkpointing"] is False
        assert found["mesh"] == ([2, 2] if preset == "hybrid_shard" else None)


def test_offloaded_states_train_on_a_machine_without_a_compiler(real: dict[str, Any]) -> None:
    assert real["optimizer_without_compiler"] == {"zero2_offload": "AdamW", "zero3_offload": "AdamW"}
