"""Loads the model the way its strategy needs it, adds adapters, and saves what was trained."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.training import attention
from soup_flows.training.proof import dtype_of


def load_tokenizer(spec: TrainingSpec) -> PreTrainedTokenizerBase:
    """Load the tokenizer; a missing pad token becomes the end-of-sequence token (rows are never padded)."""
    tokenizer = AutoTokenizer.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(spec: TrainingSpec, plan: ShardingPlan, weights: str | None = None) -> PreTrainedModel:
    """Load the model; under ZeRO-3 it is partitioned while it is built.

    `TrainingArguments` must exist by then, since Transformers reads the ZeRO stage from it.

    A full fine-tune keeps fp32 weights and computes in the plan's dtype: updates of bf16 weights round away
    (at a learning rate of 1e-5 most weights never move). DeepSpeed keeps fp32 copies itself. Frozen weights
    under adapters are loaded in the compute dtype.

    Args:
        spec: what was asked.
        plan: the resolved plan.
        weights: a checkpoint whose weights (or adapters) are taken instead of the model's, or None.
    """
    keeps_own_fp32 = plan.engine == "deepspeed"
    dtype = dtype_of(plan) if spec.training.method == "lora" or keeps_own_fp32 else torch.float32
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        weights if weights and spec.training.method == "full" else spec.model,
        dtype=dtype,
        attn_implementation=attention.NAME,
        trust_remote_code=spec.trust_remote_code,
    )
    model.config.use_cache = False
    if spec.training.method != "lora":
        return model
    adapted = add_adapters(model, spec)
    if plan.gradient_checkpointing:
        adapted.enable_input_require_grads()  # frozen embeddings give the checkpoints nothing to differentiate
    if weights:
        _load_adapters(adapted, Path(weights) / "adapter_model.safetensors")
    return adapted


def _load_adapters(model: Any, file: Path) -> None:
    """Load saved adapters into `model`; under ZeRO-3 each parameter is gathered for it on every rank."""
    from peft import set_peft_model_state_dict

    parameters = [p for p in model.parameters() if p.requires_grad]
    gathered: Any = contextlib.nullcontext()
    if any(hasattr(p, "ds_id") for p in parameters):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
    with gathered:
        set_peft_model_state_dict(model, load_file(str(file)))


def add_adapters(model: PreTrainedModel, spec: TrainingSpec) -> Any:
    """Freeze the model and put LoRA adapters beside the asked modules."""
    from peft import LoraConfig, get_peft_model

    lora = spec.lora
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


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
