"""A machine that is not here, made from the table of GPUs, for planning before renting."""

from __future__ import annotations

from soup_flows.gpus import gpu_spec
from soup_flows.hardware.values import Disk, Gpu, Hardware, HostMemory, Interconnect

GIB = 1 << 30
LEAST_HOST_BYTES = 64 * GIB
CONTEXT_FREE = 0.995
"""Share of a GPU's memory that is free when nobody uses it (recorded idle machines: 0.98 to 0.995)."""


def imagined(gpu: str, gpus: int = 1) -> Hardware:
    """Return one machine with `gpus` idle GPUs of a kind.

    Args:
        gpu: a name of `soup_flows.gpus.GPUS`, an alias, or the name its driver reports.
        gpus: GPUs of the machine.

    Returns:
        Its hardware. The host is assumed: twice the GPUs' memory, at least 64 GiB; 16 cores per GPU.

    Raises:
        Refused: `GPU001` for a kind that is not in the table.
    """
    spec = gpu_spec(gpu)
    fast = spec.link != "pcie"
    connected: Interconnect = "none" if gpus < 2 else "nvlink" if fast else "pcie"
    host = max(LEAST_HOST_BYTES, 2 * gpus * spec.memory_bytes)
    devices = tuple(
        Gpu(
            index=number,
            uuid=f"GPU-imagined-{number}",
            name=spec.device_name,
            memory_total_bytes=spec.memory_bytes,
            memory_free_bytes=int(CONTEXT_FREE * spec.memory_bytes),
            compute_capability=spec.capability,
            nvlinks=tuple(n for n in range(gpus) if n != number) if fast else (),
            vendor="nvidia" if spec.supported else "amd",
        )
        for number in range(gpus)
    )
    return Hardware(
        device="cuda",
        gpus=devices,
        interconnect=connected,
        peer_access=None if gpus < 2 else fast or not spec.device_name.startswith("NVIDIA GeForce"),
        cpu_cores=16 * gpus,
        host_memory=HostMemory(total_bytes=host, available_bytes=int(0.9 * host)),
        shm=Disk(path="/dev/shm", total_bytes=host // 2, free_bytes=host // 2, filesystem="tmpfs"),  # noqa: S108
        cxx="assumed",
        ninja=True,
        sources={"gpus": f"the table of GPUs: {spec.source}", "host_memory": "assumed"},
        notes=(
            f"This machine is imagined: {gpus} x {spec.device_name}, and {host / GIB:.0f} GiB of host memory.",
        ),
    )
