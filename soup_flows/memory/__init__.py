"""Peak memory of a fine-tuning step, predicted from shapes: by component, with a range, without torch."""

from soup_flows.memory.estimate import HostMemory, MemoryEstimate, predict
from soup_flows.memory.setup import Setup

__all__ = ["HostMemory", "MemoryEstimate", "Setup", "predict"]
