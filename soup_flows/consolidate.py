"""`soup-flows consolidate CHECKPOINT -o OUT`: the shards of a checkpoint as one model folder.

Reads distributed checkpoints of PyTorch (a folder with `.metadata`, as FSDP writes), DeepSpeed's ZeRO
checkpoints (a folder with `latest`, or `global_step<N>`), and whole `pytorch_model_fsdp.bin` files. At most one
output file is in memory. Nothing is unpickled that torch calls unsafe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.child import call
from soup_flows.errors import refuse
from soup_flows.json_text import parse_json
from soup_flows.user_file import expanded

Kind = Literal["dcp", "zero", "full"]


class Request(BaseModel):
    """What to consolidate.

    Attributes:
        kind: `dcp`, `zero` or `full` (one file).
        shards: the folder, or the file, that holds the shards.
        checkpoint: what the user named; small files beside the shards are taken from it.
        output: the folder to write; it must not exist.
        model: folder with `config.json` and the tokenizer; None when there is none.
        dtype: floating dtype of the output; None keeps that of the shards.
        file_bytes: largest output file, and about the memory that is needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    shards: str
    checkpoint: str
    output: str
    model: str | None = None
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    file_bytes: int = 4 * 2**30


class Consolidated(BaseModel):
    """What was written.

    Attributes:
        output: the folder.
        kind: what was read.
        adapter: whether it is an adapter instead of a whole model.
        tensors: tensors written.
        bytes: their size.
        files: weight files written.
        ignored: tensors of the checkpoint that are no weights of the model (optimizer states).
        checked: whether names and shapes were compared with those of the model's config.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
    kind: Kind
    adapter: bool
    tensors: int
    bytes: int
    files: int
    ignored: int
    checked: bool


def consolidate(
    checkpoint: str | Path,
    output: str | Path,
    *,
    model: str | Path | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    file_bytes: int = 4 * 2**30,
) -> Consolidated:
    """Write the shards of a checkpoint as one folder that `from_pretrained` opens.

    Args:
        checkpoint: a checkpoint folder of any of the known kinds.
        output: the folder to write; it must not exist.
        model: folder with `config.json` and the tokenizer; when empty it is looked for in the checkpoint, and
            in the spec of the run that the checkpoint is part of.
        dtype: floating dtype of the output; that of the shards when empty (ZeRO keeps fp32).
        file_bytes: largest weight file, in bytes; about twice as much memory is needed.

    Raises:
        Refused: if the folder holds no shards, a shard is missing or needs unsafe unpickling, the output exists,
            or the weights are not those of the config.
    """
    folder = expanded(checkpoint).absolute()
    kind, shards = find_shards(folder)
    target = expanded(output).absolute()
    if target.exists():
        raise refuse("CONS001", "output", f"{target} exists", "name a new folder")
    known = _model_folder(folder, model)
    request = Request(
        kind=kind,
        shards=str(shards),
        checkpoint=str(folder),
        output=str(target),
        model=str(known) if known else None,
        dtype=dtype,
        file_bytes=file_bytes,
    )
    value = call(
        "soup_flows.training.consolidate",
        request.model_dump_json(),
        rule="CONS002",
        field="checkpoint",
        what=f"{folder} could not be consolidated",
    )
    return Consolidated.model_validate(value)


def find_shards(folder: Path) -> tuple[Kind, Path]:
    """Return what kind of checkpoint a folder is, and where its shards are.

    Raises:
        Refused: if it is none of the known kinds, or whole already.
    """
    if folder.is_file() and folder.name.startswith("pytorch_model_fsdp") and folder.suffix == ".bin":
        return "full", folder
    if not folder.is_dir():
        raise refuse("CONS003", "checkpoint", f"there is no folder {folder}", "name a checkpoint folder")
    for inner in (folder, *sorted(folder.glob("pytorch_model_fsdp_*"))):
        if (inner / ".metadata").is_file():
            return "dcp", inner
    if (folder / "latest").is_file() or list(folder.glob("*zero_pp_rank_*optim_states.pt")):
        return "zero", folder
    steps = sorted(folder.glob("global_step*"))
    if steps:
        return "zero", steps[-1]
    whole = sorted(folder.glob("pytorch_model_fsdp*.bin"))
    if whole:
        return "full", whole[0]
    if list(folder.glob("*.safetensors")):
        fix = "open it with from_pretrained"
        raise refuse("CONS004", "checkpoint", f"{folder} is whole already: it holds safetensors files", fix)
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    fix = "a DCP folder (.metadata), pytorch_model_fsdp_N, pytorch_model_fsdp.bin, or a ZeRO folder (latest)"
    raise refuse("CONS003", "checkpoint", f"{folder} holds no shards that are known ({names})", fix)


def _model_folder(checkpoint: Path, named: str | Path | None) -> Path | None:
    """Return the folder with the model's config: the named one, the checkpoint, or the run's base model."""
    if named is not None:
        folder = expanded(named).absolute()
        if not (folder / "config.json").is_file():
            raise refuse("CONS005", "model", f"{folder} has no config.json", "name the base model's folder")
        return folder
    if (checkpoint / "config.json").is_file():
        return checkpoint
    for above in checkpoint.parents[:3]:
        try:
            base = expanded(parse_json((above / "spec.json").read_text())["model"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if (base / "config.json").is_file():
            return base
    return None
