"""Shoot a run at random moments, saves included, and see whether it ends as if nothing had happened.

    python benchmarks/kill_resume.py --kills 50 --preset zero2 [--json] [--preloaded]
    python benchmarks/kill_resume.py --kills 50 --folder DIR --minutes 9     # again and again, until it says passed

A reference run is never disturbed. Then runs of the same spec are shot with SIGKILL, some more than once: a random
rank, a random time after the start of the attempt, or within a save. Each is resumed until it is completed. Exit
code 0 if every run has the reference's losses and final weights bit for bit, no shot cost more steps than one save
interval, and every checkpoint that was resumed verified; 3 if the time was over before all shots were fired.

With `--folder` the runs and the figures are kept there, and another call goes on from them. With `--preloaded` the
ranks are forked from a process that has imported the training stack, not started by torch elastic; a shot then hits
training rather than the imports before it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
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

from benchmarks import preloaded
from soup_flows import tasks
from soup_flows.checkpoints import verify
from soup_flows.demo import build_demo_data, build_demo_model, demo_parameters
from soup_flows.errors import TrainingFailed
from soup_flows.launch.events import tail_events
from soup_flows.launch.plan import LaunchPlan
from soup_flows.manifest import library_versions
from soup_flows.paths import write_json
from soup_flows.report import TrainReport
from soup_flows.resume import Orders, work_hash
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
        self.launch, self.hit, self.begun = launch, "", time.time()
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
            seen |= self._saving()
            time.sleep(0.001)
        time.sleep(self.delay_s)
        pids = self._pids()
        if self._over() or not pids:
            return
        saving = self._saving()
        try:
            os.kill(pids[int(self.victim * len(pids))], signal.SIGKILL)
        except ProcessLookupError:
            return
        self.hit = f"in the save of {saving.pop()}" if saving else "between saves"

    def _saving(self) -> set[str]:
        """Return the checkpoint that is being written; what a shot left behind is older than this attempt."""
        found = set()
        for path in self.launch.paths.checkpoints.glob(".saving/*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ctime > self.begun:
                    found.add(path.name)
        return found

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
    spec: TrainingSpec,
    kills: int,
    seed: int,
    launcher: Launcher = lambda plan: plan,
    *,
    until: float = float("inf"),
    keep: Callable[[dict[str, Any]], object] = dict,
    found: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Shoot runs of `spec` until `kills` shots have hit, and compare each with one that was never disturbed.

    Args:
        spec: what is run.
        kills: shots that have to hit.
        seed: of the shots; run `n` of a seed is shot in the same way in every call.
        launcher: what starts the ranks in another way.
        until: no new run is begun after this time, by `time.monotonic`.
        keep: called with the figures after the reference and after each run.
        found: the figures of an earlier call, to go on from.
    """
    if found is None:
        found = {"seed": seed, "work": work_hash(spec, None), "kills": 0, "runs": 0, "attempts": 0,
                 "completed": 0, "equal": 0, "most_steps_lost": 0, "broken_loaded": 0, "set_aside": 0,
                 "shots": []}  # fmt: skip
        wanted, _, _ = make_attempt(spec, f"reference-{uuid.uuid4().hex[:8]}", launcher)
        if wanted.state != "completed":
            raise SystemExit(f"the undisturbed run failed: {wanted.cause}")
        found["reference"] = wanted.run_dir
        keep(found)
    elif found["work"] != work_hash(spec, None):
        raise SystemExit("the code or the settings changed since the undisturbed run; give another --folder")
    wanted = TrainReport.load(found["reference"])
    while found["kills"] < kills and time.monotonic() < until and "unexpected" not in found:
        chance = random.Random(f"{found['seed']}/{found['runs']}")
        _shoot_one_run(spec, kills - found["kills"], chance, launcher, wanted, found)
        keep(found)
    return found


def _shoot_one_run(
    spec: TrainingSpec,
    most: int,
    chance: random.Random,
    launcher: Launcher,
    wanted: TrainReport,
    found: dict[str, Any],
) -> None:
    """Shoot one run up to `most` times until it is completed, and add what happened to `found`."""
    run_id, left = f"shot-{uuid.uuid4().hex[:8]}", min(chance.randint(1, MOST_KILLS_A_RUN), most)
    longest_s = sum(point.seconds or 0.0 for point in wanted.train) + 1.0
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
            found["unexpected"] = f"{report.run_dir}: {report.failure_class}: {report.cause}"
            return
        left -= 1
        found["kills"] += 1
        found["most_steps_lost"] = max(found["most_steps_lost"], row.steps_lost)
        shot = {"run": run_id, "hit": hit, "from_step": row.from_step, "last_step": row.last_step,
                "steps_lost": row.steps_lost}  # fmt: skip
        found["shots"].append(shot)
        print(f"{found['kills']}: {hit}, step {row.last_step}, {row.steps_lost} lost", file=sys.stderr)
    found["completed"] += 1
    found["equal"] += same(report, wanted)
    shutil.rmtree(Path(report.run_dir) / "checkpoints", ignore_errors=True)


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


def machine() -> dict[str, Any]:
    """Return where and with what the figures were taken."""
    found = {"cpu_cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    return {**found, "versions": library_versions(), "date": time.strftime("%Y-%m-%d", time.gmtime())}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Shoot as asked in `folder`, going on from the figures that it holds, and return them."""
    begun, file = time.monotonic(), folder / f"{arguments.preset}.json"
    before: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    spent = before["seconds"] if before else 0.0

    def keep(found: dict[str, Any]) -> None:
        found["seconds"] = round(spent + time.monotonic() - begun, 1)
        write_json(file, found)

    with contextlib.ExitStack() as stack:
        launcher: Launcher = lambda plan: plan  # noqa: E731
        if arguments.preloaded:
            socket = stack.enter_context(preloaded.zygote())
            launcher = lambda plan: preloaded.forked(plan, socket)  # noqa: E731
        return kill_and_compare(
            make_spec(arguments.preset, folder),
            arguments.kills,
            arguments.seed,
            launcher,
            until=begun + 60 * arguments.minutes,
            keep=keep,
            found=before,
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
    parser.add_argument("--folder", type=Path, help="keep runs and figures here, and go on from them")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no new run after this time"
    )
    parser.add_argument(
        "--preloaded", action="store_true", help="fork the ranks, in place of torch elastic's"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as temporary:
        found = run(arguments, arguments.folder or Path(temporary))
    done = found["kills"] >= arguments.kills or "unexpected" in found
    found = {"preset": arguments.preset, "preloaded": arguments.preloaded, "save_steps": SAVE_STEPS,
             "passed": done and passed(found), **found, **machine()}  # fmt: skip
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{key:<18} {value}" for key, value in found.items() if key != "shots"))
    return (0 if found["passed"] else 1) if done else 3


if __name__ == "__main__":
    sys.exit(main())
