"""What was asked and what must be decided before anything can be predicted: ranks, dtype, strategy, batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from soup_flows.batch import Batch, batch_arithmetic, largest_divisor, positive
from soup_flows.errors import Refused, refuse
from soup_flows.hardware import Hardware
from soup_flows.sharding.values import Device, Dtype, OptimizerName
from soup_flows.spec import TrainingSpec
from soup_flows.units import ranks

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class World:
    """The ranks of a run."""

    device: Device
    ranks_per_node: int
    nodes: int
    reason: str
    auto: bool = False
    """Whether their number was left to the planner."""

    @property
    def size(self) -> int:
        """Ranks over all nodes."""
        return self.ranks_per_node * self.nodes


def decide_world(spec: TrainingSpec, hardware: Hardware, nodes: int, total: int | None) -> World:
    """Decide the device and the number of ranks, and say why.

    Args:
        spec: what was asked; its `gpus` count for each node.
        hardware: one node.
        nodes: machines like it.
        total: rows per optimizer step, if `gpus="auto"` may leave GPUs idle to divide them evenly.

    Raises:
        Refused: for GPUs that are not there.
    """
    positive("nodes", nodes)
    found = len(hardware.gpus)
    each = f" on each of {nodes} nodes" if nodes > 1 else ""
    if spec.device == "cpu":
        ranks = 1 if spec.gpus == "auto" else spec.gpus
        return World("cpu", ranks, nodes, f"device=cpu: {ranks} rank(s) on CPU over gloo{each}")
    if hardware.device != "cuda" or not found:
        why = "; ".join(hardware.notes) or "no CUDA device was found"
        raise refuse(
            "PLAN001",
            "gpus",
            f"gpus={spec.gpus} needs GPUs and this machine offers none ({why})",
            "run on a GPU machine, or pass device=cpu to run that many ranks on CPU",
        )
    if spec.gpus == "auto":
        ranks = found
        if total is not None and total % nodes == 0:
            ranks = max(n for n in range(1, found + 1) if total // nodes % n == 0)
        reason = f"{ranks} of {found} visible GPU(s){each}"
        if ranks < found:
            reason += f": {total} rows per optimizer step cannot be split evenly over more"
        return World("cuda", ranks, nodes, reason, auto=True)
    if spec.gpus > found:
        raise refuse(
            "PLAN002",
            "gpus",
            f"gpus={spec.gpus}, but {found} can be seen here",
            f"use gpus={found} or fewer, or gpus=auto",
        )
    return World("cuda", spec.gpus, nodes, f"as asked: {spec.gpus} of {found} visible GPU(s){each}")


def decide_dtype(spec: TrainingSpec, hardware: Hardware, device: str) -> tuple[Dtype, str]:
    """Decide the compute dtype from the GPUs' compute capability, and say why.

    Raises:
        Refused: for a dtype that the device does not have.
    """
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


def named_strategy(
    spec: TrainingSpec, world_size: int, user_config: dict[str, Any] | None
) -> tuple[str | None, str]:
    """Return the strategy that was named and the words for it, or None where the planner may choose.

    Raises:
        Refused: for a strategy that contradicts the number of ranks.
    """
    preset = spec.deepspeed or spec.fsdp
    if preset:
        return {"zero_pp": "zero++"}.get(preset, preset), "the preset you named"
    if user_config is not None:
        return nearest_preset(user_config), "the DeepSpeed JSON you named"
    if spec.strategy == "ddp" and world_size < 2:
        raise refuse("PLAN005", "strategy", "ddp needs at least 2 ranks", "use gpus=2 or strategy=single")
    if spec.strategy == "single" and world_size > 1:
        message = f"single means one rank, not {world_size}"
        raise refuse("PLAN006", "strategy", message, "use gpus=1 or strategy=ddp")
    return (None, "") if spec.strategy == "auto" else (spec.strategy, "as asked")


def check_method(spec: TrainingSpec, strategy: str | None, device: str) -> None:
    """Refuse methods that cannot run on the device or under a named strategy.

    Raises:
        Refused: with what to use instead.
    """
    if spec.training.method == "qlora" and device == "cpu":
        message = "4-bit weights (bitsandbytes) are trained on GPUs only"
        raise refuse("PLAN012", "training.method", message, "use method=lora on CPU")
    if strategy is not None and not shards_method(spec, strategy):
        message = f"{strategy} does not shard 4-bit weights: every GPU would hold the whole model"
        fix = "use method=lora, or fsdp=full_shard, or deepspeed=zero2"
        source = "transformers/modeling_utils.py, quantized models skip zero.Init"
        raise refuse("PLAN013", "training.method", message, fix, source)
    if spec.lora.merge_adapter and not spec.trains_adapters:
        message = "there is no adapter to merge with training.method=full"
        raise refuse(
            "PLAN014", "lora.merge_adapter", message, "set training.method=lora, or merge_adapter=false"
        )


def shards_method(spec: TrainingSpec, strategy: str) -> bool:
    """Whether `strategy` shards what it promises to under the asked method."""
    return spec.training.method != "qlora" or not (strategy == "zero++" or strategy.startswith("zero3"))


def nearest_preset(config: dict[str, Any]) -> str:
    """Name the preset that shards like a user's JSON does.

    Raises:
        Refused: for a JSON that shards nothing.
    """
    block = config.get("zero_optimization")
    zero = block if isinstance(block, dict) else {}
    stage = whole_number(zero.get("stage"))
    if stage not in (1, 2, 3):
        raise refuse(
            "PLAN007",
            "deepspeed_config",
            _why_no_stage(config),
            "set zero_optimization.stage to 1, 2 or 3, or drop deepspeed_config and use strategy=ddp",
        )
    devices = {
        device
        for key in ("offload_optimizer", "offload_param")
        if isinstance(block := zero.get(key), dict) and isinstance(device := block.get("device"), str)
    }
    if stage == 3 and "nvme" in devices:
        return "zero3_nvme"
    if stage == 3 and (whole_number(zero.get("zero_hpz_partition_size")) or 1) > 1:
        return "zero++"
    return f"zero{stage}" + ("_offload" if devices & {"cpu", "nvme"} and stage > 1 else "")


def _why_no_stage(config: dict[str, Any]) -> str:
    """Say what keeps a JSON from having a stage that shards, with the value that was found."""
    zero = config.get("zero_optimization")
    if "zero_optimization" not in config:
        return "there is no zero_optimization block, so nothing would be sharded"
    if not isinstance(zero, dict):
        return f"zero_optimization is {_shown(zero)} and not a block"
    if "stage" not in zero:
        return "zero_optimization has no stage, so nothing would be sharded"
    if whole_number(zero["stage"]) == 0:
        return "zero_optimization.stage is 0, so nothing would be sharded"
    return f"zero_optimization.stage is {_shown(zero['stage'])}, and there is no such stage"


def _shown(value: object) -> str:
    """Return a value as a message quotes it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def whole_number(value: object) -> int | None:
    """Return a whole number of a user's JSON, also one with a point; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def batch_numbers(config: dict[str, Any] | None) -> dict[str, int]:
    """Return the batch numbers of a user's JSON that can be used; the validation speaks of the others."""
    values = {key: (config or {}).get(key) for key in BATCH_KEYS}
    return {key: value for key, value in values.items() if type(value) is int and value > 0}


