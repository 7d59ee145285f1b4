"""Rules about a DeepSpeed JSON against the run: batch, dtype, clipping, optimizer, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from soup_flows.errors import nearest
from soup_flows.validation.deepspeed_config import DeepSpeedJson, at
from soup_flows.validation.table import ACCELERATE, DEEPSPEED, TRANSFORMERS, Found, rule, rules_in

TOTAL, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Names that DeepSpeed builds itself, in any case (runtime/config.py, DEEPSPEED_OPTIMIZERS)."""
TORCH_OPTIMIZERS = ("SGD", "ASGD", "RMSprop", "Rprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Adafactor")
"""Names that it takes from `torch.optim`, as they are spelt."""
REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
TESTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
"""runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS."""


@rule(
    "DS030",
    "error",
    "deepspeed_config.train_batch_size",
    "DeepSpeed asserts that train_batch_size = micro batch x accumulation x ranks",
    fix='write "auto" for the three batch keys',
    source="deepspeed/runtime/config.py, _batch_assertion",
    versions=DEEPSPEED,
)
def batch_product(config: DeepSpeedJson) -> Iterator[Found]:
    """Batch numbers whose product does not hold, for the run's ranks or for any number of ranks."""
    total, micro, accumulation = (config.number(key) for key in (TOTAL, MICRO, ACCUMULATION))
    for key, value in ((TOTAL, total), (MICRO, micro), (ACCUMULATION, accumulation)):
        if value is not None and value < 1:
            yield at(key, f"{key} is {value}")
            return
    if total is None:
        return
    world = config.world_size
    product = (micro or 1) * (accumulation or 1) * (world or 1)
    known = micro is not None and accumulation is not None
    if total % product or (known and world is not None and total != product):
        factors = [
            f"{value:g} {name}"
            for name, value in (("(micro)", micro), ("(accumulation)", accumulation), ("ranks", world))
            if value is not None
        ]
        yield at(TOTAL, f"train_batch_size is {total:g}, and {' x '.join(factors)} is {product:g}")


@rule(
    "DS031",
    "error",
    "deepspeed_config.train_micro_batch_size_per_gpu",
    "DeepSpeed asserts that one of them is there",
    fix='add "train_batch_size", "train_micro_batch_size_per_gpu" and "gradient_accumulation_steps": "auto"',
    source="deepspeed/runtime/config.py, _set_batch_related_parameters",
    versions=DEEPSPEED,
)
def no_batch(config: DeepSpeedJson) -> Iterator[Found]:
    """Neither `train_batch_size` nor `train_micro_batch_size_per_gpu`."""
    if not config.has(TOTAL) and not config.has(MICRO):
        yield at(MICRO, "neither train_batch_size nor train_micro_batch_size_per_gpu is there")


@rule(
    "DS032",
    "error",
    "deepspeed_config.gradient_accumulation_steps",
    "accelerate writes 1 and the batch assertion of DeepSpeed fails",
    fix='add "gradient_accumulation_steps": "auto"',
    source="accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__",
    versions=f"{ACCELERATE}, {DEEPSPEED}",
)
def no_accumulation(config: DeepSpeedJson) -> Iterator[Found]:
    """No `gradient_accumulation_steps` beside `train_batch_size`, in a run that accumulates."""
    if config.run and config.has(TOTAL) and not config.has(ACCUMULATION):
        steps = config.run.plan.batch.gradient_accumulation_steps
        if steps > 1:
            yield at(ACCUMULATION, f"gradient_accumulation_steps is missing and the run accumulates {steps}")


@rule(
    "DS033",
    "warning",
    "deepspeed_config.gradient_accumulation_steps",
    "gradients are right, but the engine counts 1 pass per step: its batch size and throughput are wrong",
    fix='add "gradient_accumulation_steps": "auto"',
    source="accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__",
    versions=f"{ACCELERATE}, {DEEPSPEED}",
)
def accumulation_hidden(config: DeepSpeedJson) -> Iterator[Found]:
    """No `gradient_accumulation_steps` and no `train_batch_size`, in a run that accumulates."""
    if config.run and config.has(MICRO) and not config.has(TOTAL) and not config.has(ACCUMULATION):
        steps = config.run.plan.batch.gradient_accumulation_steps
        if steps > 1:
            yield at(ACCUMULATION, f"gradient_accumulation_steps is missing and the run accumulates {steps}")


