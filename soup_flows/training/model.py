"""Loads the model the way its strategy needs it, adds adapters, and saves what was trained."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.training import attention
from soup_flows.training.hollow import agree_on_layout, gets_weights, hollow_model
from soup_flows.training.prepare import load_tokenizer as load_tokenizer
from soup_flows.training.proof import dtype_of


class UnsuitableModel(RuntimeError):
    """The model cannot be trained as asked."""

    failure_class = "bad_config"
    advice = "Set data.packing=false: rows are then padded, which every causal language model can do."


def load_model(spec: TrainingSpec, plan: ShardingPlan, weights: str | None = None) -> PreTrainedModel:
    """Load the model; under ZeRO-3 it is partitioned while it is built, under FSDP rank 0 alone reads it.

    `TrainingArguments` must exist by then, since Transformers reads the ZeRO stage from it.

    A full fine-tune keeps fp32 weights and computes in the plan's dtype: updates of bf16 weights round away
    (at a learning rate of 1e-5 most weights never move). DeepSpeed keeps fp32 copies itself. Frozen weights
    under adapters are loaded in the compute dtype.

    Args:
        spec: what was asked.
        plan: the resolved plan.
        weights: a checkpoint whose weights (or adapters) are taken instead of the model's, or None.

    Raises:
        UnsuitableModel: if rows are to be laid end to end and the model cannot keep them apart.
    """
    keeps_own_fp32 = plan.engine == "deepspeed"
    compute = dtype_of(plan)
    dtype = compute if spec.trains_adapters or keeps_own_fp32 else torch.float32
    attention.register()
    given: dict[str, Any] = {"dtype": dtype, "trust_remote_code": spec.trust_remote_code}
    if packs(spec):
        config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
        refuse_mixing(config)
        given["attn_implementation"] = attention.choose(plan.device, compute)
    if spec.training.method == "qlora":
        given |= quantised(compute)
    source = weights if weights and not spec.trains_adapters else spec.model
    build: Any = hollow_model if gets_weights(spec, plan) else AutoModelForCausalLM.from_pretrained
    try:
        model = build(source, **given)
    except ValueError as error:
        if packs(spec) and "attention" in str(error):  # Transformers' words for a class without an interface
            raise UnsuitableModel(f"rows cannot be laid end to end: {error}") from None
        raise
    if packs(spec):
        refuse_signature(model)
    if plan.engine == "fsdp" and plan.world_size > 1 and spec.training.method != "qlora":
        agree_on_layout(model)
    model.config.use_cache = False
    if not spec.trains_adapters or spec.compares_answers:
        return model  # TRL puts the adapters itself, to use the model without them as the reference
    adapted = add_adapters(model, spec)
    if plan.gradient_checkpointing:
        adapted.enable_input_require_grads()  # frozen embeddings give the checkpoints nothing to differentiate
    if weights:
        load_adapters(adapted, Path(weights))
    return adapted


def load_adapters(model: Any, checkpoint: Path) -> None:
    """Load saved adapters into `model`; under ZeRO-3 each parameter is gathered for it on every rank."""
    from peft import set_peft_model_state_dict

    parameters = [p for p in model.parameters() if p.requires_grad]
    gathered: Any = contextlib.nullcontext()
    if any(hasattr(p, "ds_id") for p in parameters):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
    with gathered:
        set_peft_model_state_dict(model, load_file(str(checkpoint / "adapter_model.safetensors")))


def packs(spec: TrainingSpec) -> bool:
    """Return whether rows are laid end to end; answers that are compared are padded by TRL."""
    return spec.data.packing and not spec.compares_answers


def refuse_mixing(config: Any) -> None:
    """Refuse layers that carry something from token to token across the borders of rows.

    Raises:
        UnsuitableModel: for recurrent, convolutional or chunked layers (`layer_types` of the config).
    """
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ())
    mixing = sorted(layers - {"full_attention", "sliding_attention"})
    if mixing or getattr(text, "attention_chunk_size", None):
        found = ", ".join(mixing) or "chunked attention"
        raise UnsuitableModel(f"{config.model_type} has layers ({found}) that would mix rows laid end to end")


def refuse_signature(model: PreTrainedModel) -> None:
    """Refuse a model that ignores what keeps rows apart.

    Raises:
        UnsuitableModel: when the model's forward lacks `position_ids` or `logits_to_keep`, or its class does not
            take attention from `AttentionInterface`.
    """
    accepted = inspect.signature(type(model).forward).parameters
    lacking = [name for name in ("position_ids", "logits_to_keep") if name not in accepted]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        lacking.append("**kwargs")
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        lacking.append("AttentionInterface")
    if lacking:
        name = type(model).__name__
        raise UnsuitableModel(f"rows cannot be laid end to end: {name} does not take {', '.join(lacking)}")


def quantised(compute: torch.dtype) -> dict[str, Any]:
    """Return what loads the frozen weights in 4 bits.

    They are stored in the compute dtype, in which FSDP can shard them beside the adapters (bitsandbytes
    documentation, FSDP-QLoRA); each rank loads onto its own GPU.
    """
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=compute,
    )
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}


def lora_config(spec: TrainingSpec) -> Any:
    """Return peft's config of the adapters."""
    from peft import LoraConfig

    lora = spec.lora
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )


