"""Methods and tasks on real ranks: each trains, evaluates, saves, and opens as what it says it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soup_flows.errors import Refused
from soup_flows.hardware import Gpu, Hardware
from soup_flows.launch.events import tail_events
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.sharding import make_plan
from soup_flows.spec import parse_spec
from soup_flows.training.result import model_card
from tests.conftest import Runner


def events(report: TrainReport, kind: str) -> list[dict[str, Any]]:
    path = RunPaths(Path(report.run_dir)).attempt(report.attempts).events
    return [event for event in tail_events(path).poll() if event.get("kind") == kind]


@pytest.fixture(scope="session")
def pairs(assets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Questions with their answer and an evasion: what to prefer can be learnt from few rows."""
    folder = tmp_path_factory.mktemp("pairs")
    refusal = [{"role": "assistant", "content": "I am sorry, I do not know that."}]
    files = {}
    for key in ("dataset", "eval_dataset"):
        files[key] = str(folder / f"{key}.jsonl")
        with open(files[key], "w") as out:
            for line in Path(assets[key]).read_text().splitlines():
                question, answer = json.loads(line)["messages"]
                row = {"prompt": [question], "chosen": [answer], "rejected": refusal}
                out.write(json.dumps(row) + "\n")
    return files


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "lora"),
    [
        ("zero2", {}),
        ("full_shard", {}),
        ("zero3", {"use_dora": True, "use_rslora": True, "merge_adapter": True}),
    ],
)
def test_adapters_train_save_and_open(finished: Runner, preset: str, lora: dict[str, Any]) -> None:
    report = finished(preset, method="lora", learning_rate=1e-2, lora=lora)
    assert report.eval_loss < report.first_eval_loss - 0.1
    (verified,) = events(report, "verified")
    assert verified["difference"] < 1e-3
    assert verified["same_next_token"]
    folder = Path(report.model)
    files = {file.name for file in folder.iterdir()}
    assert {"README.md", "trainer_state.json", "generation_config.json", "chat_template.jinja"} <= files
    adapter = Path(report.run_dir, "adapter") if lora else folder
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["use_dora"], config["use_rslora"]) == (bool(lora), bool(lora))
    assert ("model.safetensors" in files) == bool(lora)
    assert ("adapter_config.json" in files) == (not lora)


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(("preset", "method"), [("zero2", "full"), ("full_shard", "lora")])
def test_dpo_prefers_the_chosen_answers(
    finished: Runner, pairs: dict[str, str], preset: str, method: str
) -> None:
    report = finished(
        preset, task="dpo", method=method, learning_rate=5e-4 if method == "full" else 1e-2,
        dataset=pairs["dataset"], data={"eval_dataset": pairs["eval_dataset"]},
    )  # fmt: skip
    assert report.first_loss == pytest.approx(0.6931, abs=1e-3)  # log 2: nothing is preferred yet
    assert report.eval_loss < report.first_eval_loss - 0.02
    assert report.proof is not None
    assert not report.proof.failures
    assert events(report, "verified")[0]["difference"] < 1e-3
    assert not (Path(report.model) / "ref").exists()


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "preset", "method", "rate"),
    [("kto", "zero2", "lora", 1e-2), ("orpo", "full_shard", "full", 1e-3)],
)
def test_other_ways_to_prefer(
    finished: Runner, pairs: dict[str, str], task: str, preset: str, method: str, rate: float
) -> None:
    report = finished(
        preset, task=task, method=method, learning_rate=rate,
        dataset=pairs["dataset"], data={"eval_dataset": pairs["eval_dataset"]},
    )  # fmt: skip
    if task == "kto":  # each pair is two rows; nothing is preferred yet: 1 - sigmoid(0)
        assert report.train_rows == 2 * len(Path(pairs["dataset"]).read_text().splitlines())
        assert report.first_loss == pytest.approx(0.5, abs=1e-2)
    assert report.eval_loss < report.first_eval_loss - 0.02
    assert report.proof is not None
    assert not report.proof.failures
    assert events(report, "verified")[0]["difference"] < 1e-3


