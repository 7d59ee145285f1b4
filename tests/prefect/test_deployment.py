"""The deployments of prefect.yaml, on a real server with a real process worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
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


def test_deployment_run_ends_with_a_model(tmp_path: Path) -> None:
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
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    log, prefect = tmp_path / "log", [sys.executable, "-m", "prefect"]

    def run(*argv: str) -> str:
        done = subprocess.run(
            [*prefect, *argv],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=GENEROUS_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + log.read_text() + messages()
        return done.stdout

    def messages() -> str:
        return "".join(f"\n{run['state']['message']}" for run in get(f"{api}/flow_runs/filter", {}))

    server_argv = [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with process(server_argv, env, tmp_path, log) as server:
        wait_for(f"{api}/health", server, log)
        run("work-pool", "create", "--type", "process", "gpu")
        run("--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "--all")
        worker_argv = [*prefect, "worker", "start", "--pool", "gpu"]
        (tmp_path / "box").mkdir()
        with process(worker_argv, env, tmp_path / "box", log):
            run(
                *("deployment", "run", "soup-train/demo", "-p", "deepspeed=zero3", "--watch"),
                *("-p", 'training={"max_steps": 6, "learning_rate": 0.002}'),
            )
        (flow_run,) = get(f"{api}/flow_runs/filter", {})
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
