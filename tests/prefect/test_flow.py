"""The flow on a real Prefect server: a run with its artifacts, the pipeline example, and refusals."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import State
from prefect.types import SecretDict
from pydantic import SecretStr

from soup_flows.artifacts import load_run_config
from soup_flows.blocks import CheckpointStore, ExperimentTracker, HuggingFaceCredentials
from soup_flows.flows import soup_train
from soup_flows.pipelines import finetune_pipeline
from soup_flows.report import TrainReport
from tests.models import changed_model

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("prefect_server")]
ROOT = Path(__file__).parents[2]


def artifacts_of(state: State[Any]) -> dict[str, Any]:
    flow_run_id = state.state_details.flow_run_id
    assert flow_run_id is not None
    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        return {
            artifact.key or "": artifact.data for artifact in client.read_artifacts(artifact_filter=wanted)
        }


TOKENS = {
    "HUGGING_FACE_HUB_TOKEN": "planted-hub-of-the-worker-1f4e",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-77aa",
    "SOME_OTHER_SECRET": "planted-other-e0e0",
    "SOME_ADDRESS": "http://user:planted-password-51d1@host:5000/x",
    "PREFECT_API_KEY": "planted-prefect-0b7c",
}
HUB_TOKEN, STORE_SECRET, TRACKER_KEY = "planted-hub-93bc", "planted-store-20d1", "planted-tracker-c3a5"
SECRETS = (*(value for value in TOKENS.values() if "://" not in value), "planted-password-51d1", HUB_TOKEN,
           STORE_SECRET, TRACKER_KEY)  # fmt: skip

# The least of wandb that Trainer asks for, and a library that says everything it was given, as text and as a warning.
TRACKER = """
import os, warnings
run = None
class Config(dict):
    def update(self, *args, **kwargs): pass
config = Config()
def init(**given):
    global run
    said = f"{given} {dict(os.environ)}"
    print("wandb is told", said, flush=True)
    warnings.warn(said)
    run = type("Run", (), {"_label": staticmethod(lambda **_: None)})
def log(values): print("wandb gets", sorted(values))
def finish(): pass
"""


class CommandLines(threading.Thread):
    """Collects the command lines of all processes of this machine that say `planted`, until told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: set[bytes] = set()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    text = file.read_bytes()
                    if b"planted-" in text:
                        self.found.add(text)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, str], CommandLines]]:
    """Secrets in every place where they may enter: environment, addresses, blocks; ranks that print them all."""
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/packages{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("WANDB_WATCH", "false")
    ExperimentTracker(kind="wandb", api_key=SecretStr(TRACKER_KEY), project="p").save(
        "planted-tracker-block", overwrite=True
    )
    HuggingFaceCredentials(token=SecretStr(HUB_TOKEN)).save("planted-hub-block", overwrite=True)
    url, secret = f"file://{tmp_path}/share", SecretDict({"secret": STORE_SECRET})
    CheckpointStore(url=url, secret_options=secret).save("planted-store-block", overwrite=True)
    lines = CommandLines()
    lines.start()
    yield {"hugging_face": "planted-hub-block", "checkpoint_store": "planted-store-block",
           "tracker": "planted-tracker-block"}, lines  # fmt: skip
    lines.ended.set()


def assert_nowhere(folder: Path, lines: CommandLines, databases: Mapping[str, bytes]) -> None:
    """No secret is in a file of the run, in the server's database, or was in a command line."""
    lines.ended.set()
    lines.join()
    secrets = [value.encode() for value in SECRETS]
    assert not [line for line in lines.found if any(secret in line for secret in secrets)]
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 20
    # the block's name is; so we look right
    assert any(b"planted-store-block" in content for content in databases.values())
    for place, content in ({str(file): file.read_bytes() for file in files} | {**databases}).items():
        assert not [secret for secret in secrets if secret in content], place


@pytest.mark.ranks
def test_a_run_leaves_its_config_report_and_log_and_no_secret(
    parameters: Callable[..., dict[str, Any]],
    tmp_path: Path,
    planted: tuple[dict[str, str], CommandLines],
    stored: Callable[[], dict[str, bytes]],
) -> None:
    values = parameters("zero2", tmp_path / "out", max_steps=4) | {"blocks": planted[0]}
    state = soup_train(**values, return_state=True)
    assert state.is_completed()
    report = state.result()
    assert isinstance(report, TrainReport)

    found = artifacts_of(state)
    assert {"soup-train-config", "soup-train-report", "soup-train-data"} <= set(found)
    assert "192 of 192 rows are trained" in found["soup-train-data"]
    assert found["soup-train-config"]["plan"]["strategy"] == "zero2"  # a dict, not text in quotes
    page = found["soup-train-report"]
    assert "```mermaid" in page
    assert "DeepSpeedEngine stage 2" in page
    assert str(report.model) in page

    run_id = state.state_details.flow_run_id
    config = load_run_config(run_id)
    assert config.plan == report.plan
    assert config.spec.deepspeed == "zero2"
    assert config.launch.run_id == str(run_id) == Path(report.run_dir).name

    with get_client(sync_client=True) as client:
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id])))
    assert any("step 4/4" in log.message for log in logs)
    said = next(log.message for log in logs if "wandb is told" in log.message)
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SOME_OTHER_SECRET"):
        assert f"<{name}>" in said
    assert "user:<SOME_ADDRESS>@host" in said
    assert "PREFECT_API_KEY" not in said
    assert any("wandb gets" in log.message for log in logs)

    assert [mirrored.what for mirrored in report.mirrored][-1] == "model"
    assert "in the checkpoint store" in page
    assert (tmp_path / "share" / str(run_id) / "model" / "config.json").is_file()
    assert {"HF_TOKEN", "WANDB_API_KEY"} <= set(config.launch.secrets)
    assert_nowhere(tmp_path, planted[1], stored())


