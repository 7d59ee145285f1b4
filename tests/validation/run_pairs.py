"""For every rule about a run: arguments of `world.run` that it must catch, and the nearest it must let through."""

from __future__ import annotations

from typing import Any

from soup_flows.hardware import Disk, HostMemory
from tests.validation.world import CHAT, GIB, machine

LORA = {"training": {"method": "lora"}}
QLORA = {"training": {"method": "qlora"}}
GPT2 = {"config": {"n_positions": 512, "max_position_embeddings": None}}
QUANT = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}, "model_type": "no_such_model"}
EIGHT_B = {"parameters": 8_000_000_000}
SMALL_HOST = machine(host_memory=HostMemory(total_bytes=64 * GIB, available_bytes=50 * GIB))
ZERO3 = {"deepspeed": "zero3"}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16060522496\n"
PAIRS = [{"prompt": f"Q {i}", "chosen": f"A {i}", "rejected": "B"} for i in range(40)]
FUSED = {"optimizer": {"type": "AdamW"}}
TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
MIG = machine("A100", 2)
MIG = MIG.model_copy(update={"gpus": tuple(gpu.model_copy(update={"mig": True}) for gpu in MIG.gpus)})
UNKNOWN = machine("A100", 2)
UNKNOWN = UNKNOWN.model_copy(
    update={"gpus": tuple(gpu.model_copy(update={"compute_capability": None}) for gpu in UNKNOWN.gpus)}
)


def train(**values: Any) -> dict[str, Any]:
    """Return a spec that sets values of the group `training`."""
    return {"training": values}


def offload_config(**block: Any) -> dict[str, Any]:
    """Return a plan whose config off-loads parameters to NVMe with these values."""
    return {
        "engine": "deepspeed",
        "config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", **block}}},
    }


def zero(**values: Any) -> dict[str, Any]:
    """Return a plan with these values in its ZeRO block."""
    return {"engine": "deepspeed", "config": {"zero_optimization": {"stage": 3, **values}}}


def disk(free_gib: float, kind: str = "ext4") -> Any:
    """Return a function of the folder that gives a machine whose output disk is so."""
    return lambda folder: machine(
        disks=(
            Disk(
                path=str(folder / "out"),
                total_bytes=1000 * GIB,
                free_bytes=int(free_gib * GIB),
                filesystem=kind,
            ),
        )
    )


def slurm(**values: Any) -> dict[str, Any]:
    """Return a spec of a Slurm job that asks for these values."""
    return {"launcher": {"engine": "slurm", "slurm": values}}


def ray(**values: Any) -> dict[str, Any]:
    """Return a spec of a Ray job that asks for these values."""
    return {"launcher": {"engine": "ray", "ray": values}}


