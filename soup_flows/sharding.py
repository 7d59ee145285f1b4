"""From what the user asked and what the machine has to one `ShardingPlan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.batch import Batch, Steps, batch_arithmetic, steps
from soup_flows.deepspeed import get_deepspeed_config, load_deepspeed_config, resolve_deepspeed_config
from soup_flows.errors import refuse
from soup_flows.fsdp import get_fsdp_config, resolve_fsdp_config
from soup_flows.hardware import Hardware
from soup_flows.spec import TrainingSpec

Engine = Literal["deepspeed", "fsdp", "ddp", "single"]
Dtype = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw_torch", "adamw_torch_fused"]


class ShardingPlan(BaseModel):
    """What will run on every rank. The launcher and the ranks read nothing else.

    `reasons` maps each value that was chosen automatically to one sentence that says why.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategy: str
    """`single`, `ddp`, or a preset's name; for a user's own JSON the preset it comes closest to."""
    engine: Engine
    device: Literal["cuda", "cpu"]
    world_size: int
    """Ranks over all nodes."""
    nodes: int = 1
    dtype: Dtype
    """Compute dtype."""
    optimizer: OptimizerName
    batch: Batch
    rows: int | None = None
    """Training rows found in the data set; None when they cannot be counted before the launch."""
    steps: Steps | None = None
    """Real optimizer steps; None when `rows` is None."""
    config: dict[str, Any]
    """The DeepSpeed JSON, or what `TrainingArguments(fsdp_config=...)` takes; empty for `single` and `ddp`."""
    config_source: str
    """The preset or the file the config comes from."""
    reason: str
    """Why this strategy, in one sentence."""
    reasons: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    """One line per value that a preset or file had and that was adapted: old -> new, and why."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.world_size // self.nodes


def make_plan(spec: TrainingSpec, hardware: Hardware, rows: int | None = None) -> ShardingPlan:
    """Resolve the sharding config of `spec` for `hardware`.

    Args:
        spec: what the user asked.
        hardware: the machine that will run it.
        rows: training rows, when they are known; step counts follow from them.

    Raises:
        Refused: with the field and the nearest valid value, for GPUs that are not there, batches that cannot
            be divided, configs that cannot be read, and settings that contradict each other.
    """
    user_config = load_deepspeed_config(spec.deepspeed_config) if spec.deepspeed_config else None
    device, world_size, world_reason = _world(spec, hardware)
    dtype, dtype_reason = _dtype(spec, hardware, device)
    strategy, reason = _strategy(spec, world_size, user_config)
    _refuse_method(spec, strategy, device)
    batch, batch_reason = _batch(spec, world_size, user_config)
    config, notes = _config(spec, strategy, hardware, device, dtype, batch, user_config)
    optimizer: OptimizerName = "adamw_torch_fused"
    optimizer_reason = "the fused kernel is the fastest AdamW on GPUs"
    if spec.training.optimizer != "auto":
        optimizer, optimizer_reason = spec.training.optimizer, "as asked"
    elif device == "cpu" or "offload" in strategy or strategy == "zero3_nvme":
        optimizer, optimizer_reason = "adamw_torch", "the optimizer steps on CPU"
    train = spec.training
    return ShardingPlan(
        strategy=strategy,
        engine=_engine(strategy),
        device=device,
        world_size=world_size,
        dtype=dtype,
        optimizer=optimizer,
        batch=batch,
        rows=rows,
        steps=None
        if rows is None
        else steps(rows, batch, train.num_train_epochs, train.max_steps, train.warmup_ratio),
        config=config,
        config_source=spec.deepspeed_config or (f"preset {strategy}" if config else "no preset"),
        reason=reason,
        reasons={
            "world_size": world_reason,
            "dtype": dtype_reason,
            "optimizer": optimizer_reason,
            "batch": batch_reason,
        },
        notes=tuple(notes),
    )


def _engine(strategy: str) -> Engine:
    """Name what wraps the model under `strategy`."""
    if strategy in ("single", "ddp"):
        return "single" if strategy == "single" else "ddp"
    return "deepspeed" if strategy.startswith("zero") else "fsdp"


def _world(spec: TrainingSpec, hardware: Hardware) -> tuple[Literal["cuda", "cpu"], int, str]:
    """Decide the device and the number of ranks, and say why."""
    found = len(hardware.gpus)
    if spec.device == "cpu":
        ranks = 1 if spec.gpus == "auto" else spec.gpus
        return "cpu", ranks, f"device=cpu: {ranks} rank(s) on CPU over gloo"
    if hardware.device != "cuda" or not found:
        why = "; ".join(hardware.notes) or "no CUDA device was found"
        raise refuse(
            "PLAN001",
            "gpus",
            f"gpus={spec.gpus} needs GPUs and this machine offers none ({why})",
            "run on a GPU machine, or pass device=cpu to run that many ranks on CPU",
        )
    ranks = found if spec.gpus == "auto" else spec.gpus
    if ranks > found:
        raise refuse(
            "PLAN002",
            "gpus",
            f"gpus={ranks}, but {found} can be seen here",
            f"use gpus={found} or fewer, or gpus=auto",
        )
    return "cuda", ranks, f"{ranks} of {found} visible GPU(s)"


def _dtype(spec: TrainingSpec, hardware: Hardware, device: str) -> tuple[Dtype, str]:
    """Decide the compute dtype from the GPUs' compute capability, and say why."""
    asked = spec.training.dtype
    if device == "cpu":
        if asked == "fp16":
            raise refuse(
                "PLAN003", "training.dtype", "fp16 is not supported on CPU", "use dtype=fp32 or bf16"
            )
        return ("fp32", "CPU ranks compute in fp32") if asked == "auto" else (asked, "as asked")
    old = [gpu.name for gpu in hardware.gpus if gpu.bf16 is False]
    if asked == "bf16" and old:
        message = f"{old[0]} has no bf16 (compute capability below 8.0)"
        raise refuse("PLAN004", "training.dtype", message, "use dtype=fp16, or dtype=auto")
    if asked != "auto":
        return asked, "as asked"
    if old:
        return "fp16", f"{old[0]} has no bf16 (compute capability below 8.0)"
    return "bf16", "the GPUs have bf16 (compute capability 8.0 or newer)"


