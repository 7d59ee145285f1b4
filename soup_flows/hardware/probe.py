"""Reading NVIDIA GPUs: the `Probe` interface, the live one through NVML, and one that replays a recording.

A probe only reads. What the readings mean is decided in `visible.py` and `gpus.py`, so that recordings of
machines that are not here exercise the same code. No CUDA context is created and torch is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pydantic import Field

from soup_flows.hardware.values import GpuProcess, Value


class NvLink(Value):
    """One active NVLink of a GPU."""

    remote_bus_id: str | None = None
    """PCI bus id of the other end, lower case."""
    remote_type: str = "unknown"
    """`gpu`, `switch`, `ibmnpu` or `unknown`."""


class MigSlice(Value):
    """One MIG compute instance."""

    uuid: str
    name: str
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    processes: tuple[GpuProcess, ...] = ()


class GpuReading(Value):
    """Everything NVML said about one physical GPU; None where it gave no answer (see `unread`)."""

    index: int
    uuid: str | None = None
    name: str | None = None
    bus_id: str | None = None
    """PCI bus id, lower case."""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    mig_enabled: bool | None = None
    slices: tuple[MigSlice, ...] = ()
    ecc_errors: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    """Active links; None if NVML could not tell, empty if there are none."""
    peers: tuple[int, ...] | None = None
    """`index` of the GPUs whose memory it can read directly (peer to peer)."""
    faults: tuple[str, ...] = ()
    energy_mj: int | None = None
    """Energy since the driver was loaded, in millijoules; from Volta on."""
    unread: dict[str, str] = Field(default_factory=dict)
    """Reading -> NVML's answer, such as `memory: GPU is lost`."""


class NvidiaReading(Value):
    """One look at the NVIDIA driver."""

    source: str
    """Who read it, such as `NVML through nvidia-ml-py 13.615.71`."""
    driver_version: str | None = None
    cuda_version: str | None = None
    """Newest CUDA version the driver runs, such as `12.4`."""
    error: str | None = None
    """Why the driver could not be asked; the GPUs are empty then."""
    gpus: tuple[GpuReading, ...] = ()


class Probe(Protocol):
    """Whoever can read the NVIDIA GPUs of a machine."""

    def read(self) -> NvidiaReading:
        """Return one reading; a missing or broken driver is an `error` in it, never an exception."""
        ...


class RecordedProbe:
    """Replays a reading that was written with `NvidiaReading.model_dump_json`.

    Args:
        path: the JSON file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> NvidiaReading:
        """Return the recorded reading.

        Raises:
            OSError: the file cannot be read.
            pydantic.ValidationError: it is no reading.
        """
        return NvidiaReading.model_validate_json(self.path.read_bytes())
