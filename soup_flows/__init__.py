"""Multi-GPU LLM fine-tuning as a dependable stage of a Prefect pipeline.

Names are loaded when they are first used: importing the package imports neither Prefect nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soup_flows.artifacts import RunConfig, load_run_config
    from soup_flows.errors import Problem, Refused, SoupFlowsError, TrainingFailed
    from soup_flows.flows import soup_train
    from soup_flows.hardware import Hardware
    from soup_flows.launch.plan import LaunchPlan
    from soup_flows.report import TrainReport
    from soup_flows.sharding import ShardingPlan
    from soup_flows.spec import TrainingSpec, parse_spec
    from soup_flows.tasks import (
        detect_hardware,
        launch_distributed_train,
        prepare_dataset,
        resolve_sharding_config,
        validate_strategy,
        write_temp_config,
    )

__version__ = "0.1.0"

_HOMES = {
    "artifacts": ("RunConfig", "load_run_config"),
    "errors": ("Problem", "Refused", "SoupFlowsError", "TrainingFailed"),
    "flows": ("soup_train",),
    "hardware": ("Hardware",),
    "launch.plan": ("LaunchPlan",),
    "report": ("TrainReport",),
    "sharding": ("ShardingPlan",),
    "spec": ("TrainingSpec", "parse_spec"),
    "tasks": (
        "detect_hardware",
        "launch_distributed_train",
        "prepare_dataset",
        "resolve_sharding_config",
        "validate_strategy",
        "write_temp_config",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (types, then functions)
    "__version__",
    "Hardware",
    "LaunchPlan",
    "Problem",
    "Refused",
    "RunConfig",
    "ShardingPlan",
    "SoupFlowsError",
    "TrainReport",
    "TrainingFailed",
    "TrainingSpec",
    "detect_hardware",
    "launch_distributed_train",
    "load_run_config",
    "parse_spec",
    "prepare_dataset",
    "resolve_sharding_config",
    "soup_train",
    "validate_strategy",
    "write_temp_config",
]


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
