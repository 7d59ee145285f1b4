"""A save that lies is found at once: what is on disk is compared with the model in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from soup_flows.training.saved import SaveLied, compare_saved


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


def test_adapters_that_never_moved_are_found_after_the_first_steps(tmp_path: Path) -> None:
    model = Adapted()
    torch.nn.init.zeros_(model.lora_B["default"].weight)
    save_file(model.saved(), tmp_path / "adapter_model.safetensors")
    compare_saved(tmp_path, model, None, trained=False)
    with pytest.raises(SaveLied, match="every lora_B is zero"):
        compare_saved(tmp_path, model, None, trained=True)