# rule -> (caught, let through); a value may be a function of the folder
RUN_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BT003": ({"spec": {**ZERO3, "gpus": 1}}, {"spec": {"deepspeed": "zero3_offload", "gpus": 1}}),
    "SL002": ({"spec": slurm(time_min=3)}, {"spec": slurm(time_min=4)}),
    "SL003": (
        {"model": EIGHT_B, "spec": slurm(time_min=60)},
        {"model": EIGHT_B, "spec": slurm(time_min=60, signal_s=300)},
    ),
    "SL005": ({"spec": slurm(), "on": disk(900)}, {"spec": slurm(), "on": disk(900, "nfs4")}),
    "SL006": ({"spec": {"launcher": {"slurm": {"nodes": 2}}}}, {"spec": slurm(partition="a100")}),
    "SL007": (
        {"spec": slurm(), "environ": {"HF_TOKEN": "hf_x"}},
        {"spec": {}, "environ": {"HF_TOKEN": "hf_x"}},
    ),
    "RAY004": ({"spec": ray(), "on": disk(900)}, {"spec": ray(), "on": disk(900, "nfs4")}),
    "RAY005": ({"spec": {"launcher": {"ray": {"nodes": 2}}}}, {"spec": ray(memory_gib=4)}),
    "RAY006": (
        {"spec": ray(), "environ": {"HF_TOKEN": "hf_x"}},
        {"spec": slurm(), "environ": {"HF_TOKEN": "hf_x"}},
    ),
    "RAY007": (
        {"spec": ray(address="http://head:8265"), "environ": {"RAY_AUTH_TOKEN": "x"}},
        {"spec": ray(address="http://localhost:8265"), "environ": {"RAY_AUTH_TOKEN": "x"}},
    ),
    "RAY009": (
        {"spec": {**ZERO3, "gpus": 2, **ray(nodes=2, min_nodes=1)}},
        {"spec": {"fsdp": "full_shard", "gpus": 2, **ray(nodes=2, min_nodes=1)}},
    ),
    "BT004": ({"rows": 15}, {"rows": 16}),
    "BT005": ({"rows": 1}, {"rows": 2}),
    "BT006": (
        {
            "spec": train(global_batch_size=32),
            "deepspeed_json": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4},
        },
        {
            "spec": train(global_batch_size=8),
            "deepspeed_json": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4},
        },
    ),
    "BT007": (
        {"rows": 32, "spec": train(warmup_ratio=0.9)},
        {"rows": 320, "spec": train(warmup_ratio=0.9)},
    ),
    "BT008": ({"spec": train(max_steps=5, num_train_epochs=3)}, {"spec": train(max_steps=5)}),
    "BT009": (
        {"spec": train(lr_scheduler_type="constant", warmup_ratio=0.1)},
        {"spec": train(lr_scheduler_type="constant")},
    ),
    "BT010": ({"spec": train(learning_rate=2e-3)}, {"spec": train(learning_rate=2e-3, method="lora")}),
    "BT014": (
        {"spec": train(task="kto", per_device_train_batch_size=1)},
        {"spec": train(task="kto", per_device_train_batch_size=2)},
    ),
    "BT011": (
        {"spec": train(per_device_train_batch_size=6)},
        {"spec": train(per_device_train_batch_size=8)},
    ),
    "BT012": (
        {"spec": train(task="dpo", learning_rate=2e-5), "rows": PAIRS},
        {"spec": train(task="dpo", learning_rate=1e-6), "rows": PAIRS},
    ),
    "BT013": (
        {"spec": train(preference_beta=0.5)},
        {"spec": train(task="dpo", preference_beta=0.5), "rows": PAIRS},
    ),
    "DT003": (
        {"on": machine("T4"), "model": {}},
        {"on": machine("T4"), "model": {"config": {"dtype": "float16"}}},
    ),
    "DT004": ({"spec": train(dtype="fp32")}, {"spec": train(dtype="fp32"), "on": machine("T4")}),
    "DT005": ({"on": UNKNOWN}, {}),
    "DT006": ({"spec": {"fsdp": "full_shard"}}, {"spec": {"fsdp": "full_shard", **train(dtype="fp32")}}),
    "DT007": ({"spec": {"deepspeed": "zero2", **LORA}}, {"spec": {"deepspeed": "zero2"}}),
    "DT008": (
        {"spec": {"fsdp": "full_offload", **train(optimizer="adamw_torch_fused")}},
        {"spec": {"fsdp": "full_offload"}},
    ),
    "DS001": (
        {"plan": lambda folder: offload_config(nvme_path=str(folder / "rows.jsonl/nvme"))},
        {"plan": lambda folder: offload_config(nvme_path=str(folder / "nvme"))},
    ),
    "DS002": (
        {"plan": offload_config(nvme_path="/dev/shm")},
        {"plan": lambda folder: offload_config(nvme_path=str(folder))},
    ),
    "DS003": (
        {
            "plan": lambda folder: offload_config(nvme_path=str(folder)),
            "model": {"parameters": 4 * 10**12},
        },
        {"plan": lambda folder: offload_config(nvme_path=str(folder)), "model": {"parameters": 10**6}},
    ),
    "DS004": (
        {"plan": offload_config(nvme_path="/nvme")},
        {
            "plan": offload_config(nvme_path="/nvme"),
            "environ": lambda folder: {"CFLAGS": f"-I{folder}/include"},
            "before": lambda folder: ((folder / "include").mkdir(), (folder / "include/libaio.h").touch()),
        },
    ),
    "DS005": (
        {"plan": offload_config(nvme_path="/nvme", buffer_size=31_999), "model": {}},
        {"plan": offload_config(nvme_path="/nvme", buffer_size=32_000), "model": {}},
    ),
    "DS007": (
        {"spec": ZERO3, "model": {"config": {"hidden_size": None}}},
        {"spec": ZERO3, "model": {"config": {"hidden_size": None, "n_embd": 64}}},
    ),
    "DS008": (
        {
            "plan": offload_config(nvme_path="/nvme", pin_memory=True),
            "on": machine(memlock=8 << 20),
        },
        {"plan": offload_config(nvme_path="/nvme", pin_memory=True)},
    ),
    "DS009": (
        {"deepspeed_json": FUSED, "on": machine(cuda_toolkit=None)},
        {"deepspeed_json": TORCH_ADAM, "on": machine(cuda_toolkit=None)},
    ),
    "DS010": (
        {"deepspeed_json": FUSED, "on": machine(cuda_toolkit="13.0")},
        {"deepspeed_json": FUSED, "on": machine(cuda_toolkit="12.1")},
    ),
    "DS011": (
        {"spec": {"deepspeed": "zero2_offload"}, "model": EIGHT_B, "on": SMALL_HOST},
        {"spec": {"deepspeed": "zero2_offload"}, "model": EIGHT_B},
    ),
    "DS012": (
        {"spec": {**ZERO3, **LORA}, "model": EIGHT_B},
        {"spec": {**ZERO3, **LORA}, "model": {"parameters": 70_000_000_000}},
    ),
    "DS013": (
        {"spec": {**ZERO3, "trust_remote_code": True}, "model": {"config": {**REMOTE, "num_experts": 8}}},
        {"spec": {**ZERO3, "trust_remote_code": True}, "model": {"config": {"num_experts": 8}}},
    ),
    "DS014": (
        {"spec": {"deepspeed": "zero3", "nvme_path": "/nvme"}},
        {"spec": {"deepspeed": "zero3_nvme", "nvme_path": "/nvme"}},
    ),
    "DS015": (
        {
            "plan": {**zero(zero_quantized_gradients=True), "nodes": 2, "world_size": 4},
            "on": machine("A100", 4),
        },
        {
            "plan": {**zero(zero_quantized_gradients=True), "nodes": 2, "world_size": 8},
            "on": machine("A100", 4),
        },
    ),
    "FS020": (
        {"spec": {"fsdp": "full_shard", **train(global_batch_size=32)}},
        {"spec": {"fsdp": "full_shard"}},
    ),
    "FS021": (
        {"spec": {"fsdp": "full_shard"}, "model": {"config": {"tie_word_embeddings": True}}},
        {
            "spec": {"fsdp": "full_shard"},
            "model": {
                "config": {"tie_word_embeddings": True},
                "tensors": {"model.embed_tokens.weight": b"ab" * 8, "lm_head.weight": b"ab" * 8},
            },
        },
    ),
    "PE001": ({"spec": {"lora": {"r": 8}}}, {"spec": {"lora": {"r": 8}, **LORA}}),
    "PE002": (
        {"spec": {**LORA, "lora": {"target_modules": ["q_projj"]}}},
        {"spec": {**LORA, "lora": {"target_modules": ["q_proj"]}}},
    ),
    "PE003": (
        {
            "spec": {**LORA, "lora": {"target_modules": ["lm_head"]}},
            "model": {"config": {"tie_word_embeddings": True}},
        },
        {"spec": {**LORA, "lora": {"target_modules": ["lm_head"]}}},
    ),
    "PE004": ({"spec": LORA}, {"spec": train(method="lora", learning_rate=1e-4)}),
    "PE005": ({"model": {"config": QUANT}}, {"model": {"config": QUANT}, "spec": LORA}),
    "PE006": (
        {"model": {"config": QUANT}, "spec": {**ZERO3, **LORA}},
        {"model": {"config": QUANT}, "spec": {"deepspeed": "zero2", **LORA}},
    ),
    "PE007": (
        {"model": {"config": QUANT}, "spec": {"fsdp": "full_shard", **LORA}},
        {
            "model": {
                "config": {
                    "quantization_config": {
                        **QUANT["quantization_config"],
                        "bnb_4bit_quant_storage": "bfloat16",
                    }
                }
            },
            "spec": {"fsdp": "full_shard", **LORA},
        },
    ),
    "PE008": ({"model": {"config": QUANT}, "spec": LORA}, {"spec": LORA}),
    "PE009": ({"spec": {**LORA, "lora": {"r": 32}}}, {"spec": {**LORA, "lora": {"r": 16}}}),
    "PE010": (
        {"spec": {**LORA, "lora": {"r": 1, "alpha": 32}}},
        {"spec": {**LORA, "lora": {"r": 2, "alpha": 32}}},
    ),
    "CP001": (
        {"on": disk(10), "model": EIGHT_B},
        {"on": disk(10), "model": EIGHT_B, "spec": LORA},
    ),
    "CP004": (
        {"rows": 4000, "spec": {"recovery": {"save_steps": 0}}},
        {"rows": 64, "spec": {"recovery": {"save_steps": 0}}},
    ),
    "CP005": ({"spec": {"recovery": {"save_steps": 4}}}, {"spec": {"recovery": {"save_steps": 3}}}),
    "CP006": ({"on": disk(200), "model": EIGHT_B}, {"on": disk(400), "model": EIGHT_B}),
    "CP007": (
        {"on": disk(400), "plan": {"nodes": 2, "world_size": 4}},
        {"on": disk(400, "nfs4"), "plan": {"nodes": 2, "world_size": 4}},
    ),
    "PE011": (
        {"model": {"config": {"quantization_config": {"quant_method": "mxfp4"}}}, "spec": LORA},
        {"model": {"config": {"quantization_config": {"quant_method": "gptq"}}}, "spec": LORA},
    ),
    "PE012": (
        {"model": {"config": {"quantization_config": {"quant_method": "gptq"}}}, "spec": QLORA},
        {"model": {"config": QUANT}, "spec": QLORA},
    ),
    "PE013": (
        {"model": {"config": {"model_type": "gpt_oss"}}, "spec": LORA},
        {
            "model": {"config": {"model_type": "gpt_oss"}},
            "spec": {**LORA, "lora": {"target_modules": ["q_proj"]}},
        },
    ),
    "CP002": ({"on": disk(100, "tmpfs")}, {"on": disk(100)}),
    "CP003": (
        {"spec": lambda folder: {"output_dir": str(folder / "model/out")}},
        {"spec": lambda folder: {"output_dir": str(folder / "model-out")}},
    ),
    "MD004": (
        {"model": {"config": {"architectures": ["BertForMaskedLM"]}}},
        {"model": {"config": {"architectures": ["BertLMHeadModel"]}}},
    ),
    "MD005": (
        {"model": {"config": REMOTE}},
        {"model": {"config": {**REMOTE, "model_type": "llama"}}},
    ),
    "MD006": (
        {"model": {"config": {"model_type": "no_such_model"}}},
        {"model": {"config": {"model_type": "qwen3_moe"}}},
    ),
    "MD007": (
        {"model": {"files": {"model.safetensors": None}}},
        {"model": {"files": {"model.safetensors": None, "pytorch_model.bin": "x"}}},
    ),
    "MD008": (
        {
            "model": {
                "files": {
                    "model.safetensors.index.json": '{"weight_map": {"a.weight": "model-1.safetensors"}}'
                }
            }
        },
        {
            "model": {
                "files": {"model.safetensors.index.json": '{"weight_map": {"a.weight": "model.safetensors"}}'}
            }
        },
    ),
    "MD009": (
        {"model": {"files": {"tokenizer.json": None, "tokenizer_config.json": None}}},
        {
            "model": {"files": {"tokenizer.json": None, "tokenizer_config.json": None}},
            "rows": [{"input_ids": [1, 2, i]} for i in range(20)],
        },
    ),
    "MD010": (
        {"model": {"files": {"model.safetensors": POINTER}}},
        {"model": {"files": {"README.md": POINTER}}},
    ),
    "MD011": (
        {"model": {"cut": 1}},
        {"model": {"cut": 0}},
    ),
    "DA001": (
        {"spec": lambda folder: {"data": {"eval_split": 0.1, "eval_dataset": str(folder / "eval.jsonl")}}},
        {"spec": {"data": {"eval_split": 0.1}}},
    ),
    "DA002": (
        {"spec": train(eval_steps=2)},
        {"spec": {**train(eval_steps=2), "data": {"eval_split": 0.1}}},
    ),
    "DA003": (
        {"spec": lambda folder: {"data": {"eval_dataset": str(folder / "rows.jsonl")}}},
        {"spec": lambda folder: {"data": {"eval_dataset": str(folder / "eval.jsonl")}}},
    ),
    "DA004": (
        {"model": {"files": {"tokenizer_config.json": "{}"}}},
        {"model": {"files": {"tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}"}}},
    ),
    "DA005": (
        {"model": {"files": {"tokenizer.json": '{"added_tokens": [{"id": 1000, "content": "<new>"}]}'}}},
        {"model": {"files": {"tokenizer.json": '{"added_tokens": [{"id": 999, "content": "<new>"}]}'}}},
    ),
    "DA006": (
        {"model": GPT2, "spec": {"data": {"max_length": 513}}},
        {"model": GPT2, "spec": {"data": {"max_length": 512}}},
    ),
    "DA007": ({"spec": {"data": {"max_length": 2049}}}, {"spec": {"data": {"max_length": 2048}}}),
    "DA008": ({"rows": [*[CHAT] * 20, {"messages": []}]}, {"rows": [CHAT] * 20}),
    "DA009": (
        {"rows": [{"prompt": "Q", "chosen": f"A{i}", "rejected": "B"} for i in range(20)]},
        {"rows": [{"prompt": "Q", "completion": f"A{i}"} for i in range(20)]},
    ),
    "DA010": ({"rows": [CHAT] * 20}, {"rows": 20}),
    "DA011": (
        {"spec": {**train(eval_steps=9), "data": {"eval_split": 0.1}}},
        {"spec": {**train(eval_steps=3), "data": {"eval_split": 0.1}}},
    ),
    "DA012": (
        {"rows": 1, "spec": {"data": {"eval_split": 0.5}}},
        {"rows": 2, "spec": {"data": {"eval_split": 0.5}}},
    ),
    "DA013": (
        {"spec": train(task="dpo")},
        {"spec": train(task="dpo"), "rows": PAIRS},
    ),
    "EN012": (
        {"spec": train(report_to=["wandb"]), "environ": lambda folder: {"HOME": str(folder)}},
        {
            "spec": train(report_to=["wandb"]),
            "environ": lambda folder: {"HOME": str(folder)},
            "before": lambda folder: (folder / ".netrc").write_text(
                "machine api.wandb.ai login user password x"
            ),
        },
    ),
    "EN013": (
        {
            "spec": {"deepspeed": "zero2_offload"},
            "environ": lambda folder: {"TORCH_EXTENSIONS_DIR": str(folder / "rows.jsonl/ext")},
        },
        {
            "spec": {"deepspeed": "zero2_offload"},
            "environ": lambda folder: {"TORCH_EXTENSIONS_DIR": str(folder / "ext")},
        },
    ),
    "DA014": (
        {"spec": {**train(load_best_model_at_end=True), "data": {"eval_split": 0.1}}},
        {"spec": {**train(early_stopping_patience=2, eval_steps=3), "data": {"eval_split": 0.1}}},
    ),
    "EN005": (
        {"plan": zero(offload_optimizer={"device": "cpu"}), "on": machine(ninja=False)},
        {"plan": zero(offload_param={"device": "cpu"}), "on": machine(ninja=False)},
    ),
    "EN020": ({"environ": {"ACCELERATE_USE_FSDP": "true"}}, {"environ": {"HF_HOME": "/x"}}),
    "EN021": ({"environ": {"CUDA_LAUNCH_BLOCKING": "1"}}, {"environ": {"CUDA_LAUNCH_BLOCKING": "0"}}),
    "EN022": (
        {"environ": {"NCCL_P2P_DISABLE": "1"}},
        {"environ": {"NCCL_P2P_DISABLE": "1"}, "on": machine(interconnect="pcie")},
    ),
    "EN023": ({"environ": {"NCCL_SOCKET_IFNAME": "ib"}}, {"environ": {"NCCL_SOCKET_IFNAME": "lo"}}),
    "EN024": (
        {"model": {"id": "org/none"}, "environ": {"HF_HUB_OFFLINE": "1"}},
        {"environ": {"HF_HUB_OFFLINE": "1"}},
    ),
    "EN025": (
        {"model": {"id": "org/name"}, "environ": lambda folder: {"HF_HOME": str(folder)}},
        {
            "model": {"id": "org/name"},
            "environ": lambda folder: {"HF_HOME": str(folder)},
            "before": lambda folder: (folder / "hub/models--org--name/snapshots/abc").mkdir(parents=True),
        },
    ),
    "HW041": ({"on": MIG}, {"on": MIG, "spec": {"gpus": 1}}),
    "HW042": (
        {"model": EIGHT_B, "on": SMALL_HOST},
        {"model": EIGHT_B, "on": SMALL_HOST, "spec": {"fsdp": "full_shard"}},
    ),
    "HW044": (
        {"model": {"parameters": 16 * 10**9}, "on": SMALL_HOST, "spec": LORA},
        {"model": EIGHT_B, "on": SMALL_HOST, "spec": LORA},
    ),
    "HW043": (
        {
            "on": machine(host_memory=HostMemory(total_bytes=GIB, available_bytes=100_000)),
            "spec": train(task="dpo"),
        },
        {"on": machine(host_memory=HostMemory(total_bytes=GIB, available_bytes=100_000))},
    ),
    "SE001": ({"spec": {"trust_remote_code": True}}, {}),
    "SE002": (
        {"model": {"files": {"model.safetensors": None, "pytorch_model.bin": "x"}}},
        {"model": {"files": {"pytorch_model.bin": "x"}}},
    ),
    "SE004": (
        {"before": lambda folder: ((folder / "out").mkdir(), (folder / "out").chmod(0o777))},
        {"before": lambda folder: ((folder / "out").mkdir(), (folder / "out").chmod(0o1777))},
    ),
}
"""`before` is called with the folder first."""
