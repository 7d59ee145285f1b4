"""What a row of published measurements means as fields of `Setup`.

What differs between the programs that were measured (old transformers, litgpt, torchtune, ...) and the one
this project runs is written down here, with where it comes from; the predictor itself knows only physics.
"""

from __future__ import annotations

FLASH = "flash_attention_2"
LOSS_BYTES = {
    # bytes per logit where a program has a loss of its own, read from its source
    "torchtune_chunked": 5.5,
    "torchtune_ce": 12.0,
    "titan": 12.0,
    "litgpt_chunked": 4.5,
    "litgpt": 6.0,
}


def number(cells: dict[str, str], key: str, default: int | None = None) -> int:
    """Return a cell as a whole number; ValueError names the column when it is none."""
    text = cells.get(key, "")
    if not text and default is not None:
        return default
    try:
        return int(float(text))
    except ValueError:
        raise ValueError(f"{key} is {text!r}") from None


def settings_of(cells: dict[str, str]) -> dict[str, object]:
    """Return the fields of `Setup` that a row means."""
    framework, precision = cells.get("framework", ""), cells.get("precision", "")
    fms = "fms-accel" in cells.get("source", "")
    fsdp1 = cells["strategy"].startswith("fsdp1")
    if not precision or precision.startswith("not stated"):
        raise ValueError(f"precision is {precision!r}")
    method = {"dora": "lora"}.get(cells["method"], cells["method"])
    found: dict[str, object] = {
        "method": method,
        "strategy": strategy(cells),
        "world_size": number(cells, "n_gpus"),
        "per_device_train_batch_size": number(cells, "micro_batch"),
        "seq_len": number(cells, "seq_len"),
        "gradient_accumulation_steps": number(cells, "grad_accum", 1),
        "dtype": next((d for d in ("fp16", "fp32") if precision.startswith(d)), "bf16"),
        "gradient_checkpointing": checkpointing(cells.get("act_ckpt", "")),
        "attention": {"eager": "eager", "sdpa": "sdpa"}.get(cells.get("attn", "")[:5].rstrip("/ "), FLASH),
        "compile": bool(number(cells, "compile", 0)),
        "offload": offload(cells),
        "outer_units": "torchtitan" in framework
        or ("torchtune" in framework and "fsdp2" in cells["strategy"]),
        "reduce_fp32": "torchtitan" in framework,
        **loss(cells, fms),
        **optimizer(cells),
    }
    found["fused_kernels"] = (
        bool(found["compile"])
        or any(word in cells.get("kernels", "") for word in ("fast-kernels", "liger"))
        or ("swift" in framework and found["loss"] == "liger")
    )
    if method == "full":
        found["master_weights"] = precision.startswith("bf16_mixed")
        return found
    quantization = cells.get("base_quant", "")
    found |= {
        "lora_r": number(cells, "lora_r", 16),
        "lora_targets": tuple("lm_head" if t == "head" else t for t in cells["lora_targets"].split("+") if t),
        "lora_dropout": float(cells.get("lora_dropout") or 0),
        "autocast": "autocast" in precision and "noautocast" not in precision,
        "adapters_fp32": not any(w in framework for w in ("litgpt", "torchtune", "fsdp_qlora")),
        "frozen_upcast": ("baseline-peft-bnb" in framework and not fsdp1)
        or ("bnb" in quantization and "swift" in framework),
        "layer_inputs_kept": fsdp1,
        "inputs_saved_by_quantized": "bnb" in quantization and "litgpt" in framework,
    }
    if method == "qlora":
        found["quantization"] = quantized(quantization, fms)
    return found


def strategy(cells: dict[str, str]) -> str:
    """Return the nearest strategy of this project."""
    name, ranks = cells["strategy"], number(cells, "n_gpus")
    if "+cp" in name or "+tp" in name:
        raise ValueError(f"strategy is {name!r}: context and tensor parallelism are not modelled")
    if name.startswith("zero"):
        return "zero++" if "++" in name else name.split("+")[0].split("_")[0]
    if name.startswith("fsdp"):
        return "hybrid_shard" if "hybrid" in name else "shard_grad" if "grad_op" in name else "full_shard"
    if name.startswith(("ddp", "single")):
        return "ddp" if ranks > 1 else "single"
    raise ValueError(f"strategy is {name!r}")


def checkpointing(text: str) -> bool | str:
    """Return the checkpointing mode; ValueError when the row does not say."""
    if not text or text.endswith("?"):
        raise ValueError(f"act_ckpt is {text!r}")
    return True if text.startswith("full") else "selective" if "selective" in text else False


def offload(cells: dict[str, str]) -> tuple[str, ...]:
    """Return what a row off-loads; FSDP takes gradients and optimizer along with the parameters."""
    text = cells.get("offload", "none")
    words = ["optimizer"] * ("optim" in text) + ["params"] * ("params" in text)
    words += ["activations"] * ("activations" in text)
    if "params" in words and cells["strategy"].startswith("fsdp") and "optimizer" not in words:
        words.append("optimizer")
    return tuple(words)


def loss(cells: dict[str, str], fms: bool) -> dict[str, object]:
    """Return the loss a row used."""
    text = cells.get("loss_impl", "")
    if not text or text.endswith("?"):
        raise ValueError(f"loss_impl is {text!r}")
    newer = fms and "4.48" in cells.get("versions", "")
    if "liger" in text:
        return {"loss": "liger"}
    if "fused_ce" in text:
        return {"loss": "fused", "logits_kept": newer}
    if "chunked_nll" in text:
        return {"loss": "chunked"}
    if "torchtune_chunked" in text and number(cells, "compile", 0):
        # the compiled chunk needs no fp32 copies; a frozen head needs no whole gradient of the logits
        return {"loss": "full", "bytes_per_logit": 4.0 if cells["method"] == "full" else 2.5}
    for name, size in LOSS_BYTES.items():
        if name in text:
            return {"loss": "full", "bytes_per_logit": size}
    if "remote" in text or (
        "finetune.py" in cells.get("framework", "") and "deepspeed fp16" in cells["precision"]
    ):
        # Qwen-7B's own modelling code takes the loss of fp16 logits as they are: no fp32 copies
        return {"loss": "full", "bytes_per_logit": 6.0}
    return {"loss": "full", "logits_kept": newer}


def optimizer(cells: dict[str, str]) -> dict[str, object]:
    """Return the optimizer a row used."""
    name, how = cells.get("optimizer", "").lower(), cells.get("optim_impl", "")
    found: dict[str, object] = {"step_in_backward": "in_bwd" in how}
    if "paged" in name:
        found["optimizer"] = "paged_adamw_8bit" if "8bit" in name else "paged_adamw_32bit"
    elif "8bit" in name:
        found["optimizer"] = "adamw_8bit"
    elif "4bit" in name:
        found["optimizer"] = "adamw_4bit"
    else:
        fused = "fused" in how.split("(")[0] or "torchtune" in cells.get("framework", "")
        found["optimizer"] = "adamw_torch_fused" if fused else "adamw_torch"
    return found


def quantized(text: str, fms: bool) -> str:
    """Return the quantisation; fms-acceleration's plugin always quantises the scales too."""
    names = {
        "bnb_nf4": "nf4_double" if fms else "nf4",
        "bnb_nf4_dq": "nf4_double",
        "torchao_nf4": "nf4_double",
    }
    return names.get(text, text)
