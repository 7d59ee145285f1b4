"""Repeat drills at random moments and count how often nothing was left.

    python benchmarks/drill_repeats.py [--repeats 20] [--seed 0] [--json] [kill_flow kill_worker cancel]

The moment is drawn between the start of the flow run and some seconds after its ranks began to train, so that
start-up, loading and training are all hit. `kill_worker` here is the worker's death under a run that has its
output streamed (Prefect's default): the flow dies at its next line.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from soup_flows.drill import Watch, parameters
from soup_flows.drill.server import Site
from soup_flows.flows import soup_train
from soup_flows.launch import proc
from soup_flows.paths import RunPaths

NAMES = ("kill_flow", "kill_worker", "cancel")
LATEST_S = 30.0
"""Latest moment after the first process of the run was seen."""


def once(site: Site, name: str, folder: Path, moment_s: float) -> dict[str, Any]:
    """Run `name` once, with the blow `moment_s` seconds after the run's supervisor was first seen."""
    values = parameters("cancel", folder)
    run_id = site.submit(soup_train, values, stream_output=True)
    watch = Watch(RunPaths.of(folder, str(run_id)), lambda: True)
    while not proc.marked(str(run_id)):
        time.sleep(0.05)
    time.sleep(moment_s)
    begun = time.time()
    (supervisor,) = proc.marked(str(run_id), proc.SUPERVISOR_MARKER) or (0,)
    flow = proc.parent_of(supervisor) if supervisor else None
    if name == "cancel":
        site.cancel(run_id)
    elif name == "kill_worker":
        assert site.worker is not None
        site.worker.kill()
        site.worker.wait()
        site.start_worker()
    elif flow is not None:
        proc.send([flow], signal.SIGKILL)
    with watch.until_clean(limit_s=60):
        pass
    seconds = None if watch.clean is None else round(watch.clean - begun, 2)
    return {"drill": name, "moment_s": round(moment_s, 2), "step": watch.step, "seconds_to_clean": seconds}


def main() -> int:
    """Run the repeats; the exit code is 1 unless every one of them was clean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(NAMES), choices=[*NAMES, []], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    moments, rows = random.Random(arguments.seed), []
    with TemporaryDirectory() as temporary, Site.start() as site:
        for name in arguments.names:
            for _ in range(arguments.repeats):
                rows.append(once(site, name, Path(temporary), moments.uniform(0, LATEST_S)))
                if not arguments.json:
                    print(rows[-1], flush=True)
    clean = {name: sum(r["drill"] == name and r["seconds_to_clean"] is not None for r in rows)
             for name in arguments.names}  # fmt: skip
    if arguments.json:
        print(json.dumps({"repeats": arguments.repeats, "clean": clean, "runs": rows}, indent=2))
    else:
        print("clean:", ", ".join(f"{name} {count}/{arguments.repeats}" for name, count in clean.items()))
    return 0 if all(count == arguments.repeats for count in clean.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
