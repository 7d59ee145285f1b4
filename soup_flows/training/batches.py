"""Which rows each rank sees in which micro batch, and how they become one tensor row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from soup_flows.batch import Batch

IGNORED = -100
"""Label of a token that is not trained on (the value `torch.nn.functional.cross_entropy` skips)."""


@dataclass(frozen=True)
class TokenRow:
    """One tokenised row: `input_ids` and `labels` have equal length; labels are not shifted."""

    input_ids: Sequence[int] | npt.NDArray[np.int32]
    labels: Sequence[int] | npt.NDArray[np.int32]


class TokenRows(Dataset[TokenRow]):
    """Tokenised rows, plus one row at index `len(rows)` that trains nothing.

    That last row fills the micro batches that a rank has no row for, so that all ranks make the same number
    of passes whatever the number of rows.

    Attributes:
        lengths: tokens of each row.
    """

    def __init__(self, rows: Sequence[TokenRow], lengths: Sequence[int] | None = None) -> None:
        self.rows = rows
        self.lengths = [len(row.input_ids) for row in rows] if lengths is None else lengths
        filler_token = int(rows[0].input_ids[0])
        self.filler = TokenRow([filler_token, filler_token], [IGNORED, IGNORED])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TokenRow:
        return self.filler if index == len(self.rows) else self.rows[index]


def split_step(rows: Sequence[int], lengths: Sequence[int], slots: int, size: int) -> list[list[int]]:
    """Spread the rows of one optimizer step over micro batches with about equal numbers of tokens.

    Args:
        rows: indices of the step's rows, at most `slots * size`.
        lengths: tokens of every row of the data set.
        slots: micro batches of the step over all ranks.
        size: most rows per micro batch.

    Returns:
        `slots` lists of row indices; some are empty when there are fewer rows than slots.
    """
    filled: list[list[int]] = [[] for _ in range(slots)]
    tokens = [0] * slots
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        open_slots = [s for s in range(slots) if len(filled[s]) < size]
        slot = min(open_slots, key=lambda s: (tokens[s], s))
        filled[slot].append(row)
        tokens[slot] += lengths[row]
    return filled


class StepSampler(Sampler[list[int]]):
    """Yields this rank's micro batches, optimizer step by optimizer step.

    An optimizer step holds the same rows whatever the number of ranks and the micro batch size; only their
    distribution differs. Every row comes once an epoch; the order depends on seed and epoch alone.
    """

    def __init__(self, lengths: Sequence[int], batch: Batch, rank: int, seed: int) -> None:
        self.lengths, self.batch, self.rank, self.seed = lengths, batch, rank, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of pass number `epoch`, counted from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        steps = -(-len(self.lengths) // self.batch.global_batch_size)
        return steps * self.batch.gradient_accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        rows, batch = len(self.lengths), self.batch
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(rows, generator=generator).tolist()
        slots = batch.world_size * batch.gradient_accumulation_steps
        for start in range(0, rows, batch.global_batch_size):
            step = order[start : start + batch.global_batch_size]
            micro = split_step(step, self.lengths, slots, batch.per_device_train_batch_size)
            for slot in range(self.rank, slots, batch.world_size):
                yield micro[slot] or [rows]


class StepLoader(DataLoader[dict[str, torch.Tensor]]):
    """A data loader over a `StepSampler` that `Trainer` can tell the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Pass `epoch` on to the sampler."""
        self.batch_sampler.set_epoch(epoch)


def flatten(rows: Sequence[TokenRow]) -> dict[str, Any]:
    """Lay rows end to end in one tensor row, so that no token of padding is computed.

    Returns:
        `input_ids`, `position_ids`, `shift_labels` of shape (1, tokens): the label of position i is the token
        after it within the same row; `row_borders`: where each row begins, and the end of the last.
    """
    labels = [np.append(np.asarray(row.labels[1:], dtype=np.int64), IGNORED) for row in rows]
    lengths = [len(row.input_ids) for row in rows]
    return {
        "input_ids": torch.from_numpy(np.concatenate([row.input_ids for row in rows]).astype(np.int64))[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "shift_labels": torch.from_numpy(np.concatenate(labels))[None],
        "row_borders": [0, *itertools.accumulate(lengths)],
    }


def pad(rows: Sequence[TokenRow], pad_id: int) -> dict[str, Any]:
    """Lay rows one below the other, padded on the right, for models that cannot keep rows apart otherwise.

    Returns:
        `input_ids`, `attention_mask`, `shift_labels` of shape (rows, longest row).
    """
    size = (len(rows), max(len(row.input_ids) for row in rows))
    ids, mask = torch.full(size, pad_id), torch.zeros(size, dtype=torch.long)
    labels = torch.full(size, IGNORED)
    for number, row in enumerate(rows):
        length = len(row.input_ids)
        ids[number, :length] = torch.as_tensor(np.asarray(row.input_ids, dtype=np.int64))
        labels[number, : length - 1] = torch.as_tensor(np.asarray(row.labels[1:], dtype=np.int64))
        mask[number, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "shift_labels": labels}


def eval_batches(lengths: Sequence[int], max_tokens: int, rank: int, world_size: int) -> list[list[int]]:
    """Cut the held-out rows into batches of at most `max_tokens` tokens; every rank gets as many batches.

    A rank without a row gets the filler row (index `len(lengths)`), since sharded models need every rank in
    every forward pass.
    """
    batches: list[list[int]] = []
    room = 0
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        if lengths[row] > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(row)
        room -= lengths[row]
    while len(batches) % world_size:
        batches.append([len(lengths)])
    return batches[rank::world_size]
