"""Attention over rows laid end to end: each row attends to itself alone, without a mask over all of them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import is_flash_attn_2_available

NAME = "soup_rows"
"""Value of `attn_implementation` that selects it."""

FLASH = "flash_attention_2"


def choose(device: str, dtype: torch.dtype) -> str:
    """Return the attention for rows laid end to end: flash-attention where it is installed and fits.

    flash-attention computes in half precision on GPUs only.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return FLASH if device == "cuda" and half and is_flash_attn_2_available() else NAME


def attend_per_row(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    row_borders: list[int] | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Run causal scaled-dot-product attention once per row.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, head_dim).
        key: (1, kv_heads, tokens, head_dim).
        value: like `key`.
        _attention_mask: unused; the rows' borders say all there is to say.
        scaling: factor on the scores.
        dropout: share of attention weights to drop.
        sliding_window: tokens each token may look back, itself included; None for all.
        softcap: bound of the scores, `softcap * tanh(scores / softcap)` (Gemma 2).
        s_aux: (heads), one learned score more per head that takes weight and gives nothing (gpt-oss).
        row_borders: where each row begins, and the end of the last; one row when absent.
        other: refused where it would change the result.

    Returns:
        (1, tokens, heads, head_dim), and None for the attention weights.

    Raises:
        NotImplementedError: for a position bias or attention that is not causal.
    """
    causal = other.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if other.get("position_bias") is not None or not causal:
        raise NotImplementedError(f"{type(module).__name__} has a position bias or looks ahead")
    borders = row_borders or [0, query.shape[2]]
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for start, end in itertools.pairwise(borders):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        mask = _window(end - start, sliding_window, query.device)
        plain = softcap is None and s_aux is None
        if groups > 1 and not (
            plain and mask is None
        ):  # with a mask, grouped heads fall back to a slow kernel
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if plain:
            outputs.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
                    enable_gqa=groups > 1 and mask is None,
                )
            )  # fmt: skip
        else:
            outputs.append(_by_scores(q, k, v, mask, scaling, dropout, softcap, s_aux))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _window(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return (length, length), True where a token may look; None when a plain causal mask says the same."""
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=device)
    distance = distance[:, None] - distance[None, :]
    return (distance >= 0) & (distance < sliding_window)


def _by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with the scores of one row written out, for what the fused kernels do not know."""
    length = query.shape[2]
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if s_aux is not None:
        sink = s_aux.float().reshape(1, -1, 1, 1).expand(query.shape[0], -1, length, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = F.dropout(torch.softmax(scores, dim=-1)[..., :length].to(query.dtype), dropout)
    return weights @ value


def register() -> None:
    """Make `attn_implementation="soup_rows"` known to Transformers."""
    AttentionInterface.register(NAME, attend_per_row)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
