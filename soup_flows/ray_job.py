"""What runs as a job of a Ray cluster: `python -m soup_flows.ray_job RUN_DIR`; here alone Ray is imported.

A place is reserved on each machine (a placement group), and an actor there runs this package's supervisor, with
torch elastic below it. The actors end with this process, and the supervisors with them. A machine that goes away
makes the next attempt, from the run's newest good checkpoint; failures of the training itself end the job, and the
flow decides about them. No Prefect and no torch is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from soup_flows.cluster_job import next_attempt, read_launch
from soup_flows.errors import Refused
from soup_flows.launch.engines import finished
from soup_flows.launch.engines.ray import WAITS, per_machine
from soup_flows.launch.engines.ray_http import in_words
from soup_flows.launch.plan import LaunchPlan, Rendezvous
from soup_flows.launch.receipt import collect_receipts, new_receipt
from soup_flows.paths import RunPaths, write_atomic, write_json
from soup_flows.ray_host import Host, Seen, collect_word, differences, leave_word

MARGIN_S = 12.0
"""Seconds beyond the stop budget after which a machine that says nothing is taken for lost."""
TOLD = "TerminationSignal: SIGTERM from Ray"
"""Reason of a stop that Ray asked for; whose wish it was, the flow knows."""


class Lost(Exception):
    """Machines of the attempt went away."""


class Unfit(Exception):
    """The machines cannot run together."""


class Job:
    """The attempts of one submitted job, and the wish to stop."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.launch = read_launch(paths)
        self.told: str | None = None
        self.starts = 0

    def hear(self, *_: Any) -> None:
        """Handle SIGTERM: everything is to save and stop."""
        self.told = TOLD

    def drive(self) -> int:
        """Make attempts until one ends for a reason that is not a machine's."""
        without_progress = 0
        while True:
            group = self.reserve()
            if group is None:
                return 1
            lost = ""
            try:
                self.attempt(group)
            except Lost as error:
                lost = str(error)
            finally:
                remove_placement_group(group)
            self.say_how_it_ended(lost)
            if finished(self.launch.attempt_paths):
                return 0
            if not lost or self.told:
                return 1
            before = start_step(self.paths)
            self.launch = next_attempt(self.paths, self.launch, "Ray")
            without_progress = 0 if start_step(self.paths) > before else without_progress + 1
            if without_progress > max_retries(self.paths):
                say(
                    f"{lost}; no checkpoint was made in {without_progress} attempts, so that no other is begun"
                )
                return 1
            self.starts += 1

    def reserve(self) -> PlacementGroup | None:
        """Wait for a place on each machine; None when told to stop."""
        bundle = per_machine(self.launch)
        bundles = [dict(bundle) for _ in range(self.launch.nodes)]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        waits = self.paths.temp / WAITS
        try:
            while not group.wait(1):
                if self.told:
                    remove_placement_group(group)
                    return None
                write_atomic(waits, self.why_it_waits(bundle))
        finally:
            waits.unlink(missing_ok=True)
        return group

    def why_it_waits(self, bundle: dict[str, float]) -> str:
        """Say what is asked for, and what the cluster has free."""
        free = {name: n for name, n in ray.available_resources().items() if name in bundle}
        return (
            f"{self.launch.nodes} machine(s) with {in_words(bundle)} are asked for; free in the cluster: "
            f"{in_words(free) or 'nothing'}"
        )

    def attempt(self, group: PlacementGroup) -> None:
        """Run the ranks of all machines to their end.

        Raises:
            Lost: if a machine went away; nothing runs on the others then.
        """
        launch = self.launch
        hosts = [place(launch, group, n) for n in range(launch.nodes)]
        try:
            seen = self.look(hosts)
        except Unfit as error:
            return self.give_up(str(error))
        names = [f"{host.name} ({host.address})" for host in seen]
        say(f"attempt {launch.attempt} of {launch.run_id} on {', '.join(names)}")
        text = launch.model_dump_json()
        runs = []
        for n, host in enumerate(hosts):
            meet = None
            if launch.nodes > 1:
                here = f"{launch.attempt}.{self.starts}.{os.getpid()}"
                meet = Rendezvous(
                    id=f"{launch.run_id}.{here}",
                    host=seen[0].address,
                    port=seen[0].port,
                    nodes=launch.nodes,
                    node=n,
                ).model_dump_json()
            runs.append(host.run.remote(text, meet, os.getcwd()))
        self.wait(hosts, runs, names)
        return None

    def look(self, hosts: Sequence[Any]) -> list[Seen]:
        """Ask the machines about themselves.

        Raises:
            Lost: if one does not answer.
            Unfit: if they cannot run together.
        """
        word, since = leave_word(self.paths), time.time()
        try:
            answers = [host.look.remote(self.launch.run_dir, word) for host in hosts]
            while ray.wait(answers, num_returns=len(answers), timeout=1)[1]:
                if self.told:
                    raise Unfit(self.told)
            seen = [Seen.model_validate_json(answer) for answer in ray.get(answers)]
        except ray.exceptions.RayActorError as error:
            raise Lost(f"a machine went away before it began: {first_line(error)}") from None
        finally:
            collect_word(self.paths, word)
        faults, odd = differences(seen, since)
        for words in odd:
            say(words)
        if faults:
            raise Unfit("; ".join(faults))
        return seen

    def wait(self, hosts: Sequence[Any], runs: Sequence[Any], names: Sequence[str]) -> None:
        """Wait for all machines; after the first that failed, or when told to stop, the others are stopped.

        Raises:
            Lost: if one went away, after the others have stopped.
        """
        left = dict(zip(runs, range(len(runs)), strict=True))
        lost: list[str] = []
        until: float | None = None
        while left:
            ready, _ = ray.wait(list(left), timeout=0.5)
            reason = self.told
            for ref in ready:
                n = left.pop(ref)
                try:
                    done, how = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    lost.append(f"{names[n]}: {first_line(error)}")
                    reason = reason or f"{names[n]} was lost"
                except ray.exceptions.RayTaskError as error:
                    say(f"{names[n]}: {error}")
                    reason = reason or f"{names[n]} could not run: {first_line(error.cause)}"
                else:
                    if not done:
                        reason = reason or f"{names[n]} ended first: {how}"
            if reason and until is None:
                until = time.monotonic() + self.launch.stop_budget_s + MARGIN_S
                for n in left.values():
                    hosts[n].stop.remote(reason)
            if until is not None and time.monotonic() > until:
                lost += [f"{names[n]}: no answer" for n in left.values()]
                for n in left.values():
                    ray.kill(hosts[n])
                break
        if lost and not finished(self.launch.attempt_paths):
            raise Lost("; ".join(lost))

    def give_up(self, words: str) -> None:
        """Keep why an attempt could not begin."""
        say(words)
        receipt = new_receipt(self.launch.run_id)
        receipt |= {"reason": "stopped" if self.told else "unfit", "detail": words, "stop_time": time.time()}
        receipt |= {"survivors": []}
        attempt = self.launch.attempt_paths
        attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(attempt.receipt, receipt)

    def say_how_it_ended(self, lost: str) -> None:
        """Put the receipts of all machines together."""
        attempt = self.launch.attempt_paths
        receipt = collect_receipts(attempt)
        if lost and not finished(attempt):
            receipt = receipt or new_receipt(self.launch.run_id) | {"survivors": []}
            receipt |= {
                "reason": "node_lost",
                "detail": lost,
                "stop_time": receipt.get("stop_time") or time.time(),
            }
        if receipt:
            attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(attempt.receipt, receipt)
        say(
            f"attempt {self.launch.attempt}: {receipt.get('reason', 'no receipt')} {receipt.get('detail', '')}"
        )