def _strategy(spec: TrainingSpec, world_size: int, user_config: dict[str, Any] | None) -> tuple[str, str]:
    """Decide the strategy's name, and say why."""
    pinned = spec.deepspeed or spec.fsdp
    if pinned:
        return {"zero_pp": "zero++"}.get(pinned, pinned), "the preset you named"
    if user_config is not None:
        return _nearest_preset(user_config), "the DeepSpeed JSON you named"
    if spec.strategy == "ddp" or (spec.strategy == "auto" and world_size > 1):
        if world_size < 2:
            raise refuse("PLAN005", "strategy", "ddp needs at least 2 ranks", "use gpus=2 or strategy=single")
        return (
            "ddp",
            "as asked" if spec.strategy == "ddp" else "several ranks and no preset: plain replication",
        )
    if world_size > 1:
        raise refuse(
            "PLAN006", "strategy", f"single means one rank, not {world_size}", "use gpus=1 or strategy=ddp"
        )
    return "single", "as asked" if spec.strategy == "single" else "one rank shards nothing"


def _refuse_method(spec: TrainingSpec, strategy: str, device: str) -> None:
    """Refuse methods that cannot run on the device or under the strategy."""
    if spec.training.method == "qlora" and device == "cpu":
        message = "4-bit weights (bitsandbytes) are trained on GPUs only"
        raise refuse("PLAN012", "training.method", message, "use method=lora on CPU")
    if spec.training.method == "qlora" and (strategy == "zero++" or strategy.startswith("zero3")):
        message = f"{strategy} does not shard 4-bit weights: every GPU would hold the whole model"
        fix = "use method=lora, or fsdp=full_shard, or deepspeed=zero2"
        source = "transformers/modeling_utils.py, quantized models skip zero.Init"
        raise refuse("PLAN013", "training.method", message, fix, source)
    if spec.lora.merge_adapter and not spec.trains_adapters:
        message = "there is no adapter to merge with training.method=full"
        raise refuse(
            "PLAN014", "lora.merge_adapter", message, "set training.method=lora, or merge_adapter=false"
        )