@rule(
    "DS034",
    "warning",
    "deepspeed_config.train_micro_batch_size_per_gpu",
    "the global batch changes with the number of GPUs, and with it the number of steps and the schedule",
    fix='write "auto" for the three batch keys and set training.global_batch_size',
    source="deepspeed/runtime/config.py, _set_batch_related_parameters",
    versions=DEEPSPEED,
)
def moving_batch(config: DeepSpeedJson) -> Iterator[Found]:
    """Fixed micro batch and accumulation without a `train_batch_size`."""
    micro, accumulation = config.number(MICRO), config.number(ACCUMULATION)
    if micro and accumulation and config.number(TOTAL) is None:
        yield at(MICRO, f"each rank takes {micro:g} x {accumulation:g} rows per step, whatever the ranks")


@rule(
    "DS040",
    "error",
    "deepspeed_config.bf16.enabled",
    "transformers stops: the config and the run must agree on the dtype",
    fix='write {"enabled": "auto"} in bf16 and fp16, or set training.dtype',
    source="transformers/integrations/deepspeed.py, trainer_config_process",
    versions=TRANSFORMERS,
)
def other_dtype(config: DeepSpeedJson) -> Iterator[Found]:
    """A literal in `bf16.enabled` or `fp16.enabled` that differs from the run's dtype."""
    if not config.run:
        return
    dtype = config.run.plan.dtype
    for name in ("bf16", "fp16"):
        said = config.get(f"{name}.enabled")
        if isinstance(said, bool) and said != (dtype == name):
            yield at(f"{name}.enabled", f"{name}.enabled is {str(said).lower()} and the run computes in {dtype}")


@rule(
    "DS041",
    "error",
    "deepspeed_config.fp16.enabled",
    "DeepSpeed asserts that one of them is off",
    fix='write {"enabled": "auto"} in both',
    source="deepspeed/runtime/config.py, _initialize_params",
    versions=DEEPSPEED,
)
def both_dtypes(config: DeepSpeedJson) -> Iterator[Found]:
    """bf16 and fp16 both switched on."""
    if config.get("bf16.enabled") is True and config.get("fp16.enabled") is True:
        yield at("fp16.enabled", "bf16 and fp16 are both on")


@rule(
    "DS042",
    "error",
    "deepspeed_config.gradient_clipping",
    "transformers stops: the config and the run must agree on it",
    fix='write "auto", or set training.max_grad_norm to the same norm',
    source="transformers/integrations/deepspeed.py, trainer_config_process",
    versions=TRANSFORMERS,
)
def other_clipping(config: DeepSpeedJson) -> Iterator[Found]:
    """A `gradient_clipping` that differs from `training.max_grad_norm`."""
    norm = config.number("gradient_clipping")
    if config.run and norm is not None and norm != config.run.spec.training.max_grad_norm:
        yield at(
            "gradient_clipping",
            f"gradient_clipping is {norm:g} and training.max_grad_norm {config.run.spec.training.max_grad_norm:g}",
        )


@rule(
    "DS043",
    "error",
    "deepspeed_config.gradient_clipping",
    "DeepSpeed clips at its own default of 1.0, whatever max_grad_norm says",
    fix='add "gradient_clipping": "auto"',
    source="deepspeed/runtime/constants.py, GRADIENT_CLIPPING_DEFAULT; deepspeedai/DeepSpeed#8068",
    versions=DEEPSPEED,
)
def hidden_clipping(config: DeepSpeedJson) -> Iterator[Found]:
    """No `gradient_clipping`, in a run whose `max_grad_norm` is not 1."""
    if config.run and not config.has("gradient_clipping"):
        norm = config.run.spec.training.max_grad_norm
        if norm != 1.0:
            yield at("gradient_clipping", f"gradient_clipping is missing and training.max_grad_norm is {norm:g}")


@rule(
    "DS044",
    "error",
    "deepspeed_config.optimizer.params",
    "transformers stops: the config and the run must agree on it",
    fix='write "auto", or leave the optimizer block out',
    source="transformers/integrations/deepspeed.py, trainer_config_process",
    versions=TRANSFORMERS,
)
def other_optimizer_values(config: DeepSpeedJson) -> Iterator[Found]:
    """Learning rate, betas, eps or weight decay in the JSON that differ from the run's."""
    if not config.run:
        return
    train = config.run.spec.training
    run = {
        "optimizer.params.lr": train.learning_rate,
        "optimizer.params.weight_decay": train.weight_decay,
        "optimizer.params.eps": 1e-8,
        "optimizer.params.betas": [0.9, 0.999],
        "scheduler.params.warmup_max_lr": train.learning_rate,
    }
    for path, wanted in run.items():
        said = config.get(path)
        if said is not None and said != "auto" and not isinstance(said, str) and said != wanted:
            yield at(path, f"{path} is {said!r} and the run has {wanted!r}")
    steps = config.run.plan.steps
    counts = {"total_num_steps": steps.total_steps, "warmup_num_steps": max(1, steps.warmup_steps)} if steps else {}
    for name, count in counts.items():
        path = f"scheduler.params.{name}"
        if (number := config.number(path)) is not None and number > 0 and number != count:
            yield at(path, f"{path} is {number:g} and the run has {count}")


@rule(
    "DS045",
    "warning",
    "deepspeed_config.optimizer",
    "DeepSpeed builds it with one parameter group, so weight decay reaches biases and norms too",
    fix="leave the optimizer out: Trainer builds AdamW with the decay where it belongs",
    source="transformers/integrations/deepspeed.py, deepspeed_optim_sched",
    versions=f"{TRANSFORMERS}, {DEEPSPEED}",
)
def own_optimizer(config: DeepSpeedJson) -> Iterator[Found]:
    """An `optimizer` block."""
    if isinstance(config.get("optimizer"), Mapping):
        yield at("optimizer", f"the JSON brings the optimizer {config.get('optimizer.type')!r}")


@rule(
    "DS046",
    "error",
    "deepspeed_config.scheduler",
    "the JSON's schedule replaces it without a word",
    fix="leave the scheduler out of the JSON, or do not set training.lr_scheduler_type",
    source="transformers/integrations/deepspeed.py, deepspeed_optim_sched",
    versions=TRANSFORMERS,
)
def two_schedules(config: DeepSpeedJson) -> Iterator[Found]:
    """A `scheduler` block in a run that names another schedule."""
    if not (config.run and isinstance(config.get("scheduler"), Mapping)):
        return
    asked = config.run.spec.training.lr_scheduler_type
    same = {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "WarmupLR": "constant_with_warmup"}
    brought = same.get(str(config.get("scheduler.type")))
    if config.run.said("training", "lr_scheduler_type") and brought != asked:
        name = config.get("scheduler.type")
        yield at("scheduler", f"training.lr_scheduler_type is {asked!r} and the JSON brings {name!r}")


@rule(
    "DS047",
    "warning",
    "deepspeed_config.scheduler",
    "it replaces the schedule of the run, and the logged learning rate is one step late",
    fix="leave the scheduler out: Trainer builds it from training.lr_scheduler_type",
    source="transformers/integrations/deepspeed.py, deepspeed_optim_sched",
    versions=TRANSFORMERS,
)
def own_scheduler(config: DeepSpeedJson) -> Iterator[Found]:
    """A `scheduler` block, in a run that names no other schedule."""
    if isinstance(config.get("scheduler"), Mapping) and not list(two_schedules.check(config)):
        yield at("scheduler", f"the JSON brings the schedule {config.get('scheduler.type')!r}")


@rule(
    "DS048",
    "error",
    "deepspeed_config.scheduler.params.warmup_num_steps",
    "DeepSpeed refuses a warm-up without steps",
    fix='write "auto", or at least 1',
    source="transformers/integrations/deepspeed.py, trainer_config_finalize (deepspeed 0.19.6 and newer)",
    versions="deepspeed 0.19.6 and newer",
)
def no_warmup(config: DeepSpeedJson) -> Iterator[Found]:
    """A scheduler with `warmup_num_steps` of 0 or less."""
    number = config.number("scheduler.params.warmup_num_steps")
    if number is not None and number <= 0:
        yield at("scheduler.params.warmup_num_steps", f"warmup_num_steps is {number:g}")


@rule(
    "DS049",
    "warning",
    "deepspeed_config.data_types.grad_accum_dtype",
    "the gradients of the passes are summed in bf16, and small terms are lost",
    fix='add "data_types": {"grad_accum_dtype": "fp32"} (2 more bytes per sharded gradient)',
    source="deepspeedai/DeepSpeed#1800, #2352, #2768",
    versions=DEEPSPEED,
)
def bf16_sums(config: DeepSpeedJson) -> Iterator[Found]:
    """bf16 with gradient accumulation and without fp32 sums."""
    if config.run and config.run.plan.dtype == "bf16" and not config.get("data_types.grad_accum_dtype"):
        steps = config.run.plan.batch.gradient_accumulation_steps
        if steps > 1:
            yield at("data_types.grad_accum_dtype", f"{steps} passes per step in bf16")


@rule(
    "DS050",
    "error",
    "deepspeed_config.optimizer.type",
    "there is no such optimizer: the ranks would stop after loading the model",
    fix="leave the optimizer out, or use AdamW",
    source="deepspeed/runtime/engine.py, _configure_basic_optimizer",
    versions=DEEPSPEED,
)
def unknown_optimizer(config: DeepSpeedJson) -> Iterator[Found]:
    """An optimizer that neither DeepSpeed nor torch has; the 1-bit ones are gone, and never worked with ZeRO."""
    name = config.get("optimizer.type")
    if not isinstance(name, str):
        return
    known = name.lower() in [each.lower() for each in OPTIMIZERS] or name in TORCH_OPTIMIZERS
    if name.lower() in REMOVED_OPTIMIZERS:
        yield at("optimizer.type", f"{name} was removed from DeepSpeed and could not be used with ZeRO")
    elif not known:
        hint = nearest(name, (*OPTIMIZERS, *TORCH_OPTIMIZERS))
        yield at("optimizer.type", f"the optimizer {name!r} is not known", hint)


@rule(
    "DS051",
    "error",
    "deepspeed_config.optimizer.type",
    "DeepSpeed asserts that ZeRO was tested with it",
    fix='use AdamW, or add "zero_allow_untested_optimizer": true',
    source="deepspeed/runtime/engine.py, _do_optimizer_sanity_check; runtime/zero/utils.py",
    versions=DEEPSPEED,
)
def untested_optimizer(config: DeepSpeedJson) -> Iterator[Found]:
    """An optimizer that DeepSpeed has not tested with ZeRO, without leave to use it."""
    name = config.get("optimizer.type")
    known = isinstance(name, str) and (
        name.lower() in [each.lower() for each in OPTIMIZERS] or name in TORCH_OPTIMIZERS
    )
    if known and str(name).lower() not in TESTED_WITH_ZERO and config.stage:
        if config.get("zero_allow_untested_optimizer") is not True:
            yield at("optimizer.type", f"ZeRO with {name}")


@rule(
    "DS052",
    "error",
    "deepspeed_config.optimizer.params.max_grad_norm",
    "DeepSpeed refuses it there",
    fix="move the norm to gradient_clipping",
    source="deepspeed/runtime/engine.py, _configure_basic_optimizer",
    versions=DEEPSPEED,
)
def clipping_in_optimizer(config: DeepSpeedJson) -> Iterator[Found]:
    """`max_grad_norm` among the optimizer's parameters."""
    if config.has("optimizer.params.max_grad_norm"):
        yield at("optimizer.params.max_grad_norm", "max_grad_norm is an optimizer parameter")


@rule(
    "DS053",
    "error",
    "deepspeed_config.gradient_clipping",
    "a negative or infinite norm turns every gradient around or off",
    fix='write "auto", or a number >= 0; 0 turns clipping off',
    source="deepspeed/runtime/zero/stage_1_and_2.py, unscale_and_clip_grads",
    versions=DEEPSPEED,
)
def bad_clipping(config: DeepSpeedJson) -> Iterator[Found]:
    """A `gradient_clipping` below 0."""
    norm = config.number("gradient_clipping")
    if norm is not None and (norm < 0 or not math.isfinite(norm)):
        yield at("gradient_clipping", f"gradient_clipping is {norm:g}")


RULES = rules_in(globals())
