"""A look at model class, tokenizer and first rows, kept for the next run of the same.

The looking is done in a child process (`soup_flows.training.look`), so that torch is never imported here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

    `prepare dataset` leaves it there, since its process has the libraries loaded that a look needs.
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
    seen = _look_now(spec)
    if kept is not None and isinstance(seen, Seen):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, seen.model_dump_json())
    return seen


def _look_now(spec: TrainingSpec) -> Seen | str:
    """Look in a child process, so that torch is never imported here."""
    environ = {**run_environment(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "soup_flows.training.look"],
            input=spec.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            env=environ,
        )
        seen: Seen = Seen.model_validate_json(done.stdout)
        return seen
    except subprocess.TimeoutExpired:
        return f"it took more than {TIMEOUT_S:.0f} s"
    except subprocess.CalledProcessError as error:
        return str((error.stderr.strip().splitlines() or ["no message"])[-1])[:300]
    except (OSError, ValidationError) as error:
        return str(error).splitlines()[0]
