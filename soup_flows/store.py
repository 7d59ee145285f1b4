"""Checkpoints and models in a store that outlives the machine: any URL that fsspec knows.

`<url>/<run id>/checkpoints/checkpoint-<step>/` and `<url>/<run id>/model/`. The manifest is uploaded last, after
every other file was confirmed, so a folder without one does not count, as on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.checkpoints import hash_files, list_checkpoints, set_aside, step_of, verify
from soup_flows.data.sources import without_secrets
from soup_flows.errors import refuse
from soup_flows.launch.hide import without
from soup_flows.manifest import MANIFEST, StoredFile, read_manifest
from soup_flows.paths import write_json

logger = logging.getLogger(__name__)

Confirm = Literal["content", "size"]
FETCHING = ".fetching"
"""Folder below `checkpoints/` that a checkpoint is downloaded into before it gets its name."""
CHUNK_BYTES = 8 << 20


class Mirrored(BaseModel):
    """A folder that is in the store, confirmed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str
    """`checkpoint-<step>` or `model`."""
    url: str
    bytes: int
    seconds: float
    """Wall time of the upload, its confirmation included."""


class Store:
    """A place for the checkpoints and models of runs.

    Args:
        url: such as `s3://bucket/folder` or `file:///mnt/share`; fsspec's package for it must be installed.
        options: what fsspec's file system takes.
        keep: checkpoints of a run that stay in the store.
        confirm: `content` reads everything back and compares hashes; `size` compares sizes.
        secret_options: the same as `options`, for what must not be shown.

    Raises:
        Refused: if fsspec knows no such URL, or a package or an option is wrong.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        keep: int = 2,
        confirm: Confirm = "content",
        secret_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        import fsspec

        self.url, self._keep, self._confirm = without_secrets(url).rstrip("/"), keep, confirm
        self._secrets = _texts(secret_options) | {url: self.url}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **options, **secret_options)
        except (ValueError, ImportError, TypeError) as error:
            fix = "correct the URL in the block, and install fsspec's package for it (s3fs, gcsfs, adlfs)"
            message = f"{self.url}: {self.words(error)}"
            raise refuse("STORE001", "blocks.checkpoint_store", message, fix) from None

    def words(self, error: Exception) -> str:
        """Return what an error of the store says, without what is secret."""
        return without(f"{type(error).__name__}: {error}", self._secrets)

    def push_checkpoint(self, folder: Path, run_id: str, name: str) -> Mirrored:
        """Upload a sealed checkpoint, then remove what is older than the `keep` newest.

        Args:
            folder: the checkpoint.
            run_id: the run it belongs to.
            name: its name, `checkpoint-<step>`.

        Raises:
            OSError: if the store refuses, or what arrived differs.
            ValueError: for a folder without a manifest.
        """
        begun, where = time.monotonic(), f"{run_id}/checkpoints/{name}"
        files = read_manifest(folder).files
        size = self._push(folder, where, files, MANIFEST)
        for step in self.steps(run_id)[self._keep :]:
            self._fs.rm(f"{self._root}/{run_id}/checkpoints/checkpoint-{step}", recursive=True)
        url = f"{self.url}/{where}"
        return Mirrored(what=name, url=url, bytes=size, seconds=time.monotonic() - begun)

    def push_model(self, folder: Path, run_id: str, listing: Path) -> Mirrored:
        """Upload the final model, its list of sizes and hashes last.

        Args:
            folder: the model.
            run_id: the run it belongs to.
            listing: where that list is written, outside of `folder`.

        Raises:
            OSError: if the store refuses, or what arrived differs.
        """
        begun, where = time.monotonic(), f"{run_id}/model"
        files = hash_files(folder)
        write_json(listing, {"files": {name: file.model_dump() for name, file in files.items()}})
        size = self._push(folder, where, files, None)
        self._put(listing, f"{self._root}/{where}/soup-mirror.json", None)
        url = f"{self.url}/{where}"
        return Mirrored(what="model", url=url, bytes=size, seconds=time.monotonic() - begun)

    def steps(self, run_id: str) -> list[int]:
        """Return the steps of the checkpoints of a run that are complete in the store, the newest first."""
        folder, found = f"{self._root}/{run_id}/checkpoints", []
        with contextlib.suppress(FileNotFoundError):
            for entry in self._fs.ls(folder, detail=False, refresh=True):
                step = step_of(Path(str(entry).rstrip("/")))
                if step is not None and self._fs.exists(f"{folder}/checkpoint-{step}/{MANIFEST}"):
                    found.append(step)
        return sorted(found, reverse=True)

    def fetch_newest(self, run_id: str, checkpoints_dir: Path) -> Path | None:
        """Download the newest checkpoint that verifies, unless one as new is there.

        Args:
            run_id: the run whose checkpoints are looked for.
            checkpoints_dir: the run's folder of checkpoints here.

        Returns:
            The new folder; None if there is nothing newer.
        """
        here = max((step_of(folder) or 0 for folder in list_checkpoints(checkpoints_dir)), default=-1)
        for step in self.steps(run_id):
            if step <= here:
                return None
            try:
                folder = self._fetch(run_id, f"checkpoint-{step}", checkpoints_dir)
            except ValueError as error:  # a manifest that cannot be right: an older checkpoint may be
                logger.warning("checkpoint-%d of %s is left alone: %s", step, self.url, error)
                continue
            reasons = verify(folder, run_id)
            if not reasons:
                return folder
            set_aside(folder, [f"as it came from {self.url}: {'; '.join(reasons)}"])
        return None

    def _fetch(self, run_id: str, name: str, checkpoints_dir: Path) -> Path:
        beside, final = checkpoints_dir / FETCHING / name, checkpoints_dir / name
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True, mode=0o700)
        source = f"{self._root}/{run_id}/checkpoints/{name}"
        self._fs.get_file(f"{source}/{MANIFEST}", str(beside / MANIFEST))
        for file in read_manifest(beside).files:
            target = beside / file
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(f"{source}/{file}", str(target))
        beside.rename(final)
        return final

    def _push(self, folder: Path, where: str, files: Mapping[str, StoredFile], last: str | None) -> int:
        """Upload and confirm every file, `last` after all others; return their size in bytes."""
        target = f"{self._root}/{where}"
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)
        for name, stored in files.items():
            self._put(folder / name, f"{target}/{name}", stored)
        if last is not None:
            self._put(folder / last, f"{target}/{last}", None)
        return sum(stored.size for stored in files.values())

    def _put(self, source: Path, target: str, stored: StoredFile | None) -> None:
        """Upload a file and confirm that it arrived; the expected size and hash are the source's when None."""
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.put_file(str(source), target)
        size = stored.size if stored else source.stat().st_size
        self._fs.invalidate_cache()
        found = self._fs.info(target)["size"]
        if found != size:
            raise OSError(f"{target} has {found} bytes in the store, {size} were uploaded")
        if self._confirm == "content":
            with self._fs.open(target, "rb") as arrived, source.open("rb") as sent:
                wanted = stored.sha256 if stored else hashlib.file_digest(sent, "sha256").hexdigest()
                if _hash(arrived) != wanted:
                    raise OSError(f"{target} differs in the store from what was uploaded")


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts in options, at any depth, with what is shown in their place."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _texts(value)
        elif str(value):
            found[str(value)] = f"<{name}>"
    return found


def _hash(file: Any) -> str:
    total = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        total.update(chunk)
    return total.hexdigest()
