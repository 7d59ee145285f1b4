"""Compilers, the CUDA toolkit, RDMA ports, the installed torch, and devices of other makers."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from soup_flows.hardware.host import read_text
from soup_flows.hardware.values import UnusedGpu, Vendor

logger = logging.getLogger(__name__)

PCI_VENDORS: dict[str, Vendor] = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
"""PCI vendor ids (pci.ids)."""
DISPLAY_CLASSES = ("0x03", "0x12")
"""PCI base classes: display controller, processing accelerator (pci.ids)."""


def cuda_toolkit(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the version of `nvcc`, and where it is or that there is none.

    Looked for where torch's extension builder looks: CUDA_HOME or CUDA_PATH, then PATH, then /usr/local/cuda
    (`torch/utils/cpp_extension.py`, `_find_cuda_home`).
    """
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    nvcc = nvcc or "/usr/local/cuda/bin/nvcc"
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None, f"no nvcc that runs at {nvcc}"
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return (found[1], nvcc) if found else (None, f"{nvcc} --version tells no release")


def compiler(environ: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler torch's extension builder would call: CXX, else c++ or g++."""
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++"]
    return next(
        (found for n in names if (found := shutil.which(n, path=environ.get("PATH", os.defpath)))), None
    )


def has_ninja(environ: Mapping[str, str]) -> bool:
    """Return whether `ninja` is on PATH; torch's extension builder refuses to work without it."""
    return shutil.which("ninja", path=environ.get("PATH", os.defpath)) is not None


def torch_cuda() -> tuple[str | None, str]:
    """Return the CUDA version the installed torch was built for, without importing it.

    Returns:
        `12.8`, or `none` for a build without CUDA, or None without torch; and the source.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, "torch is not installed"
    path = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=]*=\s*(?:'([\d.]+)'|None)", read_text(path) or "", re.MULTILINE)
    return (found[1] or "none" if found else None), str(path)


def infiniband(root: Path) -> tuple[list[str], list[str]]:
    """Return the usable RDMA ports and the others, each with its state, from /sys/class/infiniband."""
    usable, down = [], []
    verbs = root / "dev/infiniband"
    reachable = verbs.is_dir() and any(verbs.glob("uverbs*"))
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state = (read_text(port / "state") or "unknown").strip().split(": ")[-1]
        layer = (read_text(port / "link_layer") or "unknown").strip()
        rate = (read_text(port / "rate") or "unknown rate").strip()
        text = f"{port.parent.parent.name} port {port.name}: {state}, {layer}, {rate}"
        if state != "ACTIVE":
            down.append(text)
        elif not reachable:
            down.append(f"{text}; /dev/infiniband is not here")
        else:
            usable.append(text)
    return usable, down


def pci_devices(root: Path) -> list[UnusedGpu]:
    """Return the GPUs and accelerators on the PCI bus, from /sys/bus/pci; no driver is needed.

    A container sees the host's bus, so a device here need not be one this process may open. Names come from
    the device itself, from amdsmi, or from the system's list of PCI ids.
    """
    found = []
    amd: dict[str, str] | None = None
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = (read_text(device / "class") or "").strip()
        vendor = PCI_VENDORS.get((read_text(device / "vendor") or "").strip())
        if vendor is None or not kind.startswith(DISPLAY_CLASSES):
            continue
        maker = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple"}[vendor]
        number = (read_text(device / "device") or "unknown").strip()
        if vendor == "amd" and amd is None:
            amd = _amd_names()
        product = (
            (read_text(device / "product_name") or "").strip()
            or (amd or {}).get(device.name, "")
            or _pci_name(root, (read_text(device / "vendor") or "").strip(), number)
        )
        found.append(
            UnusedGpu(
                vendor=vendor,
                name=f"{maker} {product.removeprefix(maker).strip() or f'device {number}'} at {device.name}",
                why="no_driver" if vendor == "nvidia" else "vendor",
                reason=(
                    "it is on the PCI bus, but the NVIDIA driver does not show it to this process"
                    if vendor == "nvidia"
                    else f"training on {maker} GPUs is not supported"
                ),
            )
        )
    return found


def _amd_names() -> dict[str, str]:
    """Return the market name of each AMD GPU by PCI address, from `amdsmi` where it is installed.

    amdsmi comes with ROCm; it raises its own exceptions and others, even on import, when no driver is loaded.
    """
    try:
        amdsmi = importlib.import_module("amdsmi")
        amdsmi.amdsmi_init()
        try:
            return {
                str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower(): str(
                    amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]
                )
                for handle in amdsmi.amdsmi_get_processor_handles()
            }
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception:
        logger.debug("amdsmi names no AMD GPU", exc_info=True)
        return {}


def _pci_name(root: Path, vendor: str, device: str) -> str:
    """Return a device's name from the system's `pci.ids`, or an empty text."""
    for folder in ("usr/share/hwdata", "usr/share/misc"):
        text = read_text(root / folder / "pci.ids") or ""
        block = re.search(rf"^{vendor[2:]} .*\n((?:[\t#].*\n)*)", text, re.MULTILINE)
        name = block and re.search(rf"^\t{device[2:]}\s+(.+)$", block[1], re.MULTILINE)
        if name:
            return name[1].strip()
    return ""


def apple() -> list[UnusedGpu]:
    """Return the GPU of an Apple-silicon machine."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return []
    return [
        UnusedGpu(
            vendor="apple",
            name=f"Apple silicon GPU ({os.uname().machine})",
            why="vendor",
            reason="training on Apple GPUs is not supported",
        )
    ]
