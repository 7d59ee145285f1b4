"""Configs of other tools: what they become, what cannot be said, and that no key is lost."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from soup_flows import accelerate_keys, cli
from soup_flows.errors import Refused
from soup_flows.migrate.axolotl import AXOLOTL
from soup_flows.migrate.llama_factory import LLAMA_FACTORY
from soup_flows.migrate.page import migration_page
from soup_flows.migrate.parts import exact_share
from soup_flows.migrate.read import TOOLS, Migration, migrate, migration_text, read_config
from soup_flows.migrate.reading import SETTINGS, Reading, is_off
from soup_flows.migrate.soup import SOUP
from soup_flows.migrate.values import Part, To, Tool, Without
from soup_flows.spec import parse_spec

FILES = Path(__file__).parents[1] / "data" / "migrate"
ROOT = Path(__file__).parents[2]
IDS = [tool.name for tool in TOOLS]


def read(tool: Tool, tmp_path: Path, text: str, **given: Any) -> Migration:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return read_config(tool, file, given)


def problems(found: Migration) -> dict[str, tuple[str, str]]:
    return {p.field.split(".", 1)[1]: (p.id, p.severity) for p in found.not_mapped}


def of_file(tool: Tool, name: str, **given: Any) -> Migration:
    return read_config(tool, FILES / name, given)


SOUP_LORA = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "dataset": "./data/train.jsonl",
    "output_dir": "./output",
    "training": {
        "task": "sft",
        "num_train_epochs": 3,
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 4,
        "global_batch_size": 64,
        "method": "lora",
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03,
        "gradient_checkpointing": True,
        "logging_steps": 10,
    },
    "data": {"eval_split": 0.1, "max_length": 2048, "train_on": "assistant"},
    "lora": {"r": 64, "alpha": 16, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]},
    "recovery": {"save_steps": 100},
}

AXOLOTL_LORA = {
    "model": "NousResearch/Meta-Llama-3-8B",
    "dataset": "mhenrichsen/alpaca_2k_test",
    "output_dir": "./outputs/lora-out",
    "deepspeed": "zero2_offload",
    "gpus": 1,
    "training": {
        "num_train_epochs": 4,
        "learning_rate": 2e-4,
        "per_device_train_batch_size": 2,
        "global_batch_size": 8,
        "method": "lora",
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "weight_decay": 0.0,
        "optimizer": "auto",
        "dtype": "auto",
        "gradient_checkpointing": True,
        "logging_steps": 1,
        "report_to": ["wandb"],
    },
    "data": {"eval_split": 0.05, "max_length": 4096, "packing": True},
    "lora": {"r": 32, "alpha": 16, "dropout": 0.05, "target_modules": "all-linear"},
}

AXOLOTL_FSDP = {
    "model": "casperhansen/llama-3-70b-fp16",
    "dataset": "tatsu-lab/alpaca",
    "output_dir": "./outputs/out/qlora-llama3-70b",
    "fsdp": "full_offload",
    "training": {
        "num_train_epochs": 4,
        "learning_rate": 1e-5,
        "per_device_train_batch_size": 1,
        "global_batch_size": 32,
        "method": "qlora",
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "weight_decay": 0.0,
        "optimizer": "adamw_torch_fused",
        "dtype": "auto",
        "gradient_checkpointing": True,
        "logging_steps": 1,
    },
    "data": {"eval_split": 0.05, "max_length": 512, "packing": False},
    "lora": {"r": 8, "alpha": 16, "dropout": 0.05, "target_modules": "all-linear"},
}

LF_LORA = {
    "model": "Qwen/Qwen3-4B-Instruct-2507",
    "dataset": "data/alpaca_en_demo.json",
    "output_dir": "saves/qwen3-4b/lora/sft",
    "trust_remote_code": True,
    "deepspeed": "zero3",
    "training": {
        "task": "sft",
        "method": "lora",
        "num_train_epochs": 3.0,
        "learning_rate": 1e-4,
        "per_device_train_batch_size": 1,
        "global_batch_size": 16,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "dtype": "bf16",
        "logging_steps": 10,
        "report_to": [],
    },
    "data": {"max_length": 2048, "workers": 16},
    "lora": {"r": 8, "alpha": 16, "target_modules": "all-linear"},
    "recovery": {"save_steps": 500},
}

LF_DPO = {
    "model": "Qwen/Qwen3-4B-Instruct-2507",
    "dataset": "someone/pairs",
    "output_dir": "saves/qwen3-4b/dpo",
    "training": {
        "task": "orpo",
        "preference_beta": 0.2,
        "method": "full",
        "num_train_epochs": 3.0,
        "max_steps": 200,
        "learning_rate": 5e-5,
        "per_device_train_batch_size": 8,
        "global_batch_size": 16,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.05,
        "dtype": "fp32",
        "eval_steps": 50,
        "gradient_checkpointing": False,
    },
    "data": {"max_length": 2048, "eval_split": 0.1},
    "recovery": {"save_steps": 0},
}


@pytest.mark.parametrize(
    ("tool", "name", "given", "wanted"),
    [
        (SOUP, "soup_lora.yaml", {"gpus": 4, "deepspeed": "zero3"}, SOUP_LORA),
        (AXOLOTL, "axolotl_lora.yml", {}, AXOLOTL_LORA),
        (AXOLOTL, "axolotl_fsdp_qlora.yaml", {"gpus": "8"}, AXOLOTL_FSDP),
        (LLAMA_FACTORY, "llama_factory_lora.yaml", {"gpus": 2}, LF_LORA),
        (LLAMA_FACTORY, "llama_factory_dpo.yaml", {"gpus": 2}, LF_DPO),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_of_each_tool_becomes_exactly_this_spec(
    tool: Tool, name: str, given: dict[str, Any], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FILES)
    found = of_file(tool, name, **given)
    assert found.values == wanted
    assert [p for p in found.not_mapped if p.severity == "error"] == []
    parse_spec({**found.values, **given})  # and it is one


def test_what_is_not_taken_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILES)
    assert problems(of_file(SOUP, "soup_lora.yaml", gpus=4)) == {
        "defaults": ("MIG006", "warning"),
    }
    assert problems(of_file(AXOLOTL, "axolotl_lora.yml")) == {
        "optimizer": ("MIG006", "warning"),
        "load_in_8bit": ("MIG006", "warning"),
        "gpus": ("MIG006", "warning"),
        "micro_batch_size (sample_packing)": ("MIG006", "warning"),
        "evals_per_epoch": ("MIG006", "warning"),
        "saves_per_epoch": ("MIG006", "warning"),
        "lora_modules_to_save": ("MIG006", "warning"),
        "model_type": ("MIG003", "note"),
        "attn_implementation": ("MIG003", "note"),
        "special_tokens": ("MIG003", "note"),
        "wandb_entity": ("MIG003", "note"),
    }
    found = of_file(LLAMA_FACTORY, "llama_factory_lora.yaml", gpus=2)
    assert {key for key, (_, severity) in problems(found).items() if severity == "warning"} == {"max_samples"}
    assert {"resume_from_checkpoint", "do_train", "save_only_model"} <= set(found.off)


def test_the_defaults_of_the_tools_are_taken_where_they_are_others(tmp_path: Path) -> None:
    soup = read(SOUP, tmp_path, "base: m\ndata:\n  train: rows.jsonl\n")
    assert soup.values == {
        "model": "m",
        "dataset": "rows.jsonl",
        "gpus": 1,
        "training": {"num_train_epochs": 3, "method": "qlora"},
        "lora": {"r": 64},
    }
    assert problems(soup)["training.batch_size"] == ("MIG006", "warning")  # auto
    assert all(not m.written for m in soup.mapped if m.field not in ("model", "dataset"))
    lf = read(LLAMA_FACTORY, tmp_path, "model_name_or_path: m\nlora_rank: 32\n", gpus=2)
    assert lf.values["lora"] == {"r": 32, "alpha": 64}
    assert lf.values["training"]["global_batch_size"] == 16
    # What is said elsewhere is not overridden, and what does not count is not said.
    above = read(SOUP, tmp_path, "base: m\ntraining:\n  lora: {r: 0}\n", training={"num_train_epochs": 1})
    assert above.values["training"] == {"method": "full"}
    assert "lora" not in above.values


@pytest.mark.parametrize(
    ("tool", "text", "key", "hint"),
    [
        (SOUP, "training:\n  epoch: 3\n", "training.epoch", "'training.epochs'"),
        (SOUP, "training:\n  learning_rate: 1\n", "training.learning_rate", "training.learning_rate"),
        (SOUP, "trainings:\n  epochs: 3\n", "trainings", "'training."),
        (AXOLOTL, "micro_batchsize: 2\n", "micro_batchsize", "'micro_batch_size'"),
        (AXOLOTL, "cutoff_len: 2\n", "cutoff_len", "data.max_length"),
        (AXOLOTL, "fsdp_config:\n  offload_parms: true\n", "fsdp_config.offload_parms", "'offload_params'"),
        (LLAMA_FACTORY, "lora_rnk: 8\n", "lora_rnk", "'lora_rank'"),
        (LLAMA_FACTORY, "zzz: 8\n", "zzz", "remove"),
    ],
)
def test_unknown_keys_are_errors_with_the_nearest(
    tool: Tool, text: str, key: str, hint: str, tmp_path: Path
) -> None:
    found = next(p for p in read(tool, tmp_path, text).not_mapped if p.field == f"{tool.option}.{key}")
    assert (found.id, found.severity) == ("MIG002", "error")
    assert hint in found.fix


@pytest.mark.parametrize(
    ("tool", "text", "key", "rule", "words"),
    [
        (AXOLOTL, "deepspeed: a.json\nfsdp: [full_shard]\n", "deepspeed", "MIG007", "exclude"),
        (
            AXOLOTL,
            "deepspeed: a.json\nfsdp_config: {offload_params: true}\n",
            "fsdp_config",
            "MIG007",
            "exclude",
        ),
        (LLAMA_FACTORY, "deepspeed: a.json\nfsdp: full_shard\n", "fsdp", "MIG007", "exclude"),
        (AXOLOTL, "bf16: true\nfp16: true\n", "fp16", "MIG007", "bf16"),
        (AXOLOTL, "dataset_num_proc: 2\ndataset_processes: 3\n", "dataset_processes", "MIG007", "2"),
        (SOUP, "training: {packing: false, multipack: true}\n", "training.multipack", "MIG007", "packing"),
        (SOUP, "training: 3\n", "training", "MIG005", "3"),
        (SOUP, "task: grpo\n", "task", "MIG005", "grpo"),
        (SOUP, "data: {format: llava}\n", "data.format", "MIG005", "llava"),
        (AXOLOTL, "rl: simpo\n", "rl", "MIG005", "simpo"),
        (AXOLOTL, "adapter: llama-adapter\n", "adapter", "MIG005", "llama-adapter"),
        (AXOLOTL, "load_in_4bit: true\n", "load_in_4bit", "MIG005", "adapter"),
        (AXOLOTL, "optimizer: muon\n", "optimizer", "MIG005", "muon"),
        (AXOLOTL, "learning_rate: fast\n", "learning_rate", "MIG005", "fast"),
        (AXOLOTL, "deepspeed: conf/zero9.json\n", "deepspeed", "MIG005", "zero9"),
        (AXOLOTL, "deepspeed: {zero_optimization: {stage: 3}}\n", "deepspeed", "MIG005", "within"),
        (AXOLOTL, "fsdp: [full_shrd]\n", "fsdp", "MIG005", "full_shrd"),
        (AXOLOTL, "fsdp_config: true\n", "fsdp_config", "MIG005", "True"),
        (AXOLOTL, "context_parallel_size: 4\n", "context_parallel_size", "MIG004", "parallel"),
        (AXOLOTL, "datasets: [{path: a/b}, {path: c/d}]\n", "datasets", "MIG005", "a/b, c/d"),
        (AXOLOTL, "datasets: [{type: alpaca}]\n", "datasets", "MIG005", "path"),
        (AXOLOTL, "datasets: [{path: a/b, split: 'train[:5%]'}]\n", "datasets.split", "MIG005", "5%"),
        (AXOLOTL, "datasets: [{path: a/b, name: fr}]\n", "datasets.name", "MIG005", "folder"),
        (AXOLOTL, "datasets: [{path: a/b, field_output: x}]\n", "datasets.field_output", "MIG004", "fixed"),
        (AXOLOTL, "datasets: [{path: a/b, type: {format: x}}]\n", "datasets.type", "MIG004", "fixed"),
        (AXOLOTL, "batch_size: 64\n", "batch_size", "MIG004", "micro_batch_size"),
        (LLAMA_FACTORY, "stage: ppo\n", "stage", "MIG005", "ppo"),
        (LLAMA_FACTORY, "stage: dpo\npref_loss: simpo\n", "pref_loss", "MIG005", "simpo"),
        (LLAMA_FACTORY, "finetuning_type: freeze\n", "finetuning_type", "MIG005", "freeze"),
        (LLAMA_FACTORY, "quantization_bit: 3\n", "quantization_bit", "MIG005", "3"),
        (LLAMA_FACTORY, "quantization_method: hqq\n", "quantization_method", "MIG005", "hqq"),
        (LLAMA_FACTORY, "deepspeed: x/ds_z3_fp8_config.json\n", "deepspeed", "MIG005", "fp8"),
        (LLAMA_FACTORY, "dataset: a,b\n", "dataset", "MIG005", "a, b"),
        (LLAMA_FACTORY, "dataset: a\ndataset_dir: /nowhere\n", "dataset", "MIG005", "/nowhere"),
        (LLAMA_FACTORY, "dataset: a\ndataset_dir: REMOTE:x/y\n", "dataset", "MIG005", "x/y"),
    ],
)
def test_what_would_be_another_run_is_an_error(
    tool: Tool, text: str, key: str, rule: str, words: str, tmp_path: Path
) -> None:
    found = next(p for p in read(tool, tmp_path, text).not_mapped if p.field == f"{tool.option}.{key}")
    assert (found.id, found.severity) == (rule, "error")
    assert words in found.message
    assert found.fix


@pytest.mark.parametrize(
    ("tool", "text", "field", "value"),
    [
        (AXOLOTL, "datasets: [{path: a/b, revision: v1, split: test}]", "dataset", "a/b@v1:test"),
        (AXOLOTL, "datasets: [{path: a/b, data_files: [x/y.parquet]}]", "dataset", "a/b/x/y.parquet"),
        (AXOLOTL, "datasets: [{path: json, data_files: rows.jsonl}]", "dataset", "rows.jsonl"),
        (
            AXOLOTL,
            "datasets: [{path: /data/rows.jsonl, ds_type: json, split: train}]",
            "dataset",
            "/data/rows.jsonl",
        ),
        (AXOLOTL, "datasets: [{path: a/b, type: completion}]", "training.task", "pretrain"),
        (AXOLOTL, "pretraining_dataset: a/b", "training.task", "pretrain"),
        (AXOLOTL, "test_datasets: [{path: held.jsonl}]", "data.eval_dataset", "held.jsonl"),
        (AXOLOTL, "fsdp: [shard_grad_op, auto_wrap]", "fsdp", "shard_grad"),
        (AXOLOTL, "fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}", "fsdp", "shard_grad"),
        (AXOLOTL, "fsdp_config: {activation_checkpointing: true}", "training.gradient_checkpointing", True),
        (AXOLOTL, "bf16: false\nfp16: false\n", "training.dtype", "fp32"),
        (AXOLOTL, "bf16: auto\nfp16: true\n", "training.dtype", "fp16"),
        (AXOLOTL, "warmup_steps: 10\nmax_steps: 100\n", "training.warmup_ratio", 0.1),
        (AXOLOTL, "save_strategy: no\n", "recovery.save_steps", 0),
        (LLAMA_FACTORY, "evaluation_strategy: steps\neval_steps: 7\n", "training.eval_steps", 7),
        (
            AXOLOTL,
            "gradient_checkpointing: false\nfsdp_config: {activation_checkpointing: true}",
            "training.gradient_checkpointing",
            True,
        ),
        (AXOLOTL, "train_on_inputs: true\n", "data.train_on", "all"),
        (AXOLOTL, "rl: orpo\norpo_alpha: 0.3\n", "training.preference_beta", 0.3),
        (AXOLOTL, "gradient_checkpointing: offload\n", "training.gradient_checkpointing", True),
        (AXOLOTL, "resume_from_checkpoint: out/checkpoint-5\n", "recovery.resume", "out/checkpoint-5"),
        (LLAMA_FACTORY, "stage: pt\n", "training.task", "pretrain"),
        (LLAMA_FACTORY, "quantization_bit: 4\n", "training.method", "qlora"),
        (LLAMA_FACTORY, "use_cpu: true\n", "device", "cpu"),
        (LLAMA_FACTORY, "deepspeed: x/ds_z0_config.json\n", "strategy", "ddp"),
        (LLAMA_FACTORY, "report_to: [wandb, swanlab]\n", "training.report_to", ["wandb"]),
        (LLAMA_FACTORY, "dataset: a/b\ndataset_dir: ONLINE\n", "dataset", "a/b"),
        (LLAMA_FACTORY, "lora_target: q_proj, v_proj\n", "lora.target_modules", ["q_proj", "v_proj"]),
        (LLAMA_FACTORY, "warmup_steps: 0.1\n", "training.warmup_ratio", 0.1),
        (LLAMA_FACTORY, "max_steps: -1\n", "training.num_train_epochs", 3.0),
        (SOUP, "training: {quantization: none, lora: {r: 0}}\n", "training.method", "full"),
        (SOUP, "data: {train_on_responses_only: false}\n", "data.train_on", "all"),
    ],
)
def test_single_values(tool: Tool, text: str, field: str, value: object, tmp_path: Path) -> None:
    found = {m.field: m.value for m in read(tool, tmp_path, text, gpus=1).mapped}
    assert found[field] == value


def test_a_deepspeed_json_that_is_here_is_used_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero2.json").write_text("{}")
    assert read(AXOLOTL, tmp_path, "deepspeed: zero2.json").values["deepspeed_config"] == "zero2.json"


def test_names_of_columns_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(
        '{"good": {"file_name": "g.json", "columns": {"messages": "conversations"}},'
        '"odd": {"file_name": "o.json", "columns": {"prompt": "frage"}},'
        '"hub": {"hf_hub_url": "a/b", "split": "test"}, "script": {"script_url": "x"}}'
    )
    where = f"dataset_dir: {tmp_path}\ndataset: "
    assert read(LLAMA_FACTORY, tmp_path, where + "good").values["dataset"] == f"{tmp_path}/g.json"
    assert read(LLAMA_FACTORY, tmp_path, where + "hub").values["dataset"] == "a/b:test"
    for name, words in (("odd", "columns"), ("script", "neither"), ("gone", "not in")):
        found = read(LLAMA_FACTORY, tmp_path, where + name)
        assert words in next(p.message for p in found.not_mapped if p.field.endswith(".dataset"))
        # The command line says it itself: nothing is wrong then.
        assert problems(read(LLAMA_FACTORY, tmp_path, where + name, dataset="f"))["dataset"][1] == "note"


@pytest.mark.parametrize("tool", TOOLS, ids=IDS)
def test_every_key_of_a_table_has_a_setting_or_a_reason(tool: Tool) -> None:
    for key, entry in tool.keys.items():
        if isinstance(entry, To):
            assert entry.field in SETTINGS, key
        elif isinstance(entry, Part):
            assert entry.fields, key
            assert set(entry.fields) <= set(SETTINGS), key
            assert entry.how, key
        else:
            assert isinstance(entry, Without)
            assert len(entry.why.split()) > 2, key


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 200), st.floats(0, 3), st.text(max_size=6),
    st.sampled_from(["auto", "no", "steps", "epoch", "4bit", "lora", "full_shard", "dpo", "adamw_torch", "linear"]),
)  # fmt: skip
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.sampled_from(["path", "type", "stage", "r", "x", "split"]), SCALARS, max_size=3),
    st.lists(st.dictionaries(st.sampled_from(["path", "split", "field"]), SCALARS, max_size=3), max_size=2),
)


@pytest.mark.parametrize("tool", TOOLS, ids=IDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_key_is_lost_and_no_value_is_too_odd(tool: Tool, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from([*tool.keys, "unheard_of"]), max_size=12, unique=True))
    values: dict[str, Any] = {}
    for key in keys:
        group, parts = values, key.split(".")
        for part in parts[:-1]:
            group = group.setdefault(part, {})
        group[parts[-1]] = data.draw(VALUES)
    above = {"gpus": 2} if data.draw(st.booleans()) else {}
    found = migrate(tool, "config.yaml", values, above)
    said = {key for m in found.mapped for key in m.keys} | set(found.off)
    said |= {p.field.split(".", 1)[1] for p in found.not_mapped}
    for key in Reading(tool, values, above).values:
        assert key in said or any(name.startswith(f"{key}.") for name in said), key
    assert {m.field for m in found.mapped} <= set(SETTINGS)
    spec = None
    with contextlib.suppress(Refused):
        spec = parse_spec({"model": "m", "dataset": "d", **found.values})
    text = migration_text(found, above, spec)
    assert all(m.field in text for m in found.mapped)
    found.model_dump_json()


@given(part=st.integers(1, 500), more=st.integers(1, 5000))
def test_a_share_of_the_steps_gives_the_steps_again(part: int, more: int) -> None:
    assert math.ceil((part + more) * exact_share(part, part + more)) == part


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: *x\n", "references"),
        ("base: a\nbase: b\n", "twice"),
        ("- 1\n", "settings"),
        ("base: !!python/object:os.system {}\n", "line 1"),
        ("a: " + "[" * 40, "deep"),
        ("a: " + "x" * 70_000, "65536 bytes"),
    ],
)
def test_hostile_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        read(SOUP, tmp_path, text)
    (problem,) = refused.value.problems
    assert (problem.id, problem.field) == ("MIG001", "--from-soup")
    assert words in problem.message


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    assert page == migration_page(), "run: python -m soup_flows.migrate > docs/migration.md"


def test_flags_that_replace_others_exist() -> None:
    parser = cli._parser()
    words = " ".join(SOUP.flags.values())
    flags = set(re.findall(r"--[a-z][a-z_-]+", words))
    assert {"--gpus", "--deepspeed", "--deepspeed-config", "--fsdp", "--set", "--save"} <= flags
    plan = next(a for a in parser._actions if a.choices).choices["plan"]  # type: ignore[index]
    assert flags <= set(plan._option_string_actions)
    for field in re.findall(r"--set ([a-z_.]+)=", words):
        assert field in SETTINGS


def test_every_key_of_accelerate_is_told() -> None:
    known = {
        *accelerate_keys.TOP_KEYS,
        *(f"deepspeed_config.{key}" for key in accelerate_keys.DEEPSPEED_KEYS),
        *(f"fsdp_config.{key}" for key in accelerate_keys.FSDP_KEYS),
    } - {"deepspeed_config", "fsdp_config"}
    tables = [
        accelerate_keys.MAPPED, accelerate_keys.SETTLED, accelerate_keys.IGNORED, accelerate_keys.UNSUPPORTED
    ]  # fmt: skip
    told = [key for table in tables for key in table]
    assert sorted(told) == sorted(known)


def test_empty_words() -> None:
    assert all(map(is_off, (None, "", "no", "None", False, 0, [], {})))
    assert not any(map(is_off, (True, "x", 1, [0], "yes")))
    assert is_off(0.9, (0.9,))


def test_the_examples_are_yaml() -> None:
    for file in FILES.glob("*.y*ml"):
        assert isinstance(yaml.safe_load(file.read_text()), dict)
