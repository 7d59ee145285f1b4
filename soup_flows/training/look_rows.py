"""Looks at tokenizer and first rows. Nothing here imports torch."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from soup_flows.data.formats import iter_examples
from soup_flows.data.masking import encode
from soup_flows.data.report import better_answer
from soup_flows.data.sources import is_here
from soup_flows.data.values import Dropped, Encoded
from soup_flows.errors import Refused, kind_and_line
from soup_flows.spec import TrainingSpec
from soup_flows.training.prepare import load_tokenizer

ROWS = 200
"""Rows that are encoded."""


def look_at_rows(spec: TrainingSpec) -> dict[str, Any]:
    """Load the tokenizer and encode the first rows."""
    try:
        tokenizer = load_tokenizer(spec)
    except Exception as error:  # whatever a tokenizer file can raise
        return {"tokenizer_error": kind_and_line(error)}
    found: dict[str, Any] = {"tokens": len(tokenizer), "has_eos": tokenizer.eos_token_id is not None}
    lost: Counter[str] = Counter()
    kept = stops = largest = 0
    if not is_here(spec.dataset):
        return found
    trained: Counter[int] = Counter()
    try:
        for example in itertools.islice(iter_examples(spec.dataset), ROWS):
            row = (
                example
                if isinstance(example, Dropped)
                else encode(better_answer(example), tokenizer, spec.data.max_length, spec.data.train_on)
            )
            if isinstance(row, Encoded):
                kept, stops = kept + 1, stops + row.stop_trained
                largest = max(largest, *row.input_ids)
                trained.update({label for label in row.labels if label >= 0})
            else:
                lost[row.reason] += 1
    except Refused as refused:
        found["rows_error"] = refused.problems[0].message
    ids = [number for number, _ in trained.most_common()]
    names = dict(zip(map(str, tokenizer.convert_ids_to_tokens(ids)), ids, strict=True))
    counts = {"kept": kept, "stop_trained": stops, "largest_id": largest, "lost": dict(lost)}
    return {**found, **counts, "trained": names}
