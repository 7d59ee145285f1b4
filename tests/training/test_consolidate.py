"""Shards of FSDP2 and ZeRO, made by the libraries themselves, become one folder that opens."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from soup_flows import consolidate as core
from soup_flows.consolidate import Request, consolidate, find_shards
from soup_flows.errors import Refused
from soup_flows.training.consolidate import run

Maker = Callable[[str], Path]


@pytest.fixture(scope="session")
def sharded(assets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Maker:
    done: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in done:
            out = tmp_path_factory.mktemp(kind)
            program = str(Path(__file__).with_name("write_checkpoints.py"))
            argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            ended = subprocess.run(
                [*argv, program, kind, assets["model"], str(out)], capture_output=True, text=True, env=env
            )
            assert ended.returncode == 0, ended.stderr[-3000:]
            done[kind] = out
        return done[kind]

    return make


def request(folder: Path, out: Path, **more: object) -> Request:
    kind, shards = find_shards(folder)
    return Request(kind=kind, shards=str(shards), checkpoint=str(folder), output=str(out), **more)  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("kind", ["dcp", "zero2", "zero3"])
def test_the_folder_opens_and_holds_the_trained_weights(
    kind: str, sharded: Maker, assets: dict[str, str], tmp_path: Path
) -> None:
    folder = sharded(kind)
    found = run(request(folder / "checkpoint", tmp_path / "out", model=assets["model"], file_bytes=2_000_000))
    wanted = load_file(folder / "wanted.safetensors")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    values = opened.state_dict()
    assert values.keys() == wanted.keys()
    assert all(torch.equal(values[name], wanted[name]) for name in wanted)
    trained = AutoModelForCausalLM.from_pretrained(assets["model"], dtype=torch.float32).state_dict()
    assert not torch.equal(values["lm_head.weight"], trained["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert found.checked
    assert found.tensors == len(wanted)
    assert found.files == len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) < 2_200_000
    assert not list(tmp_path.glob(".*"))


@pytest.mark.ranks
@pytest.mark.long
def test_a_whole_file_and_another_dtype_in_a_process(
    sharded: Maker, assets: dict[str, str], tmp_path: Path
) -> None:
    folder = sharded("dcp")
    found = consolidate(
        folder / "pytorch_model_fsdp.bin", tmp_path / "out", model=assets["model"], dtype="bf16"
    )
    wanted = load_file(folder / "wanted.safetensors")
    values = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(values[name], wanted[name].to(torch.bfloat16)) for name in wanted)
    assert (found.kind, found.files) == ("full", 1)


@pytest.mark.ranks
@pytest.mark.long
def test_another_model_is_refused(sharded: Maker, assets: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((Path(assets["model"]) / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(Refused, match="missing"):
        run(request(sharded("dcp") / "checkpoint", tmp_path / "out", model=str(other)))
    assert not (tmp_path / "out").exists()


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    torch.save({"a": Evil()}, tmp_path / "pytorch_model_fsdp.bin")
    zero = tmp_path / "zero"
    (zero / "global_step1").mkdir(parents=True)
    (zero / "latest").write_text("global_step1")
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        torch.save({"a": Evil()}, zero / "global_step1" / name)
    for source in ("dcp", "pytorch_model_fsdp.bin", "zero"):
        with pytest.raises(Refused, match=r"CONS006"):
            run(request(tmp_path / source, tmp_path / "out"))
    hidden = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    (tmp_path / "dcp" / ".metadata").write_bytes(hidden)
    with pytest.raises(Refused, match=r"CONS006"):
        run(request(tmp_path / "dcp", tmp_path / "out"))
    assert not (tmp_path / "owned").exists()


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there is no folder"):
        consolidate(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(Refused, match=r"notes\.txt"):
        consolidate(tmp_path, tmp_path / "out")
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(Refused, match="whole already"):
        consolidate(tmp_path, tmp_path / "out")
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(Refused, match="exists"):
        consolidate(tmp_path, tmp_path)
    assert core.find_shards(tmp_path) == ("zero", tmp_path)
