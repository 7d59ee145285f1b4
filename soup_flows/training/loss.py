"""The loss straight from the hidden states, in pieces, so that the logits of a batch never exist together.

A vocabulary of 128,000 tokens makes 0.5 MB of fp32 logits a token, and training holds them two or three times. Here a
piece's logits give its loss and its gradients at once and are dropped (the idea of Liger-Kernel,
https://arxiv.org/abs/2410.10989); no arithmetic is done twice.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from soup_flows.memory.activations import PIECE_ELEMENTS as GPU_PIECE_ELEMENTS
from soup_flows.memory.activations import pieces_from

PIECE_ELEMENTS = {"cpu": 2**21, "cuda": GPU_PIECE_ELEMENTS}
"""Logits that exist at once: 8 MB and 256 MB in fp32; smaller pieces make slower products."""

_PLAIN_HEAD = re.compile(
    r"hidden_states = slice_logits_to_keep\(hidden_states, logits_to_keep\)\s+"
    r"logits = self\.lm_head\(hidden_states\)\s+loss = None"
)
"""Lines that transformers 5.24's decoders share; where anything stands between them, it is not a plain head."""


class _Loss(torch.autograd.Function):
    """Summed cross entropy of a linear head; its gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        needed = ctx.needs_input_grad
        h, w = hidden.to(dtype), weight.to(dtype)
        grad_h = torch.empty_like(h) if needed[0] else None
        grad_w = torch.zeros(w.shape, dtype=torch.float32, device=w.device) if needed[1] else None
        grad_b = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None
        total = torch.zeros((), dtype=torch.float32, device=h.device)
        size = max(1, PIECE_ELEMENTS.get(kind, PIECE_ELEMENTS["cuda"]) // w.shape[0])
        with torch.autocast(kind, enabled=False):
            for start in range(0, h.shape[0], size):
                piece, wanted = h[start : start + size], labels[start : start + size, None]
                logits = (piece @ w.t()).float()
                if bias is not None:
                    logits += bias
                chances = torch.log_softmax(logits, -1)
                del logits
                kept = wanted >= 0
                wanted = wanted.clamp_min(0)
                total -= (chances.gather(1, wanted) * kept).sum()
                slope = chances.exp_() if any(needed) else None
                del chances  # else it lives on beside the next piece
                if slope is None:
                    continue
                slope.scatter_add_(1, wanted, -torch.ones_like(wanted, dtype=slope.dtype))
                if grad_b is not None:
                    grad_b += (slope * kept).sum(0)
                slope = slope.to(dtype)
                kept = kept.to(
                    dtype
                )  # put on the narrow side of each product: there it costs next to nothing
                if grad_h is not None:
                    torch.mul(slope @ w, kept, out=grad_h[start : start + size])
                piece = piece * kept
                if grad_w is not None and dtype == torch.float32:
                    grad_w.addmm_(slope.t(), piece)
                elif grad_w is not None:
                    grad_w += slope.t() @ piece
                del slope
        ctx.grads = (grad_h, grad_w, grad_b)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        grads = [
            None if grad is None else grad.mul_(outer[0]).to(dtype)  # in place: a head's gradient is large
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        ctx.grads = (None, None, None)
        return (*grads, None)


def head_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross entropy of `hidden @ weight.T + bias` against `labels`.

    Args:
        hidden: (positions, hidden size).
        weight: (vocabulary, hidden size).
        bias: (vocabulary), or None.
        labels: (positions); negative ones are not counted.
    """
    loss: torch.Tensor = _Loss.apply(hidden, weight, bias, labels)
    return loss


def has_plain_head(model: Any) -> bool:
    """Whether a model's logits are its head's output as it is: no soft cap, no scale, nothing in between."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings()
    try:
        source = inspect.getsource(type(inner).forward)
    except (OSError, TypeError):
        return False
    return type(head) is torch.nn.Linear and _PLAIN_HEAD.search(source) is not None


def worth_it_from(model: Any) -> float:
    """Return the positions from which the loss in pieces takes less memory than whole logits; infinite for never."""
    if not has_plain_head(model):
        return math.inf
    trained = model.get_output_embeddings().weight.requires_grad
    return pieces_from(model.config.get_text_config().hidden_size, trained)


@contextlib.contextmanager
def loss_in_head(model: Any, labels: torch.Tensor) -> Iterator[None]:
    """Let the head return the loss in place of the logits, of shape (1, 1, 1), while the block runs.

    The head is called where it always is, in the model's forward pass: there its weight is whole under FSDP and
    ZeRO-3.
    """
    head = model.get_output_embeddings()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return head_loss(hidden[0], head.weight, head.bias, labels).reshape(1, 1, 1)

    before = head.__dict__.get("forward")
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before
