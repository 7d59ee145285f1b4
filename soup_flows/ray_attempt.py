"""One attempt on the machines of a Ray cluster: an actor on each, what they say about themselves, how they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from soup_flows.cluster_hosts import differences
from soup_flows.errors import first_line
from soup_flows.launch.elastic import Rendezvous
from soup_flows.launch.engines.ray import per_machine
from soup_flows.launch.plan import LaunchPlan
from soup_flows.ray_host import Host, Seen, collect_word, leave_word

MARGIN_S = 12.0
"""Seconds beyond the stop budget after which a machine that says nothing is taken for lost."""
FOLLOW_S = 8.0
"""Seconds that the other machines get to end by themselves when one has ended; as for ranks (`RANK_DEATH_S`)."""


class Lost(Exception):
    """Machines of the attempt went away; nothing of it runs on the others."""


class Unfit(Exception):
    """The machines cannot run together."""


class Attempt:
    """The machines of one attempt."""

    def __init__(
        self,
        launch: LaunchPlan,
        group: PlacementGroup,
        told: Callable[[], str | None],
        each: Callable[[Sequence[str]], None],
    ) -> None:
        """Start an actor in each place of a placement group.

        Args:
            launch: what to run.
            group: a place for each machine.
            told: says why everything is to stop, or None.
            each: called about once a second with Ray's ids of the machines.
        """
        self.launch = launch
        self._told, self._each = told, each
        self._hosts = [place(launch, group, number) for number in range(launch.nodes)]
        self._names: list[str] = []
        self._lost: list[str] = []
        self._unfit: list[str] = []
        self._reason: str | None = None
        self._tell_at = 0.0

    def run(self, meeting: str) -> bool:
        """Run the ranks of all machines to their end.

        Args:
            meeting: another one for every start, or hosts of an earlier one would be met.

        Returns:
            Whether a machine saw the run's result; this one may see it later.

        Raises:
            Lost: if a machine went away.
            Unfit: if they cannot run together, or a machine cannot run its ranks.
        """
        seen = self._look()
        self._names = [f"{host.name} ({host.address})" for host in seen]
        say(f"attempt {self.launch.attempt} of {self.launch.run_id} on {', '.join(self._names)}")
        meet: Rendezvous | None = None
        if self.launch.nodes > 1:
            first = seen[0]
            meet = Rendezvous(id=meeting, host=first.address, port=first.port, nodes=self.launch.nodes)
        runs = []
        for number, host in enumerate(self._hosts):
            here = meet.model_copy(update={"node": number}).model_dump_json() if meet else None
            runs.append(host.run.remote(self.launch.model_dump_json(), here, os.getcwd()))
        done = self._wait(runs, [host.node for host in seen])
        if not done and self._lost:
            raise Lost("; ".join(self._lost))
        if not done and self._unfit:
            raise Unfit("; ".join(self._unfit))
        return done

    def _look(self) -> list[Seen]:
        """Ask the machines about themselves."""
        paths = self.launch.paths
        run_id = self.launch.run_id
        markers = [run_id, *(f"{run_id}.{number}" for number in range(self.launch.ray.nodes))]
        word, since = leave_word(paths), time.time()
        try:
            answers = [host.look.remote(self.launch.run_dir, word, markers) for host in self._hosts]
            while ray.wait(answers, num_returns=len(answers), timeout=1.0)[1]:
                if told := self._told():
                    raise Unfit(told)
            seen = [Seen.model_validate_json(answer) for answer in ray.get(answers)]
        except ray.exceptions.RayActorError as error:
            raise Lost(f"a machine went away before it began: {first_line(error, 300)}") from None
        except ray.exceptions.RayTaskError as error:
            raise Unfit(f"a machine cannot run this package: {first_line(error.cause, 300)}") from None
        finally:
            collect_word(paths, word)
        faults, odd = differences(seen, since)
        for words in odd:
            say(words)
        if faults:
            raise Unfit("; ".join(faults))
        return seen

    def _wait(self, runs: Sequence[Any], nodes: Sequence[str]) -> bool:
        """Wait for all machines; after the first that failed, or when told to stop, the others are stopped."""
        left = dict(zip(runs, range(len(runs)), strict=True))
        done = False
        until: float | None = None
        while left:
            ready, _ = ray.wait(list(left), timeout=1.0)
            for ref in ready:
                done = self._ended(ref, left.pop(ref)) or done
            self._each(nodes)
            if (told := self._told()) and self._reason != told:
                self._stop_all(told, 0.0)
            now = time.monotonic()
            if self._reason and until is None and now >= self._tell_at:
                until = now + self.launch.stop_budget_s + MARGIN_S
                for number in left.values():
                    self._hosts[number].stop.remote(self._reason)
            if until is not None and now > until:
                self._lost += [f"{self._names[number]}: no answer" for number in left.values()]
                for number in left.values():
                    ray.kill(self._hosts[number])
                break
        return done

    def _ended(self, ref: Any, number: int) -> bool:
        """Hear how a machine ended; returns whether the run has finished."""
        name = self._names[number]
        try:
            done, how, detail = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            self._lost.append(f"{name}: {first_line(error, 300)}")
            self._stop_all(f"{name} was lost", 0.0)
        except ray.exceptions.RayTaskError as error:
            say(f"{name}: {error}")
            self._unfit.append(f"{name} could not run: {first_line(error.cause, 300)}")
            self._stop_all(self._unfit[-1], 0.0)
        else:
            if not done and how == "node_lost":  # its supervisor noticed, and knows who
                self._lost.append(detail)
                self._stop_all(detail, 0.0)
            elif not done:
                self._stop_all(f"{name} ended first: {how}", FOLLOW_S)
            return bool(done)
        return False

    def _stop_all(self, reason: str, after_s: float) -> None:
        at = time.monotonic() + after_s
        if self._reason is None or at < self._tell_at:
            self._reason, self._tell_at = reason, at


def place(launch: LaunchPlan, group: PlacementGroup, number: int) -> Any:
    """Start the actor of one machine."""
    wanted = per_machine(launch)
    own = {"CPU", "GPU", "memory"}

    class Here(Host):
        def __init__(self) -> None:
            super().__init__(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())

    return (
        ray.remote(Here)
        .options(
            num_cpus=wanted["CPU"],
            num_gpus=wanted.get("GPU", 0),
            memory=wanted.get("memory"),
            resources={name: n for name, n in wanted.items() if name not in own},
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        )
        .remote()
    )


def say(text: str) -> None:
    """Print into the job's log."""
    print(text, flush=True)  # noqa: T201
