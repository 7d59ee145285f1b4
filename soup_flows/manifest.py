"""What a checkpoint says about itself, written last: without it a folder is no checkpoint."""

from __future__ import annotations

import contextlib
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from soup_flows.json_text import parse_json

MANIFEST = "manifest.json"
VERSION = 1
"""Of the manifest's format; fields with a default may be added without a new one."""
MOST_RANKS = 1_000_000
"""More than any cluster has; a manifest that was changed must not ask for files without end."""
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "soup-flows")


class StoredFile(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int = Field(ge=0)
    """Bytes."""
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint is, and every file that belongs to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: int = VERSION
    run_id: str
    step: int
    """Optimizer steps made."""
    total_steps: int
    strategy: str
    engine: str
    world_size: int = Field(ge=1, le=MOST_RANKS)
    dtype: str
    adapters: bool
    """Whether adapters were trained instead of the whole model."""
    identity: dict[str, Any]
    """Every setting that decides what is trained, by dotted name; see `soup_flows.resume_fit.identity`."""
    spec_hash: str
    """SHA-256 of `identity`."""
    data_hash: str | None = None
    """SHA-256 of the data set's content; None when it was not on a local disk."""
    learning_rate_scale: float = 1.0
    """Factor on the learning rate that an earlier attempt asked for; it is in the scheduler's state."""
    loss: float | None = None
    """Loss logged last."""
    learning_rate: float | None = None
    """Learning rate logged last."""
    save_seconds: float = 0.0
    """Wall time of the save."""
    saved_at: float = 0.0
    """Unix time."""
    versions: dict[str, str] = {}
    files: dict[str, StoredFile] = {}
    """Relative POSIX path to size and hash."""

    @property
    def total_bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(file.size for file in self.files.values())


def library_versions() -> dict[str, str]:
    """Return the installed versions of what writes checkpoints."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        ValueError: with the reason in words, when there is none or it cannot be read.
    """
    try:
        value = parse_json((folder / MANIFEST).read_bytes())
        version = value.get("v") if isinstance(value, dict) else None
        newer = isinstance(version, int) and version > VERSION
        manifest = None if newer else Manifest.model_validate(value)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing: the save was not finished") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {str(error).splitlines()[0]}") from None
    if manifest is None:
        newer_one = f"{MANIFEST} has version {version}, this soup-flows reads {VERSION}: a newer one wrote it"
        raise ValueError(newer_one)
    outside = [
        name for name in manifest.files if name.startswith("/") or ".." in name.split("/") or "\0" in name
    ]
    if outside:
        raise ValueError(f"{MANIFEST} names a file outside the checkpoint, {outside[0]!r}")
    return manifest


def missing(manifest: Manifest) -> list[str]:
    """Name what an exact resume of this engine and world size needs and the manifest does not list.

    Source: the folders that transformers 5.24 (`Trainer._save_checkpoint`), accelerate 1.15
    (`utils/fsdp_utils.py`, FULL_STATE_DICT) and deepspeed 0.19.8 (`runtime/engine.py`) write.
    """
    names, world = manifest.files, manifest.world_size
    ranks = range(world)
    wanted = [
        "trainer_state.json",
        *(["rng_state.pth"] if world == 1 else [f"rng_state_{r}.pth" for r in ranks]),
    ]
    weights = "adapter_model.safetensors" if manifest.adapters else "model.safetensors"
    if weights not in names and "model.safetensors.index.json" not in names:
        wanted.append(weights)
    if manifest.engine == "deepspeed":
        folder = f"global_step{manifest.step}/"
        wanted.append("latest")
        inner = {name.removeprefix(folder) for name in names if name.startswith(folder)}
        per_rank = [f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in ranks]
        if any(name.startswith("zero_pp_rank_") and "model_states" in name for name in inner):
            per_rank += [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in ranks]
        else:
            per_rank.append("mp_rank_00_model_states.pt")
        wanted += [folder + name for name in per_rank if not inner & {name, f"bf16_{name}", f"fp16_{name}"}]
        return [name for name in wanted if name not in names]
    wanted += ["scheduler.pt"]
    wanted += ["pytorch_model_fsdp.bin", "optimizer.bin"] if manifest.engine == "fsdp" else ["optimizer.pt"]
    if manifest.dtype == "fp16":
        wanted.append("scaler.pt")
    return [name for name in wanted if name not in names or names[name].size == 0]
