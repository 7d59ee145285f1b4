"""Data sets that are not on this machine: how they are named, and where `prepare dataset` puts them.

A Hub data set is `owner/name`, with `@revision`, `/folder or file` and `:split` behind it where they are wanted;
everything with `scheme://` is opened by fsspec. Both are fetched once, in the task, before a rank is started, into
the user's cache; a pointer there says where, so that whatever reads the source afterwards finds it by its name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from soup_flows.json_text import parse_json
from soup_flows.paths import write_json

CACHE_VARIABLE = "SOUP_FLOWS_CACHE"
"""Environment variable that moves the folder of fetched data sets."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.IGNORECASE)
_HUB = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<path>[^:@]+))?(?::(?P<split>\w+))?"
)
_FILE = re.compile(r"\.(jsonl?|ndjson|csv|tsv|txt|text|parquet|arrow|gz)$", re.IGNORECASE)
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits, and the words in a file's path that name them (the words of the `datasets` library)."""


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hugging Face Hub.

    Attributes:
        repo: `owner/name`.
        revision: branch, tag or commit; the default branch when None.
        path: a folder or file in it; all of it when None.
        split: the split whose files are read, where the files name splits.
    """

    repo: str
    revision: str | None = None
    path: str | None = None
    split: str = "train"


def is_url(source: str) -> bool:
    """Whether a source is opened by fsspec."""
    return _URL.fullmatch(source) is not None and not source.startswith("demo://")


def hub_source(source: str) -> HubSource | None:
    """Return what a Hub name says; None for anything else, and for a path whose first folder is here."""
    found = _HUB.fullmatch(source)
    if found is None or _FILE.search(found["repo"]) or Path(source.split("/")[0]).exists():
        return None
    parts = {key: value for key, value in found.groupdict().items() if value is not None}
    return HubSource(**parts)


def is_remote(source: str | Path) -> bool:
    """Whether a source has to be fetched before it can be read."""
    return isinstance(source, str) and (is_url(source) or hub_source(source) is not None)


def pointer(source: str) -> Path:
    """Return the file that says where a fetched source is."""
    root = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "soup-flows"
    key = hashlib.sha256(source.encode()).hexdigest()[:32]
    return Path(root) / "sources" / key / "source.json"


def remember(source: str, files: Sequence[Path], state: str) -> None:
    """Note which local files a source is; `state` tells whether it has changed since."""
    path = pointer(source)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(path, {"source": source, "files": [str(file) for file in files], "state": state})


def fetched(source: str) -> tuple[list[Path], str] | None:
    """Return the local files of a source and their state, or None when one of them is not here."""
    try:
        value = parse_json(pointer(source).read_text())
        files = [Path(name) for name in value["files"]]
        return (files, str(value["state"])) if all(file.exists() for file in files) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_here(source: str) -> bool:
    """Whether a source can be read now."""
    return not is_remote(source) or fetched(source) is not None


def without_secrets(text: str) -> str:
    """Return text whose addresses have no user, password or query (signed links carry a key there)."""
    return re.sub(r"\?\S+", "", re.sub(r"://[^/@\s]*@", "://", text))


def split_of(name: str) -> str | None:
    """Return the split that a file's path names, or None."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in _SPLITS.items() if set(known) & set(words)), None)


def of_split(files: Sequence[str], split: str) -> list[str]:
    """Return the files of a split; all of them where no file names one."""
    named = {name: split_of(name) for name in files}
    if not any(named.values()):
        return list(files)
    wanted = next((key for key, known in _SPLITS.items() if split in (key, *known)), split)
    return [name for name in files if named[name] == wanted]
