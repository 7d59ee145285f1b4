"""The rows of a data set in memory, made by the parts that `prepare dataset` is made of."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from soup_flows.data.encoding import Settings, encode_source
from soup_flows.data.formats import check_kept
from soup_flows.data.report import DataReport, Tally
from soup_flows.data.store import write_entry
from soup_flows.training.batches import TokenRow


def prepare(
    source: str | Path, tokenizer: Any, *, max_length: int, policy: Any = "drop", train_on: Any = "assistant"
) -> tuple[list[TokenRow], DataReport]:
    tally = Tally(source, tokenizer, max_length)
    chunks = list(encode_source(source, tokenizer, Settings("sft", max_length, train_on)))
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        report = write_entry(Path(folder, "entry"), iter(chunks), tally, tokenizer)
    check_kept(source, report.rows_kept, tally.drops, policy=policy)
    rows = []
    for chunk in chunks:
        ids, labels = (array("i", memoryview(data).cast("i")) for data in (chunk.ids, chunk.labels))
        at = 0
        for length in chunk.lengths:
            rows.append(TokenRow(ids[at : at + length].tolist(), labels[at : at + length].tolist()))
            at += length
    return rows, report
