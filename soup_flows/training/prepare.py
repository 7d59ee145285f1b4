"""Tokenise the data of a spec: `python -m soup_flows.training.prepare SPEC ANSWER`, started by the flow."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from soup_flows.child import answer
from soup_flows.data.encoding import encode_source
from soup_flows.data.formats import check_kept
from soup_flows.data.prepare import (
    TOKENIZER_PATTERNS,
    PreparedData,
    PreparedSource,
    checked,
    entry_of,
    fetch_sources,
    settings_of,
    sources_of,
)
from soup_flows.data.reading import list_files
from soup_flows.data.report import DataReport, Tally
from soup_flows.data.store import lengths_of, stored, write_entry
from soup_flows.errors import first_line, refuse
from soup_flows.hardware import host
from soup_flows.spec import TrainingSpec
from soup_flows.training.lean import leave_out_of_tokenising
from soup_flows.user_file import expanded
from soup_flows.validation.seen import is_missing, keep, looking

BYTES_PER_WORKER = 4 * 2**20
"""Data below this size is tokenised before a second process has started."""
WORKER_MEMORY = 400 * 2**20
"""Bytes of memory reckoned for a worker; most of a forked process is shared."""


def prepare_here(spec: TrainingSpec) -> PreparedData:
    """Prepare the data of a spec in this process.

    Raises:
        Refused: as `soup_flows.data.prepare.prepare_data`.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    fetch_sources(spec)
    folder = tokenizer_folder(spec)
    tokenizer = load_tokenizer(spec)
    found = []
    for field, source in sources_of(spec):
        entry = entry_of(spec, folder, source, field)
        report = stored(entry, functools.partial(_tokenise, spec, tokenizer, entry, source, field))
        found.append(PreparedSource(entry=str(entry), rows=len(lengths_of(entry)), report=report))
    return checked(spec, found)


def _tokenise(spec: TrainingSpec, tokenizer: Any, entry: Path, source: str, field: str) -> DataReport:
    settings = settings_of(spec)
    limit = None if settings.task == "pretrain" else spec.data.max_length  # documents are divided, not cut
    tally = Tally(source, tokenizer, limit)
    chunks = encode_source(source, tokenizer, settings, workers=worker_count(spec, source), field=field)
    report = write_entry(entry, chunks, tally, tokenizer)
    check_kept(source, report.rows_kept, tally.drops, field=field)
    return report


def worker_count(spec: TrainingSpec, source: str) -> int:
    """Return how many processes tokenise: by the size of the data, the cores and the free memory."""
    size = sum(path.stat().st_size for path in list_files(source))
    cores, _ = host.cores(Path("/"), os.environ)
    free, _ = host.memory(Path("/"), os.environ)
    room = free.usable_bytes // WORKER_MEMORY
    return max(1, min(spec.data.workers or cores, size // BYTES_PER_WORKER, room))


def tokenizer_folder(spec: TrainingSpec) -> Path:
    """Return the local folder of the tokenizer; from the Hub only the files it needs are fetched.

    Raises:
        Refused: if the Hub cannot be reached or has no such model.
    """
    folder = expanded(spec.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec.model, allow_patterns=list(TOKENIZER_PATTERNS)))
    except Exception as error:  # network, authorisation and naming errors alike
        fix = "check the name, the network and HF_TOKEN, or give a local folder"
        raise refuse("DATA023", "model", f"the tokenizer could not be fetched: {error}", fix) from None


def load_tokenizer(spec: TrainingSpec) -> Any:
    """Load the tokenizer; a missing pad token becomes the end-of-sequence token (it is never trained as padding).

    Raises:
        Refused: if there is no tokenizer.
    """
    from transformers import AutoTokenizer

    folder = str(tokenizer_folder(spec))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
    except Exception as error:  # transformers raises many kinds for a folder without a tokenizer
        fix = "give a folder with tokenizer.json"
        raise refuse(
            "DATA019", "model", f"{spec.model} holds no usable tokenizer: {first_line(error)}", fix
        ) from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def prepare_and_look(spec: TrainingSpec) -> PreparedData:
    """Prepare the data, and leave what the validation wants to see of model and rows (`validation.seen`).

    Looking at the model needs torch, and tokenising does not: a process of its own looks meanwhile.

    Raises:
        Refused: as `prepare_here`.
    """
    leave_out_of_tokenising(spec)
    with looking(spec):
        data = prepare_here(spec)
        if is_missing(spec, "rows"):
            from soup_flows.training.look_rows import look_at_rows

            keep(spec, "rows", look_at_rows(spec))
        return data


if __name__ == "__main__":
    raise SystemExit(
        answer(
            sys.argv[1:],
            lambda text: prepare_and_look(TrainingSpec.model_validate_json(text)).model_dump(mode="json"),
        )
    )
