"""The result: one folder that opens anywhere, with its facts, compared with the model that was trained."""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from soup_flows.paths import RunPaths, write_atomic, write_json
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.user_file import expanded

PROMPT = "The quick brown fox jumps over the lazy dog."
"""What the live and the saved model are compared on."""

TOLERANCE = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}
"""Allowed mean difference of logits, as a share of their mean size. Half precision keeps 8 to 11 bits, and
the live model sums in another order than one CPU process."""

_PACKAGES = ("soup-flows", "torch", "transformers", "accelerate", "peft", "deepspeed", "trl")


class SavedModelWrong(RuntimeError):
    """The saved model is not the one that was trained."""

    failure_class = "proof_failed"
    advice = "Do not use the model folder. Keep the run directory and report it."


def live_logits(trainer: Any, tokenizer: Any) -> torch.Tensor:
    """Return the live model's logits for `PROMPT`, (tokens, vocabulary) on CPU; a collective call."""
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]], device=trainer.args.device)
    model = trainer.model_wrapped
    model.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.as_tensor(logits[0]).float().cpu()


def free_training_state() -> None:
    """Let the next `from_pretrained` load a whole model: no ZeRO-3 partitioning, no FSDP shortcuts."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    gc.collect()


def merge_adapter(spec: TrainingSpec, paths: RunPaths) -> Path:
    """Add the saved adapter to the base model's weights on CPU; the adapter moves to `adapter/` in the run.

    One process, one copy of the base model in memory, in the dtype of its files.

    Returns:
        The folder of the adapter.
    """
    from peft import PeftModel

    adapter, merged = paths.root / "adapter", paths.root / ".model.merged"
    base = AutoModelForCausalLM.from_pretrained(
        spec.model, dtype="auto", trust_remote_code=spec.trust_remote_code
    )
    whole = PeftModel.from_pretrained(base, str(paths.model)).merge_and_unload(safe_merge=True)
    shutil.rmtree(merged, ignore_errors=True)
    whole.save_pretrained(merged)
    AutoTokenizer.from_pretrained(paths.model, trust_remote_code=spec.trust_remote_code).save_pretrained(
        merged
    )
    paths.model.rename(adapter)
    merged.rename(paths.model)
    return adapter


def compare(
    spec: TrainingSpec, plan: ShardingPlan, folder: Path, live: torch.Tensor, tokenizer: Any
) -> dict[str, Any]:
    """Open the saved model as a user would and compare it with the live one.

    Args:
        spec: what was asked.
        plan: what ran; its dtype says how close the logits must be.
        folder: the saved model or adapter.
        live: what `live_logits` returned.
        tokenizer: of the run.

    Returns:
        `skipped` with the reason, or `difference` (share), `same_next_token`, `tied`, `vocabulary`.

    Raises:
        SavedModelWrong: if logits, ties, the vocabulary or the tokenizer differ.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if (folder / "adapter_config.json").exists():
        size += sum(file.stat().st_size for file in expanded(spec.model).glob("*.safetensors"))
    if size > psutil.virtual_memory().available // 2:
        return {"skipped": f"the model has {size / 2**30:.0f} GiB, more than half of the free memory"}
    exact: Any = (
        torch.float32 if plan.dtype == "fp32" else "auto"
    )  # adapters of a 16-bit model trained in fp32
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=exact, trust_remote_code=spec.trust_remote_code
    ).eval()
    opened = AutoTokenizer.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
    ids = opened(PROMPT)["input_ids"]
    if ids != tokenizer(PROMPT)["input_ids"] or opened.chat_template != tokenizer.chat_template:
        raise SavedModelWrong(f"the tokenizer in {folder} is not the one of the run")
    with torch.no_grad():
        saved = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    if saved.shape != live.shape:
        raise SavedModelWrong(f"the saved model has a vocabulary of {saved.shape[-1]}, not {live.shape[-1]}")
    difference = float((saved - live).abs().mean() / live.abs().mean().clamp_min(1e-6))
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outer is not None and inner.weight is outer.weight
    found = {
        "difference": difference,
        "same_next_token": bool(saved[-1].argmax() == live[-1].argmax()),
        "tied": tied,
        "vocabulary": saved.shape[-1],
    }
    # 4-bit weights are opened in 16 bits: the logits differ by what quantisation rounds away
    if spec.training.method != "qlora" and not difference <= TOLERANCE[plan.dtype]:
        raise SavedModelWrong(f"the logits of {folder} differ from the trained model's by {difference:.1%}")
    if tied != bool(model.config.get_text_config().tie_word_embeddings):
        raise SavedModelWrong(
            f"{folder}: the config says tied embeddings, the weights do not (or the reverse)"
        )
    if len(opened) > saved.shape[-1]:
        raise SavedModelWrong(f"{folder}: {len(opened)} tokens, but {saved.shape[-1]} rows in the embedding")
    return found


def write_facts(
    folder: Path, trainer: Any, spec: TrainingSpec, plan: ShardingPlan, numbers: Mapping[str, Any]
) -> None:
    """Put the model card, the generation config and the trainer's log beside the weights."""
    trainer.state.save_to_json(str(folder / "trainer_state.json"))
    generation = getattr(trainer.model, "generation_config", None)
    if generation is not None and not (folder / "generation_config.json").exists():
        write_json(folder / "generation_config.json", generation.to_diff_dict(), mode=0o644)
    write_atomic(folder / "README.md", model_card(spec, plan, numbers), mode=0o644)


def model_card(spec: TrainingSpec, plan: ShardingPlan, numbers: Mapping[str, Any]) -> str:
    """Return the model card: what was trained on what, how, with what result. No path of the machine is in it.

    Args:
        spec: what was asked.
        plan: what ran.
        numbers: more facts, such as losses and rows; None is left out.
    """
    local = expanded(spec.model).exists()
    base = Path(spec.model).name if local else spec.model
    head = [
        "library_name: "
        + ("peft" if spec.trains_adapters and not spec.lora.merge_adapter else "transformers")
    ]
    head += [] if local else [f"base_model: {spec.model}"]
    head += ["tags:", f"- {spec.training.task}", "- soup-flows"]
    train = spec.training
    facts: dict[str, Any] = {
        "base model": base,
        "data": Path(spec.dataset).name,
        "task": train.task,
        "method": train.method,
        "strategy": f"{plan.strategy} on {plan.world_size} rank(s)",
        "compute dtype": plan.dtype,
        "rows per optimizer step": plan.batch.global_batch_size,
        "maximum length (tokens)": spec.data.max_length,
        "learning rate": f"{train.learning_rate:g}, {train.lr_scheduler_type}",
        "seed": train.seed,
        **{key: value for key, value in numbers.items() if value is not None},
        "versions": ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name))),
        "Python": platform.python_version(),
    }
    if spec.trains_adapters:
        settings = spec.lora.model_dump(exclude={"merge_adapter"})
        facts["adapter"] = json.dumps(settings)
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    front = "\n".join(["---", *head, "---"])
    return f"{front}\n\n# {base}, fine-tuned\n\n| | |\n| --- | --- |\n{rows}\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except Exception:  # not installed
        return ""
