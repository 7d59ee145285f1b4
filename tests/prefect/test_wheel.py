"""The wheel alone in an empty folder: the commands of docs/gpu-box.md in their order, as a newcomer types them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from soup_flows.drill.server import wait_for
from soup_flows.launch import proc

pytestmark = [pytest.mark.server, pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(3000)]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu-box.md"
GENEROUS_S = 900
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def commands() -> dict[str, list[str]]:
    """Return the page's commands by the number of their section."""
    parts = re.split(r"^## (\d)\. ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
        found[number] = [line.split(" #")[0].strip() for line in lines if line]
    return found


def ordered(value: Any) -> Any:
    """Return a JSON value with its lists of words sorted: the server keeps tags and kinds of events as sets."""
    if isinstance(value, dict):
        return {key: ordered(item) for key, item in value.items()}
    if isinstance(value, list):
        items = [ordered(item) for item in value]
        return sorted(items) if all(isinstance(item, str) for item in items) else items
    return value


class Box:
    """A machine's user: an own home, PATH with the wheel's environment first, and terminals."""

    def __init__(self, home: Path, bin_folder: Path, more: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "PYTHON", "VIRTUAL_ENV"))
        }
        self.home = home
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = kept | more | {
            "HOME": str(home),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "PREFECT_SERVER_API_PORT": self.port,
            "PREFECT_UI_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }  # fmt: skip
        self.started: list[subprocess.Popen[bytes]] = []

    def typed(self, command: str) -> str:
        """Return a command of the page as it is typed here: the port, and the names of the model and the rows."""
        made = next(iter(self.home.glob("runs/demo-output/**/tiny-llama")), Path("/models/llama"))
        rows = next(iter(self.home.glob("runs/demo-output/**/demo-train.jsonl")), Path("/data/rows.jsonl"))
        for page, here in (
            ("4200", self.port),
            ("/models/llama", str(made)),
            ("/data/rows.jsonl", str(rows)),
        ):
            command = command.replace(page, here)
        return command

    def run(self, command: str, codes: tuple[int, ...] = (0,)) -> str:
        """Type a command and return what it prints."""
        done = subprocess.run(
            ["bash", "-c", self.typed(command)], env=self.env, cwd=self.home, capture_output=True, text=True,
            timeout=GENEROUS_S, check=False,
        )  # fmt: skip
        assert done.returncode in codes, f"{command}\n{done.stdout}\n{done.stderr}\n{self.log()}"
        return done.stdout

    def start(self, command: str) -> None:
        """Type a command in a terminal of its own."""
        with (self.home / "terminal.log").open("ab") as log:
            argv = ["bash", "-c", self.typed(command)]
            self.started.append(subprocess.Popen(
                argv, env=self.env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            ))  # fmt: skip

    def log(self) -> str:
        file = self.home / "terminal.log"
        return file.read_text(errors="replace")[-6000:] if file.exists() else ""

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def answers(self) -> bool:
        try:
            self.ask("/health")
        except OSError:
            return False
        return True

    def kept(self) -> dict[str, Any]:
        """Return what `deploy` makes, as the server has it."""
        names = {
            "deployments": (
                "name",
                "entrypoint",
                "parameters",
                "job_variables",
                "pull_steps",
                "path",
                "tags",
            ),
            "automations": ("name", "enabled", "trigger", "actions"),
            "work_pools": ("name", "type", "base_job_template", "concurrency_limit"),
            "block_documents": ("name", "data"),
            "block_types": ("slug",),
        }
        found: dict[str, Any] = {}
        for kind, fields in names.items():
            # Prefect creates a deployment without pull steps with an empty list, and updates it with none.
            rows = [
                {field: row.get(field) or None for field in fields} for row in self.ask(f"/{kind}/filter", {})
            ]
            for row in rows:
                (row.get("trigger") or {}).pop("id", None)  # new with every update
            found[kind] = sorted(map(ordered, rows), key=lambda row: json.dumps(row, sort_keys=True))
        return found

    def state(self, run_id: str) -> str:
        return str(self.ask(f"/flow_runs/{run_id}")["state_name"])

    def end(self) -> None:
        for process in self.started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment with the wheel; what it depends on is that of this environment."""
    pytest.importorskip("hatchling", reason="built without isolation, so that no network is needed")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    place = folder / "env"
    venv.create(place)
    (site,) = (place / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (site / "others.pth").write_text("\n".join(others))
    argv = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    subprocess.run([*argv, "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True)
    (entry,) = (e for e in distribution("prefect").entry_points if e.name == "prefect")
    script = place / "bin" / "prefect"
    module, name = entry.value.split(":")
    script.write_text(f"#!{place}/bin/python\nimport sys\nfrom {module} import {name}\nsys.exit({name}())\n")
    script.chmod(0o755)
    return place / "bin"


@pytest.fixture
def box(installed: Path, tmp_path: Path, new_database: Callable[[], dict[str, str]]) -> Iterator[Box]:
    box = Box(tmp_path, installed, new_database())
    try:
        yield box
    finally:
        box.end()


def test_the_page_from_an_empty_folder(box: Box, installed: Path) -> None:
    page = commands()
    where = box.run("python -c 'import soup_flows; print(soup_flows.__file__)'").strip()
    assert Path(where).is_relative_to(installed.parent)
    assert "CPU cores" in box.run(page["1"][-1], codes=(0, 1))

    # -- the server ------------------------------------------------------------------------------
    server, export = page["2"]
    box.start(f"exec {server}")
    name, _, value = box.typed(export).removeprefix("export ").partition("=")
    box.env[name] = value
    wait_for(box.answers, GENEROUS_S, "the server")
    assert b"<title>Prefect" in urllib.request.urlopen(box.url, timeout=60).read()

    # -- deploy: shown, done, done again; and a worker --------------------------------------------
    deploy, worker = page["3"]
    shown, empty = box.run(f"{deploy} --dry-run"), box.kept()
    assert "soup-train/nightly" in shown
    assert empty["deployments"] == empty["automations"] == empty["work_pools"] == []
    assert "Now start a worker" in box.run(deploy)
    made = box.kept()
    assert {row["name"] for row in made["work_pools"]} == {"gpu"}
    assert "demo-job" in {row["name"] for row in made["block_documents"]}
    box.run(deploy)
    assert box.kept() == made
    box.start(worker.replace("prefect worker", "exec prefect worker"))

    # -- a first run, and its pages ---------------------------------------------------------------
    (demo,) = page["4"]
    assert "Completed" in box.run(demo), box.log()
    (run,) = box.ask("/flow_runs/filter", {})
    assert run["state_name"] == "Completed", run["state"]
    assert (box.home / "runs" / "demo-output" / "runs" / run["id"] / "model" / "model.safetensors").is_file()
    found = box.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    pages = {artifact["key"]: artifact["id"] for artifact in found}
    assert {
        f"soup-train-{name}" for name in ("plan", "data", "validation", "live", "report", "attempts")
    } <= set(pages)
    if CHROMIUM:
        seen = browse(f"{box.url}/v2/artifacts/artifact/{pages['soup-train-live']}", box.home / "profile")
        assert "Finished: step 119 of 119" in seen
        assert "gradient norm" in seen  # the table below the curves

    # -- its own model: what fits, then a run that is cancelled -----------------------------------
    plan, gpu = page["5"]
    assert "the least sharding that fits" in box.run(f"{plan} --device cpu --gpus 2")
    long = gpu.replace("20}", "100000}").replace(" --watch", " -p device=cpu -p gpus=2")
    assert long.count("-p ") == gpu.count("-p ") + 2
    box.run(long)
    listed, cancel, schedules, pause = page["7"]
    wait_for(lambda: running(box, listed), GENEROUS_S, "a running run")
    (run_id,) = running(box, listed)
    events = box.home / "runs" / "outputs" / "runs" / run_id / "attempt-1" / "events.jsonl"
    wait_for(lambda: events.exists() and '"kind": "step"' in events.read_text(), GENEROUS_S, "a step")
    box.run(cancel.replace("RUN_ID", run_id))
    wait_for(lambda: box.state(run_id) == "Cancelled", GENEROUS_S, "the cancellation")
    assert proc.marked(run_id) == []

    # -- every night, and not -----------------------------------------------------------------------
    nightly, now = page["6"]
    assert "0 2 * * * UTC, on" in box.run(f"{nightly} --device cpu --gpus 2 --set training.max_steps=2")
    (schedule,) = json.loads(box.run(schedules))
    assert schedule["active"]
    box.run(pause.replace("SCHEDULE_ID", schedule["id"]))
    box.run(deploy)
    (schedule,) = json.loads(box.run(schedules))
    assert not schedule["active"]  # what was paused stays paused
    assert "Completed" in box.run(f"{now} --watch"), box.log()


def running(box: Box, command: str) -> list[str]:
    return [run["id"] for run in json.loads(box.run(command))]


def browse(url: str, profile: Path) -> str:
    """Return a page as Chromium has drawn it."""
    assert CHROMIUM is not None
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync", "dump-dom",
             "disable-background-networking", "disable-component-update", "virtual-time-budget=60000")  # fmt: skip
    argv = [CHROMIUM, *(f"--{flag}" for flag in flags), f"--user-data-dir={profile}", url]
    return subprocess.run(argv, capture_output=True, text=True, timeout=GENEROUS_S, check=True).stdout
