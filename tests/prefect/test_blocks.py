"""The block types: kept by a real server, strict inside, and each does in a run what it says."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prefect import flow
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from pydantic import HttpUrl, SecretStr, ValidationError

from soup_flows import tasks
from soup_flows.block_use import apply_blocks, bring_back, credentials
from soup_flows.blocks import (
    CheckpointStore,
    ExperimentTracker,
    HuggingFaceCredentials,
    Placement,
    RayCluster,
    SoupTrainingJob,
)
from soup_flows.deploy import block_types
from soup_flows.errors import Refused, TrainingFailed
from soup_flows.flows import soup_train
from soup_flows.launch.engines.ray_http import Dashboard
from soup_flows.launch.plan import LaunchPlan
from soup_flows.lent import run_environment
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.spec import parse_spec
from soup_flows.stored_job import read_job

ROOT = Path(__file__).parents[2]
SPEC = {"model": "m", "dataset": "d", "fsdp": "full_shard", "gpus": 4, "training": {"learning_rate": 1e-4}}
ON_SERVER = [pytest.mark.server, pytest.mark.usefixtures("prefect_server")]


@pytest.mark.parametrize("block", block_types())
class TestStandards(BlockStandardTestSuite):
    @pytest.fixture
    def block(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    test_has_a_valid_image: ClassVar[None] = None  # type: ignore[assignment]  # it opens the URL


def test_every_type_has_a_required_field_and_a_logo() -> None:
    # With no required field a reference to a document would be ambiguous, and the server refuses the run.
    for kind in block_types():
        assert any(field.is_required() for field in kind.model_fields.values()), kind
        assert kind._logo_url
        assert kind.get_block_type_slug().startswith("soup-")
    assert len(block_types()) == 6


@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_a_job_is_kept_whole() -> None:
    SoupTrainingJob(spec=parse_spec(SPEC)).save("nightly", overwrite=True)
    loaded = SoupTrainingJob.load("nightly")
    assert isinstance(loaded, SoupTrainingJob)
    assert loaded.spec == parse_spec(SPEC)
    assert set(loaded.parameters()) == set(inspect.signature(soup_train.fn).parameters)
    assert read_job("nightly") == SPEC
    with pytest.raises(Refused, match="did you mean 'nightly'"):
        read_job("nighly")


def test_a_job_can_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(SPEC))
    assert read_job(str(file)) == SPEC
    with pytest.raises(Refused, match="cannot be opened"):
        read_job(str(tmp_path / "no.yaml"))


def test_a_job_is_strict_inside() -> None:
    with pytest.raises(ValidationError, match="lr"):
        SoupTrainingJob.model_validate({"spec": SPEC | {"training": {"lr": 1}}})


def test_the_documents_are_right() -> None:
    program = [sys.executable, str(ROOT / "blocks" / "register_blocks.py"), "--check"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1::2] == ["demo-job", "gpu-box", "shared-folder"]


def test_prefect_finds_the_types() -> None:
    found = [entry for entry in entry_points(group="prefect.collections") if entry.name == "soup_flows"]
    if not found:
        pytest.skip("the package is not installed here")
    assert found[0].load().SoupTrainingJob is SoupTrainingJob


# -- what they do ----------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_placement_and_tracker_change_the_spec() -> None:
    Placement(output_dir="/data/out", gpus=2, nvme_path="/nvme", omp_num_threads=3, max_wait_min=5).save(
        "box", overwrite=True
    )
    ExperimentTracker(kind="mlflow", url="http://mlflow:5000", project="p").save("lab", overwrite=True)
    named = {"placement": "box", "tracker": "lab"}
    spec = apply_blocks(parse_spec({**SPEC, "blocks": named, "training": {"report_to": ["tensorboard"]}}))
    assert spec.output_dir == "/data/out"
    assert spec.gpus == 4  # the run's own setting wins
    assert (spec.nvme_path, spec.launcher.omp_num_threads, spec.launcher.max_wait_min) == ("/nvme", 3, 5)
    assert spec.training.report_to == ["tensorboard", "mlflow"]
    with pytest.raises(Refused, match=r"BLOCK001.*blocks\.placement.*did you mean 'box'"):
        apply_blocks(parse_spec({**SPEC, "blocks": {"placement": "bok"}}))
    RayCluster(address=HttpUrl("http://head:8265"), token=SecretStr("t")).save("ours", overwrite=True)
    for engine, wanted in (("ray", ("http://head:8265", "t")), ("local", ("", None))):
        spec = parse_spec({**SPEC, "blocks": {"ray_cluster": "ours"}, "launcher": {"engine": engine}})
        with credentials(spec):
            dashboard = Dashboard(spec.launcher.ray, {**run_environment(), "HOME": "/nowhere"})
            assert (dashboard.address, dashboard.token) == wanted


def test_a_tracker_says_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="neptune takes no url; it takes api_key, project"):
        ExperimentTracker(kind="neptune", url="http://x").environment()
    assert ExperimentTracker(kind="wandb", api_key=SecretStr("k"), workspace="team").environment() == {
        "WANDB_API_KEY": "k",
        "WANDB_ENTITY": "team",
    }


TELL = """
import json, os, pathlib, sys
names = ("HF_TOKEN", "HF_ENDPOINT", "WANDB_API_KEY", "WANDB_PROJECT")
pathlib.Path(sys.argv[1]).write_text(json.dumps({n: os.environ.get(n) for n in names}))
"""


@contextmanager
def ranks_that_tell(launch: LaunchPlan, folder: Path) -> Iterator[tuple[LaunchPlan, Path]]:
    """Ranks that only write what their environment holds."""
    script, answer = folder / "tell.py", folder / "environment.json"
    script.write_text(TELL)
    yield launch.model_copy(update={"argv": (sys.executable, str(script), str(answer))}), answer


@pytest.mark.server
@pytest.mark.ranks
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("how", ["flow", "submitted", "no flow"])
def test_credentials_reach_the_ranks_and_nothing_else(
    parameters: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    HuggingFaceCredentials(token=SecretStr("hf-planted"), endpoint="http://hub").save("hub", overwrite=True)
    ExperimentTracker(kind="wandb", api_key=SecretStr("wb-planted"), project="p").save("wb", overwrite=True)
    values = parameters("ddp", tmp_path) | {"blocks": {"hugging_face": "hub", "tracker": "wb"}}
    spec = parse_spec(values)
    hardware = tasks.detect_hardware.fn("cpu", [])
    plan = tasks.resolve_sharding_config.fn(spec, hardware)
    launch = tasks.write_temp_config.fn(spec, hardware, plan, f"run-{how.replace(' ', '-')}")
    assert set(launch.secrets) >= {"HF_TOKEN", "WANDB_API_KEY"}

    @flow(name="telling")
    def telling(launch: LaunchPlan) -> None:
        if how == "submitted":
            tasks.launch_distributed_train.submit(launch).result()
        else:
            tasks.launch_distributed_train(launch)

    with ranks_that_tell(launch, tmp_path) as (launch, answer):
        with pytest.raises(TrainingFailed):  # they saved no model
            tasks.launch_distributed_train.fn(launch) if how == "no flow" else telling(launch)
        assert json.loads(answer.read_text()) == {
            "HF_TOKEN": "hf-planted",
            "HF_ENDPOINT": "http://hub",
            "WANDB_API_KEY": "wb-planted",
            "WANDB_PROJECT": "p",
        }

    assert "HF_TOKEN" not in os.environ
    for file in RunPaths.of(tmp_path, launch.run_id).root.rglob("*"):
        assert not file.is_file() or b"planted" not in file.read_bytes(), file


@pytest.mark.server
@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_run_goes_on_from_the_store_on_another_host(
    parameters: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    CheckpointStore(url=f"file://{tmp_path}/share").save("share", overwrite=True)
    values = parameters("ddp", tmp_path / "first", max_steps=6)
    values |= {"blocks": {"checkpoint_store": "share"}, "recovery": {"save_steps": 2}}
    first = soup_train(**values)
    assert isinstance(first, TrainReport)
    assert [m.what for m in first.mirrored] == ["checkpoint-2", "checkpoint-4", "model"]
    assert (tmp_path / "share" / first.run_id / "model" / "model.safetensors").is_file()
    elsewhere = values | {"output_dir": str(tmp_path / "second")}
    elsewhere["recovery"] = {"save_steps": 2, "resume": first.run_id}
    second = soup_train(**elsewhere)
    assert isinstance(second, TrainReport)
    assert second.started_from == 4
    assert second.final_loss == first.final_loss


@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_a_store_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "share").write_text("not a folder")
    CheckpointStore(url=f"file://{tmp_path}/share/x").save("broken", overwrite=True)
    CheckpointStore(url="nosuch://x").save("unknown", overwrite=True)
    values = {**SPEC, "output_dir": str(tmp_path / "out")}
    paths = RunPaths.of(tmp_path / "out", "run-1").create()
    with pytest.raises(Refused, match="STORE001"):
        bring_back(parse_spec({**values, "blocks": {"checkpoint_store": "unknown"}}), paths)
    spec = parse_spec({**values, "blocks": {"checkpoint_store": "broken"}})
    with pytest.raises(Refused, match="STORE002"):
        bring_back(spec, paths)
