"""Rules about optimizer and schedule in a DeepSpeed JSON, and in the run beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from soup_flows.errors import nearest
from soup_flows.validation.deepspeed_config import DeepSpeedJson, at
from soup_flows.validation.table import DEEPSPEED, TRANSFORMERS, Found, rule, rules_in

OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Names that DeepSpeed builds itself, in any case (runtime/config.py, DEEPSPEED_OPTIMIZERS)."""
TORCH_OPTIMIZERS = ("SGD", "ASGD", "RMSprop", "Rprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Adafactor")
"""Names that it takes from `torch.optim`, as they are spelt."""
REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
ADAM_PARAMS = (
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "bias_correction", "adam_w_mode", "torch_adam"),
    *("set_grad_none", "fp32_optimizer_states", "maximize", "foreach", "capturable", "differentiable"),
    *("fused", "max_grad_norm"),
)
"""What DeepSpeed's and torch's Adam take between them; `max_grad_norm` has a rule of its own."""
SCHEDULER_PARAMS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"),
    "WarmupDecayLR": (
        *("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
        "last_batch_iteration",
    ),
    "WarmupCosineLR": (
        *("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
        "last_batch_iteration",
    ),
}
"""Arguments of the schedules (runtime/lr_schedules.py)."""
TESTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
"""runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS."""


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
    counts = (
        {"total_num_steps": steps.total_steps, "warmup_num_steps": max(1, steps.warmup_steps)}
        if steps
        else {}
    )
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
    if (
        known
        and str(name).lower() not in TESTED_WITH_ZERO
        and config.stage
        and config.get("zero_allow_untested_optimizer") is not True
    ):
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
    "DS054",
    "error",
    "deepspeed_config.optimizer.params",
    "it is handed on as it is, and the ranks stop after loading the model (unexpected keyword argument)",
    fix="remove it",
    source="deepspeed/runtime/engine.py, _configure_basic_optimizer; runtime/lr_schedules.py",
    versions=DEEPSPEED,
)
def unknown_params(config: DeepSpeedJson) -> Iterator[Found]:
    """A parameter that Adam or the schedule does not take."""
    adam: dict[str, tuple[str, ...]] = {"adam": ADAM_PARAMS, "adamw": ADAM_PARAMS}
    tables: dict[str, dict[str, tuple[str, ...]]] = {"optimizer": adam, "scheduler": SCHEDULER_PARAMS}
    for block, kinds in tables.items():
        name, params = str(config.get(f"{block}.type")), config.get(f"{block}.params")
        known = kinds.get(name.lower() if block == "optimizer" else name)
        for key in params if isinstance(params, Mapping) else ():
            if known is not None and key not in known:
                path = f"{block}.params.{key}"
                yield at(path, f"{name} takes no {key!r}", nearest(key, known))


@rule(
    "DS055",
    "error",
    "deepspeed_config.scheduler.params.total_num_steps",
    "the schedule cannot be built without it",
    fix='add "total_num_steps": "auto"',
    source="deepspeed/runtime/lr_schedules.py",
    versions=DEEPSPEED,
)
def no_total(config: DeepSpeedJson) -> Iterator[Found]:
    """A decaying schedule without `total_num_steps`."""
    name = config.get("scheduler.type")
    if name in ("WarmupDecayLR", "WarmupCosineLR") and not config.has("scheduler.params.total_num_steps"):
        yield at("scheduler.params.total_num_steps", f"{name} without total_num_steps")


RULES = rules_in(globals())
