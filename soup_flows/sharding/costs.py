"""Expected time of an optimizer step, in closed form: to rank ways to run it, not to promise a duration.

Every rate is a maker's figure times a share that such work reaches; the shares are round numbers, since only
the order of the candidates matters.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from soup_flows.architecture import Architecture, Layer
from soup_flows.errors import Refused
from soup_flows.gpus import gpu_spec
from soup_flows.hardware import Hardware
from soup_flows.memory import Setup
from soup_flows.memory.states import trained_parameters
from soup_flows.sharding.values import StepCost

GB = 1e9

UTILISATION = 0.4
"""Share of the 16-bit peak that dense fine-tuning reaches (pytorch/torchtitan benchmarks: 33 to 45 % on H100)."""
NVLINK_SHARE = 0.75
"""Share of NVLink's bandwidth in one direction that NCCL's collectives reach (NVIDIA/nccl-tests: about 340 of
450 GB/s on H100)."""
PCIE_SHARE = 0.4
"""The same over PCIe, where the GPUs share switches and the host bridge."""
NO_PEER_SHARE = 0.5
"""Less again where GPUs cannot read each other's memory and traffic is copied through the host."""
NETWORK = 12.5 * GB
"""Bytes per second of each GPU between nodes where no RDMA port was found: 100 Gb/s, an assumption."""
HOST_MEMORY = 100 * GB
"""Bytes per second of host memory that CPU Adam reaches on one machine, an assumption."""
NVME = 3 * GB
"""Bytes per second of one local NVMe disk, an assumption."""
UNKNOWN_TFLOPS, UNKNOWN_MEMORY, UNKNOWN_PCIE = 100.0, 1000.0, 64.0
"""For a GPU that is not in the table: neutral figures in TFLOP/s, GB/s and GB/s (both directions)."""
CPU_FLOPS = 2e11
"""FLOP/s of one CPU rank: neutral, since the same for every candidate."""
OVERLAP = 0.7
"""Share of a collective that can hide behind compute, where the engine overlaps them at all."""
LAUNCH_S = 0.4e-3
"""Seconds per layer and pass to launch its kernels: about 80 of them at 5 microseconds."""
FSDP_S = 0.5e-3
"""Seconds per layer and pass of FSDP's hooks and small collectives."""
FSDP_PCIE_S = 10e-3
"""The same over PCIe: a 0.5B model of 24 layers with adapters took 0.49 s a step under FSDP (gradients sharded)
on four GPUs and 0.14 s under DDP, of which bandwidth explains a tenth (MakazhanAlpamys/Soup)."""
ZERO3_S = 3e-3
"""The same for ZeRO-3, which hooks every module: a 0.5B model ran at 1,025 tokens/s under it and at 6,790
under ZeRO-2 on two GPUs (MakazhanAlpamys/Soup#336)."""
UPDATE_BYTES = 28
"""Bytes AdamW reads and writes per fp32 parameter: weight, gradient, two moments, and three of them back."""


@dataclass(frozen=True)
class Rates:
    """What the machine can do, per rank and second."""

    flops: float
    memory: float
    """Bytes of device memory."""
    link: float
    """Bytes a rank sends to others of its machine."""
    network: float
    """Bytes a rank sends to other machines."""
    host_link: float
    """Bytes between a rank and host memory, one direction."""
    fast: bool = True
    """Whether NVLink connects the ranks of a machine."""
    notes: tuple[str, ...] = ()


def rates(hardware: Hardware, device: str, ranks_per_node: int, nodes: int = 1) -> Rates:
    """Return the rates of the machine; unknown ones are neutral, and said to be.

    Args:
        hardware: the machine.
        device: `cuda` or `cpu`.
        ranks_per_node: ranks on each machine; the network is divided by them.
        nodes: machines.
    """
    if device == "cpu":
        return Rates(CPU_FLOPS, 20 * GB, 5 * GB, 1 * GB, 20 * GB)
    name = hardware.gpus[0].name
    notes = []
    try:
        spec = gpu_spec(name)
        tflops, memory, pcie, fast = spec.half_tflops, spec.memory_gb_s, spec.pcie_gb_s, spec.link_gb_s
    except Refused:
        tflops, memory, pcie, fast = UNKNOWN_TFLOPS, UNKNOWN_MEMORY, UNKNOWN_PCIE, 0.0
        notes.append(
            f"cost: no figures for {name!r}; neutral ones are assumed, so the order of close candidates is unsure"
        )
    link = pcie / 2 * PCIE_SHARE * (NO_PEER_SHARE if hardware.peer_access is False else 1.0)
    nvlink = hardware.interconnect in ("nvlink", "nvswitch")
    if nvlink:
        link = max(link, fast / 2 * NVLINK_SHARE)
    elif hardware.interconnect == "unknown" and ranks_per_node > 1:
        notes.append("cost: how the GPUs are connected is not known; PCIe is assumed")
    network = _network(hardware, ranks_per_node)
    if nodes > 1 and network is None:
        notes.append("cost: no RDMA port is known; 100 Gb/s per GPU between nodes are assumed")
    return Rates(
        flops=tflops * 1e12 * UTILISATION,
        memory=memory * GB,
        link=link * GB,
        network=network or NETWORK,
        host_link=pcie / 2 * 0.7 * GB,
        fast=nvlink,
        notes=tuple(notes),
    )


