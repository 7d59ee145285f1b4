"""The rehearsal: two steps of the resolved run on CPU ranks with a small copy of the model, before GPUs are taken.

The copy, the rows and the runs live in one folder, which is removed unless a rehearsal failed.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from soup_flows.child import call
from soup_flows.deepspeed import load_deepspeed_config
from soup_flows.errors import Problem, Refused
from soup_flows.hardware import Hardware, detect
from soup_flows.launch.outcome import classify
from soup_flows.launch.run import run
from soup_flows.paths import RunPaths, write_json
from soup_flows.run_events import read_run
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.tasks import resolve_sharding_config, write_temp_config
from soup_flows.user_file import expanded

FIELD = "validation.rehearse"
STEPS, RANKS, MICRO_BATCH, PASSES, EVAL_ROWS = 2, 2, 8, 2, 4
"""Most steps, ranks, rows per rank and pass, passes per step, and held-out rows of a rehearsal."""
TIMEOUT_MIN = 15.0
"""Longest a rehearsed run may take; the first off-load on a machine compiles an operator for minutes."""
SAME_LOSS = 1e-3
"""How far the loss of a resumed step may be from the one that was not interrupted, relatively."""
GPU_ONLY_KEYS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


@task(name="rehearse", cache_policy=NO_CACHE)
def rehearse(spec: TrainingSpec, plan: ShardingPlan, folder: Path, run_id: str) -> list[Problem]:
    """Run the plan for two steps on at most two CPU ranks, save after the first, resume it and compare.

    The copy of the model has the same class, vocabulary and kinds of layers with random weights; preset,
    adapters, task, schedule, packing and the first rows are those of the run.

    Args:
        spec: what was asked.
        plan: the resolved plan.
        folder: where the rehearsal lives; emptied first, and removed unless the rehearsal fails.
        run_id: the marker of its processes.

    Returns:
        One note per thing that was rehearsed (`RH001`) and per thing that could not be (`RH002`).

    Raises:
        Refused: `RH003` with the failure class, the cause and the fix; `folder` is kept then. `RH004` when no
            small copy of the model can be made.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    keep = False
    try:
        small, found = _small_run(spec, plan, folder)
        hardware = detect("cpu", [str(folder)])
        first = _train(small, hardware, folder / "first", run_id)
        checkpoint = first["checkpoints"][0].path
        resumes = small.recovery.model_copy(update={"resume": checkpoint})
        second = _train(small.model_copy(update={"recovery": resumes}), hardware, folder / "resumed", run_id)
        losses = [result["train"][-1].loss for result in (first, second)]
        if None in losses or not math.isclose(*losses, rel_tol=SAME_LOSS):
            cause = f"the loss of step {STEPS} was {losses[0]}, and {losses[1]} when it was resumed"
            raise _failed("code_error", cause, "report it: the checkpoint lost something", folder)
    except Refused as refused:
        keep = refused.problems[0].id == "RH003"
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    resumed = (
        f"save and resume: step {STEPS} from the checkpoint of step 1 has the same loss, {losses[1]:.4f}"
    )
    done = [*_rehearsed(spec, small, plan, found), resumed, "final model: saved and read back"]
    notes = [_note("RH001", f"rehearsed, {text}") for text in done]
    return notes + [_note("RH002", f"not rehearsed, {text}") for text in _left_out(spec, small, plan)]