def decide_optimizer(spec: TrainingSpec, device: str, strategy: str) -> tuple[OptimizerName, str]:
    """Decide the optimizer's implementation, and say why."""
    if spec.training.optimizer != "auto":
        return spec.training.optimizer, "as asked"
    if device == "cpu" or "offload" in strategy or strategy == "zero3_nvme":
        return "adamw_torch", "the optimizer steps on CPU"
    return "adamw_torch_fused", "the fused kernel is the fastest AdamW on GPUs"


@dataclass(frozen=True)
class BatchAsked:
    """What is said about the batch: by a user's own JSON, else by the spec."""

    total: int
    """Rows per optimizer step."""
    micro: int | None
    """Rows per rank and pass; None where the planner may choose."""
    reason: str
    field: str = "training.global_batch_size"
    """Where the total was read."""

    def divided(self, world_size: int, limit: int | None = None) -> Batch:
        """Spread it over the ranks, with at most `limit` rows per pass where none are asked for.

        Raises:
            Refused: if it cannot be split evenly.
        """
        try:
            return batch_arithmetic(self.total, world_size, self.micro or limit)
        except Refused as refused:  # its fields are the function's arguments, not the user's settings
            raise Refused([p.model_copy(update={"field": self.field}) for p in refused.problems]) from None

    def micro_batches(self, world_size: int, limit: int) -> list[int]:
        """Return the micro batches to consider, largest first; 1 where the batch cannot be split."""
        if self.total % world_size:
            return []
        share = self.total // world_size
        if self.micro is not None:
            return [largest_divisor(share, self.micro)]
        return [m for m in range(min(limit, share), 0, -1) if share % m == 0]


def asked_batch(spec: TrainingSpec, world_size: int, config: dict[str, Any] | None) -> BatchAsked:
    """Read the batch; numbers in a user's JSON win over the spec's.

    Raises:
        Refused: for numbers in the JSON that contradict each other.
    """
    train = spec.training
    micro, total = train.per_device_train_batch_size, train.global_batch_size
    numbers, field = batch_numbers(config), BatchAsked.field
    if not numbers:
        return BatchAsked(total, micro, f"{total} rows per optimizer step, divided over {{}} rank(s)")
    micro = numbers.get("train_micro_batch_size_per_gpu", micro)
    accumulation = numbers.get("gradient_accumulation_steps")
    if "train_batch_size" in numbers:
        total, field = numbers["train_batch_size"], "deepspeed_config.train_batch_size"
    elif micro and accumulation:
        total = micro * accumulation * world_size
    if micro is None and accumulation:
        micro = max(1, total // (accumulation * world_size))
    listed = ", ".join(f"{k}={v}" for k, v in numbers.items())
    asked = BatchAsked(total, micro, f"the numbers in your DeepSpeed JSON: {listed}", field)
    _check_numbers(numbers, asked.divided(world_size), world_size)
    return asked


def _check_numbers(numbers: dict[str, int], batch: Batch, world_size: int) -> None:
    """Refuse numbers of a JSON that the arithmetic cannot keep."""
    actual = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.per_device_train_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
    }
    wrong = {key: actual[key] for key, value in numbers.items() if actual[key] != value}
    if wrong:
        listed = ", ".join(f"{key}={numbers[key]} (would be {value})" for key, value in wrong.items())
        raise refuse(
            "PLAN008",
            "deepspeed_config",
            f"train_batch_size must be micro batch x accumulation x {ranks(world_size)}; {listed}",
            'write "auto" for the three batch keys',
        )
