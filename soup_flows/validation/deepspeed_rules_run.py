"""Rules about a DeepSpeed JSON against the run: dtype and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator

from soup_flows.validation.deepspeed_config import DeepSpeedJson, at
from soup_flows.validation.table import DEEPSPEED, TRANSFORMERS, Found, rule, rules_in


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
            yield at(
                f"{name}.enabled", f"{name}.enabled is {str(said).lower()} and the run computes in {dtype}"
            )


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
            yield at(
                "gradient_clipping", f"gradient_clipping is missing and training.max_grad_norm is {norm:g}"
            )


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
