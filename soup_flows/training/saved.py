"""Compares a model that was just saved, read back from disk, with the one in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from soup_flows.safetensors_header import elements, read_header

SAMPLE = 8
"""Tensors of which every value is compared."""


class SaveLied(RuntimeError):
    """What is on disk is not what was trained."""

    failure_class = "proof_failed"
    advice = (
        "Do not use this checkpoint. Keep the run's folder and report it: a library saved something else."
    )


class SavedNotFinite(RuntimeError):
    """The weights that were saved are NaN or infinite: the loss will be too."""

    failure_class = "nan_loss"
    advice = "Lower training.learning_rate, look at the rows of this step, or use bf16 instead of fp16."


def compare_saved(folder: Path, model: Any, state: dict[str, torch.Tensor] | None, trained: bool) -> None:
    """Read a saved model back and compare it with `model`.

    Names, shapes and every value of a sample of tensors are compared; adapters must not all be zero. Models
    that Transformers renames on saving (fused experts) are compared by their number of elements.

    Args:
        folder: where the model was saved.
        model: the model in memory; its parameters may be sharded.
        state: the gathered state that was saved; the model's own when None.
        trained: whether the weights must have moved: two optimizer steps, since warm-up begins at zero.

    Raises:
        SaveLied: with everything that differs.
        SavedNotFinite: if a value of the sample is not finite.
        OSError: if a file cannot be read.
    """
    adapters = hasattr(model, "peft_config")
    pattern = "adapter_model*.safetensors" if adapters else "model*.safetensors"
    files = sorted(folder.glob(pattern))
    try:
        stored = {name: (file, shape) for file in files for name, (_, shape) in read_header(file).items()}
    except ValueError as error:
        raise SaveLied(str(error)) from None
    wanted = _trained_shapes(model) if adapters else _shapes(model)
    reasons = [] if stored else [f"{folder.name} holds no tensors"]
    reasons += _names(wanted, {name: shape for name, (_, shape) in stored.items()}, adapters)
    values = {_plain(name): value for name, value in (state or model.state_dict()).items()}
    reasons += _values(values, {name: file for name, (file, _) in stored.items()})
    if adapters and trained and not reasons and not _any_nonzero(stored):
        reasons.append("every lora_B is zero after training steps")
    if reasons:
        raise SaveLied(f"the saved model differs from the trained one: {'; '.join(reasons[:5])}")


def adapter_name(name: str) -> str:
    """Return an adapter's parameter name as peft saves it (peft/tuners/lora/model.py: DoRA's has no `.weight`)."""
    plain = name.replace(".default.", ".")
    return plain.removesuffix(".weight") if plain.endswith(".lora_magnitude_vector.weight") else plain


def _plain(name: str) -> str:
    """Return a parameter's name as it is saved: without wrappers and the adapter's name."""
    return adapter_name(name.replace("_checkpoint_wrapped_module.", ""))


def _shape(parameter: Any) -> tuple[int, ...]:
    """Return the whole shape of a parameter, sharded by ZeRO-3 or FSDP2 or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _trained_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {_plain(name): _shape(p) for name, p in model.named_parameters() if p.requires_grad}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {_plain(name): _shape(p) for name, p in model.named_parameters() if name not in tied}


def _names(
    wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]], adapters: bool
) -> list[str]:
    """Compare names and shapes, or the number of elements when names were changed on saving."""
    lacking = sorted(set(wanted) - set(stored))
    if lacking and not adapters and set(stored) - set(wanted):
        asked, found = (sum(elements(s) for s in group.values()) for group in (wanted, stored))
        return [f"{found:,} elements were saved, {asked:,} are trained"] if found < asked else []
    reasons = [f"{len(lacking)} of {len(wanted)} tensors are missing, {lacking[0]} first"] if lacking else []
    return reasons + [
        f"{name} has shape {list(stored[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]


def _values(values: dict[str, torch.Tensor], files: dict[str, Path]) -> list[str]:
    """Compare all values of a sample of tensors, evenly spread."""
    common = sorted(name for name in files if name in values)
    step = max(1, len(common) // SAMPLE)
    reasons = []
    for name in common[::step]:
        value = values[name]
        if hasattr(value, "to_local") or getattr(value, "ds_shape", None) is not None:
            continue  # sharded: its whole is not in this process
        with safe_open(str(files[name]), framework="pt") as opened:
            found = opened.get_tensor(name)
        if not bool(torch.isfinite(found).all()):
            raise SavedNotFinite(f"the weights of {name} are not finite")
        if not torch.equal(found, value.detach().to("cpu", found.dtype)):
            reasons.append(f"the values of {name} differ")
    return reasons


def _any_nonzero(stored: dict[str, tuple[Path, tuple[int, ...]]]) -> bool:
    names = [name for name in stored if "lora_B" in name]
    for name in names:
        with safe_open(str(stored[name][0]), framework="pt") as opened:
            if bool(opened.get_tensor(name).any()):
                return True
    return not names
