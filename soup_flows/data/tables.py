"""CSV, plain text, Parquet and Arrow as rows, one at a time."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from soup_flows.data.jsonlines import MAX_ROW_BYTES
from soup_flows.data.values import Dropped, Row, shown
from soup_flows.errors import refuse

_BATCH_ROWS = 1024
_DELIMITERS = ",;\t|"
_MISSING = frozenset({"", "NaN", "nan", "None", "null", "NULL", "<NA>", "#N/A"})
"""Cells without a value: pandas, Python, SQL and spreadsheets write them so."""


def read_csv(file: io.TextIOWrapper, name: str, delimiter: str) -> Iterator[Row | Dropped]:
    """Yield the rows of a table whose first line names the columns.

    An empty cell is a missing value, and so is what programs write in its place, such as `NaN` and `None`.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    head = file.readline()
    if head.lower().startswith("sep=") and len(head.strip()) == 5:  # a line that Excel reads and writes
        delimiter = head.strip()[4]
    else:
        file.seek(0)
        if delimiter not in head:
            delimiter = next((sign for sign in _DELIMITERS if sign in head), delimiter)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Dropped(line, "not valid CSV", "", str(error), "quotes that are closed", name)
            continue
        if cells is None:
            return
        if not any(cells):
            continue
        if columns is None:
            columns = [cell.strip() for cell in cells]
            if len(set(columns)) != len(columns):
                yield Dropped(line, "duplicate column", "", shown(columns), "each column once", name)
                return
        elif len(cells) != len(columns):
            wanted = f"{len(columns)} cells, as in the first line"
            yield Dropped(line, "wrong number of cells", "", f"{len(cells)} cells", wanted, name)
        else:
            value = {k: None if cell in _MISSING else cell for k, cell in zip(columns, cells, strict=True)}
            yield Row(line, value, name)


def read_text(file: IO[bytes], name: str) -> Iterator[Row | Dropped]:
    """Yield one document a line; blank lines are skipped."""
    number = 0
    while data := file.readline(MAX_ROW_BYTES):
        number += 1
        try:
            text = data.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            found = f"byte 0x{data[error.start]:02x} at byte {error.start + 1} of the line"
            yield Dropped(number, "not UTF-8", "", found, "UTF-8 text", name)
            continue
        if text.strip():
            yield Row(number, {"text": text}, name)


def read_table(path: Path, name: str, kind: str, field: str) -> Iterator[Row | Dropped]:
    """Yield the rows of a Parquet file or of an Arrow file of a saved `datasets` folder."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        fix = "pip install pyarrow (part of soup-flows[train])"
        raise refuse("DATA009", field, f"{path} needs pyarrow to be read", fix) from None
    number = 0
    try:
        with contextlib.ExitStack() as stack:
            if kind == "parquet":
                batches = stack.enter_context(pq.ParquetFile(path)).iter_batches(batch_size=_BATCH_ROWS)
            else:  # not mapped: a file that is cut while it is read would end the process by SIGBUS
                file = stack.enter_context(pa.OSFile(str(path)))
                batches = stack.enter_context(pa.ipc.open_stream(file))
            for batch in batches:
                batch.validate(full=True)  # wrong offsets would be followed out of the memory
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, value, name)
    except UnicodeDecodeError:
        raise
    except (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError) as error:
        found = f"{path} is a damaged {kind} file after row {number}: {shown(str(error))}"
        raise refuse("DATA008", field, found, "fetch or write it again") from None
