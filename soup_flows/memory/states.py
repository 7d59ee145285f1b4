"""Bytes of model state: weights, gradients, optimizer, on the GPU, on the host and on NVMe."""

from __future__ import annotations

from dataclasses import dataclass

from soup_flows.architecture import Architecture
from soup_flows.memory.setup import OPTIMIZER_STATES, QUANTIZED_BYTES, Setup

SHARD_BYTES = 5_000_000_000
"""Bytes of the largest weight file of a checkpoint that `save_pretrained` writes."""
SUB_GROUP = 1_000_000_000
"""Elements that DeepSpeed stage 3 steps at once (`sub_group_size`, default of DeepSpeed 0.19)."""


@dataclass(frozen=True)
class States:
    """Bytes per rank on the GPU, unless a name says otherwise."""

    weights: float
    """Parameters as they rest between steps."""
    master: float
    """fp32 copies the optimizer keeps beside 16-bit weights (DeepSpeed)."""
    gradients: float
    """All gradients a rank keeps at the end of a backward pass."""
    optimizer: float
    """Moments."""
    step: float
    """Temporaries of the optimizer step."""
    trained: int
    """Trained parameters of the whole model."""
    gradient_bytes: int
    """Bytes of one gradient element."""
    layer: float
    """Bytes of the largest layer's weights in compute form, unsharded."""
    outer: float
    """Bytes of embedding and head in compute form, unsharded."""
    largest_outer: float
    """Bytes of the larger of embedding and head in compute form."""
    host_per_rank: float
    """Host bytes a rank keeps for what is off-loaded."""
    nvme_per_rank: float
    """NVMe bytes a rank keeps for what is off-loaded."""


def trained_parameters(model: Architecture, setup: Setup) -> int:
    """Return how many parameters are trained."""
    if setup.method == "full":
        return model.parameters
    adapters = model.lora_parameters(setup.lora_r, setup.lora_targets)
    return adapters + (2 * model.vocab_size * model.hidden_size if setup.modules_to_save else 0)


def frozen_bytes(model: Architecture, setup: Setup) -> float:
    """Return the bytes of the frozen base weights of LoRA, unsharded."""
    plain = 4 if setup.dtype == "fp32" else 2
    if setup.method != "qlora":
        return plain * model.parameters
    matrices = sum(layer.count * layer.matrix_parameters for layer in model.layers)
    rest = model.parameters - matrices
    experts = sum(
        layer.count * x.parameters for layer in model.layers for x in layer.linears if x.kind == "expert"
    )
    wide = 4 if setup.frozen_upcast else plain
    return matrices * QUANTIZED_BYTES[setup.quantization] + experts * plain + (rest - experts) * wide


def states(model: Architecture, setup: Setup) -> States:
    """Return the model state of one rank. Even shares: padding of shards is below a percent."""
    params, grads, opt = setup.shards
    trained = trained_parameters(model, setup)
    plain = 4 if setup.dtype == "fp32" else 2
    deepspeed = setup.zero_stage > 0
    half = setup.dtype != "fp32"
    if setup.method == "full":
        wide = not half or (not deepspeed and setup.master_weights is not False)
        element = 4 if wide else 2
        weights = element * trained / params
    else:
        element = 4 if setup.wide_adapters else 2
        weights = (frozen_bytes(model, setup) + element * trained) / params
    if setup.strategy == "zero++":
        # hpZ keeps a second copy of the 16-bit weights, split over the ranks of one machine
        weights += plain * model.parameters / setup.node_ranks
    master = 4 * trained / opt if deepspeed and half and setup.master_weights is not False else 0.0
    moments = OPTIMIZER_STATES[setup.optimizer]
    if moments is None:
        moments = 8.0 if master else 2.0 * element
    optimizer, gradients = moments * trained / opt, element * trained / grads
    step = _step_bytes(setup, trained / opt, element, bool(master))

    host = nvme = 0.0
    away = setup.offloaded
    if "optimizer" in away:
        # CPU-Adam keeps fp32 weights, moments and gradients (DeepSpeed runtime/zero/stage_1_and_2.py).
        host += optimizer + master + (4 * trained / grads if deepspeed else gradients)
        optimizer = master = step = 0.0
        gradients = 0.0
    if "params" in away:
        host += weights
        weights = 0.0
    if setup.strategy == "zero3_nvme":
        nvme, host = host, 2.0e9  # pinned buffers: buffer_count x buffer_size of the NVMe presets, bound
    compute = _compute_bytes(model, setup, plain)
    outer = plain * model.outer_parameters
    return States(
        weights=weights,
        master=master,
        gradients=gradients,
        optimizer=optimizer,
        step=step,
        trained=trained,
        gradient_bytes=element,
        layer=compute,
        outer=outer,
        largest_outer=plain * max(model.embedding_parameters, model.head_parameters),
        host_per_rank=host,
        nvme_per_rank=nvme,
    )


def _step_bytes(setup: Setup, share: float, element: int, master: bool) -> float:
    """Return temporaries of the step: multi-tensor AdamW needs one more set, DeepSpeed fp32 gradients."""
    if setup.step_in_backward:
        return 0.0
    if master:
        return 4 * (min(share, SUB_GROUP) if setup.zero_stage == 3 else share)
    return element * share if setup.optimizer == "adamw_torch" else 0.0


def _compute_bytes(model: Architecture, setup: Setup, plain: int) -> float:
    """Return the bytes of the largest layer as it is used, unsharded."""
    layer = model.largest_layer
    if setup.method != "qlora":
        return plain * layer.parameters
    packed = layer.matrix_parameters
    return packed * QUANTIZED_BYTES[setup.quantization] + plain * (layer.parameters - packed)


def host_bytes_at_load(model: Architecture, setup: Setup) -> float:
    """Return the host bytes of one machine while the weights are read, an upper bound.

    Each rank of DDP and ZeRO 1 and 2 reads every weight; under ZeRO-3 and FSDP rank 0 does, and the others get
    theirs from it (`training/hollow.py`). Quantised weights are read file by file and quantised on the GPU.
    """
    if setup.method == "qlora":
        return setup.node_ranks * min(SHARD_BYTES, 2 * model.parameters)
    element = 4 if setup.dtype == "fp32" or (setup.method == "full" and setup.zero_stage == 0) else 2
    readers = 1 if setup.zero_stage == 3 or setup.fsdp else setup.node_ranks
    return float(readers * element * model.parameters)
