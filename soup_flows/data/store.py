"""Prepared rows on disk: flat files that every rank maps into memory, written once and atomically.

An entry is a folder with `lengths.bin` (int64, tokens of each row), `ids.bin` and `labels.bin` (int32, all rows
end to end), or `pairs.jsonl` for preference tasks, and `report.json`, which is written last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from soup_flows.data.encoding import Chunk
from soup_flows.data.report import DataReport, Tally, marked_text
from soup_flows.data.values import Dropped
from soup_flows.paths import write_atomic

REPORT = "report.json"


def read_report(entry: Path) -> DataReport | None:
    """Return the report of a complete entry, or None."""
    try:
        return DataReport.model_validate_json((entry / REPORT).read_bytes())
    except (OSError, ValueError):
        return None


def lengths_of(entry: Path) -> array[int]:
    """Return the tokens of each stored row."""
    found = array("q")
    path = entry / "lengths.bin"
    with path.open("rb") as file:
        found.fromfile(file, path.stat().st_size // found.itemsize)
    return found


def write_entry(entry: Path, chunks: Iterator[Chunk], tally: Tally, tokenizer: Any) -> DataReport:
    """Write chunks into a new entry and count them.

    The entry is built under another name and renamed when it is complete; an unfinished one is removed.

    Args:
        entry: the folder; an incomplete one of that name is replaced.
        chunks: what `encode_source` yields.
        tally: an empty tally of the same source and tokenizer.
        tokenizer: shows the sample row.

    Returns:
        The report. Nothing is kept when no row is: the caller refuses such data.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        with (
            (beside / "lengths.bin").open("wb") as lengths,
            (beside / "ids.bin").open("wb") as ids,
            (beside / "labels.bin").open("wb") as labels,
            (beside / "pairs.jsonl").open("wb") as pairs,
        ):
            for chunk in chunks:
                for mark in chunk.marks:
                    if isinstance(mark, Dropped):
                        tally.drop(mark)
                    else:
                        tally.count(mark)
                if chunk.first is not None and not tally.sample:
                    tally.sample = marked_text(chunk.first, tokenizer)
                lengths.write(chunk.lengths.tobytes())
                ids.write(chunk.ids)
                labels.write(chunk.labels)
                pairs.write(chunk.pairs)
            for file in (lengths, ids, labels, pairs):
                file.flush()
                os.fsync(file.fileno())
        report = tally.report()
        if report.rows_kept:
            write_atomic(beside / REPORT, report.model_dump_json())
            shutil.rmtree(entry, ignore_errors=True)
            beside.rename(entry)
        return report
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def one_writer(entry: Path) -> Iterator[None]:
    """Hold the lock of an entry, so that two runs with the same data tokenise it once.

    Refused data leaves nothing behind. A run that waited on a removed lock may then work beside a newer one:
    both rename a whole entry into place, so that this costs time and nothing else.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = entry.with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if not entry.exists():
                lock.unlink(missing_ok=True)


def stored(entry: Path, make: Callable[[], DataReport]) -> DataReport:
    """Return the report of an entry, made by `make` when it is not there yet."""
    found = read_report(entry)
    if found is not None:
        return found
    with one_writer(entry):
        return read_report(entry) or make()
