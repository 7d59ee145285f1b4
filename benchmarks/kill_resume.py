"""Shoot a run at random moments, saves included, and see whether it ends as if nothing had happened.

    python benchmarks/kill_resume.py --kills 50 --preset zero2 [--json]

A reference run is never disturbed. Then runs of the same spec are shot with SIGKILL, some more than once: a random
rank, a random time after the start of the attempt, or within a save. Each is resumed until it is completed. Exit
code 0 if every run has the reference's losses and final weights bit for bit, no shot cost more steps than one save
interval, and every checkpoint that was resumed verified.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from soup_flows import tasks
from soup_flows.checkpoints import verify
from soup_flows.demo import build_demo_data, build_demo_model, demo_parameters
from soup_flows.errors import TrainingFailed
from soup_flows.launch.events import tail_events
from soup_flows.launch.plan import LaunchPlan
from soup_flows.report import TrainReport
from soup_flows.resume import Orders
from soup_flows.spec import TrainingSpec, parse_spec

SAVE_STEPS, STEPS, ROWS = 3, 20, 320
MOST_KILLS_A_RUN = 5
Launcher = Callable[[LaunchPlan], LaunchPlan]


def make_spec(preset: str, folder: Path, steps: int = STEPS) -> TrainingSpec:
    """Return a short run of the demo's model on two CPU ranks."""
    train_path, _ = build_demo_data(folder / "demo")
    model = build_demo_model(folder / "demo" / "tiny-llama", train_path)
    few = folder / "demo" / "few.jsonl"
    lines = train_path.read_text(encoding="utf-8").splitlines()[:ROWS]
    few.write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = demo_parameters(preset, folder)
    values |= {"model": str(model), "dataset": str(few), "recovery": {"save_steps": SAVE_STEPS}}
    values["validation"] = {"deep": False}
    values["training"] |= {"max_steps": steps}
    values["data"] = {"max_length": 96}
    return parse_spec(values)


class Shot(threading.Thread):
    """Waits for its moment in one attempt and shoots a random rank; `hit` says what it hit, if anything."""

    def __init__(self, launch: LaunchPlan, chance: random.Random, longest_s: float) -> None:
        super().__init__(daemon=True)
        self.launch, self.hit = launch, ""
        self.in_save = chance.random() < 0.5
        self.delay_s = chance.uniform(0, 0.5 if self.in_save else longest_s)
        self.saves = chance.randint(1, 3)
        self.victim = chance.random()

    def run(self) -> None:
        """Wait, and shoot."""
        while not self._over() and len(self._pids()) < self.launch.nproc_per_node:
            time.sleep(0.05)
        seen: set[str] = set()
        while self.in_save and len(seen) < self.saves and not self._over():
            seen |= {path.name for path in self.launch.paths.checkpoints.glob(".saving/*")}
            time.sleep(0.001)
        time.sleep(self.delay_s)
        pids = self._pids()
        if self._over() or not pids:
            return
        saving = [path.name for path in self.launch.paths.checkpoints.glob(".saving/*")]
        try:
            os.kill(pids[int(self.victim * len(pids))], signal.SIGKILL)
        except ProcessLookupError:
            return
        self.hit = f"in the save of {saving[0]}" if saving else "between saves"

    def _over(self) -> bool:
        return self.launch.attempt_paths.receipt.exists()

    def _pids(self) -> list[int]:
        events = tail_events(self.launch.attempt_paths.events).poll()
        return [event["pid"] for event in events if event["kind"] == "started"]