def _nearest_preset(config: dict[str, Any]) -> str:
    """Name the preset that shards like a user's JSON does."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise refuse(
            "PLAN007",
            "deepspeed_config",
            f"zero_optimization.stage is {stage!r}, so nothing would be sharded",
            "set it to 1, 2 or 3, or drop deepspeed_config and use strategy=ddp",
        )
    devices = {
        block.get("device")
        for key in ("offload_optimizer", "offload_param")
        if isinstance(block := zero.get(key), dict)
    }
    if stage == 3 and "nvme" in devices:
        return "zero3_nvme"
    if stage == 3 and zero.get("zero_hpz_partition_size", 1) > 1:
        return "zero++"
    return f"zero{stage}" + ("_offload" if devices & {"cpu", "nvme"} and stage > 1 else "")


def _batch(spec: TrainingSpec, world_size: int, config: dict[str, Any] | None) -> tuple[Batch, str]:
    """Divide the global batch over the ranks; numbers in a user's JSON win over the spec's."""
    train = spec.training
    micro, total = train.per_device_train_batch_size, train.global_batch_size
    reason = f"{total} rows per optimizer step, divided over {world_size} rank(s)"
    if config is not None:
        numbers = {
            key: config[key]
            for key in (
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
            )
            if isinstance(config.get(key), int)
        }
        if numbers:
            micro = numbers.get("train_micro_batch_size_per_gpu", micro)
            accumulation = numbers.get("gradient_accumulation_steps")
            if "train_batch_size" in numbers:
                total = numbers["train_batch_size"]
            elif micro and accumulation:
                total = micro * accumulation * world_size
            elif accumulation:
                micro = total // (accumulation * world_size) or 1
            reason = "the numbers in your DeepSpeed JSON: " + ", ".join(
                f"{k}={v}" for k, v in numbers.items()
            )
    batch = batch_arithmetic(total, world_size, micro)
    if config is not None:
        actual = {
            "train_batch_size": batch.global_batch_size,
            "train_micro_batch_size_per_gpu": batch.per_device_train_batch_size,
            "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        }
        wrong = {k: v for k, v in actual.items() if isinstance(config.get(k), int) and config[k] != v}
        if wrong:
            listed = ", ".join(f"{key}={config[key]} (would be {value})" for key, value in wrong.items())
            raise refuse(
                "PLAN008",
                "deepspeed_config",
                f"train_batch_size must be micro batch x accumulation x {world_size} ranks; {listed}",
                'write "auto" for the three batch keys',
            )
    return batch, reason


def _config(
    spec: TrainingSpec,
    strategy: str,
    hardware: Hardware,
    device: str,
    dtype: Dtype,
    batch: Batch,
    user_config: dict[str, Any] | None,
) -> tuple[dict[str, Any], list[str]]:
    """Build the engine's config; a user's own JSON is taken as it is."""
    if user_config is not None:
        return user_config, []
    engine = _engine(strategy)
    if engine == "fsdp":
        config, notes = resolve_fsdp_config(get_fsdp_config(strategy), batch.world_size)
        return config["fsdp_config"], notes
    if engine != "deepspeed":
        return {}, []
    return resolve_deepspeed_config(
        get_deepspeed_config(strategy),
        batch.world_size,
        per_device_train_batch_size=batch.per_device_train_batch_size,
        train_batch_size=batch.global_batch_size,
        dtype=dtype,
        gradient_clipping=spec.training.max_grad_norm,
        nvme_path=spec.nvme_path,
        has_compiler=bool(hardware.cxx and hardware.ninja),
        pin_memory=None if device == "cuda" else False,
    )


def read_model_config(model: str) -> dict[str, Any] | None:
    """Return a local model folder's `config.json`, or None for a Hub id.

    Raises:
        Refused: if `model` is a folder without a readable `config.json`, or looks like a path that is missing.
    """
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
            raise refuse(
                "PLAN009", "model", f"there is no folder {model!r}", "give a model folder or a Hub id"
            )
        return None
    file = folder / "config.json"
    if not file.is_file():
        raise refuse(
            "PLAN010", "model", f"{model!r} has no config.json", "give a folder made by save_pretrained()"
        )
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise refuse(
            "PLAN011",
            "model",
            f"{file} cannot be read: {error}",
            "save the model again with save_pretrained()",
        ) from None
    if not isinstance(value, dict):
        raise refuse("PLAN011", "model", f"{file} is not a JSON object", "save the model again")
    return value
