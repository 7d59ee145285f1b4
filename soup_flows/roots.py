"""The folders that runs may touch, where whoever runs the worker has named any.

Parameters come from everybody who may start a deployment. With `SOUP_FLOWS_ROOTS=/data:/models:/runs` in the
worker's environment, every local path of a spec must lie inside one of these folders, links followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from soup_flows.errors import Problem
from soup_flows.user_file import expanded

ROOTS_VAR = "SOUP_FLOWS_ROOTS"
"""Folders divided by `:`; unset or empty: no limit."""
OUTSIDE_ROOTS = "SPEC004"
REMOTE = (
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "hf",
    "http",
    "https",
    "hdfs",
    "webhdfs",
    "oss",
    "demo",
)
"""Schemes that name nothing on this machine; one that is not here may (`git://`, `reference://`)."""
WRAPPERS = ("zip", "tar", "gzip", "simplecache", "filecache", "blockcache")
"""Schemes of fsspec around another address."""
NOWHERE = Path("/")
"""Stands for an address of which it is not known what it names; inside no root but `/`."""


NO_NAME = "SPEC005"
NAME_BYTES, PATH_BYTES = 255, 4095
"""Longest name and path on Linux (linux, include/uapi/linux/limits.h)."""


def problems_with_names(paths: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each path that no file can have: asking whether it exists would already fail.

    Args:
        paths: field name to a path, an address or a Hub id.
    """
    return [
        Problem(
            id=NO_NAME,
            severity="error",
            field=field,
            message=f"{value[:80]!r}... is no path: {why}"
            if len(value) > 80
            else f"{value!r} is no path: {why}",
            fix="give the path of a file or a folder",
        )
        for field, value in paths.items()
        if (why := _no_name(value))
    ]


def _no_name(value: str) -> str:
    if "\0" in value:
        return "it holds a NUL"
    if any(len(os.fsencode(part)) > NAME_BYTES for part in value.split("/")) and "://" not in value:
        return f"a name in it has more than {NAME_BYTES} bytes"
    return f"it has more than {PATH_BYTES} bytes" if len(os.fsencode(value)) > PATH_BYTES else ""


def problems_with_roots(paths: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> list[Problem]:
    """Return a problem for each path outside the folders of `SOUP_FLOWS_ROOTS`.

    Args:
        paths: field name to what was given for it: a path, an address (`file://...`) or a Hub id.
        environ: where `SOUP_FLOWS_ROOTS` is looked up.
    """
    roots = [expanded(root).resolve() for root in environ.get(ROOTS_VAR, "").split(os.pathsep) if root]
    if not roots:
        return []
    return [
        Problem(
            id=OUTSIDE_ROOTS,
            severity="error",
            field=field,
            message=f"{value!r} is outside the folders that runs may touch here",
            fix=f"use a path inside {', '.join(map(str, roots))}; whoever runs the worker sets {ROOTS_VAR}",
        )
        for field, value in paths.items()
        if not all(_inside(path, roots) for path in _local_paths(value))
    ]


def _inside(path: Path, roots: list[Path]) -> bool:
    try:
        real = path.expanduser().resolve()
    except (OSError, RuntimeError):  # a loop of links; no such user
        return False
    return any(real.is_relative_to(root) for root in roots)


def _local_paths(value: str) -> Iterator[Path]:
    """Yield the paths of this machine that a value names: none for a Hub id or a remote address."""
    for part in value.split("::"):  # fsspec chains addresses: zip://rows.jsonl::file:///data/rows.zip
        scheme, _, rest = part.partition("://") if "://" in part else ("", "", part)
        if scheme in ("file", "local"):
            yield Path(unquote(rest))
        elif scheme not in ("", *REMOTE, *WRAPPERS):
            yield NOWHERE
        elif not scheme and part not in WRAPPERS and _is_path(part):
            yield Path(part)


def _is_path(text: str) -> bool:
    """Tell a path from an id of the Hub (`owner/name`), which looks like a relative path that is not there."""
    first = Path(text).parts[0] if Path(text).parts else "."
    return (
        "/" not in text
        or first in (".", "..", "/")
        or ".." in text
        or first[0] == "~"
        or Path(first).exists()
    )
