"""Set-ups that people lost time on, from public issues and files: each must be named with the right cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soup_flows.errors import Problem, Refused
from soup_flows.hardware import HostMemory
from soup_flows.validation import validate
from soup_flows.validation.fsdp_config import check_fsdp_config
from tests.core.checkpoint_files import make_spec, write_checkpoint
from tests.validation.good_setups import ADAMW, AUTO_BATCH, CPU, ZERO2, ZERO3
from tests.validation.run_pairs import PAIRS, POINTER
from tests.validation.world import GIB, machine, rows_file, run

PAD = {"chat_template": "x", "added_tokens_decoder": {"1000": {"content": "[PAD]"}}}
INDEX = {"weight_map": {"a.weight": "model-00002.safetensors"}}
AUTO = {**AUTO_BATCH, "bf16": {"enabled": "auto"}}
LORA = {"training": {"method": "lora", "learning_rate": 1e-4}}
QLORA = {"training": {"method": "qlora", "learning_rate": 1e-4}}
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
    "GPTQ model with QLoRA (transformers#25901, unsloth#39)": (
        None,
        {"spec": QLORA, "model": {"config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}},
        "PE012",
    ),
    "gpt-oss as it is published, in MXFP4 (transformers#39969)": (
        None,
        {"spec": LORA, "model": {"config": {"quantization_config": {"quant_method": "mxfp4"}}}},
        "PE011",
    ),
    "QLoRA with ZeRO-3 (transformers#24395)": (None, {"spec": {"deepspeed": "zero3", **QLORA}}, "PLAN013"),
    "QLoRA on a laptop (bitsandbytes has no CPU training)": (
        None,
        {"spec": {"device": "cpu", "gpus": 1, **QLORA}},
        "PLAN012",
    ),
    "weights that Git LFS has not fetched (HeaderTooLarge, OmniParser#34)": (
        None,
        {"model": {"files": {"model.safetensors": POINTER}}},
        "MD010",
    ),
    "a tokenizer that Git LFS has not fetched (exllama#242)": (
        None,
        {"model": {"files": {"tokenizer.json": POINTER}}},
        "MD010",
    ),
    "an interrupted download (MetadataIncompleteBuffer, LlamaFactory#5201)": (None, {"model": {"cut": 9}}, "MD011"),
    "SFT rows with the task DPO (trl: KeyError 'chosen')": (None, {"spec": {"training": {"task": "dpo"}}}, "DA013"),
    "DPO at the rate of supervised tuning": (
        None,
        {"spec": {"training": {"task": "dpo", "learning_rate": 2e-5}}, "rows": PAIRS},
        "BT012",
    ),
    "wandb: api_key not configured (no-tty) (LlamaFactory#1372)": (
        None,
        {"spec": {"training": {"report_to": ["wandb"]}}, "environ": {"HOME": "/nonexistent"}},
        "EN012",
    ),
    "a read-only home in a container (torch_extensions: permission denied)": (
        None,
        {"spec": {"deepspeed": "zero2_offload"}, "environ": {"HOME": "/proc/self"}},
        "EN013",
    ),
    "NCCL_SOCKET_IFNAME of another machine (nccl#1580)": (
        None,
        {"environ": {"NCCL_SOCKET_IFNAME": "eno99np0"}},
        "EN023",
    ),
    "a shell that accelerate had set up: DDP becomes ZeRO-2": (
        None,
        {"environ": {"ACCELERATE_USE_DEEPSPEED": "true"}},
        "EN020",
    ),
    "CUDA_LAUNCH_BLOCKING left on": (None, {"environ": {"CUDA_LAUNCH_BLOCKING": "1"}}, "EN021"),
    "a Hub name on a cluster without network": (
        None,
        {"model": {"id": "meta-llama/Llama-3.1-8B"}, "environ": {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}},
        "EN024",
    ),
    "rows of 2048 tokens for GPT-2 (device-side assert)": (
        None,
        {"model": {"config": {"n_positions": 1024}}, "spec": {"data": {"max_length": 2048}}},
        "DA006",
    ),
    "auto buckets, and a config without hidden_size (accelerate#2296)": (
        zero(ZERO3),
        {"model": {"config": {"hidden_size": None}}},
        "DS007",
    ),
    "NVMe buffers smaller than the embedding (DeepSpeed#3506)": (
        None,
        {"plan": {"engine": "deepspeed", "config": {"zero_optimization": {
            "stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1000}}}}},
        "DS005",
    ),
    "no libaio (DeepSpeed#2503)": (
        None,
        {"plan": {"engine": "deepspeed", "config": {"zero_optimization": {
            "stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}}},
        "DS004",
    ),
    "RTX 4090s that cannot reach each other (accelerate#2328)": (
        None,
        {"on": machine("4090", 2, driver_version="535.54")},
        "HW015",
    ),
    "WarmupDecayLR without total_num_steps": (
        zero(ZERO2, optimizer={"type": "AdamW", "params": ADAMW},
             scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}),
        {},
        "DS055",
    ),
    "another schedule asked, the JSON decays linearly": (
        zero(ZERO2, optimizer={"type": "AdamW", "params": ADAMW},
             scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}),
        {"spec": {"training": {"lr_scheduler_type": "constant"}}},
        "DS046",
    ),
    "clipping at 1.0 though 0.3 was asked (DeepSpeed#8068)": (
        {k: v for k, v in zero(ZERO2).items() if k != "gradient_clipping"},
        {"spec": {"training": {"max_grad_norm": 0.3}}},
        "DS043",
    ),
    "quantised frozen weights in bf16 (DeepSpeed#4885)": (
        zero({**ZERO3, "zero_quantized_nontrainable_weights": True}),
        {"spec": LORA},
        "DS070",
    ),
    "hpz 3 on 4 GPUs": (
        zero({**ZERO3, "zero_hpz_partition_size": 3}),
        {"spec": {"gpus": 4}, "on": machine("A100", 4)},
        "DS064",
    ),
    "load_universal left on after a resume": (zero(ZERO2, checkpoint={"load_universal": True}), {}, "DS074"),
    "zero_force_ds_cpu_optimizer in the wrong block": (
        zero({**ZERO2, "offload_optimizer": CPU, "zero_force_ds_cpu_optimizer": False}),
        {},
        "DS021",
    ),
    "fp16 and bf16 both": (
        {**zero(ZERO2), "bf16": {"enabled": True}, "fp16": {"enabled": True}},
        {},
        "DS041",
    ),
    "tied in the config, two tensors in the file, FSDP2 (accelerate#3870)": (
        None,
        {"spec": {"fsdp": "full_shard"}, "model": {"config": {"tie_word_embeddings": True}}},
        "FS021",
    ),
    "a T5 for causal training": (None, {"model": {"config": {"is_encoder_decoder": True}}}, "MD004"),
    "an epoch that is all warm-up": (None, {"rows": 32, "spec": {"training": {"warmup_ratio": 0.9}}}, "BT007"),
    "save_steps=500 in a run of 4 steps, then nothing to resume": (
        None,
        {"spec": {"recovery": {"save_steps": 500}}},
        "CP005",
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
        problems = validate(context.spec, context.hardware, context.plan, environ=context.environ)
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


LORA_CPU = {"training": {"method": "lora", "learning_rate": 1e-4}}
RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ZeRO-3 saved by 2 ranks, 4 now (DeepSpeed: DP world size)": (
        {"deepspeed": "zero3"},
        {"deepspeed": "zero3", "gpus": 4},
        "RES001",
    ),
    "ZeRO-2 to DDP: the optimizer starts over in silence": (
        {"deepspeed": "zero2"},
        {"strategy": "ddp"},
        "RES002",
    ),
    "off-load switched on (KeyError: bias_correction)": (
        {"deepspeed": "zero2"},
        {"deepspeed": "zero2_offload"},
        "RES002",
    ),
    "a new learning rate, which the saved state overrules": (
        {"strategy": "ddp"},
        {"strategy": "ddp", "training": {"learning_rate": 1e-6}},
        "RES004",
    ),
    "LoRA resumed as a full run": ({"strategy": "ddp", **LORA_CPU}, {"strategy": "ddp"}, "RES004"),
}


@pytest.mark.parametrize("name", RESUMES)
def test_resumes_are_judged_with_everything_else(name: str, tmp_path: Path) -> None:
    saved, now, rule = RESUMES[name]
    cpu = {"device": "cpu", "gpus": 2}
    write_checkpoint(tmp_path / "old/checkpoints", make_spec(tmp_path, **saved), 4)

    def found(values: dict[str, Any], resume: str) -> list[Problem]:
        (tmp_path / "new").mkdir(exist_ok=True)
        asked = {**cpu, **values, "recovery": {"resume": resume}, "dataset": str(tmp_path / "rows.jsonl")}
        context = run(tmp_path / "new", spec=asked, on=machine("CPU", 0))
        return [
            p for p in validate(context.spec, context.hardware, context.plan, environ={}) if "RES" in p.id
        ]

    rows_file(tmp_path / "rows.jsonl")
    assert rule in {problem.id for problem in found(now, str(tmp_path / "old"))}
    assert {problem.id for problem in found(saved, str(tmp_path / "old"))} <= {"RES004", "RES005"}
    assert [problem.id for problem in found(now, str(tmp_path / "older"))] == ["RES010"]
    (tmp_path / "old/checkpoints/checkpoint-4/checkpoint-manifest.json").unlink(missing_ok=True)
    for file in (tmp_path / "old/checkpoints/checkpoint-4").glob("*manifest*"):
        file.unlink()
    assert [problem.id for problem in found(now, str(tmp_path / "old"))] == ["RES012"]
    assert (tmp_path / "old/checkpoints/checkpoint-4").is_dir()  # nothing is moved