def make_attempt(
    spec: TrainingSpec, run_id: str, launcher: Launcher, shoot: Callable[[LaunchPlan], Shot] | None = None
) -> tuple[TrainReport, str, bool]:
    """Make one attempt of a run.

    Returns:
        The report, what was hit, and whether the checkpoint it started from verified.
    """
    hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
    plan = tasks.resolve_sharding_config.fn(spec, hardware)
    launch = launcher(tasks.write_temp_config.fn(spec, hardware, plan, run_id))
    orders = Orders.model_validate_json(launch.paths.orders.read_bytes())
    good = orders.checkpoint is None or not verify(Path(orders.checkpoint), run_id)
    shot = shoot(launch) if shoot is not None else None
    if shot is not None:
        shot.start()
    try:
        report = tasks.launch_distributed_train.fn(launch)
    except TrainingFailed as failed:
        report = TrainReport.load(failed.run_dir)
    if shot is not None:
        shot.join()
    return report, shot.hit if shot is not None else "", good


def kill_and_compare(
    spec: TrainingSpec, kills: int, seed: int, launcher: Launcher = lambda plan: plan, say: Any = print
) -> dict[str, Any]:
    """Shoot runs of `spec` until `kills` shots have hit, and compare each with one that was never disturbed."""
    chance = random.Random(seed)
    wanted, _, _ = make_attempt(spec, f"reference-{uuid.uuid4().hex[:8]}", launcher)
    if wanted.state != "completed":
        raise SystemExit(f"the undisturbed run failed: {wanted.cause}")
    longest_s = sum(point.seconds or 0.0 for point in wanted.train) + 1.0
    found: dict[str, Any] = {"kills": 0, "runs": 0, "attempts": 0, "completed": 0, "equal": 0,
                             "most_steps_lost": 0, "broken_loaded": 0, "set_aside": 0, "shots": []}  # fmt: skip
    while found["kills"] < kills:
        run_id, left = (
            f"shot-{uuid.uuid4().hex[:8]}",
            min(chance.randint(1, MOST_KILLS_A_RUN), kills - found["kills"]),
        )
        found["runs"] += 1
        while True:
            shoot = (lambda plan: Shot(plan, chance, longest_s)) if left else None
            report, hit, good = make_attempt(spec, run_id, launcher, shoot)
            found["attempts"] += 1
            found["broken_loaded"] += not good
            found["set_aside"] += len(report.set_aside)
            if report.state == "completed":
                break
            row = report.ledger[-1]
            if not hit or report.failure_class != "rank_killed":
                say(f"run {run_id}: {report.cause}")
                return found | {"unexpected": f"{report.failure_class}: {report.cause}"}
            left -= 1
            found["kills"] += 1
            found["most_steps_lost"] = max(found["most_steps_lost"], row.steps_lost)
            found["shots"].append(
                {"run": run_id, "hit": hit, "from_step": row.from_step, "steps_lost": row.steps_lost}
            )
            say(
                f"{found['kills']}/{kills} {hit}, step {row.last_step}, {row.steps_lost} lost",
                file=sys.stderr,
            )
        found["completed"] += 1
        found["equal"] += same(report, wanted)
        shutil.rmtree(Path(report.run_dir) / "checkpoints", ignore_errors=True)
    return found


def same(one: TrainReport, other: TrainReport) -> bool:
    """Compare the losses and the files of the final models, byte for byte."""
    if [(p.step, p.loss) for p in one.train] != [(p.step, p.loss) for p in other.train]:
        return False
    files = [sorted(Path(str(report.model)).glob("*.safetensors")) for report in (one, other)]
    return bool(files[0]) and [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def passed(found: dict[str, Any]) -> bool:
    """Return whether everything held that the module promises."""
    return (
        "unexpected" not in found
        and found["runs"] == found["completed"] == found["equal"]
        and found["most_steps_lost"] <= SAVE_STEPS
        and found["broken_loaded"] == 0
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--preset", default="zero2")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as folder:
        begun = time.monotonic()
        found = kill_and_compare(make_spec(arguments.preset, Path(folder)), arguments.kills, arguments.seed)
    found = {"preset": arguments.preset, "seed": arguments.seed, "seconds": round(time.monotonic() - begun, 1),
             "save_steps": SAVE_STEPS, "passed": passed(found), **found}  # fmt: skip
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{key:<18} {value}" for key, value in found.items() if key != "shots"))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
