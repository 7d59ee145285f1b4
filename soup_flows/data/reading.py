"""Rows of a file or a folder, streamed: JSON lines, JSON, CSV, text, Parquet, Arrow, each also gzipped.

Whatever is wrong with the source as a whole is `Refused`; whatever is wrong with one row is a `Dropped` in
the stream, so that the caller decides. Nothing is ever guessed into text: a wrong encoding is named.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from soup_flows.data.jsonlines import MAX_ROW_BYTES, parse_row, read_lines, read_values
from soup_flows.data.sources import fetched, is_remote, split_of, without_secrets
from soup_flows.data.tables import read_csv, read_table, read_text
from soup_flows.data.values import Dropped, Row, shown, writable
from soup_flows.errors import Refused, nearest, refuse
from soup_flows.user_file import expanded

KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""File name endings and how such a file is read."""

_ABOUT_THE_DATA = {"dataset_info.json", "dataset_infos.json", "state.json", "package.json"}
_ENCODINGS = (
    (b"\xff\xfe\x00\x00", "UTF-32 (little-endian)"),
    (b"\x00\x00\xfe\xff", "UTF-32 (big-endian)"),
    (b"\xff\xfe", "UTF-16 (little-endian)"),
    (b"\xfe\xff", "UTF-16 (big-endian)"),
)
_OTHER_FILES = (
    (b"PK\x03\x04", "a zip archive or spreadsheet", "unpack it, or save it as CSV"),
    (b"PAR1", "a Parquet file", "give it the ending .parquet"),
    (b"ARROW1", "an Arrow file", "give it the ending .arrow"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd", "unpack it first: zstd -d"),
    (b"BZh", "packed with bzip2", "unpack it first: bunzip2"),
    (b"\xfd7zXZ\x00", "packed with xz", "unpack it first: unxz"),
    (b"SQLite format 3", "an SQLite database", "write its rows as JSON lines"),
    (b"%PDF-", "a PDF", "extract its text first"),
    (b"\x80\x04\x95", "a Python pickle", "write its rows as JSON lines; a pickle is never loaded"),
)
"""First bytes of files that are not text, whatever their ending: what they are, and what to do."""


def read_rows(source: str | Path, *, field: str = "dataset") -> Iterator[Row | Dropped]:
    """Yield the rows of `source` one at a time; memory is bounded by the longest row.

    Args:
        source: a file, or a folder whose data files are read in the order of their paths.
        field: the setting that named `source`, for messages.

    Yields:
        `Row`, or `Dropped` for a line that could not be read.

    Raises:
        Refused: if the source is missing, not a regular file, of an unknown kind or encoding, or unreadable.
            It is raised at the first row, since this is a generator; `list_files` raises at once.
    """
    for path in list_files(source, field=field):
        yield from _read_file(path, field)


def list_files(source: str | Path, *, field: str = "dataset") -> list[Path]:
    """Return the data files of `source` in the order they are read.

    Raises:
        Refused: as `read_rows`, as far as it can be seen without reading.
    """
    if isinstance(source, str) and is_remote(source):
        known = fetched(source)
        if known is None:
            fix = "`prepare dataset` and `soup-flows data` fetch it"
            raise refuse("DATA025", field, f"{without_secrets(source)} has not been fetched yet", fix)
        return known[0]
    path = expanded(source)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise _missing(path, str(source), field, error) from None
    if stat.S_ISDIR(mode):
        files = _walk(path, field, ())
        if not files:
            raise refuse("DATA003", field, f"no data file in {path}", f"put one of {_endings()} there")
        splits = {split_of(str(file.relative_to(path))) for file in files}
        if len(splits) > 1 and "train" in splits:
            names = ", ".join(str(file.relative_to(path)) for file in files[:6])
            fix = "give a file or folder of one split, and another as data.eval_dataset"
            raise refuse("DATA006", field, f"{path} holds several splits ({names})", fix)
        return files
    if not stat.S_ISREG(mode):
        raise refuse(
            "DATA002", field, f"{path} is {_what(mode)}, not a file", "give a regular file or a folder"
        )
    if _kind(path) is None:
        fix = f"use one of {_endings()}, gzipped or not" + _hint(path)
        raise refuse("DATA004", field, f"{path} has the unknown ending {path.suffix!r}", fix)
    return [path]


def _walk(folder: Path, field: str, above: tuple[tuple[int, int], ...]) -> list[Path]:
    """Return the data files below `folder`; links to folders are followed, loops refused."""
    try:
        facts = folder.stat()
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise refuse("DATA005", field, f"cannot read the folder {folder}: {error.strerror}") from None
    here = (facts.st_dev, facts.st_ino)
    if here in above:
        raise refuse("DATA002", field, f"{folder} leads back to a folder above it", "remove the link")
    if (folder / "dataset_dict.json").is_file():
        splits = [e.name for e in entries if e.is_dir()]
        fix = f"give one of them: {', '.join(str(folder / name) for name in splits)}"
        raise refuse("DATA006", field, f"{folder} holds several splits", fix)
    files: list[Path] = []
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith((".", "_")):
            files += _walk(entry, field, (*above, here))
        elif is_data_file(entry):
            files += list_files(entry, field=field)
    return files


def is_data_file(path: Path) -> bool:
    """Whether a file of a folder holds rows: by its ending, and not hidden or about the data."""
    hidden = path.name.startswith((".", "_")) or path.name in _ABOUT_THE_DATA
    return not hidden and _kind(path) is not None


def _read_file(path: Path, field: str) -> Iterator[Row | Dropped]:
    kind, name = _kind(path), writable(str(path))
    if kind is None:
        raise refuse("DATA004", field, f"{path} has the unknown ending {path.suffix!r}", f"use {_endings()}")
    try:
        if kind in ("parquet", "arrow"):
            yield from read_table(path, name, kind, field)
            return
        with _open(path, field) as file:
            if kind == "csv":
                yield from read_csv(_text(file), name, "\t" if ".tsv" in path.suffixes else ",")
            elif kind == "text":
                yield from read_text(file, name)
            elif _is_one_value(file, kind):
                yield from read_values(_text(file), name)
            else:
                yield from read_lines(file, name)
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise refuse(
            "DATA007",
            field,
            f"{path}: {found}",
            f"convert it, for instance: iconv -f CP1252 -t UTF-8 {path.name}",
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise refuse("DATA008", field, f"{path} is a damaged gzip file: {error}", "fetch it again") from None
    except OSError as error:
        raise refuse("DATA005", field, f"cannot read {path}: {error.strerror or error}") from None


def _open(path: Path, field: str) -> IO[bytes]:
    """Open a file for reading bytes, through gzip where its first bytes say so, in UTF-8 or refused."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    file = cast(IO[bytes], gzip.open(path)) if packed else path.open("rb")  # noqa: SIM115 (the caller closes it)
    try:
        head = file.read(1024)
        encoding = next((words for mark, words in _ENCODINGS if head.startswith(mark)), "")
        for mark, what, fix in _OTHER_FILES:
            if head.startswith(mark):
                raise refuse("DATA008", field, f"{path} is {what}, not text", fix)
        if not encoding and head.count(b"\x00") > len(head) // 4:
            encoding = "UTF-16 without a byte-order mark, or binary"
        if encoding:
            code = encoding.split(" ")[0]
            fix = f"convert it: iconv -f {code} -t UTF-8 {path.name} > new.jsonl"
            raise refuse("DATA007", field, f"{path} is {encoding}, not UTF-8", fix)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _text(file: IO[bytes]) -> io.TextIOWrapper:
    return io.TextIOWrapper(cast(Any, file), encoding="utf-8-sig", newline="")


def _is_one_value(file: IO[bytes], kind: str) -> bool:
    """Whether a file is a JSON array, or objects spread over lines, and not one object a line."""
    line = b""
    while (data := file.readline(MAX_ROW_BYTES)) and not line:
        line = data.removeprefix(b"\xef\xbb\xbf").strip()
    file.seek(0)
    if line.startswith(b"["):
        return True
    return line == b"{" or (kind == "json" and line != b"" and isinstance(parse_row(line, 1, ""), Dropped))


def _kind(path: Path) -> str | None:
    name = path.name.lower().removesuffix(".gz")
    return KINDS.get(os.path.splitext(name)[1])


def _endings() -> str:
    return ", ".join(KINDS)


def _hint(path: Path) -> str:
    tools = {".zst": "zstd -d", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".tar": "tar -xf"}
    tool = tools.get(path.suffix.lower())
    return f"; unpack it first: {tool} {path.name}" if tool else ""


def _what(mode: int) -> str:
    tests = {
        "a named pipe": stat.S_ISFIFO,
        "a device": lambda m: stat.S_ISCHR(m) or stat.S_ISBLK(m),
        "a socket": stat.S_ISSOCK,
    }
    return next((words for words, test in tests.items() if test(mode)), "something else")


def _missing(path: Path, source: str, field: str, error: Exception) -> Refused:
    """Say what is missing: the file (with the nearest name), or the folder it should be in."""
    if not isinstance(error, FileNotFoundError):
        words = getattr(error, "strerror", None) or str(error)
        return refuse("DATA001", field, f"cannot open {shown(source)}: {words}")
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if path.is_symlink():
        return refuse("DATA001", field, f"{path} is a link to something that is not there", "repair the link")
    missing = path.relative_to(folder).parts[0] if folder != path.parent else path.name
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        names = []
    near = nearest(missing, names)
    fix = f"in {folder.absolute()}: {near}" if near else f"{folder.absolute()} has no such name"
    return refuse("DATA001", field, f"there is no {path}", fix)
