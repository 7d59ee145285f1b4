"""Bytes that forward saves for backward, per token: layers, checkpoints, loss.

Read off the operations of the eager Hugging Face layers: what autograd keeps for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from soup_flows.architecture import Architecture, Layer, Linear
from soup_flows.memory.setup import LOGIT_BYTES, Setup

SELECTIVE_SHARE = 0.3
"""Share of a layer's saved tensors that selective checkpointing keeps (fitted; varies between versions)."""
CHUNK_ROWS = 256
"""Tokens per chunk of TRL's chunked loss."""
CHUNK_LOGIT_BYTES = 14.0
"""Bytes per logit of one chunk: 16-bit logits and the fp32 workspace of the full loss."""
PIECE_ELEMENTS = 2**26
"""Logits that exist at once on a GPU under the loss `pieces`; `training.loss.PIECE_ELEMENTS` takes it from here."""


@dataclass(frozen=True)
class Activations:
    """Bytes per rank for one micro batch."""

    saved: float
    """What all layers keep from forward to backward."""
    layer: float
    """What the largest layer saves, the tensors recomputed under checkpointing."""
    layer_backward: float
    """What the backward pass of one layer needs beyond that."""
    outer: float
    """Final norm and hidden states outside the layers."""
    logits: float
    """Workspace of the loss at its backward peak."""
    gradient: float
    """One gradient of the residual stream."""


def layer_bytes(
    layer: Layer, hidden: int, adapted: tuple[Linear, ...], setup: Setup, eager: bool
) -> tuple[float, float]:
    """Return bytes per token a layer saves, and what its backward pass needs beyond them at its peak.

    Args:
        layer: the layer.
        hidden: width of the residual stream.
        adapted: its matrices with adapters; ignored for full training.
        setup: how it is trained.
        eager: whether attention scores are kept.
    """
    e, full = setup.element, setup.method == "full"
    keeps_inputs = full or (setup.inputs_saved_by_quantized and setup.method == "qlora")
    norm = _norm_bytes(layer, hidden, keeps_inputs, setup)
    # else keys and values are expanded to every head
    grouped = setup.attention in ("flash_attention_2", "rows")
    keys, values = (layer.k_width, layer.v_width) if grouped else (layer.q_width, layer.out_width)
    attention: float = e * (layer.q_width + keys + values + layer.out_width) + 4 * layer.heads
    if setup.attention == "rows" and keeps_inputs:
        attention += e * layer.out_width  # the rows' outputs, and their copy in one tensor
    if layer.fused_qkv and (grouped or layer.k_width == layer.q_width):
        attention += e * (layer.q_width + layer.k_width)
    attention += layer.qk_norm_width * ((4 if e == 2 else 0) + (4 if layer.wide_norm else e) * full)
    if eager:
        attention += (4 + e) * layer.heads * setup.seq_len
    width = layer.mlp_width
    product = e * width if keeps_inputs else 0
    inner = 2 if layer.gated and setup.fused else layer.inner_tensors
    mlp = inner * e * width + product + 2 * e * hidden * layer.routed
    adapters = 0.0 if full else sum(_adapter_bytes(x, setup) for x in adapted)

    down = [x for x in adapted if x.d_in == width] if not full else []
    gradients: float = (3 if layer.gated else 2) * e * width - product
    if down and setup.wide_adapters:
        # the fp32 gradient of the adapter's input beside its cast or dropped-out copy, and the base's own
        gradients = max(gradients, e * width + 8 * width)
    extra: float = e * hidden + gradients
    if eager:
        extra = max(extra, e * hidden + (4 + e) * layer.heads * setup.seq_len)
    return norm + attention + mlp + adapters, extra


def _norm_bytes(layer: Layer, hidden: int, keeps_inputs: bool, setup: Setup) -> float:
    """Return what the norms of a layer save per token, their outputs included."""
    e = setup.element
    output = e * hidden * keeps_inputs
    if setup.fused or not layer.rms_norm:
        return layer.norms * (e * hidden + output)
    scaled = (4 if layer.wide_norm else e) * hidden if setup.method == "full" else 0
    return layer.norms * (4 * hidden + scaled + output)


