"""Presets x methods x GPUs x machines: exactly the expected verdicts, one table, reviewed by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from soup_flows.errors import Refused
from soup_flows.validation import validate
from tests.validation.world import install, machine, run

PRESETS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    **{
        name: {"deepspeed": name}
        for name in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero++")
    },
    **{name: {"fsdp": name} for name in ("full_shard", "shard_grad", "full_offload", "hybrid_shard")},
}
METHODS = ("full", "lora", "qlora")
COUNTS = (1, 2, 4, 8)
MACHINES = ("T4", "A100", "H100", "CPU")

FSDP = ("full_shard", "shard_grad", "full_offload", "hybrid_shard")
ZERO = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero++")
STAGE3 = ("zero3", "zero3_offload", "zero++")
OFFLOAD = ("zero2_offload", "zero3_offload", "full_offload")
ERRORS = {"PLAN005", "PLAN006", "PLAN012", "PLAN013"}
"""Those of the ids below that refuse the run."""


def expected(preset: str, method: str, count: int, where: str) -> set[str]:
    """Return the verdict: ids of everything that is said, given a healthy machine, 64 rows and a small bf16 model.

    The global batch is 16 and the micro batch at most 8, so one rank accumulates twice, and no other does.
    """
    if preset == "single" and count > 1:
        return {"PLAN006"}
    if preset == "ddp" and count == 1:
        return {"PLAN005"}
    if method == "qlora" and where == "CPU":
        return {"PLAN012"}  # 4-bit weights are trained on GPUs only
    if method == "qlora" and preset in STAGE3:
        return {"PLAN013"}  # quantised models skip ZeRO-3's partitioning
    said: set[str] = set()
    if method != "full":
        said.add("PE004")  # a note: the default learning rate is one for full fine-tuning
    if where == "T4":
        said.add("DT003")  # the model is in bf16 and a T4 computes in fp16
    if count == 1 and preset in (*ZERO, *FSDP) and preset not in OFFLOAD:
        said.add("BT003")  # one rank shards nothing
    if preset in FSDP and count > 1 and where in ("A100", "H100"):
        said.add("DT006")  # a note: gradients are reduced in bf16
    if preset in ZERO and method != "full" and where != "CPU":
        said.add("DT007")  # a note: adapters are cast
    if preset in ("zero3", "zero++") and method == "lora" and count > 1 and where != "CPU":
        said.add("DS012")  # a note: the small model fits every GPU
    return said


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("preset", PRESETS)
def test_verdicts(preset: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "bitsandbytes")
    found, wanted = {}, {}
    for number, (method, count) in enumerate(itertools.product(METHODS, COUNTS)):
        spec = {**PRESETS[preset], "gpus": count, "training": {"method": method}}
        spec["device"] = "cpu" if where == "CPU" else "auto"
        folder = tmp_path / str(number)
        folder.mkdir()
        case = f"{preset} {method} {count} x {where}"
        wanted[case] = expected(preset, method, count, where)
        try:
            context = run(folder, spec=spec, on=machine(where, count))
            problems = validate(context.spec, context.hardware, context.plan, environ={})
        except Refused as refused:
            problems = list(refused.problems)
        found[case] = {problem.id for problem in problems}
        assert {p.id for p in problems if p.severity == "error"} == wanted[case] & ERRORS
    assert found == wanted


def test_nvme_needs_a_path(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        run(tmp_path, spec={"deepspeed": "zero3_nvme"})
    assert [problem.field for problem in refused.value.problems] == ["nvme_path"]
