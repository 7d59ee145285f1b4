"""Rules about the machine and the installed packages."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from soup_flows.validation.table import Context, Rule

TRAIN_MODULES = ("torch", "transformers", "accelerate", "datasets")


def _missing(*modules: str) -> str | None:
    """Name the modules that are not installed; nothing is imported."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return ", ".join(absent) + " cannot be found" if absent else None


def _missing_stack(_: Context) -> str | None:
    return _missing(*TRAIN_MODULES)


def _missing_deepspeed(context: Context) -> str | None:
    return _missing("deepspeed") if context.plan.engine == "deepspeed" else None


def _missing_peft(context: Context) -> str | None:
    return _missing("peft") if context.spec.trains_adapters else None


def _unwritable_output(context: Context) -> str | None:
    folder = Path(context.spec.output_dir).expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return None
    return f"{folder} is not a folder that this user may write"


def _offload_without_compiler(context: Context) -> str | None:
    hardware = context.hardware
    if context.plan.engine != "deepspeed" or "offload" not in context.plan.strategy:
        return None
    if context.plan.config.get("zero_force_ds_cpu_optimizer") is False:
        return None
    lacking = [
        name for name, there in (("C++ compiler", hardware.cxx), ("ninja", hardware.ninja)) if not there
    ]
    return f"no {' and no '.join(lacking)} was found" if lacking else None


RULES = (
    Rule(
        "EN001",
        "error",
        "model",
        "the ranks could not start",
        "pip install 'soup-flows[train]' on the machine that trains",
        "the extra `train` of this package",
        _missing_stack,
    ),
    Rule(
        "EN002",
        "error",
        "deepspeed",
        "the ranks would fail after loading the model",
        "pip install 'soup-flows[train]', or use fsdp= instead",
        "MakazhanAlpamys/Soup: found after 34 s of loading",
        _missing_deepspeed,
    ),
    Rule(
        "EN003",
        "error",
        "training.method",
        "adapters could not be made",
        "pip install 'soup-flows[train]'",
        "the extra `train` of this package",
        _missing_peft,
    ),
    Rule(
        "EN004",
        "error",
        "output_dir",
        "nothing could be saved",
        "name a folder you may write",
        "POSIX permissions",
        _unwritable_output,
    ),
    Rule(
        "EN005",
        "error",
        "deepspeed",
        "DeepSpeed's CPU Adam is compiled at the first use and would fail after the model was loaded",
        "install g++ and ninja, or use a preset without off-load",
        "deepspeed 0.19.8 ops/op_builder/builder.py; nvcc is not needed",
        _offload_without_compiler,
    ),
)
