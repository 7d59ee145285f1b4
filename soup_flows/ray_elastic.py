"""A run on a Ray cluster whose machines become fewer and more: which sizes it can have, and the plan of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soup_flows.data.prepare import PreparedData
from soup_flows.errors import Refused
from soup_flows.hardware import Hardware
from soup_flows.launch.plan import LaunchPlan
from soup_flows.paths import RunPaths
from soup_flows.sharding import ShardingPlan, make_plan
from soup_flows.spec import TrainingSpec
from soup_flows.validation import count_rows


class Sizes:
    """The numbers of machines that a run may have, each with the plan that keeps the global batch."""

    def __init__(self, paths: RunPaths, launch: LaunchPlan) -> None:
        """Read the plan that was made for all machines.

        Raises:
            OSError: if the run directory holds none.
        """
        self.all = launch.ray.nodes
        self.least = launch.ray.min_nodes or self.all
        spec = TrainingSpec.model_validate_json(paths.spec.read_bytes())
        now = ShardingPlan.model_validate_json(paths.plan.read_bytes())
        self._plans: dict[int, ShardingPlan] = {now.nodes: now}
        for nodes in range(self.least, self.all + 1):
            if nodes in self._plans:
                continue
            try:
                self._plans[nodes] = _plan_for(spec, paths, nodes, now)
            except Refused:  # such as a global batch that so many ranks cannot divide
                continue

    def plan(self, nodes: int) -> ShardingPlan:
        """Return the plan for a number of machines that `order` or `larger` named."""
        return self._plans[nodes]

    def order(self, alive: int) -> list[int]:
        """Return the sizes to try, the largest first: all machines, then what is there at present.

        Args:
            alive: machines of the cluster that could take part.
        """
        fewer = [n for n in sorted(self._plans, reverse=True) if self.least <= n <= alive and n < self.all]
        return [self.all, *fewer]

    def larger(self, nodes: int, free: int) -> int | None:
        """Return the largest size above `nodes` that `free` further machines allow; None without one."""
        found = [n for n in self._plans if nodes < n <= min(self.all, nodes + free)]
        return max(found, default=None)


def _plan_for(spec: TrainingSpec, paths: RunPaths, nodes: int, like: ShardingPlan) -> ShardingPlan:
    hardware = Hardware.model_validate_json(paths.hardware.read_bytes())
    known = paths.data.is_file()
    rows = PreparedData.model_validate_json(paths.data.read_bytes()).train_rows if known else count_rows(spec)
    return make_plan(spec, hardware, rows, nodes, kept=like)


def fits(resources: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    """Whether a machine with these resources could take part."""
    return all(resources.get(name, 0.0) >= amount for name, amount in wanted.items())


def count(machines: Sequence[Mapping[str, float]], wanted: Mapping[str, float]) -> int:
    """Count the machines that could take part."""
    return sum(fits(resources, wanted) for resources in machines)
