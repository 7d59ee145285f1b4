"""What a machine offers, as values: `Hardware`, `Gpu` and their parts. All sizes are bytes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Vendor = Literal["nvidia", "amd", "intel", "apple"]
Interconnect = Literal["nvswitch", "nvlink", "pcie", "none", "unknown"]

BF16_CAPABILITY = (8, 0)
"""First compute capability with bf16 tensor cores (CUDA C++ Programming Guide, compute capabilities). torch's
`is_bf16_supported()` is also true on older cards, by emulation, hence the capability."""


class Value(BaseModel):
    """Base of the values: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuProcess(Value):
    """A process that holds memory on a GPU."""

    pid: int
    """Process id as the driver reports it; inside a container it may be the host's id."""
    used_bytes: int | None = None
    """Device memory it holds; None where the driver does not tell."""


class Gpu(Value):
    """One CUDA device as a training process would see it: a whole GPU or one MIG slice."""

    index: int
    """Number in `nvidia-smi` (PCI bus order); for a MIG slice, that of its GPU. Not the CUDA ordinal, which
    is the position in `Hardware.gpus`."""
    uuid: str
    """`GPU-...` or `MIG-...`: what to write in CUDA_VISIBLE_DEVICES."""
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    compute_capability: tuple[int, int] | None = None
    mig: bool = False
    """True for a MIG slice."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded; None without ECC."""
    processes: tuple[GpuProcess, ...] = ()
    pcie_generation: int | None = None
    """Current generation; the link is slowed down while the GPU is idle."""
    pcie_width: int | None = None
    """Current number of lanes."""
    pcie_width_max: int | None = None
    """Lanes the GPU and the slot can do together."""
    nvlinks: tuple[int, ...] = ()
    """`index` of every visible GPU that NVLink reaches, directly or through NVSwitch."""
    vendor: Vendor = "nvidia"
    faults: tuple[str, ...] = ()
    """Other reasons not to trust this device, in the driver's terms."""

    @property
    def bf16(self) -> bool | None:
        """Whether it computes in bf16 (capability 8.0 or newer); None where the capability is unknown."""
        return None if self.compute_capability is None else self.compute_capability >= BF16_CAPABILITY

    @property
    def sick(self) -> str | None:
        """Why this device should not be trained on, or None."""
        reasons = list(self.faults)
        if self.ecc_errors:
            reasons.insert(0, f"{self.ecc_errors} uncorrected ECC memory errors since the driver was loaded")
        return "; ".join(reasons) or None


class UnusedGpu(Value):
    """A device that is in the machine but that a run here cannot or must not use."""

    vendor: Vendor
    name: str
    why: Literal["hidden", "mig", "unreadable", "no_driver", "vendor"]
    reason: str
    """One sentence that names the setting or the driver's answer."""
    index: int | None = None
    uuid: str | None = None


class HostMemory(Value):
    """Main memory of the machine and what this process may use of it."""

    total_bytes: int
    available_bytes: int
    """What the kernel could hand out without swapping (MemAvailable)."""
    cgroup_limit_bytes: int | None = None
    """Smallest limit of the process's control group and its parents; None without a limit."""
    cgroup_used_bytes: int | None = None
    """What counts against that limit and cannot be dropped (usage less inactive file cache)."""
    scheduler_limit_bytes: int | None = None
    """What Slurm granted on this node; None outside Slurm."""

    @property
    def usable_bytes(self) -> int:
        """What a run can still take: the least of available memory and the room below each limit."""
        room = [self.available_bytes]
        if self.cgroup_limit_bytes is not None:
            room.append(self.cgroup_limit_bytes - (self.cgroup_used_bytes or 0))
        if self.scheduler_limit_bytes is not None:
            room.append(self.scheduler_limit_bytes)
        return max(0, min(room))


class Disk(Value):
    """A folder's file system."""

    path: str
    """The folder that was asked for; the reading is of its nearest existing parent."""
    total_bytes: int
    free_bytes: int
    """Free for this user."""
    filesystem: str = "unknown"
    """Type from the mount table, such as `ext4`, `nfs4`, `tmpfs`."""


class Hardware(Value):
    """What was found on this machine. What could not be read is None or `unknown` and named in `notes`."""

    device: Literal["cuda", "cpu"]
    """What a run with `device=auto` would use."""
    gpus: tuple[Gpu, ...] = ()
    """CUDA devices in the order a training process would number them."""
    interconnect: Interconnect = "unknown"
    """How `gpus` reach each other: `none` for fewer than two, `nvlink` if NVLink alone connects them all."""
    peer_access: bool | None = None
    """Whether every pair of `gpus` can read each other's memory; None if unknown or fewer than two."""
    cpu_cores: int
    """Cores this process may use: affinity, control-group quota and Slurm taken together."""
    host_memory: HostMemory
    shm: Disk | None = None
    """The shared-memory file system, `/dev/shm`; None where there is none."""
    disks: tuple[Disk, ...] = ()
    cuda_toolkit: str | None = None
    """Version of `nvcc`, such as `12.4`."""
    cxx: str | None = None
    """Path of the C++ compiler."""
    ninja: bool = False
    """Whether `ninja` is on PATH, as torch's extension builder needs it."""
    infiniband: tuple[str, ...] = ()
    """Active and usable RDMA ports, such as `mlx5_0 port 1: ACTIVE, InfiniBand, 400 Gb/sec (4X NDR)`."""
    infiniband_down: tuple[str, ...] = ()
    """RDMA ports that are there and cannot be used, with the reason."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES as set; None if unset."""
    driver_version: str | None = None
    """NVIDIA driver, such as `550.54.15`."""
    driver_cuda: str | None = None
    """Newest CUDA version the driver runs, such as `12.4`."""
    driver_error: str | None = None
    """Why the NVIDIA driver could not be asked; None if it answered."""
    torch_cuda: str | None = None
    """CUDA version of the installed torch, `none` for a build without CUDA; None without torch."""
    memlock: int | Literal["unlimited"] | None = None
    """Bytes of memory a process may lock (`ulimit -l`, in bytes)."""
    unused: tuple[UnusedGpu, ...] = ()
    """Devices that are there and not in `gpus`, each with the reason."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Where each reading came from, by field name."""
    notes: tuple[str, ...] = ()
    """What is unknown or odd, in plain words."""
