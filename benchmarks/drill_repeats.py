"""Repeat drills at random moments and count how often nothing was left.

    python benchmarks/drill_repeats.py [--repeats 20] [--seed 0] [--train] [--rows FILE] [kill_flow cancel ...]

Each is a flow run on a process worker, all against one Prefect server. The moment is drawn between the first
process of the run's launch and some seconds after its ranks began to step, so that start-up, loading and
stepping are all hit. The ranks only pretend to train unless `--train` is given: what is tried is the flow, the
supervisor, torch elastic and the clean-up. `kill_worker` here is the worker's death under a run that has its
output streamed (Prefect's default): the flow dies at its next line.

A repeat is clean when no process that carries the run's marker, no temporary file and no lease is left.
With `--rows` the repeats are appended to FILE (JSON lines) and the counts are over all that are in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from soup_flows.drill import Watch, parameters
from soup_flows.drill.rehearsal import rehearsal
from soup_flows.drill.server import Site, wait_for
from soup_flows.flows import soup_train
from soup_flows.launch import proc
from soup_flows.launch.devices import core_slots
from soup_flows.launch.leases import LEASE_DIR, holder
from soup_flows.paths import RunPaths

NAMES = ("kill_flow", "kill_worker", "cancel")
LATEST_S = {True: 30.0, False: 12.0}
"""Latest moment after the first process of the run was seen, by whether the ranks really train."""
LIMIT_S = 60.0
"""Longest wait for a clean end."""


def once(site: Site, name: str, folder: Path, moment_s: float, train: bool) -> dict[str, Any]:
    """Run `name` once, with the blow `moment_s` seconds after the run's first process was seen."""
    values = parameters("cancel", folder)
    flow, given = (
        (soup_train, values) if train else (rehearsal, {"values": values, "output_dir": str(folder)})
    )
    run_id = site.submit(flow, given, stream_output=True)
    watch = Watch(RunPaths.of(folder, str(run_id)), lambda: True)
    while not proc.marked(str(run_id)):
        if (state := site.state(run_id)).is_final():
            raise RuntimeError(f"the run ended before it was launched: {state.name} {state.message}")
        time.sleep(0.05)
    time.sleep(moment_s)
    step = watch.poll()
    begun = time.time()
    (supervisor,) = proc.marked(str(run_id), proc.SUPERVISOR_MARKER) or (0,)
    if name == "cancel":
        site.cancel(run_id)
    elif name == "kill_worker":
        assert site.worker is not None
        site.worker.kill()
        site.worker.wait()
    elif supervisor and (flow_process := proc.parent_of(supervisor)) is not None:
        proc.send([flow_process], signal.SIGKILL)
    with watch.until_clean(LIMIT_S):
        pass
    seconds = None if watch.clean is None else round(watch.clean - begun, 2)
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not watch.leftovers() and not held(str(run_id)), LIMIT_S, "files and leases to go")
    left = [*watch.leftovers(), *held(str(run_id))]
    clean = seconds is not None and not watch.survivors and not left
    return {
        "drill": name,
        "moment_s": round(moment_s, 2),
        "step": step,
        "seconds_to_clean": seconds,
        "left": left,
        "clean": clean,
    }


def held(run_id: str) -> list[str]:
    """Return the leases that the run holds."""
    folder = Path(os.environ[LEASE_DIR])
    names = [device.id for device in core_slots()]
    return [name for name in names if (found := holder(folder, name)) and found.get("run_id") == run_id]


def counts(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return clean repeats of all repeats, by drill."""
    names = dict.fromkeys(row["drill"] for row in rows)
    return {
        name: f"{sum(r['clean'] for r in rows if r['drill'] == name)} of {sum(r['drill'] == name for r in rows)}"
        for name in names
    }


def main() -> int:
    """Run the repeats; the exit code is 1 unless every one of them was clean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help="let the ranks really train")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append the repeats to FILE, JSON lines")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    moments, rows = random.Random(arguments.seed), []
    with TemporaryDirectory() as temporary:
        os.environ[LEASE_DIR] = f"{temporary}/leases"
        with Site.start() as site:
            for _ in range(arguments.repeats):
                for name in arguments.names:
                    moment_s = moments.uniform(0, LATEST_S[arguments.train])
                    rows.append(once(site, name, Path(temporary), moment_s, arguments.train))
                    if arguments.rows is not None:
                        with arguments.rows.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
                    if not arguments.json:
                        print(rows[-1], flush=True)
    if arguments.rows is not None:
        rows = [json.loads(line) for line in arguments.rows.read_text(encoding="utf-8").splitlines()]
    if arguments.json:
        print(json.dumps({"clean": counts(rows), "runs": rows}, indent=2))
    else:
        print("clean:", ", ".join(f"{name} {count}" for name, count in counts(rows).items()))
    return 0 if all(row["clean"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
