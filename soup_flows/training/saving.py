"""A `Trainer` whose checkpoints are written by all ranks together, and whose saves are read back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from soup_flows.training.saved import compare_saved

if TYPE_CHECKING:
    from transformers import Trainer as _Base

    from soup_flows.training.checkpointing import Checkpointer
else:
    _Base = object


class SavingTrainer(_Base):
    """Put before a `Trainer`: checkpoints are written through a `Checkpointer`, saves are read back."""

    checkpointer: Checkpointer

    def _get_output_dir(self, trial: Any) -> str:  # noqa: ARG002 (called by name)
        return str(self.checkpointer.staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.checkpointer.save(lambda: super(SavingTrainer, self)._save_checkpoint(model, trial))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the gathered model on rank 0 and compare it; the last thing that Trainer does in a save."""
        try:
            super()._save(output_dir, state_dict)
            if self.args.should_save and output_dir is not None and state_dict != {}:
                compare_saved(Path(output_dir), self.model, state_dict, self.state.global_step >= 2)
        except (OSError, SafetensorError) as error:
            if not self.checkpointer.saving:
                raise
            self.checkpointer.errors.append(str(error))


@contextlib.contextmanager
def recording_failed_writes(errors: list[str]) -> Iterator[None]:
    """Keep a full disk from raising in the middle of a save on one rank, where the others would wait for ever.

    DeepSpeed and accelerate write with `torch.save` between collectives; a write that fails is recorded, all
    ranks go through the rest of the save, and then agree that it failed.
    """
    real = torch.save

    def save(*args: Any, **kwargs: Any) -> None:
        try:
            real(*args, **kwargs)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch's zip writer raises (ENOSPC)
            errors.append(str(error))

    torch.save = save
    try:
        yield
    finally:
        torch.save = real
