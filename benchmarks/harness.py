"""What all benchmarks share: the machine, the versions, commands run in turn, results as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from soup_flows.paths import write_atomic

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HOOK = ROOT / "benchmarks" / "hook"
LIMIT_S = 1800.0
"""Longest time that one run of a benchmark may take."""
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets", "prefect")

Row = dict[str, Any]


class Result(BaseModel):
    """One benchmark's results, as they are kept below `benchmarks/results/`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of the benchmark, and of the file."""
    date: str
    """Day of the last row, UTC."""
    commit: str
    """Commit of this repository that was measured last; `+` when files were changed."""
    machine: dict[str, Any]
    """Processor, usable cores, memory, kernel, Python, accelerator."""
    versions: dict[str, str]
    """Versions of what was measured, by package; a peer's as `peer: package`."""
    commands: tuple[str, ...]
    """What was called, in the order of the rows."""
    rows: tuple[Row, ...]
    """Every single run."""

    @property
    def path(self) -> Path:
        """The file of this result."""
        return RESULTS / f"{self.name}.json"


def machine() -> dict[str, Any]:
    """Describe this machine without naming it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "accelerator": _accelerator(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _accelerator() -> str:
    try:
        argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return ", ".join(
            subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
        )
    except (OSError, subprocess.CalledProcessError):
        return "none"


def commit() -> str:
    """Return the short commit of this repository, with `+` where files differ from it; empty outside of one."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "soup_flows")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def versions() -> dict[str, str]:
    """Return the versions of the packages of this environment that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load(name: str) -> Result | None:
    """Read a kept result, None when there is none."""
    path = RESULTS / f"{name}.json"
    return Result.model_validate_json(path.read_bytes()) if path.exists() else None


def keep(name: str, rows: Iterable[Row], *, add: bool, more_versions: dict[str, str] | None = None) -> Result:
    """Show every row as soon as it is there, and write it to the result `name`.

    Args:
        name: of the benchmark.
        rows: one for every run; the next run is made when the row of the last one has been written.
        add: keep the rows that are there too, if they are from this machine and these versions.
        more_versions: of peers.

    Raises:
        ValueError: if rows of another machine or of other versions are to be added to.
    """
    before = load(name) if add else None
    here, of = machine(), versions() | (more_versions or {})
    command = shown(sys.argv[1:])
    if before is not None:
        if before.machine != here:
            raise ValueError(f"{before.path} is from another machine: {before.machine}; leave --add out")
        if clash := {k: v for k, v in of.items() if before.versions.get(k, v) != v}:
            raise ValueError(f"{before.path} is from other versions of {', '.join(clash)}; leave --add out")
        of = before.versions | of
    result = Result(
        name=name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit(),
        machine=here,
        versions=of,
        commands=(*(before.commands if before else ()), command),
        rows=before.rows if before else (),
    )
    for row in rows:
        print(json.dumps(row), flush=True)
        result = result.model_copy(update={"rows": (*result.rows, row)})
        write_atomic(result.path, result.model_dump_json(indent=1) + "\n", mode=0o644)
    return result


def largest(result: Result) -> list[Row]:
    """Return the runs on the largest data set; smaller ones in the same file were trials."""
    most = max((row["rows"] for row in result.rows), default=0)
    return [row for row in result.rows if row["rows"] == most]


def shown(argv: Sequence[str]) -> str:
    """Return the command without the places of this machine."""
    before = ["", *argv]
    words = [
        "DIR" if last in ("--peers", "--work") else word for last, word in zip(before, argv, strict=False)
    ]
    return " ".join(["python -m benchmarks", *words])


def quiet_environment() -> dict[str, str]:
    """Return the environment that every run gets: one thread a rank, nothing from the network, no GPU."""
    given = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "WANDB_DISABLED": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "PYTHONUNBUFFERED": "1",
    }
    return os.environ | given


def timed(argv: Sequence[str], folder: Path, environment: dict[str, str]) -> Row:
    """Run a command to its end in `folder`, its output in `log`.

    Returns:
        `exit_code`, `wall_s`, `cpu_s` (user and system time of it and all its descendants that it waited for),
        `load` (the machine's load average before), `begun` (Unix seconds).
    """
    before, begun, clock = os.times(), time.time(), time.monotonic()
    load_before = os.getloadavg()[0]
    with (folder / "log").open("wb") as log:
        try:
            done = subprocess.run(
                argv, cwd=folder, env=environment, stdout=log, stderr=log, timeout=LIMIT_S, check=False
            )
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "exit_code": code,
        "wall_s": round(time.monotonic() - clock, 2),
        "cpu_s": round(cpu, 2),
        "load": round(load_before, 2),
        "begun": begun,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the smallest value, the median and the largest."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def exponent(work: Sequence[float], cost: Sequence[float]) -> float:
    """Return b of `cost = a * work ** b`, fitted by least squares of the logarithms; 1 is linear.

    Raises:
        ValueError: for fewer than two different amounts of work, or figures that are not positive.
    """
    if len(set(work)) < 2 or min(*work, *cost) <= 0:
        raise ValueError("an exponent needs two different amounts of work and positive figures")
    x, y = ([math.log(v) for v in values] for values in (work, cost))
    return statistics.linear_regression(x, y).slope
