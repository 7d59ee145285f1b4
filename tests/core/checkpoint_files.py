"""Folders like those the trainers write, with real manifests and tiny contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soup_flows.checkpoints import seal
from soup_flows.hardware import detect
from soup_flows.manifest import Manifest, library_versions
from soup_flows.resume import digest
from soup_flows.resume_fit import identity
from soup_flows.sharding import ShardingPlan, make_plan
from soup_flows.spec import TrainingSpec, parse_spec


def safetensors(tensors: dict[str, list[int]]) -> bytes:
    """The bytes of a safetensors file of zeros in fp32."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def make_spec(tmp_path: Path, **values: Any) -> TrainingSpec:
    data = tmp_path / "rows.jsonl"
    if not data.exists():
        data.write_text('{"messages": []}\n')
    base = {"model": "m", "dataset": str(data), "output_dir": str(tmp_path), "device": "cpu", "gpus": 2}
    return parse_spec(base | values)


def plan_of(spec: TrainingSpec) -> ShardingPlan:
    return make_plan(spec, detect("cpu", []))


FILES: dict[str, list[str]] = {
    "ddp": ["optimizer.pt", "scheduler.pt"],
    "fsdp": ["pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt"],
    "single": ["optimizer.pt", "scheduler.pt"],
}


def write_checkpoint(folder: Path, spec: TrainingSpec, step: int, run_id: str = "run", **fields: Any) -> Path:
    """Write and seal `folder/checkpoint-<step>` as a run of `spec` would."""
    plan = plan_of(spec)
    target = folder / f"checkpoint-{step}"
    target.mkdir(parents=True)
    ranks = range(plan.world_size)
    names = ["rng_state.pth"] if plan.world_size == 1 else [f"rng_state_{r}.pth" for r in ranks]
    if plan.engine == "deepspeed":
        inner = f"global_step{step}"
        names += ["latest", "scheduler.pt"]
        names += [f"{inner}/zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in ranks]
        zero3 = plan.strategy == "zero3"
        names += [f"{inner}/{'zero_pp_rank_0_' if zero3 else ''}mp_rank_00_model_states.pt"]
        names += [f"{inner}/zero_pp_rank_1_mp_rank_00_model_states.pt"] if zero3 else []
    else:
        names += FILES[plan.engine]
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(f"{name} of step {step}".encode() * 10)
    lora = spec.training.method == "lora"
    weights = target / ("adapter_model.safetensors" if lora else "model.safetensors")
    weights.write_bytes(safetensors({"lora_A.weight": [4, 8], "lora_B.weight": [8, 4]}))
    (target / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    settings = identity(spec)
    manifest = Manifest(
        run_id=run_id,
        step=step,
        total_steps=10,
        strategy=plan.strategy,
        engine=plan.engine,
        world_size=plan.world_size,
        dtype=plan.dtype,
        adapters=lora,
        identity=settings,
        spec_hash=digest(settings),
        versions=library_versions(),
    )
    seal(target, manifest.model_copy(update=fields))
    return target
