"""`detect`: one look at the machine, or the reason why the GPUs that were asked for are not there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from soup_flows.errors import Refused, refuse
from soup_flows.hardware import gpus as gpu_rules
from soup_flows.hardware import host, tools
from soup_flows.hardware.nvml import NvmlProbe
from soup_flows.hardware.probe import NvidiaReading, Probe
from soup_flows.hardware.values import Gpu, Hardware, UnusedGpu
from soup_flows.hardware.visible import CONTAINER, CUDA, SLURM, Selection, select

LIMITS = (CUDA, CONTAINER, *SLURM)


def detect(
    device: Literal["auto", "cuda", "cpu"] = "auto",
    paths: Sequence[str | Path] = (),
    probe: Probe | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    root: str | Path = "/",
) -> Hardware:
    """Read what this machine offers to a run.

    No CUDA context is created, torch is not imported, and nothing is written.

    Args:
        device: `auto` takes the GPUs a process here would see, else the CPU; `cuda` insists on them; `cpu`
            does not look at GPUs at all.
        paths: folders whose disks matter, such as the output folder; they need not exist yet.
        probe: reads the NVIDIA GPUs; by default NVML on this machine.
        environ: the environment the run would get; by default this process's.
        root: the root below which /proc, /sys and /dev are read.

    Returns:
        Every reading with its source; what could not be read is None or `unknown`, with a note.

    Raises:
        Refused: `device="cuda"` and no GPU can be used; the problem names the reason.
    """
    env = os.environ if environ is None else environ
    base = Path(root)
    reading = NvidiaReading(source="not looked at (device=cpu)")
    selection, found = Selection(), list[Gpu]()
    if device == "cpu":
        selection.notes.append("GPUs were not looked at, since device=cpu was asked for.")
    else:
        reading = (probe or NvmlProbe()).read()
        selection = select(reading.gpus, env)
        found = gpu_rules.build(selection)
        selection.unused += _others(reading, base, live=probe is None)
        if device == "cuda" and not found:
            raise _no_gpu(reading, selection, env)
    return _assemble("cuda" if found else "cpu", found, reading, selection, paths, env, base)


def _assemble(
    device: Literal["cuda", "cpu"],
    found: list[Gpu],
    reading: NvidiaReading,
    selection: Selection,
    paths: Sequence[str | Path],
    env: Mapping[str, str],
    root: Path,
) -> Hardware:
    """Join the GPU readings with everything else."""
    visible = {gpu.index for gpu in found if not gpu.mig}
    whole = [r for r in reading.gpus if r.index in visible]
    connection, note = gpu_rules.interconnect(whole)
    memory, memory_source = host.memory(root, env)
    cores, cores_source = host.cores(root, env)
    toolkit, toolkit_source = tools.cuda_toolkit(env)
    torch, torch_source = tools.torch_cuda()
    usable, down = tools.infiniband(root)
    asked = [(str(path), host.disk(path, root)) for path in paths]
    notes = [*selection.notes, *([note] if note else [])]
    notes += [f"The disk of {path} could not be read." for path, disk in asked if disk is None]
    notes += _unread(reading, found)
    sources = _sources(reading, env) | {
        "host_memory": memory_source,
        "cpu_cores": cores_source,
        "cuda_toolkit": toolkit_source,
        "torch_cuda": torch_source,
    }
    return Hardware(
        device=device,
        gpus=tuple(found),
        interconnect=connection,
        peer_access=gpu_rules.peer_access(whole),
        cpu_cores=cores,
        host_memory=memory,
        shm=host.disk("/dev/shm", root) if Path("/dev/shm").is_dir() else None,  # noqa: S108
        disks=tuple(disk for _, disk in asked if disk is not None),
        cuda_toolkit=toolkit,
        cxx=tools.compiler(env),
        ninja=tools.has_ninja(env),
        infiniband=tuple(usable),
        infiniband_down=tuple(down),
        visible_devices=env.get(CUDA),
        driver_version=reading.driver_version,
        driver_cuda=reading.cuda_version,
        driver_error=reading.error,
        torch_cuda=torch,
        memlock=host.memlock(root),
        unused=tuple(selection.unused),
        sources=sources,
        notes=tuple(notes),
    )


def _sources(reading: NvidiaReading, env: Mapping[str, str]) -> dict[str, str]:
    """Return where the readings come from whose place is always the same."""
    limits = ", ".join(f"{name}={env[name]}" for name in LIMITS if name in env)
    gpus = ("gpus", "interconnect", "peer_access", "driver_version", "driver_cuda", "driver_error")
    return {
        **dict.fromkeys(gpus, reading.source),
        "unused": f"{reading.source}; /sys/bus/pci",
        "visible_devices": limits or f"{CUDA} is not set",
        "shm": "statvfs, /proc/self/mounts",
        "disks": "statvfs, /proc/self/mounts",
        "cxx": "CXX, PATH",
        "ninja": "PATH",
        "infiniband": "/sys/class/infiniband, /dev/infiniband",
        "infiniband_down": "/sys/class/infiniband, /dev/infiniband",
        "memlock": "/proc/self/limits",
    }


def _others(reading: NvidiaReading, root: Path, live: bool) -> list[UnusedGpu]:
    """Return devices of other makers, and NVIDIA devices that the driver does not show at all."""
    found = tools.pci_devices(root) + (tools.apple() if live else [])
    return [gpu for gpu in found if gpu.vendor != "nvidia" or not reading.gpus]


def _unread(reading: NvidiaReading, found: list[Gpu]) -> list[str]:
    """Name what a visible GPU did not tell, leaving out what its model simply does not have."""
    notes = []
    for gpu in reading.gpus:
        missing = {k: v for k, v in gpu.unread.items() if v not in ("Not Supported", "Function Not Found")}
        if missing and any(g.index == gpu.index for g in found):
            told = ", ".join(f"{name} ({text})" for name, text in missing.items())
            notes.append(f"GPU {gpu.index} did not tell: {told}.")
    return notes


def _no_gpu(reading: NvidiaReading, selection: Selection, env: Mapping[str, str]) -> Refused:
    """Say why `device=cuda` cannot be had here."""
    cpu = "or set device=cpu to run the ranks on CPU"
    others = [gpu for gpu in selection.unused if gpu.why in ("vendor", "no_driver")]
    if reading.error is not None:
        missing = "Library Not Found" in reading.error
        reason = (
            f"this process finds no NVIDIA driver ({reading.error})"
            if missing
            else f"the NVIDIA driver is broken or not loaded: {reading.error}"
        )
        fix = (
            f"run on a machine with NVIDIA GPUs, start the container with access to them, {cpu}"
            if missing
            else f"reload or reinstall the driver, or reboot, until nvidia-smi works; {cpu}"
        )
    elif not reading.gpus:
        reason, fix = (
            "the NVIDIA driver works and shows no GPU",
            f"check the container's or job's GPUs; {cpu}",
        )
    else:
        told = dict.fromkeys(f"GPU {g.index} ({g.name}): {g.reason}" for g in selection.unused)
        reason = f"none of the {len(reading.gpus)} GPUs can be used: " + "; ".join(told)
        set_here = [name for name in LIMITS if name in env]
        fix = f"change {' or '.join(set_here)}, {cpu}" if set_here else f"repair the GPUs, {cpu}"
    if others and not reading.gpus:
        reason += "; found instead: " + ", ".join(f"{g.name} ({g.reason})" for g in others)
    return refuse("HW001", "device", f"device=cuda was asked for, and {reason}.", fix)
