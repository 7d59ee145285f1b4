"""Rules about adapters and quantised models."""

from __future__ import annotations

import re
from collections.abc import Iterator

from soup_flows.errors import nearest
from soup_flows.validation.table import ACCELERATE, ANY, PEFT, TRANSFORMERS, Context, Found, rule, rules_in

USUAL_LORA_RATE = 5e-5
UNTRAINABLE = frozenset({"auto-round", "fbgemm_fp8", "gemma", "gguf", "higgs", "metal", "mxfp4", "nvfp4", "quark",
                         "spqr", "vptq"})  # fmt: skip
"""Quantisation methods whose quantizer answers `is_trainable` with False (transformers 5.24)."""
FLOAT_STORAGE = ("bfloat16", "float16", "float32")


def _targets(run: Context) -> list[str]:
    wanted = run.spec.lora.target_modules
    return [] if wanted == "all-linear" else [wanted] if isinstance(wanted, str) else list(wanted)


def _modules(run: Context) -> list[str]:
    """Return the names of the modules that hold a weight matrix, from the weight files."""
    return [name.removesuffix(".weight") for name in run.model.shards if name.endswith(".weight")]


def _matches(target: str, module: str, is_pattern: bool) -> bool:
    """Match as peft does: text is a pattern for the whole name, a list holds name endings."""
    if is_pattern:
        return re.fullmatch(target, module) is not None
    return module == target or module.endswith(f".{target}")


@rule(
    "PE001",
    "warning",
    "lora",
    "every weight is trained, and the group is ignored",
    fix="set training.method=lora, or drop the lora settings",
    source="this package: `lora` is read for training.method=lora",
)
def lora_with_full(run: Context) -> Iterator[Found]:
    """LoRA settings in a full fine-tune."""
    chosen = sorted(field for field in run.spec.lora.model_fields_set if run.said("lora", field))
    if run.full and chosen:
        yield Found(f"lora.{', lora.'.join(chosen)} with training.method=full")


@rule(
    "PE002",
    "error",
    "lora.target_modules",
    "peft finds no module and stops, or trains fewer modules than you named",
    fix="use all-linear, or names from the model",
    source="peft/tuners/tuners_utils.py, check_target_module_exists",
    versions=PEFT,
)
def no_such_module(run: Context) -> Iterator[Found]:
    """A target module that the weight files do not have."""
    modules = _modules(run)
    if run.full or not modules or run.model.is_moe:
        return  # experts are stored under other names than they are loaded
    endings = sorted({module.rsplit(".", 1)[-1] for module in modules})
    is_pattern = isinstance(run.spec.lora.target_modules, str)
    for target in _targets(run):
        try:
            there = any(_matches(target, module, is_pattern) for module in modules)
        except re.error as error:
            yield Found(f"{target!r} is no regular expression ({error})")
            continue
        if not there:
            hint = nearest(target, endings)
            yield Found(f"no module matches {target!r}", fix=hint or f"modules end in {', '.join(endings)}")


@rule(
    "PE003",
    "warning",
    "lora.target_modules",
    "the adapter changes one of two uses of the same weights, and merging it changes both",
    fix="leave embed_tokens and lm_head out",
    source="huggingface/peft, LoRA developer guide: tied weights",
    versions=PEFT,
)
def tied_target(run: Context) -> Iterator[Found]:
    """An adapter on tied embeddings."""
    names = [t for t in _targets(run) if t.rsplit(".", 1)[-1] in ("embed_tokens", "lm_head", "wte")]
    if not run.full and names and run.model.text_config.get("tie_word_embeddings") is True:
        yield Found(f"{', '.join(names)} with tied embeddings")


@rule(
    "PE004",
    "note",
    "training.learning_rate",
    "adapters learn little at the rates of full fine-tuning; about ten times as much is usual",
    fix="try 1e-4 to 3e-4",
    source="TRL documentation, LoRA Without Regret; Hu et al. 2021, appendix D",
)
def low_rate(run: Context) -> Iterator[Found]:
    """A learning rate for full fine-tuning in a LoRA run."""
    rate = run.spec.training.learning_rate
    if not run.full and rate < USUAL_LORA_RATE:
        yield Found(f"learning_rate={rate:g} with LoRA")


@rule(
    "PE005",
    "error",
    "training.method",
    "transformers refuses to train purely quantised weights",
    fix="use training.method=lora, or the model that is not quantised",
    source="transformers/trainer_utils.py, validate_quantization_for_training",
    versions=TRANSFORMERS,
)
def full_quantised(run: Context) -> Iterator[Found]:
    """A full fine-tune of a quantised model."""
    if run.full and run.model.quantization is not None:
        yield Found(f"{run.model.name} is quantised ({_method(run)}) and training.method is full")


def _method(run: Context) -> str:
    config = run.model.quantization or {}
    return str(config.get("quant_method") or "unknown method")


def _is_8bit(run: Context) -> bool:
    config = run.model.quantization or {}
    return config.get("load_in_8bit") is True


