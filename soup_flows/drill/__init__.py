"""Fault drills: a tiny real run suffers, and what is left and what is reported is checked from outside."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from soup_flows.demo import build_demo_data, demo_parameters
from soup_flows.diagnose import Diagnosis, diagnose
from soup_flows.drill.cases import DRILLS, QUICK_TIMEOUT_MIN, settings
from soup_flows.errors import nearest, refuse
from soup_flows.json_text import parse_json
from soup_flows.launch import proc
from soup_flows.launch.events import read_events, tail_events
from soup_flows.launch.receipt import read_receipt_file
from soup_flows.paths import RunPaths, write_json
from soup_flows.user_file import expanded

LIMIT_S = 420.0
"""Longest drill; it is ended after that and has failed."""
CLEAN_S = 20.0
"""Seconds from the cause within which nothing may be left."""
STALL_ALLOWANCE_S = 12.0
"""What a stall may take beyond `CLEAN_S`: its threshold, and the time to write the stacks."""


class DrillResult(BaseModel):
    """What a drill found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drill: str
    expected_class: str
    found_class: str | None
    """Failure class, or `completed`; None if the run left nothing to tell it from."""
    survivors: int
    """Processes of the run that were left."""
    seconds_to_clean: float | None
    """From the cause until no process of the run was left; None if that never came."""
    steps_lost: int
    """Optimizer steps that were made and are in no saved model or checkpoint."""
    leftovers: tuple[str, ...] = ()
    """Temporary files that should be gone, and leases that are still held."""
    notes: tuple[str, ...] = ()
    run_dir: str
    passed: bool


def drill(name: str, output_dir: str | Path = "drill-output", *, quick: bool = False) -> DrillResult:
    """Run a drill to its end and say what was found.

    Args:
        name: one of `DRILLS`.
        output_dir: the demo's model, data and the drill's run go there.
        quick: let the ranks only pretend to train, where the drill is about processes alone.

    Raises:
        Refused: for an unknown name, or `quick` where it says nothing.
    """
    (result,) = drills([name], output_dir, quick=quick)
    return result


