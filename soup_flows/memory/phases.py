"""The moments of a step that can be its memory peak, and which of them is."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from soup_flows.architecture import Architecture
from soup_flows.memory.activations import Activations, in_pieces
from soup_flows.memory.setup import Setup
from soup_flows.memory.states import States

Phase = Literal["gather", "loss", "first_layer", "last_layer", "root", "step"]

EXACT = frozenset({"weights", "master_weights", "gradients", "optimizer"})
"""Components that follow from shapes, dtypes and ranks; a measured peak corrects the others."""
WORKSPACE = 32 << 20
"""Bytes of cuBLAS workspaces that torch allocates through its allocator."""


@dataclass(frozen=True)
class Parts:
    """Bytes alive at one moment, by component."""

    weights: float = 0.0
    master_weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    autocast_copies: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    communication: float = 0.0
    step_temporaries: float = 0.0
    workspace: float = WORKSPACE

    @property
    def total(self) -> float:
        """All of them together."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def corrected(self, factor: float) -> Parts:
        """Return these with what is not plain arithmetic of shapes and ranks multiplied: all but `EXACT`."""
        rough = [field.name for field in fields(self) if field.name not in EXACT]
        return replace(self, **{name: factor * getattr(self, name) for name in rough})


@dataclass(frozen=True)
class Buffers:
    """Bytes of gathered parameters and communication buffers."""

    layer: float
    """Gathered layers and bucket space while a layer runs."""
    root: float
    """Gathered embedding and head."""
    kept: float
    """Layers that stay gathered from forward to backward (`shard_grad`)."""
    reduce_layer: float
    """Unsharded gradients of a layer and the input of their reduction."""
    reduce_root: float
    """The same for embedding and head."""
    resident: float
    """Buckets that exist all the time (DDP)."""


def buffers(model: Architecture, setup: Setup, state: States) -> Buffers:
    """Return the communication buffers the strategy needs."""
    params, grads, _ = setup.shards
    full, stage = setup.method == "full", setup.zero_stage
    gathered = params > 1 or ("params" in setup.offloaded)
    layer = root = kept = 0.0
    if gathered:
        layer = 2 * state.layer
        root = state.largest_outer if setup.outer_units else state.outer
    if setup.strategy == "shard_grad":
        kept = (
            state.layer / max(1, model.largest_layer.parameters) * (model.parameters - model.outer_parameters)
        )
        layer = state.layer
    bucket = setup.bucket_elements or model.hidden_size**2
    element = setup.element
    if stage == 3:
        layer += 2 * element * bucket
    elif stage:
        layer += 2 * element * min(bucket, state.trained)
    reduce_layer = reduce_root = 0.0
    if full and grads > 1:
        wire = 4 if setup.fsdp and setup.reduce_fp32 else element
        reduce_layer = model.largest_layer.parameters * (element + wire)
        outer = model.outer_parameters
        if setup.outer_units:
            outer = max(model.embedding_parameters, model.head_parameters)
        reduce_root = outer * (element + wire)
    elif not full:
        reduce_layer = 2 * state.gradient_bytes * state.trained / model.num_layers
    # DDP keeps buckets beside the gradients (torch: gradient_as_bucket_view is False by default).
    resident = float(state.gradient_bytes * state.trained) if setup.strategy == "ddp" else 0.0
    return Buffers(layer, root, kept, reduce_layer, reduce_root, resident)


def autocast_bytes(model: Architecture, setup: Setup, state: States) -> tuple[float, float, float]:
    """Return 16-bit copies that autocast makes of fp32 weights: in forward, kept for backward, in one layer.

    The cache lives until the outermost autocast context ends, with the loss inside it; what backward needs
    is kept by the graph unless checkpointing drops it.
    """
    wide = setup.method == "full" and state.gradient_bytes == 4 and setup.zero_stage == 0
    if not (wide and setup.under_autocast) or setup.fsdp:
        return 0.0, 0.0, 0.0
    inner = 2.0 * (model.parameters - model.outer_parameters)
    head = 2.0 * model.vocab_size * model.hidden_size
    layer = 2.0 * model.largest_layer.parameters
    kept = head if setup.gradient_checkpointing is True else inner + head
    return inner + head, kept, layer


