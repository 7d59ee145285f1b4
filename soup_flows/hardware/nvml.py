"""The live probe: every reading is one NVML call through `pynvml` (nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from soup_flows.hardware.probe import GpuReading, MigSlice, NvidiaReading, NvLink
from soup_flows.hardware.values import GpuProcess

T = TypeVar("T")

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
        lost: dict[int, str] = {}
        for index in range(count or 0):
            missing: dict[str, str] = {}
            handle = self._get(missing, "handle", lambda i=index: self.nvml.nvmlDeviceGetHandleByIndex(i))
            if handle is None:
                lost[index] = missing["handle"]
            else:
                handles[index] = handle
        gpus = [self._gpu(index, handle, handles) for index, handle in handles.items()]
        gpus += [GpuReading(index=index, unread={"handle": text}) for index, text in lost.items()]
        return NvidiaReading(
            source=self.source,
            driver_version=None if driver is None else _text(driver),
            cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            error=f"the number of GPUs cannot be read: {unread['count']}" if count is None else None,
            gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        )

    def _get(self, unread: dict[str, str], name: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returns, or None and the reason in `unread[name]`."""
        try:
            return call()
        except self.nvml.NVMLError as error:
            unread[name] = str(error)
        except UnicodeDecodeError as error:
            unread[name] = f"unreadable text: {error}"
        return None

    def _gpu(self, index: int, handle: Any, handles: dict[int, Any]) -> GpuReading:
        nvml, unread = self.nvml, dict[str, str]()
        get = lambda name, call: self._get(unread, name, call)  # noqa: E731
        uuid = get("uuid", lambda: nvml.nvmlDeviceGetUUID(handle))
        name = get("name", lambda: nvml.nvmlDeviceGetName(handle))
        pci = get("bus_id", lambda: nvml.nvmlDeviceGetPciInfo(handle))
        memory = get("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        capability = get("compute_capability", lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
        mig = get("mig_enabled", lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        ecc = get(
            "ecc_errors",
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        )
        mig_on = None if mig is None else mig == nvml.NVML_DEVICE_MIG_ENABLE
        return GpuReading(
            index=index,
            uuid=None if uuid is None else _text(uuid),
            name=None if name is None else _text(name),
            bus_id=None if pci is None else _text(pci.busId).lower(),
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_free_bytes=None if memory is None else int(memory.free),
            compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
            mig_enabled=mig_on,
            slices=self._slices(handle, unread) if mig_on else (),
            ecc_errors=None if ecc is None else int(ecc),
            processes=self._processes(handle, unread),
            pcie_generation=get("pcie_generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            pcie_width=get("pcie_width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            pcie_width_max=get("pcie_width_max", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
            nvlinks=self._nvlinks(handle, unread),
            peers=self._peers(index, handles, unread),
            faults=self._faults(handle, unread),
            unread=unread,
        )

    def _processes(self, handle: Any, unread: dict[str, str]) -> tuple[GpuProcess, ...]:
        found = self._get(unread, "processes", lambda: self.nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return tuple(GpuProcess(pid=int(p.pid), used_bytes=p.usedGpuMemory) for p in found or ())

    def _slices(self, handle: Any, unread: dict[str, str]) -> tuple[MigSlice, ...]:
        nvml, slices = self.nvml, []
        for number in range(
            self._get(unread, "slices", lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
        ):
            empty: dict[str, str] = {}  # most numbers have no slice: NVML answers Not Found
            get = lambda name, call, into=empty: self._get(into, name, call)  # noqa: E731
            part = get("handle", lambda n=number: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n))
            uuid = part and get("uuid", lambda p=part: nvml.nvmlDeviceGetUUID(p))
            if not uuid:
                continue
            name = get("name", lambda p=part: nvml.nvmlDeviceGetName(p))
            memory = get("memory", lambda p=part: nvml.nvmlDeviceGetMemoryInfo(p))
            slices.append(
                MigSlice(
                    uuid=_text(uuid),
                    name="MIG slice" if name is None else _text(name),
                    memory_total_bytes=None if memory is None else int(memory.total),
                    memory_free_bytes=None if memory is None else int(memory.free),
                    processes=self._processes(part, empty),
                )
            )
        return tuple(slices)

    def _nvlinks(self, handle: Any, unread: dict[str, str]) -> tuple[NvLink, ...] | None:
        nvml, links, asked = self.nvml, [], 0
        for number in range(nvml.NVML_NVLINK_MAX_LINKS):
            reasons: dict[str, str] = {}
            get = lambda name, call, into=reasons: self._get(into, name, call)  # noqa: E731
            state = get("state", lambda n=number: nvml.nvmlDeviceGetNvLinkState(handle, n))
            if state is None:
                if not asked:  # without NVLink the first number is already refused
                    unread["nvlinks"] = reasons["state"]
                break
            asked += 1
            if not state:
                continue
            kind = get("type", lambda n=number: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, n))
            pci = get("pci", lambda n=number: nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, n))
            links.append(
                NvLink(
                    remote_bus_id=None if pci is None else _text(pci.busId).lower(),
                    remote_type="unknown" if kind is None else REMOTE_TYPES.get(int(kind), "unknown"),
                )
            )
        if not asked and unread.get("nvlinks") not in ("Not Supported", "Invalid Argument"):
            return None
        return tuple(links)

    def _peers(self, index: int, handles: dict[int, Any], unread: dict[str, str]) -> tuple[int, ...] | None:
        peers = []
        for other, handle in handles.items():
            if other == index:
                continue
            status = self._get(
                unread,
                "peers",
                lambda h=handle: self.nvml.nvmlDeviceGetP2PStatus(handles[index], h, P2P_READ),
            )
            if status is None:
                return None
            if status == self.nvml.NVML_P2P_STATUS_OK:
                peers.append(other)
        return tuple(peers)

    def _faults(self, handle: Any, unread: dict[str, str]) -> tuple[str, ...]:
        """Return what NVML reports as broken: failed or pending row remapping, a fabric that is not up."""
        nvml, faults = self.nvml, []
        rows = self._get(unread, "remapped_rows", lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        if rows is not None and rows[3]:
            faults.append("a failing memory row could not be remapped")
        if rows is not None and rows[2]:
            faults.append("a memory row waits to be remapped, which needs a GPU reset")
        fabric = nvml.c_nvmlGpuFabricInfo_t()
        if self._get(unread, "fabric", lambda: nvml.nvmlDeviceGetGpuFabricInfo(handle, fabric)) is not None:
            state = FABRIC_STATES.get(int(fabric.state))
            if state:
                faults.append(f"its NVSwitch fabric is {state} (is the Fabric Manager running?)")
        return tuple(faults)


def _text(value: str | bytes) -> str:
    """Return text; old `pynvml` answers bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
