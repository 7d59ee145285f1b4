"""Shared fixtures: the demo's model and data, finished runs, and a Prefect server for tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from soup_flows import tasks
from soup_flows.demo import build_demo_data, build_demo_model, demo_parameters
from soup_flows.report import TrainReport
from soup_flows.spec import parse_spec
from tests.postgres import Cluster

if TYPE_CHECKING:
    from soup_flows.drill.server import Site

TRAIN_ROWS, EVAL_ROWS, STEPS = 192, 24, 20


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo's tiny model, and a few of its rows."""
    folder = tmp_path_factory.mktemp("assets")
    train_path, eval_path = build_demo_data(folder)
    model = build_demo_model(folder / "tiny-llama", train_path)
    paths = {"model": str(model)}
    for key, path, rows in (("dataset", train_path, TRAIN_ROWS), ("eval_dataset", eval_path, EVAL_ROWS)):
        few = folder / f"few-{path.name}"
        few.write_text(
            "\n".join(path.read_text(encoding="utf-8").splitlines()[:rows]) + "\n", encoding="utf-8"
        )
        paths[key] = str(few)
    return paths


@pytest.fixture(scope="session")
def parameters(assets: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """Return the flow's parameters for a short run on two CPU ranks under a preset."""

    def build(preset: str, output_dir: Path, **training: Any) -> dict[str, Any]:
        values = demo_parameters("ddp" if preset == "single" else preset, output_dir)
        if preset == "single":
            values |= {"strategy": "single", "gpus": 1}
        values |= {"model": assets["model"], "dataset": assets["dataset"]}
        values["training"] |= {"max_steps": STEPS, **training}
        values["data"] |= {"eval_dataset": assets["eval_dataset"]}
        values["data"] |= {"cache_dir": str(Path(assets["model"]).parent / "cache")}
        return values

    return build


Runner = Callable[..., TrainReport]


@pytest.fixture(scope="session")
def finished(parameters: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Return the report of a finished run under a preset; each kind of run is made once a session.

    The tasks are called through `.fn`, without Prefect, as `README.md` says they can be.
    """
    done: dict[str, TrainReport] = {}

    def run(
        preset: str,
        *,
        ranks: int | None = None,
        dataset: str | None = None,
        model: str | None = None,
        recovery: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        **training: Any,
    ) -> TrainReport:
        key = json.dumps([preset, ranks, dataset, model, recovery, lora, data, training], sort_keys=True)
        if key not in done:
            values = parameters(preset, tmp_path_factory.mktemp("run"), **training)
            values |= {"lora": lora or {}, "data": values["data"] | (data or {})}
            values |= {"gpus": ranks} if ranks else {}
            values |= {"dataset": dataset} if dataset else {}
            values |= {"model": model} if model else {}
            values["recovery"] = {**values.get("recovery", {}), **(recovery or {})}
            spec = parse_spec(values)
            hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
            rows = tasks.prepare_dataset.fn(spec)
            plan = tasks.resolve_sharding_config.fn(spec, hardware, rows)
            problems = tasks.validate_strategy.fn(spec, hardware, plan)
            launch = tasks.write_temp_config.fn(spec, hardware, plan, data=rows)
            done[key] = tasks.launch_distributed_train.fn(launch, problems)
        return done[key]

    return run


DATABASE = os.environ.get("SOUP_FLOWS_TEST_DATABASE", "sqlite")
"""What the servers of the tests keep their state in: sqlite, or postgres (`tests/postgres.py`)."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster | None]:
    """The PostgreSQL cluster that the session's servers use; None with SQLite."""
    if DATABASE not in ("sqlite", "postgres"):
        raise ValueError(f"SOUP_FLOWS_TEST_DATABASE={DATABASE!r}; it can be sqlite or postgres")
    if DATABASE == "sqlite":
        yield None
        return
    with Cluster.start() as started:
        yield started
        used = started.databases()
        assert used, "no server was started"
        for name in used:  # a server that ignored the variable would leave them empty
            assert started.query(name, "SELECT version_num FROM alembic_version"), name


@pytest.fixture(scope="session")
def new_database(cluster: Cluster | None) -> Callable[[], dict[str, str]]:
    """Return what makes a database for one server: the environment variables with which it finds it."""
    if cluster is None:
        return dict
    return lambda: {"PREFECT_SERVER_DATABASE_CONNECTION_URL": cluster.new_database()}


@pytest.fixture(scope="session")
def stored(cluster: Cluster | None, prefect_server: None) -> Callable[[], dict[str, bytes]]:
    """Return what reads everything that `prefect_server` keeps, by the name of the file or database."""

    def read() -> dict[str, bytes]:
        if cluster is not None:
            return {name: cluster.dump(name) for name in cluster.databases()}
        from prefect.settings import get_current_settings

        url = get_current_settings().server.database.connection_url
        assert url is not None
        file = Path(url.get_secret_value().split(":///", 1)[1])
        return {str(part): part.read_bytes() for part in file.parent.glob(f"{file.name}*")}

    return read


@pytest.fixture(scope="session")
def site_type(new_database: Callable[[], dict[str, str]]) -> type[Site]:
    """The server of the drills, on the database that the tests run with."""
    from soup_flows.drill.server import Site

    class OnDatabase(Site):
        def __init__(self, home: Path, python_path: str) -> None:
            super().__init__(home, python_path)
            self._environment |= new_database()

    return OnDatabase


@pytest.fixture(scope="session")
def prefect_server(new_database: Callable[[], dict[str, str]]) -> Iterator[None]:
    """A real Prefect server with a database of its own; flows of this process report to it."""
    from prefect import settings
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    start_server = SubprocessASGIServer._run_uvicorn_command

    def start_on_database(server: SubprocessASGIServer) -> Any:
        """Start the harness's server on another database than the SQLite file that it insists on."""
        with temporary_settings({getattr(settings, name): value for name, value in new_database().items()}):
            return start_server(server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SubprocessASGIServer, "_run_uvicorn_command", start_on_database)
        with (
            prefect_test_harness(server_startup_timeout=300),
            temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        ):
            yield