def _small_run(spec: TrainingSpec, plan: ShardingPlan, folder: Path) -> tuple[TrainingSpec, dict[str, Any]]:
    """Write model and rows in a process of its own, and return the spec of the rehearsal."""
    ranks = min(plan.world_size, RANKS)
    micro = min(plan.batch.per_device_train_batch_size, MICRO_BATCH)
    passes = min(plan.batch.gradient_accumulation_steps, PASSES)
    rows = STEPS * ranks * micro * passes
    if spec.data.eval_split and not spec.data.eval_dataset:
        rows = math.ceil(rows / (1 - spec.data.eval_split)) + 1
    request = {
        "spec": spec.model_dump(mode="json"),
        "folder": str(folder),
        "rows": rows,
        "eval_rows": EVAL_ROWS,
    }
    found = call("soup_flows.training.shrink", json.dumps(request), rule="RH004", field=FIELD,
                 what="no small copy of the model could be made")  # fmt: skip
    small = spec.model_dump(mode="json")
    small |= {
        "model": str(folder / "model"),
        "dataset": str(folder / "rows.jsonl"),
        "output_dir": str(folder),
    }
    small |= {
        "gpus": ranks,
        "device": "cpu",
        "nvme_path": None,
        **_strategy(spec, plan, folder, micro, passes),
    }
    small["training"] |= {
        "method": "lora" if spec.training.method == "qlora" else spec.training.method,
        "max_steps": STEPS,
        "global_batch_size": ranks * micro * passes,
        "per_device_train_batch_size": micro,
        "dtype": "fp32" if plan.dtype == "fp16" else plan.dtype,
        "optimizer": "auto",
        "gradient_checkpointing": plan.gradient_checkpointing,
        "logging_steps": 1,
        "eval_steps": 1 if spec.training.eval_steps else None,
        "report_to": [],
    }
    small["lora"]["target_modules"] = _targets(spec)
    held_out = str(folder / "eval.jsonl") if spec.data.eval_dataset else None
    small["data"] |= {
        "max_length": found["max_length"],
        "eval_dataset": held_out,
        "cache_dir": None,
        "workers": 1,
    }
    small["recovery"] |= {"resume": "never", "save_steps": 1, "save_total_limit": 2, "reuse": "never"}
    small["launcher"] |= {
        "engine": "local",
        "slurm": {},
        "ray": {},
        "timeout_min": TIMEOUT_MIN,
        "lease": "off",
        "drill": None,
    }
    return TrainingSpec.model_validate(small), found


def _strategy(
    spec: TrainingSpec, plan: ShardingPlan, folder: Path, micro: int, passes: int
) -> dict[str, str | None]:
    """Name the plan's strategy, chosen or asked; of a user's own JSON a copy is made that CPU ranks can run."""
    named: dict[str, str | None] = {
        "deepspeed": None,
        "fsdp": None,
        "deepspeed_config": None,
        "strategy": "auto",
    }
    if spec.deepspeed_config is not None:
        ranks = min(plan.world_size, RANKS)
        config = _json_for_cpu(load_deepspeed_config(spec.deepspeed_config), ranks, micro, passes)
        path = write_json(folder / "deepspeed.json", config)
        return named | {"deepspeed_config": str(path)}
    kind = {"deepspeed": "deepspeed", "fsdp": "fsdp"}.get(plan.engine, "strategy")
    name = {"zero3_nvme": "zero3_offload"}.get(plan.strategy, plan.strategy)
    return named | {kind: "single" if kind == "strategy" and plan.world_size == 1 else name}


def _json_for_cpu(config: dict[str, Any], ranks: int, micro: int, passes: int) -> dict[str, Any]:
    """Return the config with the rehearsal's batch, without fp16, NVMe, page-locked memory and CUDA kernels."""
    batch = {"train_batch_size": ranks * micro * passes, "train_micro_batch_size_per_gpu": micro,
             "gradient_accumulation_steps": passes}  # fmt: skip
    config = config | {key: value for key, value in batch.items() if isinstance(config.get(key), int)}
    zero = {k: v for k, v in config["zero_optimization"].items() if k not in GPU_ONLY_KEYS}
    for name in ("offload_optimizer", "offload_param"):
        block = zero.get(name)
        if isinstance(block, dict) and block.get("device", "none") != "none":
            zero[name] = {"device": "cpu", "pin_memory": False}
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = min(int(zero["zero_hpz_partition_size"]), ranks)
    config["zero_optimization"] = zero
    fp16, optimizer = config.get("fp16"), config.get("optimizer")
    if isinstance(fp16, dict) and fp16.get("enabled") is True:
        config["fp16"] = {"enabled": False}
    if isinstance(optimizer, dict) and str(optimizer.get("type")).lower() in ("adam", "adamw"):
        params = optimizer.get("params")
        config["optimizer"] = optimizer | {"params": {**(params or {}), "torch_adam": True}}
    return config


def _targets(spec: TrainingSpec) -> str | list[str]:
    """Return the adapters' targets; those that name layers by number would miss them in a copy with two."""
    targets = spec.lora.target_modules
    words = [targets] if isinstance(targets, str) else targets
    return "all-linear" if any(re.search(r"\d+\\?\.|layers", word) for word in words) else targets


