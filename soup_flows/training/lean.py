"""Installed packages that a process has no use for: importing them takes a good part of a start.

transformers imports peft and datasets (with pandas and pyarrow) wherever they are installed, and DeepSpeed when a
model is built. A process that needs none of them says so before it imports transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from soup_flows.spec import TrainingSpec


def leave_out(names: Iterable[str]) -> None:
    """Make installed packages look as if they were not, unless they are imported already.

    With None in `sys.modules`, `import` raises ModuleNotFoundError and `importlib.util.find_spec` returns None,
    which is how transformers and accelerate ask (https://docs.python.org/3/reference/import.html#the-module-cache).
    """
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def unneeded(spec: dict[str, Any], engine: str) -> list[str]:
    """Return the packages that a rank imports for nothing.

    Args:
        spec: the run's `TrainingSpec`, as JSON has it.
        engine: what shards, `deepspeed` or another; empty where nothing is trained.
    """
    if spec["trust_remote_code"]:  # a model's own code may import anything
        return []
    names = ["deepspeed"] if engine != "deepspeed" else []
    if spec["training"]["task"] in ("sft", "pretrain"):  # else TRL trains, which needs both
        names.append("datasets")
        if spec["training"]["method"] == "full":
            names.append("peft")
    return names


def leave_out_of_rank(run_dir: Path) -> None:
    """Leave out what the run in `run_dir` does not need; a file that cannot be read is somebody else's to report."""
    try:
        spec, plan = (json.loads((run_dir / name).read_bytes()) for name in ("spec.json", "plan.json"))
        names = unneeded(spec, plan["engine"])
    except (OSError, ValueError, KeyError):
        return
    leave_out(names)


def leave_out_of_tokenising(spec: TrainingSpec) -> None:
    """Leave out what tokenising does not need, torch above all."""
    if not spec.trust_remote_code:
        leave_out(("torch", "deepspeed", "datasets", "peft"))
