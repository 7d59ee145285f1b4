"""`predict`: from an architecture and a setup to a `MemoryEstimate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.architecture import Architecture
from soup_flows.errors import refuse
from soup_flows.memory.activations import activations
from soup_flows.memory.phases import EXACT, WORKSPACE, Phase, buffers, phases
from soup_flows.memory.setup import STRANDED_LOGIT_BYTES, Setup, parse_setup
from soup_flows.memory.states import States, host_bytes_at_load, states

Confidence = Literal["high", "medium", "low"]

GIB = 1 << 30
CONTEXT = int(0.55 * GIB)
"""Bytes of the CUDA context and loaded kernels outside torch's allocator (typical of A100 and H100)."""
NCCL = int(0.5 * GIB)
"""Bytes of NCCL's buffers, with more than one rank."""
MARGIN = 0.86
"""Share of a card that prediction and context may fill. Of the published A100 runs in the tests, none of the
54 that ran out of memory is accepted at this margin and 8.5 % of the 118 that ran are refused."""
RESERVED_SPREAD = 1.15
"""Upper end of the allocator's peak around its guess."""
SPREAD: dict[Confidence, tuple[float, float]] = {
    "high": (0.92, 1.08),
    "medium": (0.85, 1.18),
    "low": (0.65, 1.45),
}
"""Likely range around the prediction, from the errors on published measurements of each kind."""


class Value(BaseModel):
    """Base of the answers: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class HostMemory(Value):
    """Memory outside the GPU, bytes for one machine with all its ranks. Upper bounds, not expectations."""

    load: int
    """While weights are read."""
    step: int
    """While training: what is off-loaded, pinned copies included."""
    nvme: int
    """On disk, with `zero3_nvme`."""


class MemoryEstimate(Value):
    """Predicted peak memory of one rank, in bytes."""

    parameters: int
    """Parameters of the model."""
    trained_parameters: int
    """Parameters that are trained."""
    load: dict[str, int]
    """By component, when the model and the optimizer stand ready."""
    step: dict[str, int]
    """By component, at the peak of a training step."""
    phases: dict[Phase, int]
    """Bytes at each moment that can be the peak: gather, loss, first and last layer of backward, root, step."""
    peak_phase: Phase
    """Which of them is."""
    load_bytes: int
    """Peak while loading."""
    allocated_bytes: int
    """Peak that `torch.cuda.max_memory_allocated` would show."""
    low_bytes: int
    """Lower end of the likely range of `allocated_bytes`."""
    high_bytes: int
    """Upper end of the likely range of `allocated_bytes`."""
    reserved_bytes: int
    """Peak that the caching allocator would hold on a card with room: a guess, it varies from run to run."""
    context_bytes: int
    """CUDA context and NCCL, outside torch's counters."""
    minimum_bytes: int
    """Free device memory below which the run is refused: prediction and context may fill 86 % of it, and the
    upper end of the range still fits."""
    required_bytes: int
    """Free device memory to ask for: `minimum_bytes`, and room for all the allocator would keep, so that
    nvidia-smi stays below it."""
    host: HostMemory
    """Memory of the machine."""
    confidence: Confidence
    """How well this kind of run is covered by measurements."""
    reasons: tuple[str, ...]
    """What the confidence rests on, one sentence each."""

    def fits(self, device_bytes: int) -> bool:
        """Say whether a rank fits on a card with `device_bytes` free, with the margin kept.

        What the allocator merely keeps does not count: under pressure it gives that back.
        """
        return self.minimum_bytes <= device_bytes


