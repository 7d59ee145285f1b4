"""A look at model class, tokenizer and first rows, kept for the next run of the same.

The looking is done in a child process (`soup_flows.training.look`), so that torch is never imported here.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from soup_flows.data.prepare import cache_folder, entry_of, sha256
from soup_flows.errors import Refused
from soup_flows.json_text import parse_json
from soup_flows.lent import run_environment
from soup_flows.manifest import library_versions
from soup_flows.paths import write_atomic
from soup_flows.resume import digest
from soup_flows.spec import TrainingSpec
from soup_flows.user_file import expanded

TIMEOUT_S = 180.0


class SeenRows(BaseModel):
    """What tokenizer and first rows show; it is kept by data set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokenizer_error: str = ""
    rows_error: str = ""
    tokens: int | None = None
    """Size of the tokenizer's vocabulary, added tokens included."""
    has_eos: bool = True
    kept: int = 0
    """Rows with a trained token, of the first ones."""
    stop_trained: int = 0
    """Rows in which a token that ends the answer is trained."""
    largest_id: int = 0
    """Largest token id in the rows."""
    lost: dict[str, int] = {}
    """Reason -> rows that are left out."""
    trained: dict[str, int] = {}
    """Token -> its id, of all that are trained; the most frequent first."""


class SeenModel(BaseModel):
    """What the model's class shows; it is kept by model, for every data set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_error: str = ""
    embedding_rows: int | None = None
    wrap_classes: tuple[str, ...] = ()
    """Classes that the model wants to be wrapped whole."""
    wrap_found: tuple[str, ...] = ()
    """Those of them that are in the model."""
    adapters: int | None = None
    """Weights of the adapters."""
    adapter_error: str = ""
    empty_ids: tuple[int, ...] = ()
    """Token ids whose embedding was never trained and stays frozen under the adapters."""
    packing_error: str = ""
    """Why rows cannot be laid end to end."""


class Seen(SeenRows, SeenModel):
    """What `soup_flows.training.look` found; None where it could not look."""

    @property
    def unlearnt(self) -> tuple[str, ...]:
        """Trained tokens whose embedding was never trained and stays frozen."""
        empty = frozenset(self.empty_ids)
        return tuple(token for token, number in self.trained.items() if number in empty)


PARTS: dict[str, type[SeenRows] | type[SeenModel]] = {"rows": SeenRows, "model": SeenModel}


def seen_file(spec: TrainingSpec, part: str) -> Path | None:
    """Return where a part of a look is kept: its name is a hash of all that it looks at; None for what is not local.

    `prepare dataset` leaves it there: it looks while it tokenises.
    """
    folder = expanded(spec.model)
    facts: list[object] = [part, library_versions(), list(PARTS[part].model_fields), spec.trust_remote_code]
    try:
        if part == "rows":
            facts.append(entry_of(spec, folder, spec.dataset, "dataset").name)
        else:
            code = sorted((*folder.glob("config.json"), *folder.glob("*.py")))
            if not code:
                return None
            facts.append([(file.name, sha256(file)) for file in code])
            facts += [spec.training.method, spec.training.task, spec.data.packing, spec.lora.model_dump()]
            if spec.trains_adapters:  # they look at the stored embeddings as well
                weights = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
                facts.append([(name, stat.st_size, stat.st_mtime_ns) for name, stat in weights])
    except (OSError, Refused):
        return None
    return cache_folder(spec) / "look" / f"{part}-{digest(facts)[:32]}.json"


def look(spec: TrainingSpec) -> Seen | str:
    """Return what was seen of model, tokenizer and first rows; the reason where a look fails."""
    found = {part: _kept(spec, part) for part in PARTS}
    missing = [part for part, value in found.items() if value is None]
    try:
        if missing:
            with _underway(spec, missing) as said:
                fresh = said()
            if isinstance(fresh, str):
                return fresh
            found |= fresh
    except OSError as error:
        return str(error)
    return Seen.model_validate(
        {key: value for part in found.values() for key, value in dict(part or ()).items()}
    )


@contextlib.contextmanager
def looking(spec: TrainingSpec) -> Iterator[None]:
    """Look at the model while the block runs, and wait for it at its end; nothing is done where that is kept.

    A look that fails leaves nothing, and is made again by whoever needs it. A block that raises ends it.
    """
    if not is_missing(spec, "model"):
        yield
        return
    with _underway(spec, ["model"]) as said:
        yield
        said()


def is_missing(spec: TrainingSpec, part: str) -> bool:
    """Return whether a part will be looked at, could be kept and is not."""
    kept = seen_file(spec, part) if spec.validation.deep else None
    return kept is not None and not kept.exists()


def keep(spec: TrainingSpec, part: str, values: dict[str, Any]) -> SeenRows | SeenModel:
    """Keep what was seen for the next run, and return it.

    Raises:
        ValidationError: for what is no such part.
    """
    seen = PARTS[part].model_validate(values)
    kept = seen_file(spec, part)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, seen.model_dump_json())
    return seen


def _kept(spec: TrainingSpec, part: str) -> SeenRows | SeenModel | None:
    kept = seen_file(spec, part)
    if kept is None:
        return None
    try:
        return PARTS[part].model_validate_json(kept.read_bytes())
    except (OSError, ValidationError):
        return None


@contextlib.contextmanager
def _underway(
    spec: TrainingSpec, parts: list[str]
) -> Iterator[Callable[[], dict[str, SeenRows | SeenModel] | str]]:
    """Look in a child process, so that torch is never imported here.

    Yields:
        What waits for the look, keeps its parts and returns them, or the reason where it failed.
    """
    end = time.monotonic() + TIMEOUT_S
    with TemporaryFile() as asked, TemporaryFile() as said, TemporaryFile() as failed:
        asked.write(spec.model_dump_json().encode())
        asked.seek(0)
        environ = {**run_environment(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        argv = [sys.executable, "-m", "soup_flows.training.look", *parts]

        def found() -> dict[str, SeenRows | SeenModel] | str:
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"it took more than {TIMEOUT_S:.0f} s"
            if code:
                failed.seek(0)
                lines = failed.read().decode("utf-8", "replace").strip().splitlines()
                return (lines or ["no message"])[-1][:300]
            said.seek(0)
            try:
                value = parse_json(said.read())
                return {part: keep(spec, part, value[part]) for part in parts}
            except (ValueError, KeyError, TypeError) as error:
                return str(error).splitlines()[0]

        process = subprocess.Popen(argv, stdin=asked, stdout=said, stderr=failed, env=environ)
        try:
            yield found
        finally:
            process.kill()  # nothing happens to one that was waited for
            process.wait()