def _adapter_bytes(linear: Linear, setup: Setup) -> float:
    """Return what the adapter of one matrix saves per token: its input, cast and dropped out."""
    element = 2 if setup.under_autocast or not setup.wide_adapters else 4
    return linear.count * linear.d_in * (element + (1 if setup.lora_dropout else 0))


def activations(model: Architecture, setup: Setup) -> Activations:
    """Return the activations of one micro batch, `setup.tokens` tokens long."""
    hidden, e, tokens = model.hidden_size, setup.element, setup.tokens
    targets = () if setup.method == "full" else setup.lora_targets
    adapted = model.adapted(targets)
    eager = setup.attention == "eager" or (setup.attention == "sdpa" and not model.sdpa)
    per_layer = [(layer, *layer_bytes(layer, hidden, linears, setup, eager)) for layer, linears in adapted]
    total = sum(layer.count * saved for layer, saved, _ in per_layer)
    _, largest, backward = max(per_layer, key=lambda item: item[1] + item[2])
    checkpoint: float = (4 if setup.wide_residual else e) * hidden
    kept: float = min(model.num_layers, 4) if "activations" in setup.offloaded else model.num_layers
    if setup.gradient_checkpointing is True:
        saved: float = checkpoint * kept
    elif setup.gradient_checkpointing == "selective":
        saved = SELECTIVE_SHARE * total
    else:
        saved = total * kept / model.num_layers
    full = setup.method == "full"
    final = e * hidden if setup.fused else 4 * hidden
    outer = final + e * hidden * (3 if full and not setup.fused else 1)
    return Activations(
        saved=tokens * saved,
        layer=tokens * largest,
        layer_backward=tokens * backward,
        outer=tokens * outer,
        logits=logit_bytes(model, setup) + tokens * e * hidden,
        gradient=tokens * e * hidden,
    )


def pieces_from(hidden_size: int, head_is_trained: bool) -> float:
    """Return the tokens from which the loss in pieces takes less memory than whole logits.

    A trained head's gradient exists beside the pieces, in fp32: 4 bytes times vocabulary times hidden size, against
    about 12 bytes times vocabulary for each token of whole logits.
    """
    return hidden_size / 3 if head_is_trained else 0


def in_pieces(model: Architecture, setup: Setup) -> bool:
    """Whether the loss is made in pieces."""
    return setup.loss == "pieces" and setup.tokens >= pieces_from(model.hidden_size, setup.method == "full")


def logit_bytes(model: Architecture, setup: Setup) -> float:
    """Return the bytes that logits and their loss hold at the backward peak."""
    tokens, vocab, hidden = setup.tokens, model.vocab_size, model.hidden_size
    head_gradient = 2 * vocab * hidden if setup.method == "full" else 0
    if setup.bytes_per_logit is None and setup.loss == "liger":
        # Liger chunks so that one chunk of logits is about as large as the hidden states (fused_linear_ce).
        ratio = -(-vocab // hidden)
        rows = -(-tokens // ratio)
        chunk = min(tokens, 1 << (rows - 1).bit_length())
        return chunk * vocab * 10 + head_gradient
    if setup.bytes_per_logit is None and in_pieces(model, setup):
        # fp32 logits of a piece and their log-softmax, then its slope and its share of the head's fp32 gradient
        piece = min(tokens * vocab, PIECE_ELEMENTS)
        gradient = vocab * hidden if setup.method == "full" else 0
        return max(8 * piece, setup.element * (piece + gradient)) + 4 * gradient
    if setup.bytes_per_logit is None and setup.loss == "chunked":
        return min(tokens, CHUNK_ROWS) * vocab * CHUNK_LOGIT_BYTES + head_gradient
    each = LOGIT_BYTES[setup.loss] if setup.bytes_per_logit is None else setup.bytes_per_logit
    return tokens * vocab * (each + (setup.element if setup.logits_kept else 0))