@pytest.mark.ranks
@pytest.mark.long
def test_pretrain_learns_every_token(finished: Runner, assets: dict[str, str]) -> None:
    report = finished("zero1", task="pretrain", data={"max_length": 32})
    rows = len(Path(assets["dataset"]).read_text().splitlines())
    assert report.train_rows > rows  # documents are divided into rows of 32 tokens
    assert report.eval_loss < report.first_eval_loss - 0.5


@pytest.mark.ranks
@pytest.mark.long
def test_padded_rows_give_the_losses_of_packed_rows(finished: Runner) -> None:
    padded, packed = finished("ddp", data={"packing": False}), finished("ddp")
    assert [point.loss for point in padded.train] == pytest.approx(
        [point.loss for point in packed.train], rel=1e-4
    )
    assert padded.eval_loss == pytest.approx(packed.eval_loss, rel=1e-4)


@pytest.mark.ranks
@pytest.mark.long
def test_the_model_card_has_the_facts_and_no_path(finished: Runner, assets: dict[str, str]) -> None:
    report = finished("ddp")
    card = (Path(report.model) / "README.md").read_text()
    assert "| strategy | ddp on 2 rank(s) |" in card
    assert f"{report.eval_loss:.4f} on {report.eval_rows} rows" in card
    assert str(Path(assets["model"]).parent) not in card
    state = json.loads((Path(report.model) / "trainer_state.json").read_text())
    assert state["global_step"] == report.steps


def spec(**values: Any) -> Any:
    return parse_spec({"model": "owner/name", "dataset": "rows.jsonl", **values})


def test_what_cannot_be_trained_is_refused_before_a_start(hardware: Hardware, two_gpus: Hardware) -> None:
    qlora = {"training": {"method": "qlora"}}
    with pytest.raises(Refused, match="GPUs only"):
        make_plan(spec(device="cpu", gpus=2, **qlora), hardware)
    for preset in ("zero3", "zero++", "zero3_offload"):
        with pytest.raises(Refused, match="every GPU would hold the whole model"):
            make_plan(spec(deepspeed=preset, gpus=2, **qlora), two_gpus)
    for choice in ({"deepspeed": "zero2"}, {"fsdp": "full_shard"}, {"strategy": "ddp"}):
        assert make_plan(spec(gpus=2, **qlora, **choice), two_gpus).world_size == 2
    with pytest.raises(Refused, match="no adapter to merge"):
        make_plan(spec(device="cpu", lora={"merge_adapter": True}), hardware)


def test_qlora_stores_computes_and_adapts_in_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from soup_flows.training.model import quantised

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = quantised(torch.bfloat16)
    config = found["quantization_config"]
    assert config.load_in_4bit
    assert config.bnb_4bit_compute_dtype == config.bnb_4bit_quant_storage == torch.bfloat16
    assert found["device_map"] == {"": 1}


def test_a_hub_model_is_named_as_the_base(hardware: Hardware) -> None:
    asked = spec(device="cpu", training={"method": "lora"})
    card = model_card(asked, make_plan(asked, hardware, 10), {"held-out loss": None})
    assert "base_model: owner/name" in card
    assert "library_name: peft" in card
    assert "held-out loss" not in card


@pytest.fixture
def hardware() -> Hardware:
    from soup_flows.hardware import detect

    return detect("cpu", ["."])


@pytest.fixture
def two_gpus(hardware: Hardware) -> Hardware:
    def gpu(index: int) -> Gpu:
        return Gpu(
            index=index, uuid=f"GPU-{index}", name="NVIDIA L4", memory_total_bytes=24 << 30,
            memory_free_bytes=24 << 30, compute_capability=(8, 9),
        )  # fmt: skip

    return hardware.model_copy(update={"device": "cuda", "gpus": (gpu(0), gpu(1))})
