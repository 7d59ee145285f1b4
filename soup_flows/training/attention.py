"""Attention over rows laid end to end: each row attends to itself alone, without a mask matrix."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "soup_rows"
"""Value of `attn_implementation` that selects it."""


def attend_per_row(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Run causal scaled-dot-product attention once per row.

    Args:
        _module: the attention layer, unused.
        query: (1, heads, tokens, head_dim).
        key: (1, kv_heads, tokens, head_dim).
        value: like `key`.
        _attention_mask: unused; the rows' borders say all there is to say.
        scaling: factor on the scores.
        dropout: share of attention weights to drop.
        sliding_window: tokens each token may look back, itself included; None for all.
        cu_seq_lens: (rows + 1), where each row begins and ends; one row when absent.

    Returns:
        (1, tokens, heads, head_dim), and None for the attention weights.
    """
    borders = [0, query.shape[2]] if cu_seq_lens is None else cu_seq_lens.tolist()
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for start, end in itertools.pairwise(borders):
        mask = None
        if sliding_window is not None and end - start > sliding_window:
            distance = torch.arange(end - start, device=query.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance < sliding_window)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, start:end],
                value[:, :, start:end],
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `attn_implementation="soup_rows"` known to Transformers."""
    AttentionInterface.register(NAME, attend_per_row)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