def phases(model: Architecture, setup: Setup, state: States, act: Activations) -> dict[Phase, Parts]:
    """Return what is alive at each moment that can be the peak of a step."""
    buf = buffers(model, setup, state)
    cast_forward, cast_kept, cast_layer = autocast_bytes(model, setup, state)
    full, checkpointed = setup.method == "full", setup.gradient_checkpointing is True
    accumulated = setup.gradient_accumulation_steps > 1 and not setup.step_in_backward
    gradients = state.gradients
    if setup.step_in_backward:
        gradients = state.gradient_bytes * float(model.largest_parameter)
    carried = gradients if accumulated else 0.0
    whole_grads = full and setup.shards[1] > 1
    head = float(model.vocab_size * model.hidden_size)
    head_gradient = head * (setup.element if whole_grads else state.gradient_bytes) if full else 0.0
    base = {"weights": state.weights, "master_weights": state.master, "optimizer": state.optimizer}
    gathered = buf.layer / 2 if setup.fsdp else buf.layer
    selective = setup.gradient_checkpointing == "selective"

    def at(**parts: float) -> Parts:
        parts["communication"] = parts.get("communication", 0.0) + buf.resident
        return Parts(**base, **parts)

    logits, pieces = act.logits, in_pieces(model, setup)
    if cast_forward > cast_kept:  # the cache ends with the forward pass; then the loss still holds 10 of 12
        logits = max(logits, logits * (1.0 if pieces else 10 / 12) + cast_forward - cast_kept)
    at_loss = buf.root + buf.kept + gathered
    if setup.loss_outside and not pieces and setup.fsdp and setup.strategy != "shard_grad":
        # gathered again when the gradient of the logits arrives: half of the loss's workspace is gone by then
        at_loss = max(0.0, buf.root - logits / 2)
    # Sharded, the embedding's and the head's gradients are reduced together at the very end; else the head's
    # come first and the embedding's last.
    pending = model.outer_parameters if whole_grads else model.embedding_parameters if full else 0
    late = gradients if accumulated else gradients * (1 - pending / model.parameters)
    early = 0.0 if whole_grads or setup.step_in_backward else min(head_gradient, gradients)
    unreduced = head_gradient if whole_grads else 0.0
    # FSDP copies its shard of the root unit in, gathers all into one buffer and copies that out into parameters.
    gathering = buf.root * (2 + 1 / setup.shards[0]) if setup.fsdp else 0.0
    return {
        "gather": at(gradients=carried, communication=gathering),
        "loss": at(
            gradients=carried,
            activations=act.saved + act.outer,
            logits=logits,
            autocast_copies=cast_kept,
            communication=at_loss,
        ),
        "first_layer": at(
            gradients=max(carried, early),
            activations=act.saved
            + act.gradient
            + (act.layer if checkpointed or selective else 0.0)
            + act.layer_backward,
            autocast_copies=cast_layer if checkpointed else cast_kept,
            communication=buf.root + buf.kept + buf.layer + buf.reduce_layer + unreduced,
        ),
        "last_layer": at(
            gradients=late,
            activations=2 * act.gradient
            + act.layer
            + act.layer_backward
            + 2 * act.saved * setup.layer_inputs_kept,
            autocast_copies=cast_layer,
            communication=buf.root + buf.layer + buf.reduce_layer + unreduced,
        ),
        "root": at(
            gradients=late if whole_grads else gradients,
            activations=act.gradient,
            communication=buf.reduce_root if whole_grads else buf.root,
        ),
        "step": at(gradients=gradients, step_temporaries=state.step),
    }
