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

from pydantic import BaseModel, ConfigDict, ValidationError

from soup_flows.data.prepare import cache_folder, entry_of, sha256
from soup_flows.errors import Refused
from soup_flows.lent import run_environment
from soup_flows.manifest import library_versions
from soup_flows.paths import write_atomic
from soup_flows.resume import digest
from soup_flows.spec import TrainingSpec
from soup_flows.user_file import expanded

TIMEOUT_S = 180.0


class Seen(BaseModel):
    """What `soup_flows.training.look` found; None where it could not look."""

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
    model_error: str = ""
    embedding_rows: int | None = None
    wrap_classes: tuple[str, ...] = ()
    """Classes that the model wants to be wrapped whole."""
    wrap_found: tuple[str, ...] = ()
    """Those of them that are in the model."""
    adapters: int | None = None
    """Weights of the adapters."""
    adapter_error: str = ""
    unlearnt: tuple[str, ...] = ()
    """Trained tokens whose embedding was never trained and stays frozen under the adapters."""
    packing_error: str = ""
    """Why rows cannot be laid end to end."""


def seen_file(spec: TrainingSpec) -> Path | None:
    """Return where a look is kept: its name is a hash of all that it looks at; None where that is not local.

    `prepare dataset` leaves it there: it looks while it tokenises.
    """
    folder = expanded(spec.model)
    try:
        data = entry_of(spec, folder, spec.dataset, "dataset").name
        model = [
            (file.name, sha256(file)) for file in sorted((*folder.glob("config.json"), *folder.glob("*.py")))
        ]
    except (OSError, Refused):
        return None
    if not model:
        return None
    method = [spec.training.method, spec.lora.model_dump(), spec.trust_remote_code]
    facts = [data, model, method, library_versions(), list(Seen.model_fields)]
    return cache_folder(spec) / "look" / f"{digest(facts)[:32]}.json"


def look(spec: TrainingSpec) -> Seen | str:
    """Return what was seen of model, tokenizer and first rows; the reason where a look fails."""
    kept = seen_file(spec)
    if kept is not None:
        try:
            return Seen.model_validate_json(kept.read_bytes())
        except (OSError, ValidationError):
            pass
    try:
        with _underway(spec) as found:
            return found(kept)
    except OSError as error:
        return str(error)


@contextlib.contextmanager
def looking(spec: TrainingSpec) -> Iterator[None]:
    """Look while the block runs, and wait for it at its end; nothing is done where a look is kept or not asked for.

    A look that fails leaves nothing, and is made again by whoever needs it. A block that raises ends it.
    """
    kept = seen_file(spec) if spec.validation.deep else None
    if kept is None or kept.exists():
        yield
        return
    with _underway(spec) as found:
        yield
        found(kept)


@contextlib.contextmanager
def _underway(spec: TrainingSpec) -> Iterator[Callable[[Path | None], Seen | str]]:
    """Look in a child process, so that torch is never imported here.

    Yields:
        What waits for the look, keeps it in a file and returns it, or the reason where it failed.
    """
    end = time.monotonic() + TIMEOUT_S
    with TemporaryFile() as asked, TemporaryFile() as said, TemporaryFile() as failed:
        asked.write(spec.model_dump_json().encode())
        asked.seek(0)
        environ = {**run_environment(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        argv = [sys.executable, "-m", "soup_flows.training.look"]

        def found(kept: Path | None) -> Seen | str:
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
                seen = Seen.model_validate_json(said.read())
            except ValidationError as error:
                return str(error).splitlines()[0]
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(kept, seen.model_dump_json())
            return seen

        process = subprocess.Popen(argv, stdin=asked, stdout=said, stderr=failed, env=environ)
        try:
            yield found
        finally:
            process.kill()  # nothing happens to one that was waited for
            process.wait()
