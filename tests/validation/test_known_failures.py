"""Set-ups that people lost time on, from public issues and files: each must be named with the right cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soup_flows.errors import Refused
from soup_flows.hardware import HostMemory
from soup_flows.validation import validate
from soup_flows.validation.fsdp_config import check_fsdp_config
from tests.validation.good_setups import ADAMW, AUTO_BATCH, CPU, ZERO2, ZERO3
from tests.validation.world import GIB, machine, run

PAD = {"chat_template": "x", "added_tokens_decoder": {"1000": {"content": "[PAD]"}}}
INDEX = {"weight_map": {"a.weight": "model-00002.safetensors"}}
AUTO = {**AUTO_BATCH, "bf16": {"enabled": "auto"}}
LORA = {"training": {"method": "lora", "learning_rate": 1e-4}}
FOUR_BIT = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
BIG = {"hidden_size": 4096, "vocab_size": 128256}


def zero(stage: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**AUTO, "zero_optimization": stage, **more}


# what happened -> (DeepSpeed JSON or None, arguments of world.run, the rule that must name it)
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "bf16 preset on a V100 or T4 (Soup#385)": (
        {**zero(ZERO2), "bf16": {"enabled": True}},
        {"on": machine("T4")},
        "DS040",
    ),
    "apex amp block of older LLaVA and Qwen files": (zero(ZERO2, amp={"enabled": "auto"}), {}, "DS023"),
    "opt_level in the fp16 block": (zero(ZERO2, fp16={"enabled": "auto", "opt_level": "O2"}), {}, "DS021"),
    "elasticity left over": (zero(ZERO2, elasticity={"enabled": False}), {}, "DS023"),
    "sparse attention of GPT-NeoX files": (zero(ZERO2, sparse_attention={"mode": "fixed"}), {}, "DS023"),
    "1-bit Adam of the DeepSpeed tutorial under ZeRO": (
        zero(ZERO2, optimizer={"type": "OneBitAdam", "params": {"lr": "auto"}}),
        {},
        "DS050",
    ),
    "compile block of Axolotl's zero1_torch_compile": (
        zero(ZERO2, compile={"disable": False, "backend": "inductor"}),
        {},
        "DS021",
    ),
    "thread_count of older aio blocks": (zero(ZERO3, aio={"thread_count": 1}), {}, "DS022"),
    "clipping misspelt": ({**zero(ZERO2), "gradient_cliping": 0.3}, {}, "DS020"),
    "zero_optimisation in British": ({**zero(ZERO2), "zero_optimisation": {"stage": 3}}, {}, "DS020"),
    "offload_param at stage 2": (zero({**ZERO2, "offload_param": CPU}), {}, "DS060"),
    "NVMe without a path (DeepSpeed#2503)": (
        zero({**ZERO3, "offload_optimizer": {"device": "nvme"}}),
        {},
        "DS062",
    ),
    "three processes with a batch for four": ({**zero(ZERO2), "train_batch_size": 32}, {"spec": {"gpus": 3},
                                              "on": machine("A100", 3)}, "BATCH002"),
    "micro batch and accumulation that do not give the batch": (
        {
            **zero(ZERO2),
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
        },
        {},
        "PLAN008",
    ),
    "learning rate in JSON and arguments": (
        zero(ZERO2, optimizer={"type": "AdamW", "params": {**ADAMW, "lr": 1e-3}}),
        {},
        "DS044",
    ),
    "numbers in quotes": (zero({**ZERO2, "allgather_bucket_size": "5e8"}), {}, "DS026"),
    "bf16: true": ({**zero(ZERO2), "bf16": True}, {}, "DS026"),
    "ZeRO++ file with hpz 8 on one node (Soup#336)": (
        zero({**ZERO3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}),
        {},
        "DS067",
    ),
    "no model.safetensors after ZeRO-3 (transformers#28921)": (
        zero({k: v for k, v in ZERO3.items() if "gather" not in k}),
        {},
        "DS071",
    ),
    "NaN with overlap_comm at stage 2 (DeepSpeed#5294)": (zero(ZERO2), {}, "DS063"),
    "fused Adam without nvcc": (
        zero(ZERO2, optimizer={"type": "AdamW", "params": ADAMW}),
        {"on": machine(cuda_toolkit=None)},
        "DS009",
    ),
    "no attribute ds_opt_adam (DeepSpeed#1846)": (
        zero({**ZERO2, "offload_optimizer": CPU}),
        {"on": machine(cxx=None)},
        "EN005",
    ),
    "killed with exit code -9 under off-load (DeepSpeed#3481)": (
        None,
        {
            "spec": {"deepspeed": "zero2_offload"},
            "model": {"parameters": 13 * 10**9},
            "on": machine(host_memory=HostMemory(total_bytes=128 * GIB, available_bytes=120 * GIB)),
        },
        "DS011",
    ),
    "every rank loads the whole model": (
        None,
        {
            "spec": {"strategy": "ddp", "gpus": 8},
            "model": {"parameters": 8 * 10**9},
            "on": machine("A100", 8, host_memory=HostMemory(total_bytes=128 * GIB, available_bytes=120 * GIB)),
        },
        "HW042",
    ),
    "QLoRA with ZeRO-3 (peft#2016)": (
        None,
        {"spec": {"deepspeed": "zero3", **LORA}, "model": {"config": FOUR_BIT}},
        "PE006",
    ),
    "cannot flatten integer dtype: 4-bit and FSDP (axolotl#1482)": (
        None,
        {"spec": {"fsdp": "full_shard", **LORA}, "model": {"config": FOUR_BIT}},
        "PE007",
    ),
    "full fine-tune of a 4-bit model": (None, {"model": {"config": FOUR_BIT}}, "PE005"),
    "target modules of another family": (
        None,
        {"spec": {**LORA, "lora": {"target_modules": ["query_key_value"]}}},
        "PE002",
    ),
    "no chat template in a base model": (None, {"model": {"files": {"tokenizer_config.json": "{}"}}}, "DA004"),
    "pad token added, embedding not resized (alpaca)": (
        None,
        {
            "model": {
                "files": {"tokenizer_config.json": json.dumps(PAD)}
            }
        },
        "DA005",
    ),
    "remote code not allowed": (
        None,
        {"model": {"config": {"auto_map": {"AutoModelForCausalLM": "m.X"}, "model_type": "my_model"}}},
        "MD005",
    ),
    "a shard is missing after the copy": (
        None,
        {"model": {"files": {"model.safetensors.index.json": json.dumps(INDEX)}}},
        "MD008",
    ),
    "/dev/shm of 64 MB in Docker (nccl#290)": (
        None,
        {"on": machine("A100", 2, shm=machine().shm.model_copy(update={"free_bytes": 64 << 20}))},  # type: ignore[union-attr]
        "HW018",
    ),
    "ranks on MIG slices (pytorch#130181)": (
        None,
        {
            "on": machine().model_copy(
                update={"gpus": tuple(g.model_copy(update={"mig": True}) for g in machine().gpus)}
            )
        },
        "HW041",
    ),
    "fp16 of a bf16 model: loss 0 or NaN": (None, {"on": machine("T4")}, "DT003"),
    "DPO rows in SFT": (
        None,
        {"rows": [{"prompt": "Q", "chosen": "A", "rejected": "B"} for _ in range(4)]},
        "DA009",
    ),
    "BERT as a causal model": (None, {"model": {"config": {"architectures": ["BertForMaskedLM"]}}}, "MD004"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_named_with_the_right_cause(name: str, tmp_path: Path) -> None:
    config, arguments, rule = CASES[name]
    arguments = dict(arguments)
    if config is not None:
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(config))
        arguments["spec"] = {**arguments.get("spec", {}), "deepspeed_config": str(file)}
    model = dict(arguments.get("model", {}))
    if "config" not in model and config is not None:
        model["config"] = BIG
    try:
        context = run(tmp_path, **{**arguments, "model": model})
        problems = validate(context.spec, context.hardware, context.plan, environ={})
    except Refused as refused:
        problems = list(refused.problems)
    assert rule in {problem.id for problem in problems}


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        # Soup's presets, which are called FSDP2 and hold the keys of FSDP1
        ({"backward_prefetch": "backward_pre", "use_orig_params": True, "limit_all_gathers": True}, "FS002"),
        # ms-swift's file: an adapter of 40 bytes
        ({"fsdp_version": 2, "activation_checkpointing": True}, "FS008"),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, "FS001"),
        ({"reshard_after_forward": "FULL_SHARD"}, "FS004"),
        ({"offload_params": True}, "FS001"),
    ],
)
def test_fsdp_configs(config: dict[str, Any], rule: str) -> None:
    assert rule in {problem.id for problem in check_fsdp_config(config)}
