"""What the rules know about model and data: read once, from files, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from soup_flows.architecture.files import folder_shapes
from soup_flows.data.formats import load_examples
from soup_flows.data.reading import list_files
from soup_flows.data.sources import is_here
from soup_flows.errors import Problem, Refused
from soup_flows.safetensors_header import read_table
from soup_flows.sharding import read_model_config
from soup_flows.spec import TrainingSpec
from soup_flows.user_file import BadFile, expanded, read_json

LOOK_AT_ROWS = 1000
"""Rows of each data set that are read before a launch; the ranks read all of them."""
LARGEST_JSON_BYTES = 1 << 26
"""Largest JSON file of a model folder that is read; an index of a million tensors has about that."""
ADDED_TOKENS_WITHIN = 1 << 20
"""Characters of `tokenizer.json` in which its added tokens are looked for; the vocabulary comes after them."""


@dataclass(frozen=True)
class ModelFacts:
    """A model folder, or a Hub id of which nothing is known (`folder` is None)."""

    name: str
    config: dict[str, Any] | None = None
    """`config.json`; None for a Hub id or where it cannot be read."""
    folder: Path | None = None

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the language model: `text_config` where a model has several."""
        config = self.config or {}
        inner = config.get("text_config")
        return {**config, **inner} if isinstance(inner, dict) else config

    def number(self, *names: str) -> int | None:
        """Return the first of `names` in the config that is a positive whole number."""
        values = [self.text_config.get(name) for name in names]
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

    @property
    def hidden_size(self) -> int | None:
        """Width of the model; the other spellings are those of transformers' `attribute_map`s."""
        return self.number("hidden_size", "n_embd", "d_model", "dim", "model_dim", "hidden_dim")

    @property
    def dtype(self) -> str | None:
        """The dtype that the config says the weights have, such as `bfloat16`."""
        value = (self.config or {}).get("dtype", (self.config or {}).get("torch_dtype"))
        return value.removeprefix("torch.") if isinstance(value, str) else None

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The config's `quantization_config`; None for plain weights."""
        value = (self.config or {}).get("quantization_config")
        return value if isinstance(value, dict) else None

    @property
    def is_moe(self) -> bool:
        """Whether the model routes tokens to experts."""
        return bool(self.number("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))

    @cached_property
    def files(self) -> dict[str, int]:
        """Names and sizes (bytes) of the folder's regular files."""
        try:
            found = list(self.folder.iterdir()) if self.folder else []
            return {path.name: path.stat().st_size for path in found if path.is_file()}
        except OSError:
            return {}

    @cached_property
    def shards(self) -> dict[str, str]:
        """Tensor name -> file, from the safetensors index or the header of the only file."""
        index = self.read_json("model.safetensors.index.json")
        if index is not None:
            names = index.get("weight_map")
            return {str(k): str(v) for k, v in names.items()} if isinstance(names, dict) else {}
        return dict.fromkeys(self.shapes, "model.safetensors")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape; empty where the weight files cannot be read."""
        try:
            return (folder_shapes(self.folder) if self.folder else None) or {}
        except (OSError, ValueError):
            return {}

    @cached_property
    def parameters(self) -> int | None:
        """Number of weights in the files; None where that cannot be known, as for quantised ones."""
        counted = sum(prod(shape) for shape in self.shapes.values())
        return counted if counted and self.quantization is None else None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object of the folder; None if there is none that can be read."""
        if name not in self.files or self.folder is None:
            return None
        try:
            return read_json(self.folder / name, LARGEST_JSON_BYTES, strict=False)
        except BadFile:
            return None

    def head_of(self, tensor: str, count: int = 4096) -> bytes | None:
        """Return the first bytes of a stored tensor, or None where they cannot be read."""
        file = self.shards.get(tensor)
        if file is None or self.folder is None:
            return None
        try:
            path = self.folder / file
            with path.open("rb") as stream:
                start, table = read_table(stream, path.stat().st_size, file)
                stream.seek(start + table[tensor].begin)
                return stream.read(min(count, table[tensor].end - table[tensor].begin))
        except (OSError, ValueError, KeyError):
            return None

    def starts_with(self, name: str, words: bytes) -> bool:
        """Whether a file of the folder begins with `words`; False where it cannot be read."""
        try:
            with ((self.folder or Path()) / name).open("rb") as stream:
                return stream.read(len(words)) == words
        except OSError:
            return False

    def stated_size(self, name: str) -> int | None:
        """Return the bytes that the header of a safetensors file accounts for; None without a good header."""
        if self.folder is None or name not in self.files:
            return None
        try:
            with (self.folder / name).open("rb") as stream:
                start, table = read_table(stream, self.files[name], name)
            return start + max((entry.end for entry in table.values()), default=0)
        except (OSError, ValueError):
            return None

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """`tokenizer_config.json`, empty where there is none."""
        return self.read_json("tokenizer_config.json") or {}

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Id -> text of the tokens that were added to the vocabulary."""
        listed = self.tokenizer_config.get("added_tokens_decoder")
        if isinstance(listed, dict):
            pairs = [(key, value.get("content")) for key, value in listed.items() if isinstance(value, dict)]
            return {int(key): str(text) for key, text in pairs if str(key).isdecimal()}
        if "tokenizer.json" not in self.files or self.folder is None:
            return {}
        try:
            with (self.folder / "tokenizer.json").open(encoding="utf-8") as stream:
                text = stream.read(ADDED_TOKENS_WITHIN)
            start = text.index('"added_tokens":') + len('"added_tokens":')
            tokens, _ = json.JSONDecoder().raw_decode(text[start:].lstrip())
            return {int(token["id"]): str(token["content"]) for token in tokens}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder brings a chat template."""
        return bool(self.tokenizer_config.get("chat_template")) or any(
            name.startswith("chat_template.") for name in self.files
        )


@dataclass(frozen=True)
class DataFacts:
    """The first rows of the training data."""

    read: int = 0
    kept: int = 0
    distinct: int = 0
    """Different rows among those kept."""
    dropped: tuple[str, ...] = ()
    """Why and where rows were dropped."""
    kinds: frozenset[str] = field(default_factory=frozenset)
    bytes: int = 0
    """Size of all data files."""


def look_at_model(name: str) -> tuple[ModelFacts, list[Problem]]:
    """Read a model folder's config; a Hub id is not looked up."""
    try:
        config = read_model_config(name)
    except Refused as refused:
        return ModelFacts(name), list(refused.problems)
    return ModelFacts(name, config, None if config is None else expanded(name)), []


def look_at_data(spec: TrainingSpec) -> tuple[DataFacts, list[Problem]]:
    """Read the first rows of each local data set."""
    facts = DataFacts()
    problems: list[Problem] = []
    for setting, source in (("dataset", spec.dataset), ("data.eval_dataset", spec.data.eval_dataset)):
        if source is None or not is_here(source):  # `prepare dataset` fetches it
            continue
        try:
            rows = load_examples(source, field=setting, limit=LOOK_AT_ROWS)
        except Refused as refused:
            problems += refused.problems
            continue
        if setting == "dataset":
            contents = {
                repr((e.messages, e.prompt, e.completion, e.text, e.input_ids)) for e in rows.examples
            }
            facts = DataFacts(
                read=rows.rows_read,
                kept=rows.rows_kept,
                distinct=len(contents),
                dropped=tuple(str(item) for item in rows.dropped),
                kinds=frozenset(e.kind for e in rows.examples),
                bytes=sum(file.stat().st_size for file in list_files(source)),
            )
    return facts, problems
