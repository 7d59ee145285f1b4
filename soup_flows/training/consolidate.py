"""Reads shards tensor by tensor and writes safetensors: the other side of `soup_flows.consolidate`."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from soup_flows.child import answer
from soup_flows.consolidate import Consolidated, Request
from soup_flows.data.prepare import TOKENIZER_PATTERNS
from soup_flows.errors import refuse
from soup_flows.training.saved import adapter_name

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_COPIED = (*TOKENIZER_PATTERNS, "generation_config.json")
_PREFIXES = ("", "model.", "module.", "state.model.", "app.model.")
"""What trainers put before the names of weights in a distributed checkpoint."""

_PICKLED_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device", "dtype"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_dtype"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset", "list", "dict", "tuple"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
"""Names that the index of a distributed checkpoint may hold."""


class Shards:
    """Tensors of a checkpoint by name, read when they are asked for.

    Attributes:
        sizes: bytes of each tensor.
        shapes: shape of each tensor.
        read: returns the tensors of some names.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
        read: Callable[[list[str]], dict[str, torch.Tensor]],
    ) -> None:
        self.shapes = {name: tuple(shape) for name, (shape, _) in tensors.items()}
        self.sizes = {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in tensors.items()}
        self.read = read


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the index of a distributed checkpoint and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        plain_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _PICKLED_METADATA.get(module, ()) or plain_dtype:
            return super().find_class(module, name)
        message = f".metadata asks for {module}.{name}, which no checkpoint needs"
        raise refuse("CONS006", "checkpoint", message, "do not use this file")


class _Reader(FileSystemReader):
    """PyTorch's reader, with an index that is not unpickled freely."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(None), "rb") as stream:
            metadata: Metadata = _MetadataUnpickler(cast(IO[bytes], stream)).load()
        return metadata


def read_dcp(folder: Path) -> Shards:
    """Open a distributed checkpoint of PyTorch."""
    entries = _Reader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        found = {name: torch.empty(tensors[name][0], dtype=tensors[name][1]) for name in names}
        torch.distributed.checkpoint.load(found, storage_reader=_Reader(folder), no_dist=True)
        return found

    return Shards(tensors, read)


def read_zero(folder: Path) -> Shards:
    """Open a ZeRO checkpoint; its tensors are put together one by one from the memory-mapped shards."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import zero_to_fp32
    from deepspeed.utils.tensor_fragment import fragment_address

    needed = [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, ZeroStageEnum, fragment_address]
    torch.serialization.add_safe_globals(needed)
    unsafe_load = torch.load

    def load(file: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return unsafe_load(file, *arguments, **(options | {"weights_only": True, "mmap": True}))
        except pickle.UnpicklingError:
            asked = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
            message = f"{file} needs more than tensors: unpickling it would run code ({asked})"
            fix = "if you trust the file, convert it with zero_to_fp32.py of DeepSpeed"
            raise refuse("CONS006", "checkpoint", message, fix) from None

    tagged = (folder / "latest").is_file()
    torch.load = load  # DeepSpeed's reader unpickles freely; this process does nothing else
    try:
        lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
            str(folder if tagged else folder.parent), tag=None if tagged else folder.name, lazy_mode=True
        )
    finally:
        torch.load = unsafe_load
    tensors = {name: (torch.Size(entry.shape), entry.dtype) for name, entry in lazy.items()}

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        return {
            name: entry if isinstance(entry := lazy[name], torch.Tensor) else entry.contiguous()
            for name in names
        }

    return Shards(tensors, read)


