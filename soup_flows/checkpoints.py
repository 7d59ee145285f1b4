"""Checkpoints that can be trusted: a manifest written last, verification, and which one to resume from.

A folder `checkpoint-<step>` without a manifest that holds does not exist for resuming. It is set aside under
`checkpoints/broken/` with the reason, never deleted, and the next older one is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from soup_flows.json_text import parse_json
from soup_flows.manifest import MANIFEST, Manifest, StoredFile, missing, read_manifest
from soup_flows.paths import write_atomic, write_json
from soup_flows.safetensors_header import read_header

BROKEN = "broken"
STAGING = ".saving"
"""Folder below `checkpoints/` in which a checkpoint is written before it gets its name."""
_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder, or None for another name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Return the folders named `checkpoint-<step>`, the newest step first."""
    try:
        entries = list(checkpoints_dir.iterdir())
    except OSError:
        return []
    found = [(step, path) for path in entries if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def hash_files(folder: Path) -> dict[str, StoredFile]:
    """Return size and hash of every file below `folder` but the manifest, read back from disk."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p != folder / MANIFEST]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(_sha256, paths))
    return {
        path.relative_to(folder).as_posix(): StoredFile(size=path.stat().st_size, sha256=digest)
        for path, digest in zip(paths, hashes, strict=True)
    }


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Hash and flush every file of a finished save, check that it is complete, write the manifest last.

    Args:
        folder: the folder in which all ranks have written.
        manifest: everything but `files`.

    Raises:
        ValueError: with every reason why this is no checkpoint.
        OSError: if the disk refuses.
    """
    manifest = manifest.model_copy(update={"files": hash_files(folder)})
    reasons = _incomplete(folder, manifest)
    if reasons:
        raise ValueError("; ".join(reasons))
    for name in manifest.files:
        sync(folder / name)
    for directory in {folder, *((folder / name).parent for name in manifest.files)}:
        sync(directory)
    write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=1))
    sync(folder)
    return manifest


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def verify(folder: Path, run_id: str | None = None) -> list[str]:
    """Return every reason not to resume from `folder`; an empty list for a good checkpoint.

    All files are read and hashed (about a second per GiB and disk).

    Args:
        folder: the checkpoint.
        run_id: the run it has to come from; any run when None.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    reasons = []
    if run_id is not None and manifest.run_id != run_id:
        reasons.append(f"{MANIFEST} is of another run, {manifest.run_id}")
    named = step_of(folder)
    if named is not None and named != manifest.step:
        reasons.append(f"{MANIFEST} is of step {manifest.step}")
    damaged = False
    for name, wanted in manifest.files.items():
        reason = _damage(folder / name, wanted)
        if reason:
            reasons.append(f"{name} {reason}")
            damaged = True
    return reasons if damaged else reasons + _incomplete(folder, manifest)


def _damage(path: Path, wanted: StoredFile) -> str | None:
    """Say what is wrong with a stored file, or None."""
    try:
        size = path.stat().st_size
        if size != wanted.size:
            return f"has {size} bytes, {wanted.size} were saved"
        return None if _sha256(path) == wanted.sha256 else "has changed since it was saved"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _incomplete(folder: Path, manifest: Manifest) -> list[str]:
    """Say what a resume needs and is not there, or cannot be read."""
    reasons = [f"{what} is missing" for what in missing(manifest)]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        state = parse_json((folder / "trainer_state.json").read_text())
        if state.get("global_step") != manifest.step:
            reasons.append(f"trainer_state.json is of step {state.get('global_step')}, not {manifest.step}")
    for name in manifest.files:
        if not name.endswith(".safetensors"):
            continue
        try:
            if not read_header(folder / name):
                reasons.append(f"{name} holds no tensors")
        except (OSError, ValueError) as error:
            reasons.append(str(error))
    return reasons


def set_aside(folder: Path, reasons: Collection[str]) -> Path:
    """Move a checkpoint below `broken/` beside it, with the reasons in `reason.json`; nothing is deleted.

    Returns:
        Where it is now.
    """
    broken = folder.parent / BROKEN
    broken.mkdir(mode=0o700, exist_ok=True)
    target, number = broken / folder.name, 1
    while target.exists():
        number += 1
        target = broken / f"{folder.name}.{number}"
    folder.rename(target)
    with contextlib.suppress(OSError):
        write_json(target / "reason.json", {"reasons": list(reasons), "time": time.time()})
    return target


def newest_good(
    checkpoints_dir: Path,
    *,
    run_id: str | None = None,
    max_step: int | None = None,
    on_broken: Callable[[Path, list[str]], None] | None = None,
) -> Path | None:
    """Return the newest checkpoint that verifies; those that do not are set aside on the way.

    Args:
        checkpoints_dir: folder of `checkpoint-<step>` folders; it may be missing.
        run_id: the run the checkpoints have to come from; any run when None.
        max_step: newer ones are set aside too: training goes back behind them.
        on_broken: told where each one is now, and why.
    """
    for folder in list_checkpoints(checkpoints_dir):
        step = step_of(folder)
        if max_step is not None and step is not None and step > max_step:
            reasons = [f"training went back to step {max_step}"]
        else:
            reasons = verify(folder, run_id)
        if not reasons:
            return folder
        try:
            moved = set_aside(folder, reasons)
        except OSError as error:  # somebody else's folder, or a disk that can only be read
            moved, reasons = folder, [*reasons, f"it could not be moved: {error.strerror}"]
        if on_broken is not None:
            on_broken(moved, reasons)
    return None


def rotate(
    checkpoints_dir: Path, keep: int, known_good: Collection[str] = (), spared: Collection[str] = ()
) -> list[str]:
    """Delete the oldest checkpoints beyond `keep`, unless that would delete the last one that verifies.

    Args:
        checkpoints_dir: folder of `checkpoint-<step>` folders.
        keep: checkpoints to keep, at least 1.
        known_good: names of those that were read back and hashed just now.
        spared: names of those that are kept beside the newest `keep`: the best one.

    Returns:
        Names of the deleted ones.
    """
    folders = list_checkpoints(checkpoints_dir)
    kept = folders[: max(1, keep)]
    old = [folder for folder in folders[max(1, keep) :] if folder.name not in spared]
    if not old or not any(f.name in known_good or not verify(f) for f in kept):
        return []
    for folder in old:
        folder.rename(folder.with_name(f".removing-{folder.name}"))
    for rest in checkpoints_dir.glob(".removing-*"):
        if rest.is_symlink():  # what it leads to is not ours to delete
            rest.unlink()
        shutil.rmtree(rest, ignore_errors=True)
    return [folder.name for folder in old]
