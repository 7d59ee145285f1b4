"""`render`: a machine and its problems as text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from soup_flows.errors import Problem
from soup_flows.hardware.values import Disk, Gpu, Hardware
from soup_flows.units import gib

WIDTH = 100
GPU_HEAD = ("GPU", "name", "free / total GiB", "cap.", "bf16", "PCIe", "NVLink to", "ECC", "processes")


def render(hardware: Hardware, problems: Sequence[Problem] = ()) -> str:
    """Return what was found, and what is wrong with it, as plain text.

    Args:
        hardware: the machine.
        problems: what `doctor` said about it.

    Returns:
        Lines without trailing newline; `?` stands for what could not be read, `-` for what there is none of.
    """
    lines = _table(_summary(hardware))
    if hardware.gpus:
        lines += ["", *_table([GPU_HEAD, *(_gpu(gpu) for gpu in hardware.gpus)], head=True)]
    if hardware.unused:
        lines += ["", "not used"]
        for gpu in hardware.unused:
            where = "" if gpu.index is None else f"GPU {gpu.index} "
            lines += _wrap(f"{where}{gpu.name}: {gpu.reason}", "  ")
    if hardware.notes:
        lines += ["", "notes", *(line for note in hardware.notes for line in _wrap(note, "  "))]
    lines.append("")
    if not problems:
        lines.append("no problems found")
    for problem in problems:
        lines += _wrap(f"{problem.severity} [{problem.id}] {problem.message}", "")
        if problem.fix:
            lines += _wrap(f"fix: {problem.fix}", "    ")
    return "\n".join(lines)


def _summary(hw: Hardware) -> list[tuple[str, ...]]:
    """Return the rows that describe the machine: what, reading, source."""
    memory = hw.host_memory
    limits = [
        f"{name} {gib(size)}"
        for name, size in (
            ("cgroup limit", memory.cgroup_limit_bytes),
            ("Slurm limit", memory.scheduler_limit_bytes),
        )
        if size is not None
    ]
    detail = ", ".join([f"{gib(memory.available_bytes)} of {gib(memory.total_bytes)} available", *limits])
    count = f"{len(hw.gpus)} GPU{'s' * (len(hw.gpus) != 1)}"
    driver = hw.driver_error or f"{hw.driver_version or '?'}, CUDA up to {hw.driver_cuda or '?'}"
    if hw.driver_error is None and hw.driver_version is None:
        driver = "-"
    build = f"{hw.cxx or 'no C++ compiler'}, {'ninja' if hw.ninja else 'no ninja'}"
    rows = [
        ("device", hw.device if not hw.gpus else f"{hw.device}, {count}, {hw.interconnect}", "gpus"),
        ("NVIDIA driver", driver, "driver_version"),
        ("visible devices", "all" if hw.visible_devices is None else hw.visible_devices, "visible_devices"),
        ("CPU cores", str(hw.cpu_cores), "cpu_cores"),
        ("host memory", f"{gib(memory.usable_bytes)} usable ({detail})", "host_memory"),
        ("shared memory", _disk(hw.shm), "shm"),
        *((f"disk {disk.path}", _disk(disk), "disks") for disk in hw.disks),
        ("CUDA toolkit", hw.cuda_toolkit or "-", "cuda_toolkit"),
        ("torch for CUDA", hw.torch_cuda or "-", "torch_cuda"),
        ("compiler", build, "cxx"),
        ("RDMA", "; ".join((*hw.infiniband, *hw.infiniband_down)) or "-", "infiniband"),
        ("locked memory", _memlock(hw), "memlock"),
    ]
    return [(name, value, f"[{hw.sources.get(source, '?')}]") for name, value, source in rows]


def _gpu(gpu: Gpu) -> tuple[str, ...]:
    capability = "?" if gpu.compute_capability is None else "{}.{}".format(*gpu.compute_capability)
    link = f"gen {gpu.pcie_generation or '?'} x{gpu.pcie_width or '?'}"
    return (
        str(gpu.index),
        gpu.name,
        f"{gpu.memory_free_bytes / (1 << 30):.1f} / {gpu.memory_total_bytes / (1 << 30):.1f}",
        capability,
        {True: "yes", False: "no", None: "?"}[gpu.bf16],
        link,
        ",".join(map(str, gpu.nvlinks)) or "-",
        "-" if gpu.ecc_errors is None else str(gpu.ecc_errors),
        ",".join(str(process.pid) for process in gpu.processes) or "-",
    )


def _disk(disk: Disk | None) -> str:
    if disk is None:
        return "-"
    return f"{gib(disk.free_bytes)} of {gib(disk.total_bytes)} free, {disk.filesystem}"


def _memlock(hw: Hardware) -> str:
    if hw.memlock is None:
        return "?"
    return hw.memlock if isinstance(hw.memlock, str) else f"{hw.memlock // 1024} KiB"


def _table(rows: Sequence[Sequence[str]], head: bool = False) -> list[str]:
    """Align the columns of `rows`; the last one is ragged."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if head:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "    ")