def _network(hardware: Hardware, ranks_per_node: int) -> float | None:
    """Return bytes per second and rank of the RDMA ports, from their `400 Gb/sec`; None if none tells."""
    total = 0.0
    for port in hardware.infiniband:
        words = port.split()
        total += sum(float(a) for a, b in itertools.pairwise(words) if b == "Gb/sec" and a.isdecimal())
    return total / 8 * GB / ranks_per_node or None


def active_parameters(model: Architecture) -> int:
    """Return the matrix elements one token passes through: experts count as often as it is routed to them."""
    return model.vocab_size * model.hidden_size + sum(layer.count * _active(layer) for layer in model.layers)


def _active(layer: Layer) -> int:
    """Return the matrix elements of one layer that a token passes through."""
    return sum(
        x.parameters * min(layer.routed, x.count) // x.count if x.kind == "expert" else x.parameters
        for x in layer.linears
    )


def step_cost(model: Architecture, setup: Setup, rate: Rates) -> StepCost:
    """Return the expected seconds of one optimizer step and their parts.

    2 FLOP per active parameter and token forward, 4 backward (2 where weights are frozen), attention on top;
    each collective at its bytes over the slowest link it crosses, less what hides behind compute.

    Args:
        model: shapes of the model.
        setup: how it is trained; `gradient_accumulation_steps` passes of `tokens` each.
        rate: what the machine can do.
    """
    passes = setup.gradient_accumulation_steps
    tokens = passes * setup.tokens
    scores = sum(layer.count * 2 * setup.seq_len * layer.q_width for layer in model.layers)
    forward = tokens * (2 * active_parameters(model) + scores)
    speed = rate.flops / (8 if setup.dtype == "fp32" else 1)
    compute = forward * (3 if setup.method == "full" else 2) / speed
    recompute = forward / speed if setup.gradient_checkpointing else 0.0
    layers = passes * model.num_layers
    fsdp = FSDP_S if rate.fast else FSDP_PCIE_S
    engine = fsdp if setup.fsdp else max(fsdp, ZERO3_S) if setup.zero_stage == 3 else 0.0
    moved = _communication(model, setup, rate, passes)
    if setup.zero_stage in (1, 2):  # the presets do not overlap there
        exposed = moved
    else:
        exposed = max(moved - OVERLAP * (compute + recompute), (1 - OVERLAP) * moved)
    offload, update = _offload(model, setup, rate, passes)
    return StepCost(
        compute=compute,
        recompute=recompute,
        optimizer=update,
        communication=exposed,
        offload=offload,
        overhead=layers * (LAUNCH_S * (4 / 3 if setup.gradient_checkpointing else 1.0) + engine),
    )


def _communication(model: Architecture, setup: Setup, rate: Rates, passes: int) -> float:
    """Return the seconds all collectives of a step take, one after the other."""
    ranks, local = setup.world_size, setup.node_ranks
    if ranks == 1:
        return 0.0
    wide = rate.link if setup.nodes == 1 else min(rate.link, rate.network)
    part, inner = (ranks - 1) / ranks, (local - 1) / local
    trained, half = trained_parameters(model, setup), setup.element
    weights = half * model.parameters
    gradients = (4 if setup.method != "full" else half) * trained
    if setup.strategy == "ddp":
        own = 4 if setup.method != "full" or setup.master_weights is not False else half
        return 2 * part * own * trained / wide
    if setup.strategy == "hybrid_shard":
        inside = passes * inner * (2 * weights + gradients) / rate.link
        return inside + passes * 2 * (1 - 1 / setup.nodes) * gradients / local / rate.network
    if setup.strategy == "zero++":
        return passes * (part * (weights + gradients) / wide + inner * weights / rate.link)
    if setup.zero_stage == 1:
        return part * (gradients + half * trained) / wide
    if setup.zero_stage == 2:
        return part * (passes * gradients + half * trained) / wide
    gathers = 1 if setup.strategy == "shard_grad" else 2
    return passes * part * (gathers * weights + gradients) / wide


def _offload(model: Architecture, setup: Setup, rate: Rates, passes: int) -> tuple[float, float]:
    """Return the seconds of off-load traffic and of the update in a step."""
    params, _, opt = setup.shards
    trained = trained_parameters(model, setup)
    share, half = trained / opt, setup.element
    away = setup.offloaded
    traffic = 0.0
    update = UPDATE_BYTES * share / rate.memory
    if "optimizer" in away:
        traffic += 2 * half * share / rate.host_link
        update = UPDATE_BYTES * share * setup.node_ranks / HOST_MEMORY
    if "params" in away:
        traffic += passes * 2 * half * model.parameters / params / rate.host_link
    if setup.strategy == "zero3_nvme":
        stored = 24 * share + passes * 2 * half * model.parameters / params
        traffic += stored * setup.node_ranks / NVME
    return traffic, update
