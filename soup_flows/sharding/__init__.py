"""From what the user asked and what the machine has to one `ShardingPlan`: chosen, predicted, explained."""

from soup_flows.sharding.model import read_model_config
from soup_flows.sharding.plan import make_plan
from soup_flows.sharding.problems import memory_problems
from soup_flows.sharding.values import (
    Candidate,
    Correction,
    Device,
    Dtype,
    Engine,
    OptimizerName,
    Room,
    ShardingPlan,
    StepCost,
)

__all__ = [
    "Candidate",
    "Correction",
    "Device",
    "Dtype",
    "Engine",
    "OptimizerName",
    "Room",
    "ShardingPlan",
    "StepCost",
    "make_plan",
    "memory_problems",
    "read_model_config",
]
