"""`soup-flows deploy`, then the classic `prefect deploy`, on a real server with a real process worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

pytestmark = [pytest.mark.server, pytest.mark.ranks]
ROOT = Path(__file__).parents[2]
GENEROUS_S = 420


@contextmanager
def process(argv: list[str], env: dict[str, str], cwd: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as file:
        started = subprocess.Popen(
            argv, env=env, cwd=cwd, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def wait_for(url: str, started: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + GENEROUS_S
    while time.monotonic() < end:
        try:
            get(url)
        except OSError:
            assert started.poll() is None, log.read_text()
            time.sleep(1)
        else:
            return
    raise AssertionError(log.read_text())


def test_deployment_run_ends_with_a_model(tmp_path: Path, new_database: Callable[[], dict[str, str]]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    env |= new_database()
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    log, prefect = tmp_path / "log", [sys.executable, "-m", "prefect"]

    def run(*argv: str) -> str:
        return run_in(ROOT, *prefect, *argv)

    def run_in(folder: Path, *argv: str) -> str:
        done = subprocess.run(
            argv,
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=GENEROUS_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + log.read_text() + messages()
        return done.stdout

    def messages() -> str:
        return "".join(f"\n{run['state']['message']}" for run in get(f"{api}/flow_runs/filter", {}))

    def deployments() -> dict[str, Any]:
        """Return what decides how a run runs, by flow and name."""
        flows = {flow["id"]: flow["name"] for flow in get(f"{api}/flows/filter", {})}
        kept = ("id", "entrypoint", "path", "pull_steps", "parameters", "job_variables", "work_pool_name", "tags",
                "enforce_parameter_schema", "parameter_openapi_schema", "concurrency_options")  # fmt: skip
        found = {}
        for one in get(f"{api}/deployments/filter", {}):
            schedules = [(s["slug"], s["active"], s["schedule"]) for s in one["schedules"]]
            values = {k: one[k] or None for k in kept} | {"schedules": schedules}
            found[f"{flows[one['flow_id']]}/{one['name']}"] = values
        return found

    def assert_a_nan_cancels(deployment_id: str) -> None:
        """The automation takes a run that is to start in a year, and is told that its loss is not finite."""
        later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
        run_id = get(f"{api}/deployments/{deployment_id}/create_flow_run", {"state": later})["id"]
        emit = (
            "from prefect.events import emit_event; import sys; "
            "emit_event('soup.train.nan', resource={'prefect.resource.id': 'soup.train.' + sys.argv[1]}, related=["
            "{'prefect.resource.id': 'prefect.flow-run.' + sys.argv[1], 'prefect.resource.role': 'flow-run'}])"
        )
        run_in(tmp_path, sys.executable, "-c", emit, run_id)
        end = time.monotonic() + GENEROUS_S
        while (state := get(f"{api}/flow_runs/{run_id}")["state_type"]) not in ("CANCELLING", "CANCELLED"):
            assert time.monotonic() < end, state
            time.sleep(0.5)

    server_argv = [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with process(server_argv, env, tmp_path, log) as server:
        wait_for(f"{api}/health", server, log)
        (tmp_path / "empty").mkdir()
        soup_flows = (sys.executable, "-m", "soup_flows.cli")
        done = run_in(tmp_path / "empty", *soup_flows, "deploy", "--automations", "--json")
        made = {step["name"] for step in json.loads(done)["steps"] if step["kind"] == "deployment"}
        before = deployments()
        assert set(before) == made
        assert_a_nan_cancels(before["soup-train/demo"]["id"])
        run("--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "--all")
        assert deployments() == before  # the same set, the same everything
        worker_argv = [*prefect, "worker", "start", "--pool", "gpu"]
        (tmp_path / "box").mkdir()
        with process(worker_argv, env, tmp_path / "box", log):
            run(
                *("deployment", "run", "soup-train/demo", "-p", "deepspeed=zero3", "--watch"),
                *("-p", 'training={"max_steps": 6, "learning_rate": 0.002}'),
            )
        (flow_run,) = get(
            f"{api}/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
        )
        assert flow_run["state_type"] == "COMPLETED"
        found = get(f"{api}/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run["id"]]}}})
        data = {artifact["key"]: artifact["data"] for artifact in found}
        assert data["soup-train-config"]["plan"]["strategy"] == "zero3"
        assert "## Proof" in data["soup-train-report"]
        (model,) = (tmp_path / "box" / "demo-output" / "runs").glob("*/model/model.safetensors")
        with safe_open(str(model), framework="pt") as stored:
            assert len(list(stored.keys())) == 39
        code = (
            "import sys; from transformers import AutoModelForCausalLM as M; "
            "print(M.from_pretrained(sys.argv[1]).num_parameters())"
        )
        opened = subprocess.run(
            [sys.executable, "-c", code, str(model.parent)], capture_output=True, text=True, check=True
        )
        assert int(opened.stdout) > 1_000_000