def place(launch: LaunchPlan, group: PlacementGroup, number: int) -> Any:
    """Start the actor of one machine."""
    wanted = per_machine(launch)
    own = {"CPU", "GPU", "memory"}

    class Here(Host):
        def __init__(self) -> None:
            super().__init__(ray.util.get_node_ip_address())

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


def start_step(paths: RunPaths) -> int:
    """Return the step that the present attempt starts from."""
    from soup_flows.resume import Orders

    return Orders.model_validate_json(paths.orders.read_bytes()).step


def max_retries(paths: RunPaths) -> int:
    """Return how often the user lets the run fail in a row."""
    from soup_flows.spec import TrainingSpec

    return TrainingSpec.model_validate_json(paths.spec.read_bytes()).recovery.max_retries


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def say(text: str) -> None:
    """Print into the job's log."""
    print(text, flush=True)  # noqa: T201


def main() -> int:
    """Run the job for the run directory in the first argument."""
    try:
        job = Job(RunPaths(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        say(f"{os.uname().nodename} cannot read the run directory, which all machines have to share: {error}")
        return 1
    ray.init(address="auto")
    signal.signal(signal.SIGTERM, job.hear)  # after Ray's own
    try:
        return job.drive()
    except Refused as refused:
        say(str(refused))
        return 1


if __name__ == "__main__":
    sys.exit(main())