def predict(
    model: Architecture, *, setup: Setup | None = None, correction: float = 1.0, **settings: Any
) -> MemoryEstimate:
    """Predict the peak memory of one rank for loading and for a training step.

    Closed form, milliseconds, no torch. The peak is the largest of the moments in `phases.Phase`.

    Args:
        model: shapes of the model; see `soup_flows.architecture`.
        setup: how it is trained.
        correction: factor on everything that is not exact, from a measured peak; see `correction_from`.
        settings: fields of `Setup`, in place of `setup` or changing it: `method`, `strategy`, `world_size`,
            `per_device_train_batch_size`, `seq_len` (tokens), `dtype`, `optimizer`,
            `gradient_checkpointing`, `attention`, `loss`, `lora_r`, `offload`, ...

    Returns:
        The estimate; all sizes in bytes.

    Raises:
        Refused: `MEM003` for each wrong setting, `MEM004` if an adapter target names no module.
    """
    given = setup.model_dump() if setup is not None else {}
    chosen = parse_setup({**given, **settings}) if settings or setup is None else setup
    try:
        state = states(model, chosen)
        act = activations(model, chosen)
    except ValueError as error:
        raise refuse("MEM004", "lora_targets", str(error), "use all-linear") from None
    moments = {name: parts.corrected(correction) for name, parts in phases(model, chosen, state, act).items()}
    peak_phase = max(moments, key=lambda name: moments[name].total)
    peak = moments[peak_phase]
    allocated = peak.total
    confidence, reasons = judge(model, chosen)
    low, high = SPREAD[confidence]
    context = CONTEXT + (NCCL if chosen.world_size > 1 else 0)
    load = _load(model, chosen, state)
    reserved = _reserved(model, chosen, state, allocated)
    minimum = max((allocated + context) / MARGIN, high * allocated + context, sum(load.values()) + context)
    return MemoryEstimate(
        parameters=model.parameters,
        trained_parameters=state.trained,
        load=load,
        step={name: round(size) for name, size in asdict(peak).items()},
        phases={name: round(parts.total) for name, parts in moments.items()},
        peak_phase=peak_phase,
        load_bytes=sum(load.values()),
        allocated_bytes=round(allocated),
        low_bytes=round(low * allocated),
        high_bytes=round(high * allocated),
        reserved_bytes=round(reserved),
        context_bytes=context,
        minimum_bytes=round(minimum),
        required_bytes=round(max(minimum, RESERVED_SPREAD * reserved + context)),
        host=_host(model, chosen, state),
        confidence=confidence,
        reasons=reasons,
    )


def correction_from(estimate: MemoryEstimate, measured_bytes: int) -> float:
    """Return the factor on the inexact components with which `estimate` would have said `measured_bytes`.

    Args:
        estimate: a prediction; one that was corrected itself gives a factor on top of that.
        measured_bytes: peak that torch's allocator really held.
    """
    exact = sum(size for name, size in estimate.step.items() if name in EXACT)
    return max(0.0, measured_bytes - exact) / max(1, estimate.allocated_bytes - exact)


def _load(model: Architecture, setup: Setup, state: States) -> dict[str, int]:
    """Return what is on the GPU when training can start; FSDP moves one whole parameter at a time."""
    moving = model.largest_parameter * 4 if setup.fsdp and setup.world_size > 1 else 0
    return {
        "weights": round(state.weights),
        "master_weights": round(state.master),
        "moving": moving,
        "workspace": WORKSPACE,
    }


def _reserved(model: Architecture, setup: Setup, state: States, allocated: float) -> float:
    """Return a guess of the allocator's peak: stranded blocks of the loss, FSDP's pools, and slack.

    DeepSpeed keeps flat buffers, so its slack is that of one rank.
    """
    stranded = setup.tokens * model.vocab_size * STRANDED_LOGIT_BYTES[setup.loss]
    pools = buffers(model, setup, state).reduce_root if setup.fsdp else 0.0
    return (allocated + stranded + pools) * (1.15 if setup.fsdp or setup.strategy == "ddp" else 1.05)


def _host(model: Architecture, setup: Setup, state: States) -> HostMemory:
    """Return host and NVMe bounds of one machine; pinned copies can add half (DeepSpeed's own factor)."""
    return HostMemory(
        load=round(host_bytes_at_load(model, setup)),
        step=round(1.5 * state.host_per_rank * setup.node_ranks),
        nvme=round(state.nvme_per_rank * setup.node_ranks),
    )


def judge(model: Architecture, setup: Setup) -> tuple[Confidence, tuple[str, ...]]:
    """Return how far measurements cover such a run, and why."""
    low = {
        "mixture of experts: routing decides how many tokens an expert sees": model.moe,
        "torch.compile changes which tensors are saved": setup.compile,
        "selective checkpointing differs between versions": setup.gradient_checkpointing == "selective",
        "off-loading: an upper bound": bool(setup.offloaded),
        "quantised or paged optimizer states": setup.optimizer
        not in ("adamw_torch", "adamw_torch_fused", "sgd"),
        "hybrid sharding is not covered by measurements": setup.strategy in ("hybrid_shard", "zero++"),
        "few published measurements of models unlike Llama": not all(
            layer.gated and layer.rms_norm for layer in model.layers
        ),
        "bitsandbytes of 2023 and 2024": setup.inputs_saved_by_quantized,
    }
    medium = {
        "ZeRO: few published measurements": setup.zero_stage > 0,
        "quantised base weights": setup.method == "qlora",
        "activation widths of this family are assumed": not model.known,
        "eager attention": setup.attention == "eager" or not model.sdpa,
        "the optimizer steps inside backward": setup.step_in_backward,
    }
    for word, rules in (("low", low), ("medium", medium)):
        if found := tuple(text for text, true in rules.items() if true):
            return word, found  # type: ignore[return-value]
    return "high", ("dense Llama-like layers, covered by published measurements",)
