"""The live probe: every reading is one NVML call through `pynvml` (nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from soup_flows.hardware.probe import GpuReading, MigSlice, NvidiaReading, NvLink
from soup_flows.hardware.values import GpuProcess

P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ; `pynvml` 13.615 has a stray comma there and defines it as a tuple."""
REMOTE_TYPES = {0: "gpu", 1: "ibmnpu", 2: "switch"}
FABRIC_STATES = {1: "not started", 2: "in progress"}


class NvmlProbe:
    """Reads this machine's NVIDIA driver. Loads `pynvml` only when asked to read."""

    def read(self) -> NvidiaReading:
        """Return one reading of all GPUs; see `Probe.read`."""
        try:
            import pynvml
        except ImportError as error:
            return NvidiaReading(source="none", error=f"the package nvidia-ml-py cannot be imported: {error}")
        source = f"NVML through nvidia-ml-py {_version('nvidia-ml-py')}"
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            return NvidiaReading(source=source, error=str(error))
        try:
            return _Session(pynvml, source).read()
        finally:
            pynvml.nvmlShutdown()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


class _Session:
    """One initialised NVML; every call that fails leaves its reason behind instead of an exception."""

    def __init__(self, nvml: Any, source: str) -> None:
        self.nvml = nvml
        self.source = source

    def read(self) -> NvidiaReading:
        unread: dict[str, str] = {}
        driver = self._get(unread, "driver_version", self.nvml.nvmlSystemGetDriverVersion)
        cuda = self._get(unread, "cuda_version", self.nvml.nvmlSystemGetCudaDriverVersion_v2)
        count = self._get(unread, "count", self.nvml.nvmlDeviceGetCount)
        handles: dict[int, Any] = {}
        gpus: list[GpuReading] = []
        for index in range(count or 0):
            lost: dict[str, str] = {}
            handle = self._get(lost, "handle", self.nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                gpus.append(GpuReading(index=index, unread=lost))
            else:
                handles[index] = handle
        gpus += [self._gpu(index, handles) for index in handles]
        return NvidiaReading(
            source=self.source,
            driver_version=_text(driver),
            cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            error=f"the number of GPUs cannot be read: {unread['count']}" if count is None else None,
            gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        )

    def _get(self, unread: dict[str, str], name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, or None and the reason in `unread[name]`."""
        try:
            return function(*args)
        except self.nvml.NVMLError as error:
            unread[name] = str(error)
        except UnicodeDecodeError as error:
            unread[name] = f"unreadable text: {error}"
        return None

    def _gpu(self, index: int, handles: dict[int, Any]) -> GpuReading:
        nvml, handle = self.nvml, handles[index]
        unread: dict[str, str] = {}

        def get(name: str, function: Callable[..., Any], *args: Any) -> Any:
            return self._get(unread, name, function, handle, *args)

        pci = get("bus_id", nvml.nvmlDeviceGetPciInfo)
        memory = get("memory", nvml.nvmlDeviceGetMemoryInfo)
        mig = get("mig_enabled", nvml.nvmlDeviceGetMigMode)
        mig_on = None if mig is None else mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
        uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        return GpuReading(
            index=index,
            uuid=_text(get("uuid", nvml.nvmlDeviceGetUUID)),
            name=_text(get("name", nvml.nvmlDeviceGetName)),
            bus_id=_bus(pci),
            memory_total_bytes=None if memory is None else memory.total,
            memory_free_bytes=None if memory is None else memory.free,
            compute_capability=get("compute_capability", nvml.nvmlDeviceGetCudaComputeCapability),
            mig_enabled=mig_on,
            slices=self._slices(handle, unread) if mig_on else (),
            ecc_errors=get("ecc_errors", nvml.nvmlDeviceGetTotalEccErrors, *uncorrected),
            processes=self._processes(handle, unread),
            pcie_generation=get("pcie_generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
            pcie_width=get("pcie_width", nvml.nvmlDeviceGetCurrPcieLinkWidth),
            pcie_width_max=get("pcie_width_max", nvml.nvmlDeviceGetMaxPcieLinkWidth),
            nvlinks=self._nvlinks(handle, unread),
            peers=self._peers(index, handles, unread),
            faults=self._faults(handle, unread),
            energy_mj=get("energy", nvml.nvmlDeviceGetTotalEnergyConsumption),
            unread=unread,
        )

    def _processes(self, handle: Any, unread: dict[str, str]) -> tuple[GpuProcess, ...]:
        found = self._get(unread, "processes", self.nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return tuple(GpuProcess(pid=p.pid, used_bytes=p.usedGpuMemory) for p in found or ())

    def _slices(self, handle: Any, unread: dict[str, str]) -> tuple[MigSlice, ...]:
        nvml, slices = self.nvml, []
        for number in range(self._get(unread, "slices", nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            empty: dict[str, str] = {}  # most numbers have no slice: NVML answers Not Found
            part = self._get(empty, "handle", nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            uuid = None if part is None else self._get(empty, "uuid", nvml.nvmlDeviceGetUUID, part)
            if uuid is None:
                continue
            memory = self._get(empty, "memory", nvml.nvmlDeviceGetMemoryInfo, part)
            slices.append(
                MigSlice(
                    uuid=_text(uuid) or "",
                    name=_text(self._get(empty, "name", nvml.nvmlDeviceGetName, part)) or "MIG slice",
                    memory_total_bytes=None if memory is None else memory.total,
                    memory_free_bytes=None if memory is None else memory.free,
                    processes=self._processes(part, empty),
                )
            )
        return tuple(slices)

    def _nvlinks(self, handle: Any, unread: dict[str, str]) -> tuple[NvLink, ...] | None:
        """Return the active links; none if the model has no NVLink, None if NVML would not tell."""
        nvml, links = self.nvml, []
        for number in range(nvml.NVML_NVLINK_MAX_LINKS):
            told: dict[str, str] = {}
            state = self._get(told, "state", nvml.nvmlDeviceGetNvLinkState, handle, number)
            if state is None:  # no such link: the last one of this model is behind us
                if number == 0 and told["state"] not in ("Not Supported", "Invalid Argument"):
                    unread["nvlinks"] = told["state"]
                    return None
                break
            if state:
                kind = self._get(told, "type", nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number)
                pci = self._get(told, "pci", nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
                links.append(NvLink(remote_bus_id=_bus(pci), remote_type=REMOTE_TYPES.get(kind, "unknown")))
        return tuple(links)

    def _peers(self, index: int, handles: dict[int, Any], unread: dict[str, str]) -> tuple[int, ...] | None:
        peers = []
        for other in handles.keys() - {index}:
            pair = (handles[index], handles[other], P2P_READ)
            status = self._get(unread, "peers", self.nvml.nvmlDeviceGetP2PStatus, *pair)
            if status is None:
                return None
            if status == self.nvml.NVML_P2P_STATUS_OK:
                peers.append(other)
        return tuple(sorted(peers))

    def _faults(self, handle: Any, unread: dict[str, str]) -> tuple[str, ...]:
        """Return what NVML reports as broken: failed or pending row remapping, a fabric that is not up."""
        nvml, faults = self.nvml, []
        rows = self._get(unread, "remapped_rows", nvml.nvmlDeviceGetRemappedRows, handle)
        if rows is not None and rows[3]:
            faults.append("a failing memory row could not be remapped")
        if rows is not None and rows[2]:
            faults.append("a memory row waits to be remapped, which needs a GPU reset")
        fabric = nvml.c_nvmlGpuFabricInfo_t()
        pointer = byref(fabric)  # pynvml hands its argument on as it is, and NVML wants an address
        if self._get(unread, "fabric", nvml.nvmlDeviceGetGpuFabricInfo, handle, pointer) is not None:
            state = FABRIC_STATES.get(fabric.state)
            if state:
                faults.append(f"its NVSwitch fabric is {state} (is the Fabric Manager running?)")
        return tuple(faults)


def _bus(pci: Any) -> str | None:
    """Return the PCI bus id in lower case, the same for a GPU and for the far end of its links."""
    text = None if pci is None else _text(pci.busId)
    return text.lower() if text else None


def _text(value: str | bytes | None) -> str | None:
    """Return text; old `pynvml` answers bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
