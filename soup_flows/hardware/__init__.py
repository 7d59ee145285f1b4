"""What a machine offers to a run: GPUs, their links, cores, memory, disks, compilers.

`detect` reads it, `doctor` says what is wrong with it, `render` prints both. `Hardware` is the value that the
plan is made for; it can be recorded as JSON on one machine and planned for on another.
"""

from soup_flows.hardware.detect import detect
from soup_flows.hardware.doctor import doctor
from soup_flows.hardware.imagined import imagined
from soup_flows.hardware.nvml import NvmlProbe
from soup_flows.hardware.probe import GpuReading, MigSlice, NvidiaReading, NvLink, Probe, RecordedProbe
from soup_flows.hardware.render import render
from soup_flows.hardware.values import (
    Disk,
    Gpu,
    GpuProcess,
    Hardware,
    HostMemory,
    Interconnect,
    UnusedGpu,
    Vendor,
)

__all__ = [
    "Disk",
    "Gpu",
    "GpuProcess",
    "GpuReading",
    "Hardware",
    "HostMemory",
    "Interconnect",
    "MigSlice",
    "NvLink",
    "NvidiaReading",
    "NvmlProbe",
    "Probe",
    "RecordedProbe",
    "UnusedGpu",
    "Vendor",
    "detect",
    "doctor",
    "imagined",
    "render",
]