@rule(
    "PE006",
    "error",
    "deepspeed",
    "quantised weights skip ZeRO-3's partitioning: every rank holds the whole model",
    fix="use strategy=ddp or deepspeed=zero2",
    source="transformers/modeling_utils.py; huggingface/peft#2016, huggingface/transformers#24395",
    versions=TRANSFORMERS,
)
def quantised_zero3(run: Context) -> Iterator[Found]:
    """A quantised model under ZeRO-3."""
    if run.stage == 3 and run.model.quantization is not None:
        yield Found(f"a quantised model ({_method(run)}) under ZeRO-3")


@rule(
    "PE007",
    "error",
    "fsdp",
    "its integer weights cannot be sharded: the ranks stop, or keep the whole model each",
    fix="use strategy=ddp, or a 4-bit model stored with bnb_4bit_quant_storage=bfloat16",
    source="accelerate/utils/fsdp_utils.py; bitsandbytes documentation, FSDP-QLoRA",
    versions=ACCELERATE,
)
def quantised_fsdp(run: Context) -> Iterator[Found]:
    """A quantised model under FSDP without a floating-point storage type."""
    config = run.model.quantization
    if run.plan.engine == "fsdp" and config is not None:
        storage = str(config.get("bnb_4bit_quant_storage", "uint8")).removeprefix("torch.")
        if _is_8bit(run) or config.get("load_in_4bit") is not True or storage not in FLOAT_STORAGE:
            yield Found(f"a quantised model ({_method(run)}, stored as {storage}) under FSDP")


@rule(
    "PE008",
    "warning",
    "model",
    "its norms are not raised to fp32 first, so training is less stable than usual QLoRA",
    fix="use the model that is not quantised if it fits",
    source="huggingface/peft, quantization guide: prepare_model_for_kbit_training",
    versions=PEFT,
)
def quantised_lora(run: Context) -> Iterator[Found]:
    """Adapters on a quantised model."""
    if not run.full and run.model.quantization is not None:
        yield Found(f"{run.model.name} is quantised ({_method(run)})")


@rule(
    "PE009",
    "warning",
    "lora.r",
    "the adapter has as many weights as the layer it stands beside: full fine-tuning costs no more",
    fix="use a rank of 8 to 256",
    source="Hu et al. 2021 (LoRA): r much smaller than the layer's width",
    versions=ANY,
)
def high_rank(run: Context) -> Iterator[Found]:
    """A rank of half the model's width or more."""
    hidden = run.model.hidden_size
    if not run.full and hidden and 2 * run.spec.lora.r >= hidden:
        yield Found(f"lora.r={run.spec.lora.r} for a hidden size of {hidden}")


@rule(
    "PE010",
    "warning",
    "lora.alpha",
    "the adapter's output is scaled that far up or down",
    fix="use an alpha of r to 2 r",
    source="Hu et al. 2021 (LoRA), section 4.1: the scale is alpha / r",
)
def odd_scale(run: Context) -> Iterator[Found]:
    """An `alpha / r` above 16 or below 1/16."""
    scale = run.spec.lora.alpha / run.spec.lora.r
    if not run.full and not 1 / 16 <= scale <= 16:
        yield Found(f"alpha / r is {scale:g}")


@rule(
    "PE011",
    "error",
    "model",
    "transformers refuses to train on it, with adapters too, once it is loaded",
    fix="use the model that is not quantised (gpt-oss: load it with Mxfp4Config(dequantize=True) and save it once)",
    source="transformers/trainer_utils.py and quantizers/*.py, is_trainable; huggingface/transformers#39969",
    versions=TRANSFORMERS,
)
def untrainable_quantisation(run: Context) -> Iterator[Found]:
    """Adapters on a model quantised by a method that transformers cannot train with."""
    if not run.full and _method(run) in UNTRAINABLE:
        yield Found(f"{run.model.name} is quantised by {_method(run)}")


@rule(
    "PE012",
    "error",
    "training.method",
    "transformers does not quantise a quantised model again and stops while loading",
    fix="use training.method=lora, or the model that is not quantised",
    source="transformers/quantizers/auto.py, merge_quantization_configs; huggingface/transformers#25901",
    versions=TRANSFORMERS,
)
def quantised_twice(run: Context) -> Iterator[Found]:
    """QLoRA on a model that is quantised by another method than bitsandbytes."""
    config = run.model.quantization
    if run.spec.training.method == "qlora" and config is not None and not _is_bitsandbytes(config):
        yield Found(f"{run.model.name} is quantised ({_method(run)}) and training.method is qlora")


def _is_bitsandbytes(config: dict[str, object]) -> bool:
    return config.get("quant_method") == "bitsandbytes" or bool(
        config.get("load_in_4bit") or config.get("load_in_8bit")
    )


@rule(
    "PE013",
    "warning",
    "lora.target_modules",
    "only the attention gets adapters, and the experts, nine tenths of the weights, stay as they are",
    fix="nothing if that is meant; else use training.method=full",
    source="peft 0.21 on transformers 5.24: the experts of gpt-oss are tensors with biases, not linear layers",
    versions=PEFT,
)
def bare_experts(run: Context) -> Iterator[Found]:
    """`all-linear` on gpt-oss."""
    if (
        not run.full
        and run.model.text_config.get("model_type") == "gpt_oss"
        and run.spec.lora.target_modules == "all-linear"
    ):
        yield Found("lora.target_modules=all-linear on gpt-oss")


RULES = rules_in(globals())