def _train(spec: TrainingSpec, hardware: Hardware, output: Path, run_id: str) -> dict[str, Any]:
    """Plan, launch and judge one run below `output`; returns what its folder says.

    Raises:
        Refused: `RH003` if it does not end with a saved model and a good proof.
    """
    spec = spec.model_copy(update={"output_dir": str(output)})
    plan = resolve_sharding_config.fn(spec, hardware)
    launch = write_temp_config.fn(spec, hardware, plan, run_id)
    outcome = run(launch)
    paths = RunPaths(Path(launch.run_dir))
    found = read_run(paths, launch.attempt)
    proof = found.get("proof")
    if found.get("saved") and proof is not None and not proof.failures and not found["save_failures"]:
        return found
    if found["save_failures"]:
        cause = "the checkpoint of step 1 was not saved: " + "; ".join(found["save_failures"])
        raise _failed("disk_full", cause, "free space in the output folder", output.parent)
    raise _failed(*classify(paths.attempt(launch.attempt), outcome.receipt), output.parent)


def _failed(failure_class: str, cause: str, advice: str, folder: Path) -> Refused:
    message = f"the rehearsal on CPU ranks failed: {failure_class}: {cause}; everything about it: {folder}"
    return Refused([Problem(id="RH003", severity="error", field=FIELD, message=message, fix=advice)])


def _rehearsed(
    spec: TrainingSpec, small: TrainingSpec, plan: ShardingPlan, found: dict[str, Any]
) -> list[str]:
    """Say what ran, item by item."""
    batch, train = small.training, spec.training
    passes = min(plan.batch.gradient_accumulation_steps, PASSES)
    rows = "laid end to end" if spec.data.packing and not spec.compares_answers else "padded"
    told = [
        f"model: {found['class']} with {found['parameters']:,} random weights ({', '.join(found['changes'])})",
        f"data: {found['rows']} of the first rows, read, tokenised to at most {found['max_length']} tokens, {rows}",
        f"strategy: {small.deepspeed or plan.strategy} on {small.gpus} CPU rank(s) in {batch.dtype}, proven from "
        f"the ranks",
        f"batch: {batch.per_device_train_batch_size} rows x {passes} passes x {small.gpus} rank(s), {STEPS} steps "
        f"of {train.task}",
    ]  # fmt: skip
    if small.trains_adapters:
        told.append(f"adapters: LoRA on {small.lora.target_modules}, rank {small.lora.r}")
    return told


def _left_out(spec: TrainingSpec, small: TrainingSpec, plan: ShardingPlan) -> list[str]:
    """Say what the GPUs alone will show, item by item."""
    batch, gpu = plan.batch, plan.device == "cuda"
    config = plan.config.get("zero_optimization") or {}
    micro, passes = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
    items = {
        "GPU kernels, GPU memory and speed": gpu,
        "NCCL and the links between the GPUs": gpu and plan.world_size > 1,
        f"{plan.world_size} ranks: {small.gpus} ran": plan.world_size > RANKS,
        f"{plan.nodes} nodes": plan.nodes > 1,
        "fp16 and its loss scaling: the ranks computed in fp32": plan.dtype == "fp16",
        "4-bit or 8-bit weights: plain ones were trained": spec.training.method == "qlora"
        or _quantised(spec),
        "the NVMe disk: off-loaded to CPU memory instead": "nvme" in json.dumps(config),
        "quantised collectives of ZeRO++": any(config.get(key) for key in GPU_ONLY_KEYS),
        f"the optimizer {plan.optimizer}: plain AdamW ran": "fused" in plan.optimizer,
        f"micro batch {micro}: {MICRO_BATCH} rows ran": micro > MICRO_BATCH,
        f"{passes} passes per step: {PASSES} ran": passes > PASSES,
        f"rows of {spec.data.max_length} tokens": small.data.max_length < spec.data.max_length,
        "adapters on layers by number: all linear layers got one": small.trains_adapters
        and small.lora.target_modules != spec.lora.target_modules,
        f"the trackers {', '.join(spec.training.report_to)}": bool(spec.training.report_to),
        "the model's own weights and the loss they reach": True,
    }
    return [text for text, applies in items.items() if applies]


def _quantised(spec: TrainingSpec) -> bool:
    file = expanded(spec.model) / "config.json"
    return file.is_file() and "quantization_config" in file.read_text(encoding="utf-8")


def _note(rule: str, message: str) -> Problem:
    return Problem(id=rule, severity="note", field=FIELD, message=message)
