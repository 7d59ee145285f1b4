"""For every rule of the deep look: what was seen that it must catch, and the nearest it must let through."""

from __future__ import annotations

from typing import Any

SEEN: dict[str, Any] = {
    "tokens": 1000,
    "kept": 5,
    "stop_trained": 5,
    "largest_id": 999,
    "embedding_rows": 1000,
    "wrap_classes": ("LlamaDecoderLayer",),
    "wrap_found": ("LlamaDecoderLayer",),
}

SEEN_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DP001": ({"tokenizer_error": "ValueError: no such file"}, {}),
    "DP002": ({"model_error": "ValueError: unknown type", "embedding_rows": None}, {}),
    "DP003": ({"largest_id": 1000}, {"tokens": 1001}),
    "DP004": ({"adapters": 0}, {"adapters": 128}),
    "DP005": ({"wrap_found": ()}, {"wrap_classes": ("LlamaDecoderLayer", "Other")}),
    "DP006": ({"stop_trained": 0}, {"stop_trained": 1}),
    "DP007": (
        {"kept": 0, "stop_trained": 0, "lost": {"no trained token": 5}},
        {"lost": {"no trained token": 5}},
    ),
    "DP010": ({"packing_error": "mamba has layers (mamba) that would mix rows laid end to end"}, {}),
    "DP011": (
        {"trained": {"a": 7, "<|eot_id|>": 9}, "empty_ids": (9,)},
        {"trained": {"a": 7}, "empty_ids": (9,)},
    ),
    "DP008": ({"lost": {"no trained token": 5}}, {}),
}
