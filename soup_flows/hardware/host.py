"""Cores, main memory, limits and disks. Readers take the file-system root, so that tests replay files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from soup_flows.hardware.values import Disk, HostMemory
from soup_flows.units import whole
from soup_flows.user_file import expanded

NO_LIMIT = 1 << 60
"""cgroup v1 writes 9223372036854771712 for "no limit"; nothing real comes near 2**60 bytes."""


def read_text(path: Path) -> str | None:
    """Return the file's text, or None if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def cgroup_folders(root: Path, controller: str) -> tuple[list[Path], int]:
    """Return the control-group folders whose limits bind this process, innermost first, and the version.

    Reads `/proc/self/cgroup`. A line that names the controller is v1, the line `0::` is v2. Inside a
    container the path may be the host's and not exist below `/sys/fs/cgroup`; then the mount's own counts.

    Args:
        root: the file-system root.
        controller: `memory` or `cpu`.
    """
    found: tuple[Path, str, int] | None = None
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in (controllers, controller)]
            mount = next((m for m in mounts if m.is_dir()), None)
            if mount:
                found = (mount, path, 1)
                break
        if line.startswith("0::"):
            unified = root / "sys/fs/cgroup/unified"
            found = (unified if unified.is_dir() else root / "sys/fs/cgroup", path, 2)
    if found is None:
        return [], 0
    mount, path, version = found
    inner = mount / path.lstrip("/")
    folders = [inner, *inner.parents] if ".." not in path and inner.is_dir() else [mount]
    return [f for f in folders if f == mount or mount in f.parents], version


def _number(path: Path) -> int | None:
    return whole((read_text(path) or "").strip())


def memory(root: Path, environ: Mapping[str, str]) -> tuple[HostMemory, str]:
    """Return main memory with its limits, and the source.

    Args:
        root: the file-system root.
        environ: for Slurm's SLURM_MEM_PER_NODE and SLURM_MEM_PER_CPU (MiB).

    Raises:
        RuntimeError: neither /proc/meminfo nor psutil tells the memory.
    """
    text = read_text(root / "proc/meminfo") or ""
    kib = {
        str(name): int(size) for name, size in re.findall(r"^(\w+):\s+([0-9]{1,18}) kB", text, re.MULTILINE)
    }
    source = "/proc/meminfo"
    if "MemTotal" in kib:
        total = kib["MemTotal"] * 1024
        available = kib.get("MemAvailable", kib.get("MemFree", 0)) * 1024
    else:
        import psutil

        found = psutil.virtual_memory()
        total, available, source = found.total, found.available, "psutil.virtual_memory"
    folders, version = cgroup_folders(root, "memory")
    limit, used = None, None
    for folder in folders:
        here = _number(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if here is not None and here < NO_LIMIT and (limit is None or here < limit):
            limit, used = here, _used(folder, version)
            source_limit = f"{folder} (cgroup v{version})"
    if limit is not None:
        source += f"; {source_limit}"
    granted = _slurm_memory(environ)
    if granted is not None:
        source += "; Slurm"
    return (
        HostMemory(
            total_bytes=total,
            available_bytes=available,
            cgroup_limit_bytes=limit,
            cgroup_used_bytes=used,
            scheduler_limit_bytes=granted,
        ),
        source,
    )


def _used(folder: Path, version: int) -> int | None:
    """Return what counts against the limit, less inactive file cache, which the kernel drops first.

    The same figure as Kubernetes' working set: usage - (total_)inactive_file.
    """
    usage = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
    if usage is None:
        return None
    name = "inactive_file" if version == 2 else "total_inactive_file"
    cache = re.search(rf"^{name} ([0-9]{{1,18}})$", read_text(folder / "memory.stat") or "", re.MULTILINE)
    return max(0, usage - int(cache[1])) if cache else usage


def _slurm_memory(environ: Mapping[str, str]) -> int | None:
    """Return Slurm's memory for this node in bytes; 0 or absent means no limit (sbatch(1), --mem)."""
    names = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    mib, per_cpu, cpus = (whole(environ.get(name, "")) for name in names)
    if mib:
        return mib << 20
    return per_cpu * cpus << 20 if per_cpu and cpus else None


def cores(root: Path, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the usable cores, at least 1, and the source: the least of affinity, quota and Slurm's grant.

    A fractional quota is rounded down: threads beyond it would only be throttled.
    """
    status = read_text(root / "proc/self/status") or ""
    listed = re.search(r"^Cpus_allowed_list:\s*([0-9,-]+)$", status, re.MULTILINE)
    spans = [span.partition("-")[::2] for span in listed[1].split(",")] if listed else []
    ends = [(whole(first), whole(last or first)) for first, last in spans]
    best = sum(last - first + 1 for first, last in ends if first is not None and last is not None)
    if best > 0:
        source = "affinity (/proc/self/status)"
    else:
        best, source = os.cpu_count() or 1, "os.cpu_count"
    folders, version = cgroup_folders(root, "cpu")
    for folder in folders:
        quota = _quota(folder, version)
        if quota is not None and quota < best:
            best, source = max(1, int(quota)), f"quota of {folder} (cgroup v{version})"
    granted = whole(environ.get("SLURM_CPUS_ON_NODE", ""))
    if granted is not None and 0 < granted < best:
        best, source = granted, "SLURM_CPUS_ON_NODE"
    return best, source


def _quota(folder: Path, version: int) -> float | None:
    """Return the CPU quota in cores, or None without one."""
    if version == 2:
        first, _, length = (read_text(folder / "cpu.max") or "").strip().partition(" ")
        quota, period = whole(first), whole(length)
        return quota / period if quota is not None and period else None
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def disk(path: str | Path, root: Path) -> Disk | None:
    """Return the file system of `path` or its nearest existing parent; None if it cannot be read."""
    asked = expanded(path).absolute()
    here = next((p for p in (asked, *asked.parents) if p.exists()), None)
    if here is None:
        return None
    try:
        stat = os.statvfs(here)
    except OSError:
        return None
    return Disk(
        path=str(asked),
        total_bytes=stat.f_blocks * stat.f_frsize,
        free_bytes=stat.f_bavail * stat.f_frsize,
        filesystem=_filesystem(here, root),
    )


def _filesystem(path: Path, root: Path) -> str:
    """Return the type of the innermost mount that holds `path`, from /proc/self/mounts."""
    best, kind, real = -1, "unknown", path.resolve()
    for line in (read_text(root / "proc/self/mounts") or "").splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        mount = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), parts[1]))
        if (mount == real or mount in real.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), parts[2]
    return kind


def memlock(root: Path) -> int | Literal["unlimited"] | None:
    """Return the soft limit on locked memory in bytes, from /proc/self/limits."""
    text = read_text(root / "proc/self/limits") or ""
    found = re.search(r"^Max locked memory\s+(\S+)", text, re.MULTILINE)
    if not found:
        return None
    return "unlimited" if found[1] == "unlimited" else whole(found[1])
