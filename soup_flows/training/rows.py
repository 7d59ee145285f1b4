"""The prepared rows as a rank reads them: mapped into memory, one copy of the pages for all ranks of a host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
import torch

from soup_flows.data.prepare import PreparedData
from soup_flows.data.store import lengths_of
from soup_flows.launch import rank
from soup_flows.paths import RunPaths, write_atomic
from soup_flows.spec import TrainingSpec
from soup_flows.training.batches import TokenRow, TokenRows
from soup_flows.training.prepare import prepare_here

_LOOK_EVERY_S = 0.5


class StoredRows(Sequence[TokenRow]):
    """Rows of a stored data set.

    Args:
        entry: folder of the stored rows.
        chosen: which rows, in which order; all of them when empty.
    """

    def __init__(self, entry: Path, chosen: Sequence[int] | None = None) -> None:
        lengths = np.asarray(lengths_of(entry), dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._chosen = np.arange(len(lengths)) if chosen is None else np.asarray(chosen, dtype=np.int64)
        self.lengths: list[int] = lengths[self._chosen].tolist()
        self._ids = np.memmap(entry / "ids.bin", dtype=np.int32, mode="r")
        self._labels = np.memmap(entry / "labels.bin", dtype=np.int32, mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...
    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._chosen[index]
        span = slice(int(self._starts[row]), int(self._starts[row + 1]))
        return TokenRow(self._ids[span], self._labels[span])


def prepared(spec: TrainingSpec, paths: RunPaths, is_main: bool) -> PreparedData:
    """Return what `prepare dataset` left in the run directory.

    Where the task was not called, rank 0 prepares the data and the others wait for it.

    Raises:
        Refused: on rank 0, as `prepare_here`; the launcher then stops the others.
    """
    if is_main and not paths.data.exists():
        write_atomic(paths.data, prepare_here(spec).model_dump_json())
    while not paths.data.exists():
        rank.heartbeat(0, "load")
        time.sleep(_LOOK_EVERY_S)
    return PreparedData.model_validate_json(paths.data.read_bytes())


def split_rows(rows: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Divide row numbers into trained and held-out ones, both in rising order; the seed alone decides."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[held_out:]), sorted(order[:held_out])


def token_rows(spec: TrainingSpec, data: PreparedData) -> tuple[TokenRows, TokenRows | None]:
    """Return the rows to train on and the held-out rows; they are disjoint."""
    entry = Path(data.train.entry)
    if data.evaluation is not None:
        return _rows(StoredRows(entry)), _rows(StoredRows(Path(data.evaluation.entry)))
    if not data.eval_rows:
        return _rows(StoredRows(entry)), None
    train, held_out = split_rows(data.train.rows, data.eval_rows, spec.training.seed)
    return _rows(StoredRows(entry, train)), _rows(StoredRows(entry, held_out))


def _rows(stored: StoredRows) -> TokenRows:
    return TokenRows(stored, stored.lengths)
