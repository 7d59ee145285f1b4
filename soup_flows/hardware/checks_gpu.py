"""Checks of the GPUs and of what drives them; `doctor.CHECKS` lists them."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.errors import Problem, Severity
from soup_flows.hardware.values import Hardware, UnusedGpu
from soup_flows.units import gib

GIB = 1 << 30
OWNERLESS_BYTES = 2 * GIB
"""More than any driver keeps for itself on an idle GPU (about 0.6 GiB on H100, by nvidia-smi)."""
P2P_FIXED = (550, 40, 7)
"""First driver on which RTX 40-series cards do not corrupt peer-to-peer copies (accelerate,
`check_cuda_p2p_ib_support`; NVIDIA/nccl-tests#117)."""


def say(rule: str, severity: Severity, field: str, message: str, fix: str, source: str = "") -> Problem:
    """Return a problem; a shorthand for the checks."""
    return Problem(id=rule, severity=severity, field=field, message=message, fix=fix, source=source)


def driver(hw: Hardware) -> Iterator[Problem]:
    """Find a missing or broken driver."""
    if hw.driver_error is None:
        return
    on_bus = [gpu.name for gpu in hw.unused if gpu.why == "no_driver"]
    missing = "Library Not Found" in hw.driver_error
    if not missing:
        yield say(
            "HW002",
            "error",
            "driver_error",
            f"The NVIDIA driver does not answer: {hw.driver_error}. No GPU can be used.",
            "reload the driver or reboot (after a driver update the loaded module is the old one), "
            "until nvidia-smi works",
        )
    elif on_bus:
        yield say(
            "HW003",
            "error",
            "driver_error",
            f"{', '.join(on_bus)}: on the PCI bus, but this process finds no driver library.",
            "install the NVIDIA driver, or start the container with GPUs (docker run --gpus all; the "
            "resource nvidia.com/gpu in Kubernetes)",
        )
    else:
        yield say(
            "HW004",
            "note",
            "device",
            "There is no NVIDIA driver here: runs use the CPU.",
            "set device=cpu to say that this is meant",
        )


def unused(hw: Hardware) -> Iterator[Problem]:
    """Report devices that are there and left out."""
    texts = {
        "hidden": ("HW005", "warning", "visible_devices", "change that setting if the run should have it"),
        "mig": (
            "HW006",
            "warning",
            "gpus",
            "choose one with CUDA_VISIBLE_DEVICES=<uuid>, for each run its own",
        ),
        "unreadable": ("HW007", "error", "gpus", "look for Xid errors in dmesg; reset the GPU or reboot"),
        "vendor": ("HW008", "note", "gpus", "use a machine with NVIDIA GPUs, or device=cpu"),
    }
    by_reason: dict[tuple[str, str], list[UnusedGpu]] = {}
    for gpu in hw.unused:
        by_reason.setdefault((gpu.why, gpu.reason), []).append(gpu)
    for (why, reason), gpus in by_reason.items():
        if why not in texts:
            continue
        rule, severity, field, fix = texts[why]
        names = ", ".join(g.name if g.index is None else f"GPU {g.index} ({g.name})" for g in gpus)
        yield Problem.model_validate(
            {
                "id": rule,
                "severity": severity,
                "field": field,
                "message": f"Not used: {names}: {reason}.",
                "fix": fix,
                "source": "pytorch/pytorch#130181" if why == "mig" else "",
            }
        )


def sick(hw: Hardware) -> Iterator[Problem]:
    """Report GPUs that should not be trained on."""
    for gpu in hw.gpus:
        if gpu.sick:
            yield say(
                "HW009",
                "error",
                "gpus",
                f"GPU {gpu.index} ({gpu.name}) is sick: {gpu.sick}. Results may be wrong or the run may die.",
                f"reset it (nvidia-smi --gpu-reset -i {gpu.index}) or leave it out of CUDA_VISIBLE_DEVICES; "
                "replace it if it comes back",
                "NVIDIA GPU memory error management",
            )


def occupied(hw: Hardware) -> Iterator[Problem]:
    """Report memory that somebody else holds."""
    for gpu in hw.gpus:
        used = gpu.memory_total_bytes - gpu.memory_free_bytes
        if gpu.processes:
            holders = ", ".join(
                f"pid {p.pid}" + ("" if p.used_bytes is None else f" with {p.used_bytes / GIB:.1f} GiB")
                for p in gpu.processes
            )
            yield say(
                "HW010",
                "warning",
                "gpus",
                f"GPU {gpu.index} ({gpu.name}) is in use by {holders}; free: {gib(gpu.memory_free_bytes)}.",
                "wait for them, end them, or leave this GPU out of CUDA_VISIBLE_DEVICES",
            )
        elif used > OWNERLESS_BYTES:
            yield say(
                "HW011",
                "warning",
                "gpus",
                f"GPU {gpu.index} ({gpu.name}) has {used / GIB:.1f} GiB in use by no process that is visible "
                "here: it belongs to another container, or to a process that died badly.",
                "look at nvidia-smi on the host",
            )


def software(hw: Hardware) -> Iterator[Problem]:
    """Compare driver, torch and toolkit."""
    if not hw.gpus:
        return
    if hw.torch_cuda == "none":
        yield say(
            "HW012",
            "error",
            "torch_cuda",
            "There are GPUs, but the installed torch is built without CUDA.",
            "install a CUDA build of torch",
        )
    torch, driver, toolkit = (_version(v) for v in (hw.torch_cuda, hw.driver_cuda, hw.cuda_toolkit))
    if torch and driver and driver[0] < torch[0]:
        yield say(
            "HW013",
            "error",
            "driver_version",
            f"The driver {hw.driver_version} runs CUDA up to {hw.driver_cuda}, and the installed torch needs "
            f"CUDA {hw.torch_cuda}.",
            f"update the driver, or install a torch built for CUDA {driver[0]}",
            "NVIDIA CUDA compatibility guide: minor versions mix, major ones do not",
        )
    if torch and toolkit and toolkit[0] != torch[0]:
        yield say(
            "HW014",
            "warning",
            "cuda_toolkit",
            f"nvcc is CUDA {hw.cuda_toolkit} and torch was built with CUDA {hw.torch_cuda}: DeepSpeed's CUDA "
            "operators do not build.",
            f"point CUDA_HOME at a CUDA {torch[0]} toolkit",
            "deepspeed/ops/op_builder/builder.py, assert_no_cuda_mismatch",
        )
    version = _version(hw.driver_version)
    if version and version < P2P_FIXED and len(hw.gpus) > 1 and any("RTX 40" in g.name for g in hw.gpus):
        yield say(
            "HW015",
            "warning",
            "driver_version",
            f"RTX 40-series cards and driver {hw.driver_version}: peer-to-peer copies hang or corrupt data.",
            "update the driver to 550.40.07 or newer, or set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1",
            "accelerate, check_cuda_p2p_ib_support; NVIDIA/nccl-tests#117",
        )


def models(hw: Hardware) -> Iterator[Problem]:
    """Report mixed and old GPUs."""
    kinds = sorted({f"{g.name} {g.memory_total_bytes / GIB:.0f} GiB" for g in hw.gpus})
    if len(kinds) > 1:
        yield say(
            "HW025",
            "warning",
            "gpus",
            f"The GPUs differ ({', '.join(kinds)}): the slowest and the smallest decide.",
            "choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    old = [str(gpu.index) for gpu in hw.gpus if gpu.bf16 is False]
    if old:
        yield say(
            "HW026",
            "note",
            "gpus",
            f"GPU {', '.join(old)}: no bf16 (compute capability below 8.0); fp16 with loss scaling is used.",
            "models trained in bf16 may overflow in fp16; fp32 is safe and slower",
        )


def _version(text: str | None) -> tuple[int, ...]:
    """Return `12.4` as (12, 4); empty for None, `none` and anything that is no version."""
    parts = (text or "").split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