def add_adapters(model: PreTrainedModel, spec: TrainingSpec) -> Any:
    """Freeze the model and put LoRA adapters beside the asked modules."""
    from peft import get_peft_model

    adapted = get_peft_model(model, lora_config(spec))
    if spec.training.method == "qlora":  # FSDP wants one dtype: that of the stored 4-bit weights
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(model.dtype)
    return adapted


def save_model(trainer: Any, folder: Path) -> None:
    """Gather the model on rank 0 and save it whole; a collective call.

    The folder is written under another name and renamed when it is complete.
    """
    beside = folder.with_name(f".{folder.name}.tmp")
    if trainer.is_world_process_zero():
        shutil.rmtree(beside, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(beside))
    if trainer.is_world_process_zero():
        # A pickle of the arguments: nobody should have to unpickle anything to use the model.
        (beside / "training_args.bin").unlink(missing_ok=True)
        config = beside / "config.json"
        if config.exists():
            values = json.loads(config.read_text())
            values["use_cache"] = True
            config.write_text(json.dumps(values, indent=2) + "\n")
        if folder.exists():  # an attempt before was killed between this and its result
            old = folder.with_name(f".{folder.name}.old")
            folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        beside.rename(folder)
    trainer.accelerator.wait_for_everyone()


def verify_saved(folder: Path, lora: bool, trained: bool) -> dict[str, Any]:
    """Read the saved tensors back from disk.

    Args:
        folder: the saved model.
        lora: whether adapters are expected instead of a whole model.
        trained: whether at least one optimizer step was made (then no adapter may be zero).

    Returns:
        `tensors`, `elements` and `bytes` found.

    Raises:
        RuntimeError: if a file is missing, empty, holds a non-finite value, or an adapter is still zero.
    """
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    files = [folder / name] if (folder / name).exists() else sorted(folder.glob("model-*.safetensors"))
    if not files:
        raise RuntimeError(f"the saved model is not there: no {name} in {folder}")
    tensors = elements = 0
    adapters_moved = False
    for file in files:
        with safe_open(str(file), framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                tensor = stored.get_tensor(key)
                tensors, elements = tensors + 1, elements + tensor.numel()
                if not torch.isfinite(tensor).all():
                    raise RuntimeError(f"{key} in {file} holds a value that is not finite")
                adapters_moved |= "lora_B" in key and bool(tensor.any())
    if not elements:
        raise RuntimeError(f"{files[0]} holds no tensors")
    if lora and trained and not adapters_moved:
        raise RuntimeError(f"every lora_B in {files[0]} is zero: the adapters were not trained or not saved")
    return {"tensors": tensors, "elements": elements, "bytes": sum(f.stat().st_size for f in files)}
