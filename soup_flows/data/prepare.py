"""`prepare dataset`: tokenised once, kept by content, mapped into memory by every rank.

The flow process imports no tokenizer: a process of its own does the work, or none when the cache has it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

import soup_flows
from soup_flows.child import call
from soup_flows.data.encoding import Settings
from soup_flows.data.fetch import fetch
from soup_flows.data.formats import check_kept
from soup_flows.data.reading import list_files
from soup_flows.data.report import DataReport
from soup_flows.data.store import lengths_of, read_report
from soup_flows.errors import refuse
from soup_flows.spec import TrainingSpec
from soup_flows.user_file import expanded

_LAYOUT = 2
_TOKENIZER_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "special_tokens_map.json",
                    "added_tokens.json", "chat_template*", "config.json", "*.py")  # fmt: skip
TOKENIZER_PATTERNS = (*_TOKENIZER_FILES, "additional_chat_templates/*")
"""Files of a model folder or Hub repository that decide how text becomes tokens."""


class PreparedSource(BaseModel):
    """One data set as it is stored.

    Attributes:
        entry: folder of the stored rows; see `soup_flows.data.store`.
        rows: rows stored; for `pretrain` a document may be several.
        report: what was read, dropped and kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    entry: str
    rows: int
    report: DataReport


class PreparedData(BaseModel):
    """What the ranks train and evaluate on.

    Attributes:
        train: the training set; when a share of it is held out, the held-out rows are in it.
        evaluation: the held-out data set, when there is one of its own.
        train_rows: rows that are trained.
        eval_rows: rows that are held out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: PreparedSource
    evaluation: PreparedSource | None = None
    train_rows: int
    eval_rows: int


def settings_of(spec: TrainingSpec) -> Settings:
    """Return the settings that decide how the rows of a spec become tokens."""
    task = spec.training.task
    return Settings(task, spec.data.max_length, "all" if task == "pretrain" else spec.data.train_on)


def sources_of(spec: TrainingSpec) -> list[tuple[str, str]]:
    """Return (field, source) of the data sets of a spec."""
    pairs = [("dataset", spec.dataset), ("data.eval_dataset", spec.data.eval_dataset)]
    return [(field, source) for field, source in pairs if source]


def entry_of(spec: TrainingSpec, tokenizer_folder: Path, source: str, field: str) -> Path:
    """Return where a prepared data set is kept: its name is a hash of everything that decides its content.

    Args:
        spec: names the cache folder and the settings.
        tokenizer_folder: local folder of the tokenizer.
        source: the data set.
        field: the setting that named it.

    Raises:
        Refused: if the data cannot be read.
    """
    settings = settings_of(spec)
    facts = {
        "layout": _LAYOUT,
        "versions": [soup_flows.__version__, *map(_version, ("transformers", "tokenizers"))],
        "settings": [settings.task, settings.max_length, settings.train_on],
        "trust_remote_code": spec.trust_remote_code,
        "tokenizer": [
            (str(p.relative_to(tokenizer_folder)), sha256(p)) for p in _tokenizer_files(tokenizer_folder)
        ],
        "data": [(str(path), sha256(path)) for path in list_files(source, field=field)],
    }
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    return cache_folder(spec) / "data" / key


def cache_folder(spec: TrainingSpec) -> Path:
    """Return the folder of what is kept between runs."""
    return expanded(spec.data.cache_dir or Path(spec.output_dir) / "cache").absolute()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({p for pattern in TOKENIZER_PATTERNS for p in folder.glob(pattern) if p.is_file()})


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file; one that did not change is read once by this process."""
    facts = path.stat()
    return _sha256(path, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


@functools.lru_cache(maxsize=4096)
def _sha256(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepare_data(spec: TrainingSpec) -> PreparedData:
    """Prepare the data of a spec; with unchanged data, tokenizer and settings nothing is tokenised again.

    Raises:
        Refused: if the data or the tokenizer cannot be used, no row can be trained, or a row is faulty and
            `data.bad_rows` is `refuse`.
    """
    fetch_sources(spec)
    return cached_data(spec) or _in_a_process(spec)


def fetch_sources(spec: TrainingSpec) -> None:
    """Fetch the data sets of a spec that are not on this machine.

    Raises:
        Refused: if one cannot be reached.
    """
    for field, source in sources_of(spec):
        fetch(source, field=field)


def cached_data(spec: TrainingSpec) -> PreparedData | None:
    """Return the prepared data if the cache has all of it; a tokenizer of the Hub is not looked up here."""
    folder = expanded(spec.model)
    if not folder.is_dir():
        return None
    found: list[PreparedSource] = []
    for field, source in sources_of(spec):
        entry = entry_of(spec, folder, source, field)
        report = read_report(entry)
        if report is None:
            return None
        found.append(PreparedSource(entry=str(entry), rows=len(lengths_of(entry)), report=report))
    return checked(spec, found)


def checked(spec: TrainingSpec, found: list[PreparedSource]) -> PreparedData:
    """Apply the policies of the spec to stored sources.

    Raises:
        Refused: for faulty rows under `data.bad_rows=refuse`, or a share that holds out every row.
    """
    for (field, source), item in zip(sources_of(spec), found, strict=True):
        report = item.report
        check_kept(source, report.rows_kept, report.drops, policy=spec.data.bad_rows, field=field)
    rows = found[0].rows
    if len(found) > 1:
        return PreparedData(train=found[0], evaluation=found[1], train_rows=rows, eval_rows=found[1].rows)
    held_out = max(1, round(rows * spec.data.eval_split)) if spec.data.eval_split else 0
    if held_out >= rows:
        message = f"{spec.data.eval_split} holds out all {rows} rows"
        raise refuse("DATA020", "data.eval_split", message, "use a smaller share, or more rows")
    return PreparedData(train=found[0], train_rows=rows - held_out, eval_rows=held_out)


def _in_a_process(spec: TrainingSpec) -> PreparedData:
    value = call(
        "soup_flows.training.prepare",
        spec.model_dump_json(),
        rule="DATA022",
        field="dataset",
        what="the data could not be prepared",
    )
    return PreparedData.model_validate(value)