def read_full(file: Path) -> Shards:
    """Open a whole state dict, memory-mapped."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        message = f"{file} needs more than tensors: {str(error).splitlines()[0]}"
        raise refuse("CONS006", "checkpoint", message, "save plain tensors") from None
    found = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    tensors = {name: (value.shape, value.dtype) for name, value in found.items()}
    return Shards(tensors, lambda names: {name: found[name] for name in names})


def run(request: Request) -> Consolidated:
    """Consolidate; see `soup_flows.consolidate.consolidate`."""
    source = Path(request.shards)
    shards = {"dcp": read_dcp, "zero": read_zero, "full": read_full}[request.kind](source)
    model = Path(request.model) if request.model else None
    adapter = any("lora_" in name for name in shards.shapes)
    if adapter:
        names = {name: _adapter_name(name) for name in shards.shapes if "lora_" in name}
        _need_adapter_config(Path(request.checkpoint))
    else:
        names = _weight_names(shards, model)
    target = Path(request.output)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        beside.chmod(0o755)
        stem = "adapter_model" if adapter else "model"
        count, size, files = write_files(shards, names, beside, stem, request)
        if adapter:
            shutil.copyfile(Path(request.checkpoint, "adapter_config.json"), beside / "adapter_config.json")
        if model is not None:
            _copy_small_files(model, beside, without={"config.json"} if adapter else set())
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Consolidated(
        output=str(target),
        kind=request.kind,
        adapter=adapter,
        tensors=count,
        bytes=size,
        files=files,
        ignored=len(shards.shapes) - len(names),
        checked=model is not None and not adapter,
    )


def _copy_small_files(model: Path, folder: Path, without: set[str]) -> None:
    """Copy config, tokenizer and chat template."""
    for pattern in _COPIED:
        for file in model.glob(pattern):
            if file.is_file() and file.name not in without:
                target = folder / file.relative_to(model)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)


def _adapter_name(name: str) -> str:
    return adapter_name(name[max(0, name.find("base_model.")) :])


def _need_adapter_config(checkpoint: Path) -> None:
    if not (checkpoint / "adapter_config.json").is_file():
        message = f"the shards hold an adapter, but {checkpoint} has no adapter_config.json"
        raise refuse("CONS007", "checkpoint", message, "put the adapter's config there")


def _weight_names(shards: Shards, model: Path | None) -> dict[str, str]:
    """Return stored names to names of weights; without a config, what is no optimizer state is a weight.

    Raises:
        Refused: if weights of the config are missing or have other shapes.
    """
    if model is None:
        kept = [name for name in shards.shapes if not name.startswith(("optim", "optimizer"))]
        strip = "model." if any(name.startswith(("model.model.", "model.lm_head")) for name in kept) else ""
        return {name: name.removeprefix(strip) for name in kept}
    expected, tied = expected_weights(model)
    prefix = max(_PREFIXES, key=lambda p: sum(f"{p}{name}" in shards.shapes for name in expected))
    names = {f"{prefix}{name}": name for name in expected if f"{prefix}{name}" in shards.shapes}
    found = set(names.values())
    missing = [n for n in expected if n not in found and not any(n in g and g & found for g in tied)]
    wrong = [n for stored, n in names.items() if shards.shapes[stored] != expected[n]]
    if missing or wrong:
        named = ", ".join((missing or wrong)[:3])
        message = (
            f"{len(missing)} weights of {model.name} are missing and {len(wrong)} have other shapes ({named})"
        )
        raise refuse("CONS008", "checkpoint", message, "name the model that was trained with --model")
    return names


def expected_weights(model: Path) -> tuple[dict[str, tuple[int, ...]], list[set[str]]]:
    """Return the weights that a config stands for with their shapes, and the groups that are one tensor."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    groups: dict[int, set[str]] = {}
    for name, parameter in built.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    shapes = {name: tuple(value.shape) for name, value in built.state_dict().items()}
    return shapes, [group for group in groups.values() if len(group) > 1]


def write_files(
    shards: Shards, names: Mapping[str, str], folder: Path, stem: str, request: Request
) -> tuple[int, int, int]:
    """Write the tensors into files of at most `file_bytes` (or one tensor) each; return tensors, bytes, files."""
    index: dict[str, str] = {}
    written: list[Path] = []
    total = 0
    limit = 2**62 if stem == "adapter_model" else request.file_bytes  # adapters are one file
    for group in _groups(shards, list(names), limit):
        tensors = {names[stored]: tensor for stored, tensor in shards.read(group).items()}
        if request.dtype:
            wanted = _DTYPES[request.dtype]
            tensors = {n: t.to(wanted) if t.is_floating_point() else t for n, t in tensors.items()}
        # tied weights may come as views of one storage, which safetensors refuses
        tensors = {
            n: t.clone() if t.untyped_storage().nbytes() != t.nbytes else t.contiguous()
            for n, t in tensors.items()
        }
        path = folder / f"{stem}-{len(written) + 1:05d}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        written.append(path)
        total += sum(tensor.nbytes for tensor in tensors.values())
        index |= dict.fromkeys(tensors, path.name)
    finals = {path.name: f"{path.stem}-of-{len(written):05d}.safetensors" for path in written}
    if len(written) == 1:
        finals = {written[0].name: f"{stem}.safetensors"}
    for path in written:
        path.rename(folder / finals[path.name])
    if len(written) > 1:
        text = {
            "metadata": {"total_size": total},
            "weight_map": {n: finals[file] for n, file in index.items()},
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(text, indent=2) + "\n")
    return len(index), total, len(written)


def _groups(shards: Shards, names: list[str], limit: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in names:
        if group and size + shards.sizes[name] > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += shards.sizes[name]
    if group:
        yield group


if __name__ == "__main__":
    raise SystemExit(
        answer(sys.argv[1:], lambda text: run(Request.model_validate_json(text)).model_dump(mode="json"))
    )
