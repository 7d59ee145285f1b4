"""CUDA_VISIBLE_DEVICES as CUDA reads it, and what Slurm and containers grant."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import types
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soup_flows.hardware.probe import GpuReading, MigSlice
from soup_flows.hardware.visible import select

GPUS = [GpuReading(index=i, uuid=f"GPU-{i // 2}a{i}", name="H100", mig_enabled=False) for i in range(4)]
"""UUIDs GPU-0a0, GPU-0a1, GPU-1a2, GPU-1a3: `GPU-0` is ambiguous, `GPU-0a1` is not."""


def visible(**environ: str) -> list[int]:
    return [reading.index for reading, _ in select(GPUS, environ).devices]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        ("3,1", [3, 1]),
        (" 2 , 0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("1,7,2", [1]),
        ("1,1", []),
        ("2gpu", [2]),
        ("none", []),
        ("GPU-1a3,GPU-0a0", [3, 0]),
        ("GPU-0", []),
        ("GPU-0a1,GPU-0", [1]),
        ("GPU-0a1,2", [1]),
        ("2,GPU-0a1", [2]),
        ("GPU-0a1,GPU-0a1", []),
        ("GPU-9", []),
        ("MIG-1", []),
    ],
)
def test_cuda_visible_devices(value: str, expected: list[int]) -> None:
    assert visible(CUDA_VISIBLE_DEVICES=value) == expected


@functools.cache
def torch_parser() -> types.CodeType:
    """Torch's own functions, taken from its source since importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    names = {"_parse_visible_devices", "_transform_uuid_to_ordinals"}
    tree = ast.parse((Path(spec.origin).parent / "cuda/__init__.py").read_text())
    body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    return compile(ast.Module(body, []), "torch", "exec")


def torch_says(value: str) -> list[int]:
    torch = types.SimpleNamespace(version=types.SimpleNamespace(hip=None))
    fake_os = types.SimpleNamespace(getenv={"CUDA_VISIBLE_DEVICES": value}.get)
    scope: dict[str, Any] = {"os": fake_os, "torch": torch, "cast": cast}
    exec(torch_parser(), scope)
    found = scope["_parse_visible_devices"]()
    if found and isinstance(found[0], str):
        return list(scope["_transform_uuid_to_ordinals"](found, [str(gpu.uuid) for gpu in GPUS]))
    inside = [number < len(GPUS) for number in found]
    return found[: inside.index(False)] if False in inside else found


ENTRIES = st.sampled_from(
    ["0", "1", "3", "5", " 2", "-1", "2x", "", "GPU-0a1", "GPU-1a3", "GPU-0", "GPU-9", "x"]
)


@given(st.lists(ENTRIES, max_size=5))
def test_reads_the_variable_like_torch(entries: list[str]) -> None:
    value = ",".join(entries)
    assert visible(CUDA_VISIBLE_DEVICES=value) == torch_says(value)


def test_hidden_gpus_name_the_variable() -> None:
    selection = select(GPUS, {"CUDA_VISIBLE_DEVICES": "2"})
    assert [(gpu.index, gpu.why) for gpu in selection.unused] == [(0, "hidden"), (1, "hidden"), (3, "hidden")]
    assert all("CUDA_VISIBLE_DEVICES='2'" in gpu.reason for gpu in selection.unused)


def test_a_wrong_entry_is_noted() -> None:
    assert any("'7' names no device" in note for note in select(GPUS, {"CUDA_VISIBLE_DEVICES": "1,7"}).notes)
    assert any("twice" in note for note in select(GPUS, {"CUDA_VISIBLE_DEVICES": "1,1"}).notes)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3"}, [2, 3]),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "1-3", "SLURM_STEP_GPUS": "1"}, [1]),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "4,5,6,7"}, [0, 1, 2, 3]),  # confined and renumbered
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0"}, [0]),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, [0, 1, 2, 3]),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, [0, 1, 2, 3]),  # set where CDI injects the devices
        ({"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}, [0, 1, 2, 3]),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, []),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1a2"}, [2]),  # a privileged pod shows all four
        ({"NVIDIA_VISIBLE_DEVICES": "0,3"}, [0, 3]),
        ({"NVIDIA_VISIBLE_DEVICES": "4,5,6,7"}, [0, 1, 2, 3]),  # the toolkit applied and renumbered them
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1a2", "CUDA_VISIBLE_DEVICES": "0,2"}, [2]),
    ],
)
def test_grants(environ: dict[str, str], expected: list[int]) -> None:
    assert visible(**environ) == expected


def test_a_slurm_job_without_gpus_is_noted() -> None:
    assert any("--gres" in note for note in select(GPUS, {"SLURM_JOB_ID": "7"}).notes)
    assert select(GPUS, {}).notes == []


def test_granted_slice_in_a_privileged_container() -> None:
    slices = tuple(MigSlice(uuid=f"MIG-{n}", name="1g") for n in range(3))
    gpu = GPUS[0].model_copy(update={"mig_enabled": True, "slices": slices})
    selection = select([gpu], {"NVIDIA_VISIBLE_DEVICES": "MIG-2"})
    assert [part.uuid for _, part in selection.devices if part] == ["MIG-2"]
    assert {gpu.uuid for gpu in selection.unused} == {"MIG-0", "MIG-1"}


def test_mig_without_slices_is_explained() -> None:
    gpu = GPUS[0].model_copy(update={"mig_enabled": True})
    selection = select([gpu, GPUS[1]], {})
    assert [reading.index for reading, _ in selection.devices] == [1]
    assert "not divided" in selection.unused[0].reason


def test_mixed_models_note_the_order() -> None:
    mixed = [GPUS[0], GPUS[1].model_copy(update={"name": "T4"})]
    assert any("fastest first" in note for note in select(mixed, {}).notes)
    assert select(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).notes == []


def test_the_environment_is_not_read_behind_the_callers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert visible() == [0, 1, 2, 3]
