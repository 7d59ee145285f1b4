"""A data set as packed bytes of token ids, chunk by chunk, encoded by one process or by many."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soup_flows.data.formats import iter_examples
from soup_flows.data.masking import TrainOn, encode
from soup_flows.data.report import Kept, better_answer, kept_row
from soup_flows.data.values import Dropped, Encoded, Example
from soup_flows.errors import refuse

Task = Literal["sft", "pretrain", "dpo", "kto", "orpo"]
"""`sft` learns answers, `pretrain` every token of every document, the others compare answers."""

COMPARED = {"dpo": ("preference",), "orpo": ("preference",), "kto": ("kto", "preference")}
"""Tasks that compare answers, and the kinds of rows they take; `kto` takes a pair as two rows."""

CHUNK_ROWS = 200
"""Rows that travel between processes at once."""


@dataclass(frozen=True)
class Settings:
    """How rows become tokens; two equal settings and equal files give equal bytes."""

    task: Task
    max_length: int
    train_on: TrainOn


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows in file order.

    Attributes:
        marks: one entry a row read.
        lengths: tokens of each stored row.
        ids: the token ids of the stored rows end to end, int32.
        labels: like `ids`; -100 where the loss does not count.
        pairs: for tasks that compare answers, one JSON line a stored row instead of tokens.
        first: the first kept row, for the report's sample.
    """

    marks: list[Kept | Dropped]
    lengths: array[int]
    ids: bytes
    labels: bytes
    pairs: bytes
    first: Encoded | None


def encode_source(
    source: str | Path, tokenizer: Any, settings: Settings, *, workers: int = 1, field: str = "dataset"
) -> Iterator[Chunk]:
    """Read and encode a data set; at most four chunks a worker are in memory.

    Args:
        source: as in `read_rows`.
        tokenizer: as in `encode`.
        settings: how rows become tokens.
        workers: processes that encode; with 1 it happens in this process.
        field: the setting that named `source`.

    Yields:
        Chunks in file order; the result does not depend on `workers`.

    Raises:
        Refused: as `iter_examples` and `encode`; also when an encoding process dies.
    """
    examples = iter_examples(source, field=field)
    batches = iter(lambda: list(itertools.islice(examples, CHUNK_ROWS)), [])
    if workers < 2:
        for batch in batches:
            yield encode_chunk(batch, tokenizer, settings)
        return
    # A forked process shares the tokenizer's memory and imports nothing again.
    context = multiprocessing.get_context("fork")
    done = 0
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer, settings)) as pool:
        waiting: deque[Future[Chunk]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode_in_worker, batch))
                while len(waiting) >= 4 * workers:
                    yield waiting.popleft().result()
                    done += CHUNK_ROWS
            while waiting:
                yield waiting.popleft().result()
                done += CHUNK_ROWS
        except BrokenProcessPool:
            message = (
                f"a process that tokenised rows {done + 1} to {done + CHUNK_ROWS} (or soon after) was killed"
            )
            fix = "most likely the memory ran out: lower data.workers"
            raise refuse("DATA021", field, message, fix) from None
        finally:
            pool.shutdown(cancel_futures=True)


_worker: tuple[Any, Settings]


def _start_worker(tokenizer: Any, settings: Settings) -> None:
    global _worker
    _worker = (tokenizer, settings)


def _encode_in_worker(batch: list[Example | Dropped]) -> Chunk:
    return encode_chunk(batch, *_worker)


def encode_chunk(batch: list[Example | Dropped], tokenizer: Any, settings: Settings) -> Chunk:
    """Encode some rows; see `Chunk`."""
    marks: list[Kept | Dropped] = []
    lengths, ids, labels = array("q"), array("i"), array("i")
    pairs: list[str] = []
    first: Encoded | None = None
    for item in batch:
        if isinstance(item, Dropped):
            marks.append(item)
            continue
        found = _encode_row(item, tokenizer, settings)
        if isinstance(found, Dropped):
            marks.append(found)
            continue
        first = first or found
        marks.append(kept_row(item, found))
        if settings.task in COMPARED:
            compared = _compared(item, settings.task)
            pairs += [json.dumps(row, ensure_ascii=False) + "\n" for row in compared]
            lengths.extend([len(found.input_ids)] * len(compared))
            continue
        for start, end in _pieces(len(found.input_ids), settings):
            lengths.append(end - start)
            ids.extend(found.input_ids[start:end])
            labels.extend(found.labels[start:end])
    text = "".join(pairs).encode("utf-8", "surrogatepass")
    return Chunk(marks, lengths, ids.tobytes(), labels.tobytes(), text, first)


def _encode_row(example: Example, tokenizer: Any, settings: Settings) -> Encoded | Dropped:
    if settings.task in COMPARED:
        if example.kind not in COMPARED[settings.task]:
            fix = f"training.task={settings.task} needs rows with `chosen` and `rejected`"
            fix += ", or with `prompt`, `completion` and `label`" if settings.task == "kto" else ""
            raise refuse("DATA016", "dataset", f"the rows have the format {example.format}", fix)
        return encode(better_answer(example), tokenizer, settings.max_length, settings.train_on)
    if settings.task == "pretrain":
        return encode(example, tokenizer, 2**62, "all")
    return encode(example, tokenizer, settings.max_length, settings.train_on)


def _pieces(length: int, settings: Settings) -> Iterator[tuple[int, int]]:
    """Cut a document for `pretrain`; pieces share one token, so that each is predicted exactly once."""
    if settings.task != "pretrain":
        yield 0, length
        return
    for start in range(0, max(1, length - 1), settings.max_length - 1):
        yield start, min(length, start + settings.max_length)


def _compared(example: Example, task: Task) -> list[dict[str, Any]]:
    """Return a row as TRL reads it: an explicit prompt, all texts or all messages; a pair is two rows for `kto`."""
    answer = example.chosen if example.kind == "preference" else example.completion
    prompt: Any = example.messages if isinstance(answer, list) else example.prompt
    if example.kind == "kto":
        return [{"prompt": prompt, "completion": answer, "label": example.label}]
    pair = {"prompt": prompt, "chosen": answer, "rejected": example.rejected}
    if task != "kto":
        return [pair]
    return [
        {"prompt": prompt, "completion": pair[key], "label": key == "chosen"}
        for key in ("chosen", "rejected")
    ]