@pytest.mark.ranks
@pytest.mark.long
def test_a_run_is_rehearsed_before_it_is_launched(
    parameters: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    values = parameters("ddp", tmp_path / "good", max_steps=2) | {"validation": {"rehearse": True}}
    state = soup_train(**values, return_state=True)
    report = state.result()
    assert report.state == "completed"
    assert {problem.id for problem in report.problems} >= {"RH001", "RH002"}
    assert not (Path(report.run_dir) / "rehearsal").exists()
    found = artifacts_of(state)
    assert "has the same loss" in found["soup-train-validation"]
    assert "has the same loss" in found["soup-train-report"]

    broken = changed_model(values["model"], tmp_path / "model", vocab_size=100)
    quick = {"rehearse": True, "deep": False}  # the deep look would find the tokenizer of another model, too
    values |= {"model": str(broken), "output_dir": str(tmp_path / "bad"), "validation": quick}
    state = soup_train(**values, return_state=True)
    assert state.is_failed()
    assert "RH003" in (state.message or "")
    (run_dir,) = (tmp_path / "bad/runs").iterdir()
    assert (run_dir / "rehearsal/first").is_dir()
    assert not (run_dir / "attempt-1").exists()
    assert "the rehearsal on CPU ranks failed" in artifacts_of(state)["soup-train-validation"]


def test_load_run_config_of_another_run(prefect_server: None) -> None:
    with pytest.raises(LookupError, match="soup-train-config"):
        load_run_config("00000000-0000-4000-8000-000000000000")


@pytest.mark.ranks
def test_a_subflow_hands_its_report_on(tmp_path: Path) -> None:
    result = finetune_pipeline("ddp", str(tmp_path), rows=128, max_steps=2)
    assert isinstance(result, dict)
    assert result["architecture"] == "LlamaForCausalLM"
    assert result["strategy"] == "ddp"
    assert isinstance(result["held_out_loss"], float)


@pytest.mark.ranks
@pytest.mark.long
def test_the_pipeline_example_hands_the_model_on(tmp_path: Path) -> None:
    location = importlib.util.spec_from_file_location(
        "finetune_pipeline", ROOT / "flows" / "finetune_pipeline.py"
    )
    assert location is not None
    assert location.loader is not None
    script = importlib.util.module_from_spec(location)
    location.loader.exec_module(script)
    result = script.finetune_pipeline("ddp", str(tmp_path))
    assert result["architecture"] == "LlamaForCausalLM"
    assert (Path(result["model"]) / "model.safetensors").exists()


def broken_json(folder: Path) -> dict[str, Any]:
    file = folder / "broken.json"
    file.write_text('{"zero_optimization": {"stage": 2},}')
    return {"deepspeed_config": str(file)}


def empty_data(folder: Path) -> dict[str, Any]:
    file = folder / "empty.jsonl"
    file.write_text("")
    return {"dataset": str(file)}


def no_config(folder: Path) -> dict[str, Any]:
    (folder / "model").mkdir()
    return {"model": str(folder / "model")}


BAD = {
    "unknown preset": (lambda _: {"deepspeed": "zero9"}, "deepspeed"),
    "unknown fsdp preset": (lambda _: {"fsdp": "half_shard"}, "fsdp"),
    "both strategies": (lambda _: {"deepspeed": "zero2", "fsdp": "full_shard"}, "deepspeed"),
    "missing data file": (lambda folder: {"dataset": str(folder / "nowhere.jsonl")}, "dataset"),
    "empty data set": (empty_data, "dataset"),
    "unreadable JSON": (broken_json, "deepspeed_config"),
    "missing JSON": (lambda folder: {"deepspeed_config": str(folder / "no.json")}, "deepspeed_config"),
    "gpus=0": (lambda _: {"gpus": 0}, "gpus"),
    "gpus=-1": (lambda _: {"gpus": -1}, "gpus"),
    "gpus=many": (lambda _: {"gpus": "many"}, "gpus"),
    "no gpus here": (lambda _: {"gpus": 2, "device": "auto"}, "gpus"),
    "no config.json": (no_config, "model"),
    "missing model": (lambda folder: {"model": str(folder / "none" / "here")}, "model"),
    "unknown setting": (lambda _: {"training": {"lr": 1}}, "training.lr"),
    "impossible batch": (lambda _: {"training": {"global_batch_size": 15}}, "global_batch_size"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_one_clear_error(
    assets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "no gpus here":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    change, field = BAD[case]
    output = tmp_path / "out"
    values = {"model": assets["model"], "dataset": assets["dataset"], "gpus": 2, "device": "cpu"}
    values |= {"output_dir": str(output), **change(tmp_path)}
    state = soup_train(**values, return_state=True)
    assert state.is_failed()
    assert field in (state.message or "")
    left = [path for path in output.rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["report.json"]
    report = json.loads(left[0].read_text())
    assert report["state"] == "refused"
    assert field in {problem["field"] for problem in report["problems"]} or field in report["cause"]
    assert "refused" in artifacts_of(state)["soup-train-report"]
