"""A save that lies is found at once: what is on disk is compared with the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from soup_flows.safetensors_header import read_header
from soup_flows.training.saved import SavedNotFinite, SaveLied, adapter_name, compare_saved
from tests.recovery.conftest import Maker


def whole() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


class Adapted(torch.nn.Module):
    """Named as peft names its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.peft_config = {"default": None}
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 4, bias=False)})
        self.base = torch.nn.Linear(4, 4).requires_grad_(False)

    def saved(self) -> dict[str, torch.Tensor]:
        state = self.state_dict().items()
        return {k.replace(".default.", "."): v.clone() for k, v in state if "lora" in k}


def test_a_true_save_passes(tmp_path: Path) -> None:
    model, adapted = whole(), Adapted()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    compare_saved(tmp_path, model, None, trained=True)
    save_file(adapted.saved(), tmp_path / "adapter_model.safetensors")
    compare_saved(tmp_path, adapted, adapted.state_dict(), trained=True)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}, {"bias": "lora_only"}])
def test_what_peft_saves_passes(tmp_path: Path, settings: dict[str, Any]) -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    model = get_peft_model(llama, lora)
    model.save_pretrained(tmp_path)
    compare_saved(tmp_path, model, None, trained=False)
    names = read_header(tmp_path / "adapter_model.safetensors")
    assert set(names) == {adapter_name(name) for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lie", ["nothing", "a tensor less", "another shape", "other values", "no file"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_lie_is_found(tmp_path: Path, lie: str, adapters: bool) -> None:
    model = Adapted() if adapters else whole()
    stored = (
        model.saved() if isinstance(model, Adapted) else {k: v.clone() for k, v in model.state_dict().items()}
    )
    name = min(stored)
    if lie == "nothing":
        stored = {}
    elif lie == "a tensor less":
        del stored[name]
    elif lie == "another shape":
        stored[name] = stored[name].flatten()[:1].clone()
    else:
        stored[name] += 1
    file = tmp_path / ("adapter_model.safetensors" if adapters else "model.safetensors")
    if lie != "no file":
        save_file(stored, file)
    with pytest.raises(SaveLied):
        compare_saved(tmp_path, model, None, trained=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_no_lie(tmp_path: Path, value: float) -> None:
    """NaN equals nothing, itself neither; the policy for losses that are not finite decides what follows."""
    model = whole()
    with torch.no_grad():
        next(model.parameters())[0, 0] = value
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(SavedNotFinite, match="not finite") as found:
        compare_saved(tmp_path, model, None, trained=True)
    assert found.value.failure_class == "nan_loss"


def test_adapters_that_never_moved_are_found_after_the_first_steps(tmp_path: Path) -> None:
    model = Adapted()
    torch.nn.init.zeros_(model.lora_B["default"].weight)
    save_file(model.saved(), tmp_path / "adapter_model.safetensors")
    compare_saved(tmp_path, model, None, trained=False)
    with pytest.raises(SaveLied, match="every lora_B is zero"):
        compare_saved(tmp_path, model, None, trained=True)


LORA = {"training": {"method": "lora", "learning_rate": 1e-2}}
LONG = pytest.mark.long


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("zero3", LORA),
        *[pytest.param(name, {}, marks=LONG) for name in ("single", "ddp", "zero1", "zero2", "zero3")],
        *[pytest.param(name, {}, marks=LONG) for name in ("full_shard", "shard_grad")],
        *[pytest.param(name, LORA, marks=LONG) for name in ("single", "ddp", "zero1", "zero2")],
        *[pytest.param(name, LORA, marks=LONG) for name in ("full_shard", "shard_grad")],
    ],
)
def test_a_save_that_lies_ends_the_run_at_that_step(
    preset: str, changes: dict[str, Any], case: Maker
) -> None:
    run = case(preset, **changes)
    report = run.attempt(hook="lying_save")
    assert (report.state, report.failure_class) == ("failed", "proof_failed")
    assert "the saved model differs from the trained one: the values of" in report.cause
    assert run.checkpoints() == ["checkpoint-2"]
    assert report.train[-1].step == 4
    assert not run.paths.model.exists()
