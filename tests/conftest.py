"""Shared fixtures: the demo's model and data, finished runs, and a Prefect server for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from soup_flows import tasks
from soup_flows.demo import build_demo_data, build_demo_model, demo_parameters
from soup_flows.report import TrainReport
from soup_flows.spec import parse_spec

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


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real Prefect server with a database of its own; flows of this process report to it."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    with (
        prefect_test_harness(server_startup_timeout=300),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield
