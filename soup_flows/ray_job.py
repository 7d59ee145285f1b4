"""What runs as a job of a Ray cluster: `python -m soup_flows.ray_job RUN_DIR`.

Here and in `ray_attempt` alone Ray is imported; both run on the cluster.

A place is reserved on each machine (a placement group), and an actor there runs this package's supervisor, with
torch elastic below it. The actors end with this process, and the supervisors with them. A machine that goes away
makes the next attempt, from the run's newest good checkpoint; failures of the training itself end the job, and the
flow decides about them. No Prefect and no torch is imported.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from soup_flows.cluster_job import ask_to_save, new_step, next_attempt, read_launch
from soup_flows.errors import Refused
from soup_flows.launch.engines import finished
from soup_flows.launch.engines.ray import WAITS, per_machine
from soup_flows.launch.engines.ray_http import in_words
from soup_flows.launch.receipt import collect_receipts, new_receipt, write_no_start
from soup_flows.paths import RunPaths, write_atomic, write_json
from soup_flows.ray_attempt import Attempt, Lost, Unfit, say
from soup_flows.ray_elastic import Sizes, count
from soup_flows.resume import Orders
from soup_flows.spec import TrainingSpec

TOLD = "TerminationSignal: SIGTERM from Ray"
"""Reason of a stop that Ray asked for; whose wish it was, the flow knows."""


class Job:
    """The attempts of one submitted job, and the wish to stop."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.launch = read_launch(paths)
        self.sizes = Sizes(paths, self.launch) if self.launch.ray.min_nodes else None
        self.bundle = per_machine(self.launch)
        self.told: str | None = None
        self.starts = 0
        self.ended: dict[str, Any] | None = None
        """How the attempt before ended."""
        self.done = False
        """Whether a machine saw the result, which this one may see later."""
        self.growing = False
        self.room_since: float | None = None

    def hear(self, *_: Any) -> None:
        """Handle SIGTERM: everything is to save and stop."""
        self.told = TOLD

    def drive(self) -> int:
        """Make attempts until one ends for a reason that is not a machine's."""
        fruitless = 0
        again = False
        while (got := self.reserve()) is not None:
            group, nodes = got
            before = start_step(self.paths) if again else 0
            if again or nodes != self.launch.nodes:
                plan = self.sizes.plan(nodes) if self.sizes else None
                self.launch = next_attempt(self.paths, self.launch, "Ray", plan, self.ended)
            fruitless = fruitless + 1 if again and start_step(self.paths) <= before else 0
            if fruitless and fruitless > max_retries(self.paths):
                say(f"no checkpoint was made in {fruitless} attempts, so that no other is begun")
                return 1
            try:
                lost = self.attempt(group)
            finally:
                remove_placement_group(group)
            again = self.say_how_it_ended(lost)
            if self.done or finished(self.launch.attempt_paths):
                return 0
            if not again or self.told:
                return 1
            self.starts += 1
        return 1

    def reserve(self) -> tuple[PlacementGroup, int] | None:
        """Wait for a place on each machine; None when told to stop.

        Where fewer machines would do, those that are missing are waited for some time only.
        """
        while True:
            alive = count([node["Resources"] for node in ray.nodes() if node["Alive"]], self.bundle)
            order = self.sizes.order(alive) if self.sizes else [self.launch.nodes]
            for nodes in order:
                patience = self.launch.ray.patience_s if self.sizes else math.inf
                group = placement_group([dict(self.bundle)] * nodes, strategy="STRICT_SPREAD")
                if self.granted(group, nodes, patience):
                    return group, nodes
                remove_placement_group(group)
                if self.told:
                    return None

    def granted(self, group: PlacementGroup, nodes: int, patience_s: float) -> bool:
        """Wait until a group has its places, and say why it has not."""
        waits = self.paths.temp / WAITS
        end = time.monotonic() + patience_s
        try:
            while not group.wait(1):
                if self.told or time.monotonic() > end:
                    return False
                write_atomic(waits, self.why_it_waits(nodes))
        finally:
            waits.unlink(missing_ok=True)
        return True

    def why_it_waits(self, nodes: int) -> str:
        """Say what is asked for, and how much of it there is room for; a text that does not change often."""
        room = count(list(available_resources_per_node().values()), self.bundle)
        return f"{nodes} machine(s) with {in_words(self.bundle)} are asked for; machines with room at present: {room}"

    def grow(self, nodes: Sequence[str]) -> None:
        """Have the ranks save and end when there has been room for more machines for some time.

        Args:
            nodes: Ray's ids of the machines that run.
        """
        if self.sizes is None or self.growing or self.paths.stop_request.exists():
            return
        free = available_resources_per_node()
        others = [resources for node, resources in free.items() if node not in nodes]
        if self.sizes.larger(len(nodes), count(others, self.bundle)) is None:
            self.room_since = None
        elif self.room_since is None:
            self.room_since = time.monotonic()
        elif time.monotonic() - self.room_since > self.launch.ray.patience_s:
            say("there is room for more machines: the ranks save, and go on with them")
            self.growing = True
            ask_to_save(self.paths)

    def attempt(self, group: PlacementGroup) -> str:
        """Run the ranks of all machines to their end; returns which machines went away, if any did."""
        here = Attempt(self.launch, group, lambda: self.told, self.grow)
        try:
            self.done = here.run(f"{self.launch.run_id}.{self.launch.attempt}.{self.starts}.{os.getpid()}")
        except Lost as error:
            return str(error)
        except Unfit as error:
            self.give_up(str(error))
        return ""

    def give_up(self, words: str) -> None:
        """Keep why an attempt could not begin."""
        say(words)
        reason = "stopped" if self.told else "unfit"
        write_no_start(self.launch.attempt_paths, self.launch.run_id, words, reason)

    def say_how_it_ended(self, lost: str) -> bool:
        """Put the receipts of all machines together; returns whether another attempt goes on from here."""
        attempt = self.launch.attempt_paths
        receipt = collect_receipts(attempt)
        again = False
        if lost:
            receipt = receipt or new_receipt(self.launch.run_id) | {"survivors": []}
            stop_time = receipt.get("stop_time") or time.time()
            receipt |= {"reason": "node_lost", "detail": lost, "stop_time": stop_time}
            again = True
        if self.growing:
            self.growing, self.room_since = False, None
            self.paths.stop_request.unlink(missing_ok=True)
            step = new_step(attempt)
            if receipt.get("reason") == "exited" and step is not None:
                receipt |= {
                    "reason": "preempted",
                    "detail": f"saved at step {step} to go on with more machines",
                }
                again = True
        if receipt and attempt.root.exists():  # else it never began, and the next one has its number
            write_json(attempt.receipt, receipt)
        self.ended = receipt or None
        say(
            f"attempt {self.launch.attempt}: {receipt.get('reason', 'no receipt')} {receipt.get('detail', '')}"
        )
        return again


def start_step(paths: RunPaths) -> int:
    """Return the step that the present attempt starts from."""
    return Orders.model_validate_json(paths.orders.read_bytes()).step


def max_retries(paths: RunPaths) -> int:
    """Return how often the user lets the run fail in a row."""
    return TrainingSpec.model_validate_json(paths.spec.read_bytes()).recovery.max_retries


def main() -> int:
    """Run the job for the run directory in the first argument."""
    try:
        job = Job(RunPaths(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        say(f"{os.uname().nodename} cannot read the run directory, which all machines have to share: {error}")
        return 1
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))  # an explicit one does not turn authentication on
    signal.signal(signal.SIGTERM, job.hear)  # after Ray's own
    try:
        return job.drive()
    except Refused as refused:
        say(str(refused))
        return 1


if __name__ == "__main__":
    sys.exit(main())
