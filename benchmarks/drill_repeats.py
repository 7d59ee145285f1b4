"""Repeat drills at random moments and count how often nothing was left.

    python benchmarks/drill_repeats.py [--repeats 20] [--ranks elastic] [--at-once 1] [--rows FILE] [NAME ...]

Each is a flow run on a process worker, all against one Prefect server. The moment is drawn between the first
process of the run's launch and some seconds after its ranks began to step, so that start-up, loading and
stepping are all hit. `--ranks` says what is launched: ranks that really `train`, ones that only pretend to under
torch `elastic`, or under a `light` launcher of ten lines; the last two try the flow, the supervisor and the
clean-up. `kill_worker` kills the worker under runs that have their output streamed to it (Prefect's default), and
then cancels them, with no worker left to do it. It strikes when all runs that are tried at once have been launched.

A repeat is clean when no process that carries the run's marker, no temporary file and no lease is left. Runs that
are tried at once take no lease. With `--rows` the repeats are appended to FILE (JSON lines) and the counts are over
all that are in it.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

from soup_flows.drill import Watch, parameters
from soup_flows.drill.rehearsal import rehearsal
from soup_flows.drill.server import Site, wait_for
from soup_flows.flows import soup_train
from soup_flows.launch import proc
from soup_flows.launch.devices import core_slots
from soup_flows.launch.leases import LEASE_DIR, holder
from soup_flows.paths import RunPaths

NAMES = ("kill_flow", "kill_worker", "cancel")
LATEST_S = {"train": 30.0, "elastic": 12.0, "light": 5.0}
"""Latest moment after the first process of the run was seen, by what is launched."""
LIMIT_S = 60.0
"""Longest wait for a clean end."""
START_S = 240.0
"""Longest wait for a launch."""


def together(site: Site, name: str, folder: Path, moments: list[float], ranks: str) -> list[dict[str, Any]]:
    """Run `name` as often as there are `moments`, at once: seconds from a run's first process to its blow."""
    values = parameters("cancel", folder)
    flow: Any = soup_train
    if ranks != "train":
        values = {"values": values, "output_dir": str(folder), "elastic": ranks == "elastic"}
        values |= {"lease": len(moments) == 1}
        flow = rehearsal
    run_ids = [site.submit(flow, values, stream_output=True) for _ in moments]
    with ThreadPoolExecutor(len(moments)) as pool:
        contexts = [contextvars.copy_context() for _ in moments]  # hold the address of the server
        ready = threading.Barrier(len(moments) if name == "kill_worker" else 1)
        futures = [
            pool.submit(context.run, once, site, name, folder, run_id, moment, ready)
            for context, run_id, moment in zip(contexts, run_ids, moments, strict=True)
        ]
        rows = [future.result() | {"ranks": ranks} for future in futures]
    site.start_worker()
    return rows


def once(
    site: Site, name: str, folder: Path, run_id: UUID, moment_s: float, ready: threading.Barrier
) -> dict[str, Any]:
    """Strike one run `moment_s` seconds after its first process was seen, and wait until nothing is left."""
    watch = Watch(RunPaths.of(folder, str(run_id)), lambda: True)
    try:
        wait_for(lambda: proc.marked(str(run_id)) or site.state(run_id).is_final(), START_S, "the launch")
    except TimeoutError:
        return {"drill": name, "clean": None, "why": f"not launched: {site.state(run_id).name}"}
    ready.wait(START_S)
    time.sleep(moment_s)
    step = watch.poll()
    begun = time.time()
    supervisor = min(proc.marked(str(run_id), proc.SUPERVISOR_MARKER), default=0)
    if name == "cancel":
        site.cancel(run_id)
    elif name == "kill_worker":
        assert site.worker is not None
        site.worker.kill()
        site.worker.wait()
        site.cancel(run_id)
    elif supervisor and (flow_process := proc.parent_of(supervisor)) is not None:
        proc.send([flow_process], signal.SIGKILL)
    with watch.until_clean(LIMIT_S):
        pass
    seconds = None if watch.clean is None else round(watch.clean - begun, 2)
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not watch.leftovers() and not held(str(run_id)), LIMIT_S, "files and leases to go")
    left = [*watch.leftovers(), *held(str(run_id))]
    found = {"drill": name, "moment_s": round(moment_s, 2), "step": step, "seconds_to_clean": seconds}
    return found | {"left": left, "clean": seconds is not None and not watch.survivors and not left}


def held(run_id: str) -> list[str]:
    """Return the leases that the run holds."""
    folder = Path(os.environ[LEASE_DIR])
    if not folder.exists():
        return []
    names = [device.id for device in core_slots()]
    return [name for name in names if (found := holder(folder, name)) and found.get("run_id") == run_id]


def repeats(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for every repeat."""
    draw = random.Random(arguments.seed)
    with Site.start() as site:
        for first in range(0, arguments.repeats, arguments.at_once):
            number = min(arguments.at_once, arguments.repeats - first)
            for name in arguments.names:
                moments = [draw.uniform(0, LATEST_S[arguments.ranks]) for _ in range(number)]
                if name == "kill_worker":  # one worker, so one moment; the runs are of different age then
                    moments = moments[:1] * number
                yield from together(site, name, folder, moments, arguments.ranks)


def counts(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return clean repeats of all that were launched, by drill."""
    tried = [row for row in rows if row["clean"] is not None]
    names = dict.fromkeys(row["drill"] for row in tried)
    return {
        name: f"{sum(r['clean'] for r in tried if r['drill'] == name)} of "
        f"{sum(r['drill'] == name for r in tried)}"
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
    parser.add_argument("--ranks", choices=list(LATEST_S), default="elastic")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs that are tried at once")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append the repeats to FILE, JSON lines")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    rows = []
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        os.environ[LEASE_DIR] = f"{temporary}/leases"
        for row in repeats(arguments, Path(temporary)):
            rows.append(row)
            if arguments.rows is not None:
                with arguments.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            if not arguments.json:
                print(row, flush=True)
    if arguments.rows is not None:
        rows = [json.loads(line) for line in arguments.rows.read_text(encoding="utf-8").splitlines()]
    if arguments.json:
        print(json.dumps({"clean": counts(rows), "runs": rows}, indent=2))
    else:
        print("clean:", ", ".join(f"{name} {count}" for name, count in counts(rows).items()))
    return 0 if all(row["clean"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
