"""Where the model is sharded, no rank but the first holds a whole copy in host memory, not even while loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from soup_flows.training.hollow import hollow_model
from tests.conftest import Runner
from tests.training.test_methods import events

BIG = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8}


def build(folder: Path, assets: dict[str, str], **shape: int) -> int:
    """Write a random bf16 model with the demo's tokenizer; return the bytes of its weights in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(assets["model"])
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(4 * parameter.numel() for parameter in model.parameters())


def resident() -> int:
    """Return the bytes of memory of this process that no file stands for."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def test_a_hollow_model_takes_no_memory_and_has_the_buffers(assets: dict[str, str], tmp_path: Path) -> None:
    size = build(tmp_path, assets, **BIG)
    before = resident()
    hollow = hollow_model(str(tmp_path), dtype=torch.float32, trust_remote_code=False)
    assert resident() - before < size / 20
    real = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert resident() - before > size * 0.9
    assert {n: p.shape for n, p in hollow.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }
    for name, buffer in real.named_buffers():
        assert torch.equal(hollow.get_buffer(name), buffer), name
    assert len({p.data_ptr() for p in hollow.parameters()}) == len(list(hollow.parameters()))


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("preset", ["full_shard", "zero3"])
def test_a_rank_peaks_below_a_whole_copy(
    finished: Runner, assets: dict[str, str], tmp_path_factory: pytest.TempPathFactory, preset: str
) -> None:
    """Loading for LoRA in fp32 from bf16 files; what the same run takes with a tiny model is subtracted."""
    folder = tmp_path_factory.mktemp("big")
    # A gigabyte: what communication takes for messages of this size, 0.2 GiB whatever the model, stays below a half.
    size = build(folder, assets, **BIG | {"num_hidden_layers": 20})
    peaks = {}
    for name, model in (("tiny", assets["model"]), ("big", str(folder))):
        report = finished(
            preset, model=model, method="lora", max_steps=2, global_batch_size=4, recovery={"save_steps": 0},
            data={"max_length": 32, "eval_dataset": None},
        )  # fmt: skip
        assert report.state == "completed"
        loaded = {event["rank"]: event["host_peak_bytes"] for event in events(report, "loaded")}
        peaks[name] = [loaded[rank] for rank in (0, 1)]
    grown = [big - tiny for big, tiny in zip(peaks["big"], peaks["tiny"], strict=True)]
    print(json.dumps({"copy": size, "grown": grown}))
    assert size / 3 < grown[1] < size  # half of it is this rank's shard
