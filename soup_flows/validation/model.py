"""Rules about the model folder."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from soup_flows.validation.table import TRANSFORMERS, Context, Found, rule, rules_in

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
LFS_POINTER = b"version https://git-lfs"
LARGEST_POINTER = 1024
WEIGHT_FILE = re.compile(r"(model|pytorch_model)([.-].*)?\.(safetensors|bin)")


@rule(
    "MD004",
    "error",
    "model",
    "this program trains causal language models, and AutoModelForCausalLM cannot load it",
    fix="give a decoder model whose architecture ends in ForCausalLM",
    source="transformers/models/auto/modeling_auto.py",
    versions=TRANSFORMERS,
)
def not_causal(run: Context) -> Iterator[Found]:
    """A model that is no causal language model."""
    config = run.model.config or {}
    names = [str(name) for name in config.get("architectures") or []]
    heads = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    if config.get("is_encoder_decoder") is True or any(name.endswith(heads) for name in names):
        yield Found(f"its architecture is {', '.join(names) or 'an encoder-decoder'}")


@rule(
    "MD005",
    "error",
    "trust_remote_code",
    "its classes are in the model's own Python files, which are not run without your leave",
    fix="read the files, then set trust_remote_code=true; or use a model that transformers knows",
    source="transformers/dynamic_module_utils.py, resolve_trust_remote_code",
    versions=TRANSFORMERS,
    local=True,
)
def needs_remote_code(run: Context) -> Iterator[Found]:
    """A model with its own code that the installed transformers does not know, without leave to run it."""
    config = run.model.config or {}
    if config.get("auto_map") and not run.spec.trust_remote_code and not _known(config.get("model_type")):
        yield Found(f"model_type {config.get('model_type')!r} is not in the installed transformers")


@rule(
    "MD006",
    "warning",
    "model",
    "the ranks would stop while loading it",
    fix="install a newer transformers, or check model_type in config.json",
    source="transformers/models: one folder per model_type",
    versions=TRANSFORMERS,
    local=True,
)
def unknown_type(run: Context) -> Iterator[Found]:
    """A `model_type` that the installed transformers has no folder for, and no code of its own."""
    config = run.model.config
    if config is not None and not config.get("auto_map") and not _known(config.get("model_type")):
        yield Found(f"model_type {config.get('model_type')!r} is not in the installed transformers")


def _known(model_type: object) -> bool:
    """Say whether transformers has a folder for `model_type`; True where that cannot be told."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return True
    if not isinstance(model_type, str) or not model_type.replace("-", "_").isidentifier():
        return False
    folder = Path(spec.submodule_search_locations[0]) / "models"
    name = model_type.replace("-", "_")
    return (folder / name).is_dir() or (folder / name.rsplit("_", 1)[0]).is_dir()  # x_text lives in x


@rule(
    "MD007",
    "error",
    "model",
    "there is nothing to load",
    fix="copy the weight files too (*.safetensors)",
    source="transformers/modeling_utils.py, _get_resolved_checkpoint_files",
    versions=TRANSFORMERS,
    local=True,
)
def no_weights(run: Context) -> Iterator[Found]:
    """A model folder without weight files."""
    if run.model.files and not any(WEIGHT_FILE.fullmatch(name) for name in run.model.files):
        yield Found(f"{run.model.name} holds no weight file")


@rule(
    "MD008",
    "error",
    "model",
    "every rank would stop while loading",
    fix="copy the folder again",
    source="transformers/utils/hub.py, get_checkpoint_shard_files",
    versions=TRANSFORMERS,
    local=True,
)
def lost_shard(run: Context) -> Iterator[Found]:
    """A weight file that the index names and the folder lacks, or an empty one."""
    if "model.safetensors.index.json" not in run.model.files:
        return
    lost = sorted({file for file in run.model.shards.values() if not run.model.files.get(file)})
    if lost:
        yield Found(f"{len(lost)} weight file(s) are missing or empty, the first is {lost[0]}")


@rule(
    "MD009",
    "error",
    "model",
    "rows cannot become tokens",
    fix="save the tokenizer beside the weights (tokenizer.json, tokenizer_config.json)",
    source="transformers/models/auto/tokenization_auto.py",
    versions=TRANSFORMERS,
    local=True,
)
def no_tokenizer(run: Context) -> Iterator[Found]:
    """A model folder without tokenizer files, for rows of text."""
    needs = bool(run.data.kinds - {"tokens"})
    if (
        run.model.files
        and needs
        and not any(name in run.model.files for name in TOKENIZER_FILES)
        and not any(name.endswith((".tiktoken", ".py")) for name in run.model.files)
    ):
        yield Found(f"{run.model.name} holds no tokenizer")


@rule(
    "MD010",
    "error",
    "model",
    "it is a pointer of three lines, and the ranks stop while reading it (HeaderTooLarge, invalid JSON)",
    fix="run git lfs pull in the folder, or fetch it with hf download",
    source="Git LFS specification, pointer files; huggingface/transformers#27923, microsoft/OmniParser#34",
    local=True,
)
def lfs_pointer(run: Context) -> Iterator[Found]:
    """A weight or tokenizer file that Git LFS has not fetched."""
    small = [name for name, size in run.model.files.items() if 0 < size < LARGEST_POINTER]
    kinds = [n for n in small if WEIGHT_FILE.fullmatch(n) or n in TOKENIZER_FILES]
    pointers = [name for name in sorted(kinds) if run.model.starts_with(name, LFS_POINTER)]
    if pointers:
        yield Found(f"{pointers[0]}{' and others' if len(pointers) > 1 else ''} was not fetched by Git LFS")


@rule(
    "MD011",
    "error",
    "model",
    "every rank would stop while reading it (MetadataIncompleteBuffer)",
    fix="copy or download the file again",
    source="safetensors/src/tensor.rs: the header must cover the whole file; hiyouga/LlamaFactory#5201",
    local=True,
)
def cut_short(run: Context) -> Iterator[Found]:
    """A safetensors file that is shorter than its header says."""
    for name in sorted(set(run.model.shards.values())):
        need, size = run.model.stated_size(name), run.model.files.get(name, 0)
        if need is not None and size and size < need:
            yield Found(f"{name} has {size:,} of {need:,} bytes")


RULES = rules_in(globals())
