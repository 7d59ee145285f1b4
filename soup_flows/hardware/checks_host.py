"""Checks of everything beside the GPUs themselves; `doctor.CHECKS` lists them."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.errors import Problem
from soup_flows.hardware.checks_gpu import GIB, say
from soup_flows.hardware.values import Hardware
from soup_flows.units import gib

MIN_SHM_BYTES = GIB
"""NCCL and DataLoader workers share memory there; Docker gives 64 MB by default (NVIDIA/nccl#290)."""
MIN_DISK_BYTES = 10 * GIB
"""Less does not hold one checkpoint of a 1B model: 16 bytes per parameter with its optimizer state."""
MIN_MEMLOCK_BYTES = 64 << 20
"""RDMA registers (locks) its buffers; common defaults are 64 KiB and 8 MiB (NCCL user guide, InfiniBand)."""


def building(hw: Hardware) -> Iterator[Problem]:
    """Report what DeepSpeed's operators need to be built on first use."""
    missing = [name for name, here in (("C++ compiler", hw.cxx), ("ninja", hw.ninja)) if not here]
    if missing:
        yield say(
            "HW016",
            "warning",
            "cxx" if not hw.cxx else "ninja",
            f"No {' and no '.join(missing)} on PATH: DeepSpeed cannot build its CPU optimizer, so "
            "zero2_offload, zero3_offload and zero3_nvme cannot run.",
            "install g++ and ninja, or choose a preset without off-load",
            "deepspeed/ops/op_builder/builder.py, jit_load",
        )
    if hw.gpus and hw.cuda_toolkit is None:
        yield say(
            "HW017",
            "note",
            "cuda_toolkit",
            "No nvcc: DeepSpeed's CUDA operators (quantised ZeRO++ among them) cannot be built.",
            "install the CUDA toolkit and set CUDA_HOME if you want them",
            "deepspeed/ops/op_builder/builder.py, installed_cuda_version",
        )


def host(hw: Hardware) -> Iterator[Problem]:
    """Report small shared memory, few cores, full disks."""
    shm = hw.shm
    if shm is None or shm.free_bytes < MIN_SHM_BYTES:
        size = "missing" if shm is None else f"{shm.free_bytes / (1 << 20):.0f} MiB free"
        yield say(
            "HW018",
            "error" if len(hw.gpus) > 1 else "warning",
            "shm",
            f"The shared-memory folder /dev/shm is {size}: NCCL and data loading fail with bus errors or "
            '"unhandled system error".',
            "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory",
            "NVIDIA/nccl#290, pytorch/torchtitan#853",
        )
    if hw.cpu_cores < len(hw.gpus):
        yield say(
            "HW019",
            "warning",
            "cpu_cores",
            f"{hw.cpu_cores} CPU cores for {len(hw.gpus)} GPUs: the ranks wait for each other's CPU time.",
            "ask for at least 2 cores per GPU",
        )
    for disk in hw.disks:
        if disk.free_bytes < MIN_DISK_BYTES:
            yield say(
                "HW020",
                "warning",
                "disks",
                f"Only {gib(disk.free_bytes)} is free at {disk.path}: a checkpoint may not fit.",
                "free some space or choose another output folder",
            )


def links(hw: Hardware) -> Iterator[Problem]:
    """Report slow or broken ways between GPUs and machines."""
    for gpu in hw.gpus:
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            yield say(
                "HW021",
                "warning",
                "gpus",
                f"GPU {gpu.index} ({gpu.name}) runs on {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes.",
                "reseat the card or check the riser and the BIOS; power saving can also do this while idle",
            )
    if hw.peer_access is False:
        yield say(
            "HW022",
            "note",
            "peer_access",
            "The GPUs cannot read each other's memory: traffic between them goes through host memory.",
            "normal for GeForce cards; elsewhere check PCIe ACS and the IOMMU",
            "NCCL user guide, troubleshooting",
        )
    if hw.infiniband_down:
        yield say(
            "HW023",
            "warning",
            "infiniband_down",
            f"RDMA ports that cannot be used: {'; '.join(hw.infiniband_down)}. Runs over several machines "
            "may hang or fall back to TCP.",
            "check cable and subnet manager, give the container /dev/infiniband, or set NCCL_IB_DISABLE=1",
            "NVIDIA/nccl#676",
        )
    if hw.infiniband and isinstance(hw.memlock, int) and hw.memlock < MIN_MEMLOCK_BYTES:
        yield say(
            "HW024",
            "warning",
            "memlock",
            f"A process may lock only {hw.memlock // 1024} KiB, and RDMA locks its buffers.",
            "docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit",
            "NCCL user guide, InfiniBand",
        )
