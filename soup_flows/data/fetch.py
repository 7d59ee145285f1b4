"""Fetches a data set once, before any rank is started: from the Hub, or by fsspec."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from soup_flows.data.reading import KINDS, is_data_file
from soup_flows.data.sources import (
    HubSource,
    fetched,
    hub_source,
    is_remote,
    is_url,
    of_split,
    pointer,
    remember,
    split_of,
    without_secrets,
)
from soup_flows.data.store import one_writer
from soup_flows.errors import Refused, first_line, refuse


def fetch(source: str, *, field: str = "dataset") -> None:
    """Bring a remote source onto this machine, if it is not here or has changed; anything else is left alone.

    Raises:
        Refused: if it cannot be reached, or holds no data file.
    """
    if not is_remote(source):
        return
    pointer(source).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with one_writer(pointer(source)):
        hub = hub_source(source)
        if hub is not None:
            _from_hub(source, hub, field)
        elif is_url(source):
            _by_fsspec(source, field)


def _from_hub(source: str, hub: HubSource, field: str) -> None:
    """Fetch the files of one split into the Hub's own cache; offline, what that cache has is used."""
    from huggingface_hub import snapshot_download

    below = f"{hub.path}*" if hub.path else "*"
    patterns = [f"{below}{ending}{packed}" for ending in KINDS for packed in ("", ".gz")]
    if hub.path and is_data_file(Path(hub.path)):
        patterns = [hub.path]
    try:
        folder = Path(
            snapshot_download(hub.repo, repo_type="dataset", revision=hub.revision, allow_patterns=patterns)
        )
    except Exception as error:  # network, authorisation and naming errors alike
        fix = "check the name, the network and HF_TOKEN, or give a local file"
        words = first_line(error)
        raise refuse(
            "DATA024", field, f"there is no {source} here, and the Hub gave none: {words}", fix
        ) from None
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and is_data_file(p))
    names = [name for name in names if name.startswith(hub.path or "")]
    chosen = of_split(names, hub.split)
    if not chosen:
        there = ", ".join(sorted({split_of(name) or "no split" for name in names})) or "no data file"
        fix = f"add :validation or :test for another split; read are {', '.join(KINDS)}"
        raise refuse("DATA003", field, f"{source} has no file of the split {hub.split} ({there})", fix)
    remember(source, [folder / name for name in chosen], folder.name)


def _by_fsspec(source: str, field: str) -> None:
    """Copy a file or a folder through fsspec; a copy whose original has not changed is kept."""
    try:
        import fsspec
    except ImportError:
        fix = "pip install 'soup-flows[train]'"
        raise refuse("DATA024", field, f"{without_secrets(source)} needs fsspec to be read", fix) from None
    try:
        system, path = fsspec.core.url_to_fs(source)
        if not system.exists(path):
            raise FileNotFoundError(path)
        names = [path] if system.isfile(path) else [n for n in system.find(path) if is_data_file(Path(n))]
        if not names:
            raise refuse(
                "DATA003",
                field,
                f"no data file in {without_secrets(source)}",
                f"put one of {', '.join(KINDS)} there",
            )
        state = _state(system, names)
        known = fetched(source)
        if known is not None and known[1] == state:
            return
        remember(source, _copy(system, path, names, pointer(source).parent / "files"), state)
    except Refused:
        raise
    except FileNotFoundError:
        raise refuse(
            "DATA001", field, f"there is no {without_secrets(source)}", "check the address"
        ) from None
    except Exception as error:  # each file system has errors of its own
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = "check the address and the credentials; s3:// needs s3fs, gs:// needs gcsfs"
        raise refuse(
            "DATA024", field, f"{without_secrets(source)} cannot be fetched: {without_secrets(words)}", fix
        ) from None


def _state(system: Any, names: list[str]) -> str:
    """Return a hash of what the file system says about the files: size, and time or checksum."""
    facts = [(name, str(system.info(name).get("size")), str(system.ukey(name))) for name in names]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _copy(system: Any, base: str, names: list[str], folder: Path) -> list[Path]:
    """Copy files beside the old copy and put them in its place."""
    beside = folder.with_name("files.new")
    shutil.rmtree(beside, ignore_errors=True)
    targets = []
    for name in names:
        below = os.path.relpath(name, base) if name != base else os.path.basename(name)
        target = beside / below
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        system.get_file(name, str(target))
        targets.append(folder / below)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
    return targets
