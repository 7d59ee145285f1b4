"""A Prefect server and a process worker of a drill's own, in a temporary `PREFECT_HOME`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from prefect.states import Cancelling
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from soup_flows.drill import LIMIT_S, DrillResult, Watch, parameters
from soup_flows.drill.cases import DRILLS
from soup_flows.launch.plan import PACKAGE_ROOT
from soup_flows.launch.proc import PR_SET_PDEATHSIG, prctl
from soup_flows.paths import RunPaths

POOL = "soup-drill"
START_S = 240.0
OUTAGE_S = 30.0
BEGIN_AT_STEP = 4


class Site:
    """A server, a worker, and the means to end them; use `Site.start()`."""

    def __init__(self, home: Path, python_path: str) -> None:
        self.home = home
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        self._environment = kept | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [python_path, PACKAGE_ROOT, kept.get("PYTHONPATH")])),
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextlib.contextmanager
    def start(cls, python_path: str = "") -> Iterator[Site]:
        """Start a server; on the way out end it, the worker and the runs' flow processes.

        Args:
            python_path: more folders in which the worker's runs look for flows.
        """
        with tempfile.TemporaryDirectory(prefix="soup-drill-", ignore_cleanup_errors=True) as folder:
            site = cls(Path(folder), python_path)
            settings = {PREFECT_API_URL: site.url, PREFECT_HOME: site.home}
            with temporary_settings(settings):
                try:
                    site.start_server()
                    site._make_pool()
                    yield site
                finally:
                    site._end(site.worker)
                    site._end(site.server)

    def start_server(self) -> None:
        """Start the server (again) on its port and database, and wait until it answers."""
        argv = ("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        self.server = self._spawn("server", *argv)
        wait_for(self._answers, START_S, "the Prefect server")

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return False

    def start_worker(self) -> None:
        """Start the worker, unless one lives."""
        if self.worker is None or self.worker.poll() is not None:
            self.worker = self._spawn("worker", "prefect", "worker", "start", "--pool", POOL)

    def _spawn(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *argv],
                env=self._environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None) -> None:
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @staticmethod
    def _make_pool() -> None:
        template = ProcessWorker.get_default_base_job_template()
        with get_client(sync_client=True) as client, contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))

    def submit(self, flow: Any, values: dict[str, Any], *, stream_output: bool = False) -> UUID:
        """Deploy `flow` from its module and start a run of it; returns the run's id."""
        deployment = flow.to_deployment(
            name="drill",
            work_pool_name=POOL,
            job_variables={"stream_output": stream_output},
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        deployment_id = deployment.apply()
        self.start_worker()
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(deployment_id, parameters=values)
        return run.id

    @staticmethod
    def state(flow_run_id: UUID) -> State:
        """Return the state of a flow run."""
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
        assert state is not None
        return state

    @staticmethod
    def cancel(flow_run_id: UUID) -> None:
        """Ask Prefect to cancel a run, as its button and command do."""
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run_id, Cancelling())

    def outage(self, seconds: float = OUTAGE_S) -> None:
        """Kill the server, wait, and start it again on the same database."""
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        time.sleep(seconds)
        self.start_server()

    def drill(self, name: str, folder: Path) -> DrillResult:
        """Run the drill called `name` here; see `soup_flows.drill.drill`."""
        from soup_flows.flows import soup_train

        run_id = self.submit(soup_train, parameters(name, folder))
        watch = Watch(RunPaths.of(folder, str(run_id)), lambda: self._final(run_id))
        with watch.until_clean():
            wait_for(lambda: watch.poll() >= BEGIN_AT_STEP, LIMIT_S, "a training step")
            watch.cause = time.time()
            if name == "kill_worker":
                assert self.worker is not None
                self.worker.kill()
                self.worker.wait()
            if name == "server_down_30s":
                self.outage()
            else:
                self.cancel(run_id)
        wanted = "COMPLETED" if DRILLS[name].expected_class == "completed" else "CANCELLED"
        found = self.state(run_id)
        note = f"Prefect shows {found.name}"
        return watch.result(name, (note,), agreed=found.type.value == wanted)

    def _final(self, flow_run_id: UUID) -> bool | None:
        """Return True once the run's state is final; None while it is not, or the server does not say."""
        with contextlib.suppress(httpx.HTTPError):
            return True if self.state(flow_run_id).is_final() else None
        return None


def _end_with_parent() -> None:
    """Let a server or worker end, and the worker its runs, even when the drill itself is killed."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_for(condition: Callable[[], Any], limit_s: float, what: str) -> None:
    """Wait until `condition` holds.

    Raises:
        TimeoutError: if it does not within `limit_s` seconds.
    """
    end, pause_s = time.monotonic() + limit_s, 0.1
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(pause_s)
        pause_s = min(1.0, 1.2 * pause_s)  # asking a server all the time would slow what is waited for