def drills(
    names: Sequence[str], output_dir: str | Path = "drill-output", *, quick: bool = False
) -> Iterator[DrillResult]:
    """Run drills one after another, those that need a Prefect server with one server; see `drill`."""
    for name in names:
        _check_name(name, quick)
    folder = expanded(output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        site: Any = None
        for name in names:
            if not DRILLS[name].server:
                yield _drill_process(name, folder, quick)
                continue
            if site is None:
                from soup_flows.drill.server import Site

                site = stack.enter_context(Site.start())
            yield site.drill(name, folder)


def _check_name(name: str, quick: bool) -> None:
    case = DRILLS.get(name)
    if case is None:
        fix = f"{nearest(name, DRILLS)} Drills: {', '.join(DRILLS)}".strip()
        raise refuse("DRILL001", "drill", f"there is no {name!r}", fix)
    if quick and not case.quick:
        quick_ones = ", ".join(key for key, value in DRILLS.items() if value.quick)
        raise refuse(
            "DRILL002", "quick", f"{name} needs ranks that really train", f"quick ones: {quick_ones}"
        )


def parameters(name: str, folder: Path) -> dict[str, Any]:
    """Return the flow's parameters for a drill's run."""
    values = demo_parameters("ddp", folder)
    values["training"] = {"learning_rate": 2e-3, "global_batch_size": 4, "max_steps": DRILLS[name].steps}
    values["data"] = {"max_length": 128}
    values["launcher"] = settings(name)
    if name == "bad_row":
        values["dataset"] = str(_with_bad_row(folder))
    return values


def _with_bad_row(folder: Path) -> Path:
    """Copy some rows of the demo's data with a broken one among them."""
    train_path, _ = build_demo_data(folder / "demo")
    lines = train_path.read_text(encoding="utf-8").splitlines()[:64]
    lines.insert(7, '{"messages": [{"role": "user", "content": 17}, {"role"')
    path = folder / "drill-bad-row.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _drill_process(name: str, folder: Path, quick: bool) -> DrillResult:
    """Run a drill in a flow process of its own, and watch it from here."""
    run_id = f"drill-{name.replace('_', '-')}-{uuid4().hex[:8]}"
    values = parameters(name, folder)
    if quick and name == "timeout":
        values["launcher"]["timeout_min"] = QUICK_TIMEOUT_MIN
    small_disk = name == "disk_full" and bool(_namespace())
    request = {"run_id": run_id, "values": values, "quick": quick, "small_disk": small_disk}
    path = write_json(folder / f"{run_id}.json", request)
    with (folder / f"{run_id}.log").open("wb") as log:
        argv = [sys.executable, "-m", "soup_flows.drill.flow_process", str(path)]
        flow = subprocess.Popen(
            [*_namespace(), *argv] if small_disk else argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        watch = Watch(RunPaths.of(folder, run_id), flow.poll)
        with watch.until_clean():
            pass
    path.unlink()
    return watch.result(name, () if small_disk or name != "disk_full" else ("used /dev/full: no tmpfs here",))


def _namespace() -> list[str]:
    """Return the command that starts another in a mount namespace of its own; empty where that is refused."""
    for argv in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as folder:
            mount = ["mount", "-t", "tmpfs", "tmpfs", folder]
            if subprocess.run([*argv, *mount], capture_output=True, check=False).returncode == 0:
                return argv
    return []


class Watch:
    """Follows a drill's run by its folder and by its marker in `/proc`.

    Args:
        paths: the run's files; its folder's name is the marker.
        ended: says whether the flow process has ended, by anything but None.
    """

    def __init__(self, paths: RunPaths, ended: Callable[[], Any]) -> None:
        self.paths, self._ended = paths, ended
        self.attempt = paths.attempt(1)
        self.cause: float | None = None
        self.clean: float | None = None
        self.survivors: list[int] = []
        self.step = 0
        self._events = tail_events(self.attempt.events)

    def poll(self) -> int:
        """Read the new events for when the cause was, and return the last step that any rank made."""
        while events := self._events.poll():
            for event in events:
                if event["kind"] in ("step", "metrics"):
                    self.step = max(self.step, event["step"])
                elif event["kind"] == "drill" and self.cause is None:
                    self.cause = event["time"]
        return self.step

    @contextlib.contextmanager
    def until_clean(self, limit_s: float = LIMIT_S) -> Iterator[None]:
        """After the body wait until the flow has ended and nothing of the run is left; end what is left then."""
        try:
            yield
            end = time.monotonic() + limit_s
            while time.monotonic() < end:
                self.poll()
                if proc.marked(self.paths.root.name):
                    self.clean = None
                elif self.clean is None:
                    self.clean = time.time()
                if self.clean is not None and self._ended() is not None:
                    break
                time.sleep(0.05 if self.clean is None else 0.3)
        finally:
            self.survivors = proc.marked(self.paths.root.name)
            proc.send(self.survivors, signal.SIGKILL)
            self.poll()

    def result(self, name: str, notes: tuple[str, ...] = (), agreed: bool = True) -> DrillResult:
        """Judge; `agreed` is whether everything else (the server's state) was as it should be."""
        case = DRILLS[name]
        found_class, diagnosis = self._found()
        receipt = read_receipt_file(self.attempt.receipt)
        cause = self.cause
        if case.expected_class in ("completed", "timeout"):
            cause = (
                receipt.get("stop_time") or cause
            )  # what counts is the end: the run was to go on until then
        seconds = None if self.clean is None or cause is None else round(max(0.0, self.clean - cause), 2)
        leftovers = self.leftovers()
        allowed = CLEAN_S + (STALL_ALLOWANCE_S if case.expected_class == "stalled" else 0)
        return DrillResult(
            drill=name,
            expected_class=case.expected_class,
            found_class=found_class,
            survivors=len(self.survivors),
            seconds_to_clean=seconds,
            steps_lost=self._steps_lost(diagnosis),
            leftovers=leftovers,
            notes=notes + self._notes(name, diagnosis),
            run_dir=str(self.paths.root),
            passed=agreed
            and found_class == case.expected_class
            and not self.survivors
            and not leftovers
            and seconds is not None
            and seconds <= allowed,
        )

    def _found(self) -> tuple[str | None, Diagnosis | None]:
        try:
            found = diagnose(self.paths.root)
        except FileNotFoundError:
            return None, None
        return ("completed" if found.state == "completed" else found.failure_class), found

    def _notes(self, name: str, diagnosis: Diagnosis | None) -> tuple[str, ...]:
        notes = [] if diagnosis is None or not diagnosis.cause else [diagnosis.cause]
        if name == "bad_row":
            dropped = parse_json(self.paths.data.read_text())["train"]["report"]["dropped"]
            notes.append(f"rows left out: {json.dumps(dropped)[:500]}")
        return tuple(notes)

    def _steps_lost(self, diagnosis: Diagnosis | None) -> int:
        saved = 0
        for event in read_events(self.attempt.events):
            if event["kind"] == "finished" or event["kind"].startswith("checkpoint"):
                saved = max(saved, int(event.get("step") or 0))
        return 0 if diagnosis is None or diagnosis.state == "completed" else max(0, self.step - saved)

    def leftovers(self) -> tuple[str, ...]:
        """Return the temporary files of the run that are still there."""
        run_id = self.paths.root.name
        found = [*self.paths.temp.glob("*"), *Path(tempfile.gettempdir()).glob(f"soup-flows-{run_id}@*")]
        return tuple(map(str, found))


def drill_text(result: DrillResult) -> str:
    """Return the result for a terminal."""
    rows = {
        "expected class": result.expected_class,
        "found class": result.found_class,
        "survivors": result.survivors,
        "seconds to clean": result.seconds_to_clean,
        "steps lost": result.steps_lost,
        **({"left over": ", ".join(result.leftovers)} if result.leftovers else {}),
        **({"notes": "; ".join(result.notes)} if result.notes else {}),
        "run": result.run_dir,
    }
    head = f"Drill {result.drill}: {'passed' if result.passed else 'FAILED'}"
    return "\n".join([head, *(f"  {name:<17} {value}" for name, value in rows.items())])
