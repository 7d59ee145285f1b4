"""What supervision costs against plain torchrun: time to the first rank's first line, and time per step.

    python benchmarks/launch_overhead.py [--pairs 5] [--steps 200] [--json]

Both start the same program on two CPU ranks, in turn, in one run of this script, so that a loaded machine
slows both. The program prints a line first, then makes steps that compute for a while and meet in a
collective. Under supervision each step also beats and writes an event, as the rank program does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from soup_flows.launch.plan import PACKAGE_ROOT, build_launch_plan, elastic_argv
from soup_flows.launch.run import run
from soup_flows.paths import RunPaths

RANKS = 2
PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
out, steps = sys.argv[1], int(sys.argv[2])
from soup_flows.launch import rank
supervised = rank.attach()
me = rank.rank_number()
print("first line", flush=True)
first = time.time()
import json, pathlib, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
events = rank.EventWriter(rank.attempt_dir() / "events.jsonl", me) if supervised else None
a, flag = torch.randn(384, 384), torch.zeros(1)
dist.barrier()
times = []
for step in range(1, steps + 1):
    begun = time.perf_counter()
    for _ in range(12):
        a = torch.tanh(a @ a)
    dist.all_reduce(flag)
    print(f"step {{step}}/{{steps}} loss 1.234", flush=True)
    if supervised:
        rank.heartbeat(step)
        events.write("step", step=step, seconds=times[-1] if times else 0.0)
    times.append(time.perf_counter() - begun)
dist.destroy_process_group()
if me == 0:
    pathlib.Path(out).write_text(json.dumps({{"first": first, "times": times[steps // 10:]}}))
"""


def plain(program: Path, out: Path, steps: int) -> dict[str, float]:
    """Run the program under torchrun alone."""
    argv = elastic_argv(f"plain-{uuid4().hex[:8]}", RANKS, 20.0, str(program), str(out), str(steps))
    begun = time.time()
    with (out.parent / "plain.log").open("ab") as log:
        subprocess.run(argv, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return measured(out, begun)


def supervised(program: Path, out: Path, steps: int) -> dict[str, float]:
    """Run the program as an attempt, with its lines and events passed on."""
    run_id = f"bench-{uuid4().hex[:8]}"
    paths = RunPaths.of(out.parent, run_id).create()
    plan = build_launch_plan(
        paths=paths,
        run_id=run_id,
        attempt=1,
        nproc_per_node=RANKS,
        device="cpu",
        config_path=None,
        omp_num_threads=1,
        stop_budget_s=20.0,
        timeout_s=None,
    )
    plan = plan.model_copy(
        update={"argv": elastic_argv(run_id, RANKS, 20.0, str(program), str(out), str(steps))}
    )
    begun = time.time()
    outcome = run(plan, on_lines=lambda _: None, on_events=lambda _: None)
    assert outcome.exit_code == 0, outcome
    return measured(out, begun)


def measured(out: Path, begun: float) -> dict[str, float]:
    """Return seconds from the start to the first line, and the step in seconds.

    The step is the 10th percentile: on a machine that others use too, the undisturbed steps are compared.
    """
    value = json.loads(out.read_text())
    out.unlink()
    return {"start_s": value["first"] - begun, "step_s": statistics.quantiles(value["times"], n=10)[0]}


def main() -> None:
    """Run the pairs and print what supervision adds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary:
        program, out = Path(temporary) / "program.py", Path(temporary) / "out.json"
        program.write_text(PROGRAM.format(root=PACKAGE_ROOT))
        for pair in range(arguments.pairs):
            order = (plain, supervised) if pair % 2 == 0 else (supervised, plain)
            row = {kind.__name__: kind(program, out, arguments.steps) for kind in order}
            rows.append(row)
    found = {
        "added_start_s": statistics.median(r["supervised"]["start_s"] - r["plain"]["start_s"] for r in rows),
        "added_start_best_s": best(rows, "supervised", "start_s") - best(rows, "plain", "start_s"),
        "added_step_share": statistics.median(
            r["supervised"]["step_s"] / r["plain"]["step_s"] - 1 for r in rows
        ),
        "added_step_best_share": best(rows, "supervised", "step_s") / best(rows, "plain", "step_s") - 1,
    }
    if arguments.json:
        print(json.dumps({**found, "pairs": rows}, indent=2))
    else:
        print("first line: {added_start_s:+.2f} s (best of each {added_start_best_s:+.2f} s)".format(**found))
        print("step: {added_step_share:+.2%} (best of each {added_step_best_share:+.2%})".format(**found))


def best(rows: list[dict[str, Any]], kind: str, name: str) -> float:
    """Return the smallest value, which other load on the machine has disturbed least."""
    return min(float(row[kind][name]) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
