"""Good public set-ups, re-written: what the documents and examples of the usual projects recommend.

None of them may get an error. `JSONS` are DeepSpeed configs (with the run they are for, or None when the numbers
in them fit one script only), `YAMLS` accelerate files, `SPECS` whole runs.
"""

from __future__ import annotations

from typing import Any

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
SCALING = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
FP16 = {"enabled": "auto", **SCALING}
BF16 = {"enabled": "auto"}
ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
CPU = {"device": "cpu", "pin_memory": True}
BUCKETS = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    **BUCKETS,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
LF_ZERO2 = {
    **ZERO2,
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8,
    "overlap_comm": False,
    "round_robin_gradients": True,
}
AXOLOTL_FP16 = {"auto_cast": False, **FP16, "initial_scale_power": 32}
AXOLOTL_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 0,
    **BUCKETS,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ACCELERATE_END = {
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
FP16_RUN = {"spec": {"training": {"dtype": "fp16"}}}
LORA_FP16 = {"spec": {"training": {"dtype": "fp16", "method": "lora"}}}


def hf(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the long example of transformers' DeepSpeed guide around a ZeRO block."""
    return {
        "fp16": FP16,
        "bf16": BF16,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "zero_optimization": zero,
        **AUTO_BATCH,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        **more,
    }


def templates(zero: dict[str, Any], **params: Any) -> dict[str, Any]:
    """Return a template of accelerate's examples around a ZeRO block."""
    return {
        "fp16": {"enabled": True, **SCALING},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", **params}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
        "zero_optimization": zero,
        **ACCELERATE_END,
    }


JSONS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "transformers guide, ZeRO-1": ({"zero_optimization": {"stage": 1}, **AUTO_BATCH}, {}),
    "transformers guide, ZeRO-2": (
        hf({**ZERO2, "offload_optimizer": CPU, "round_robin_gradients": True}),
        {},
    ),
    "transformers guide, ZeRO-3": (hf({**ZERO3, "offload_optimizer": CPU, "offload_param": CPU}), {}),
    "transformers guide, ZeRO-3 by hand": (
        {
            **hf({**ZERO3, "reduce_bucket_size": 1e6, "stage3_prefetch_bucket_size": 0.94e6}),
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
            },
        },
        None,
    ),
    "transformers guide, ZeRO-Infinity": (
        hf(
            {
                **ZERO3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 4,
                    "fast_init": False,
                },
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 5,
                    "buffer_size": 1e8,
                    "max_in_cpu": 1e9,
                },
            },
            aio={
                "block_size": 262144,
                "queue_depth": 32,
                "intra_op_parallelism": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        ),
        None,
    ),
    "transformers guide, torch's AdamW with off-load": (
        {
            "zero_optimization": {**ZERO3, "offload_optimizer": CPU},
            "zero_force_ds_cpu_optimizer": False,
            "bf16": BF16,
            **AUTO_BATCH,
        },
        {},
    ),
    "accelerate template, stage 1": (
        templates({**ZERO2, "stage": 1, "reduce_bucket_size": "auto"}, torch_adam=True, adam_w_mode=True),
        FP16_RUN,
    ),
    "accelerate template, stage 2": (
        templates({**ZERO2, "reduce_bucket_size": "auto"}, torch_adam=True),
        FP16_RUN,
    ),
    "accelerate template, stage 2 off-load": (
        templates({**ZERO2, "reduce_bucket_size": "auto", "offload_optimizer": CPU}),
        FP16_RUN,
    ),
    "accelerate template, stage 3": (
        templates({**ZERO3, "stage3_gather_16bit_weights_on_model_save": "auto"}),
        LORA_FP16,
    ),
    "accelerate template, stage 3 off-load": (
        templates(
            {
                **ZERO3,
                "stage3_gather_16bit_weights_on_model_save": "auto",
                "offload_optimizer": CPU,
                "offload_param": CPU,
            }
        ),
        LORA_FP16,
    ),
    "LLaMA-Factory, z2": (
        {
            **AUTO_BATCH,
            "zero_allow_untested_optimizer": True,
            "fp16": FP16,
            "bf16": BF16,
            "zero_optimization": LF_ZERO2,
        },
        {},
    ),
    "LLaMA-Factory, z2 off-load": (
        {
            **AUTO_BATCH,
            "zero_allow_untested_optimizer": True,
            "fp16": FP16,
            "bf16": BF16,
            "zero_optimization": {**LF_ZERO2, "offload_optimizer": CPU},
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        },
        {},
    ),
    "LLaMA-Factory, z3": (
        {
            **AUTO_BATCH,
            "zero_allow_untested_optimizer": True,
            "fp16": FP16,
            "bf16": BF16,
            "zero_optimization": {**ZERO3, "overlap_comm": False},
        },
        {},
    ),
    "LLaMA-Factory, z3 off-load": (
        {
            **AUTO_BATCH,
            "zero_allow_untested_optimizer": True,
            "fp16": FP16,
            "bf16": BF16,
            "zero_optimization": {
                **ZERO3,
                "overlap_comm": False,
                "offload_optimizer": CPU,
                "offload_param": CPU,
            },
        },
        {},
    ),
    "Axolotl, zero1": (
        {
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "bf16": BF16,
            "fp16": AXOLOTL_FP16,
            **AUTO_BATCH,
        },
        {},
    ),
    "Axolotl, zero2": (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
            "bf16": BF16,
            "fp16": AXOLOTL_FP16,
            **AUTO_BATCH,
            "wall_clock_breakdown": False,
        },
        {},
    ),
    "Axolotl, zero3": (
        {"zero_optimization": AXOLOTL_ZERO3, "bf16": BF16, "fp16": AXOLOTL_FP16, **AUTO_BATCH},
        {},
    ),
    "Axolotl, zero3_bf16": (
        {"zero_optimization": AXOLOTL_ZERO3, "bf16": {"enabled": True}, **AUTO_BATCH},
        {},
    ),
    "Axolotl, zero3_bf16_cpuoffload_all": (
        {
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 0,
                **BUCKETS,
                "max_live_parameters": 0,
                "max_reuse_distance": 0,
                "gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True},
            **AUTO_BATCH,
        },
        {},
    ),
    "LLaVA, zero2": (
        {
            "fp16": FP16,
            "bf16": BF16,
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
            },
        },
        {},
    ),
    "LLaVA, zero3 off-load": (
        {
            **hf(
                {
                    **{k: v for k, v in ZERO3.items() if k != "stage3_gather_16bit_weights_on_model_save"},
                    "gather_16bit_weights_on_model_save": True,
                    "offload_optimizer": CPU,
                    "offload_param": CPU,
                },
            ),
            "bf16": {"enabled": True},
            "steps_per_print": 1e5,
        },
        {},
    ),
    "DeepSpeed tutorial, ZeRO-2": (
        {
            "train_batch_size": 16,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {**ZERO2, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8},
            "fp16": {"enabled": True},
        },
        FP16_RUN,
    ),
    "DeepSpeed tutorial, ZeRO-3 off-load": (
        {
            "train_batch_size": 16,
            "zero_optimization": {
                "stage": 3,
                "contiguous_gradients": True,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_prefetch_bucket_size": 1e7,
                "stage3_param_persistence_threshold": 1e5,
                "reduce_bucket_size": 1e7,
                "sub_group_size": 1e9,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        },
        None,
    ),
    "DeepSpeed tutorial, ZeRO++ in fp16": (
        {
            "train_batch_size": 16,
            "fp16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 10_000_000,
                "reduce_scatter": True,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 16,
                "zero_quantized_gradients": True,
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
        },
        None,
    ),
}

ACCELERATE_HEAD = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def zero_yaml(stage: int, offload: str = "none", more: str = "") -> str:
    """Return what `accelerate config` writes for ZeRO."""
    return f"""{ACCELERATE_HEAD}
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: {offload}
  offload_param_device: {offload if stage == 3 else "none"}
  zero3_init_flag: {str(stage == 3).lower()}
  zero3_save_16bit_model: {str(stage == 3).lower()}
  zero_stage: {stage}
{more}"""


def fsdp_yaml(*lines: str) -> str:
    """Return what `accelerate config` writes for FSDP."""
    block = "\n".join(f"  fsdp_{line}" for line in ("auto_wrap_policy: TRANSFORMER_BASED_WRAP", *lines))
    return f"{ACCELERATE_HEAD}\ndistributed_type: FSDP\nfsdp_config:\n{block}\n"


FSDP1 = (
    *("backward_prefetch: BACKWARD_PRE", "cpu_ram_efficient_loading: true", "forward_prefetch: false"),
    *("sync_module_states: true", "use_orig_params: true", "state_dict_type: SHARDED_STATE_DICT"),
)
FSDP2 = ("version: 2", "cpu_ram_efficient_loading: true", "state_dict_type: FULL_STATE_DICT")

# name -> (text, what it means here)
YAMLS: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL, single_gpu": (
        ACCELERATE_HEAD.replace("num_processes: 8", "num_processes: 1") + "distributed_type: 'NO'\n",
        {"strategy": "single", "gpus": 1},
    ),
    "TRL, multi_gpu": (ACCELERATE_HEAD + "distributed_type: MULTI_GPU\ngpu_ids: all\n", {"strategy": "ddp"}),
    "TRL, zero1": (zero_yaml(1, more="  gradient_accumulation_steps: 1\n"), {"deepspeed": "zero1"}),
    "TRL, zero2": (zero_yaml(2), {"deepspeed": "zero2"}),
    "TRL, zero3": (zero_yaml(3), {"deepspeed": "zero3"}),
    "alignment-handbook, zero3": (zero_yaml(3, "cpu"), {"deepspeed": "zero3_offload"}),
    "PEFT, deepspeed": (zero_yaml(3, more="  gradient_accumulation_steps: 4\n"), {"deepspeed": "zero3"}),
    "accelerate guide, zero2 off-load": (
        zero_yaml(2, "cpu", "  gradient_clipping: 0.5\n"),
        {"deepspeed": "zero2_offload", "training": {"dtype": "bf16", "max_grad_norm": 0.5}},
    ),
    "TRL, fsdp1": (
        fsdp_yaml(*FSDP1, "offload_params: false", "sharding_strategy: FULL_SHARD"),
        {"fsdp": "full_shard"},
    ),
    "TRL, fsdp2": (
        fsdp_yaml(
            *FSDP2, "offload_params: false", "reshard_after_forward: true", "activation_checkpointing: false"
        ),
        {"fsdp": "full_shard"},
    ),
    "LLaMA-Factory, fsdp2": (
        fsdp_yaml(*FSDP2, "offload_params: false", "reshard_after_forward: true"),
        {"fsdp": "full_shard"},
    ),
    "LLaMA-Factory, fsdp off-load": (
        fsdp_yaml(*FSDP1, "offload_params: true", "sharding_strategy: FULL_SHARD"),
        {"fsdp": "full_offload"},
    ),
    "PEFT, fsdp": (
        fsdp_yaml(*FSDP1, "offload_params: false", "sharding_strategy: SHARD_GRAD_OP"),
        {"fsdp": "shard_grad"},
    ),
    "accelerate guide, activation checkpointing": (
        fsdp_yaml(*FSDP2, "reshard_after_forward: false", "activation_checkpointing: true"),
        {"fsdp": "shard_grad", "training": {"dtype": "bf16", "gradient_checkpointing": True}},
    ),
}

EIGHT = {"gpus": 8}
SPECS: dict[str, dict[str, Any]] = {
    "Stanford Alpaca, FSDP": {
        "gpus": 4,
        "fsdp": "full_shard",
        "training": {
            "global_batch_size": 128,
            "per_device_train_batch_size": 4,
            "num_train_epochs": 3,
            "learning_rate": 2e-5,
            "warmup_ratio": 0.03,
        },
        "data": {"max_length": 512},
    },
    "FastChat, Vicuna": {
        "gpus": 4,
        "fsdp": "full_shard",
        "training": {
            "global_batch_size": 128,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 3,
            "gradient_checkpointing": True,
            "warmup_ratio": 0.03,
        },
        "data": {"max_length": 2048},
    },
    "alignment-handbook, Zephyr SFT full": {
        **EIGHT,
        "deepspeed": "zero3",
        "training": {
            "global_batch_size": 128,
            "per_device_train_batch_size": 16,
            "learning_rate": 2e-5,
            "warmup_ratio": 0.1,
            "gradient_checkpointing": True,
        },
        "data": {"max_length": 2048},
    },
    "alignment-handbook, Zephyr SFT LoRA": {
        **EIGHT,
        "strategy": "ddp",
        "training": {
            "method": "lora",
            "learning_rate": 2e-4,
            "global_batch_size": 64,
            "warmup_ratio": 0.1,
            "gradient_checkpointing": True,
        },
        "lora": {"r": 16, "alpha": 16, "dropout": 0.05, "target_modules": ["q_proj", "down_proj"]},
        "data": {"max_length": 2048},
    },
    "LLaMA-Factory, llama3 LoRA": {
        "gpus": 2,
        "training": {
            "method": "lora",
            "learning_rate": 1e-4,
            "num_train_epochs": 3,
            "warmup_ratio": 0.1,
            "per_device_train_batch_size": 1,
        },
        "lora": {"r": 8, "alpha": 16},
        "data": {"max_length": 2048, "eval_split": 0.1},
    },
    "LLaMA-Factory, llama3 full": {
        "gpus": 4,
        "deepspeed": "zero3",
        "training": {"learning_rate": 1e-5, "num_train_epochs": 3, "warmup_ratio": 0.1},
        "data": {"max_length": 2048},
    },
    "TRL, SFT script": {
        "gpus": 2,
        "training": {"learning_rate": 2e-5, "gradient_checkpointing": True, "eval_steps": 100},
        "data": {"eval_split": 0.1},
    },
    "TRL, SFT script with LoRA": {
        "gpus": 2,
        "deepspeed": "zero2",
        "training": {"method": "lora", "learning_rate": 2e-4, "gradient_checkpointing": True},
        "lora": {"r": 32, "alpha": 16},
    },
    "Axolotl, llama-3 LoRA 8B": {
        "gpus": 2,
        "deepspeed": "zero1",
        "training": {
            "method": "lora",
            "learning_rate": 2e-4,
            "num_train_epochs": 4,
            "gradient_checkpointing": True,
        },
        "lora": {"r": 32, "alpha": 16, "dropout": 0.05},
        "data": {"max_length": 4096, "eval_split": 0.05},
    },
    "Axolotl, FSDP2 with off-load": {
        "gpus": 2,
        "fsdp": "full_offload",
        "training": {"learning_rate": 2e-5, "gradient_checkpointing": True},
        "data": {"max_length": 4096},
    },
    "PEFT, SFT with FSDP and LoRA": {
        **EIGHT,
        "fsdp": "shard_grad",
        "training": {
            "method": "lora",
            "learning_rate": 1e-4,
            "gradient_checkpointing": True,
            "weight_decay": 1e-4,
        },
        "lora": {"r": 8, "alpha": 16, "dropout": 0.1},
        "data": {"max_length": 2048},
    },
    "LLaVA, LoRA stage": {
        **EIGHT,
        "deepspeed": "zero3",
        "training": {"method": "lora", "learning_rate": 2e-4, "global_batch_size": 128},
        "lora": {"r": 128, "alpha": 256},
        "data": {"max_length": 2048},
    },
    "TRL, DPO script": {
        "gpus": 2,
        "training": {"task": "dpo", "learning_rate": 5e-7, "gradient_checkpointing": True},
        "data": {"packing": False},
    },
    "alignment-handbook, Zephyr DPO full": {
        **EIGHT,
        "deepspeed": "zero3",
        "training": {"task": "dpo", "preference_beta": 0.01, "learning_rate": 5e-7, "global_batch_size": 128},
    },
    "alignment-handbook, Zephyr DPO LoRA": {
        **EIGHT,
        "strategy": "ddp",
        "training": {"task": "dpo", "method": "lora", "learning_rate": 5e-6, "global_batch_size": 32},
        "lora": {"r": 128, "alpha": 128, "dropout": 0.05},
    },
    "alignment-handbook, Zephyr SFT QLoRA": {
        **EIGHT,
        "strategy": "ddp",
        "training": {"method": "qlora", "learning_rate": 2e-4, "global_batch_size": 128},
        "lora": {"r": 16, "alpha": 16, "dropout": 0.05},
        "data": {"max_length": 2048},
    },
    "Answer.AI, FSDP-QLoRA of 70B on two cards": {
        "gpus": 2,
        "fsdp": "full_offload",
        "training": {"method": "qlora", "learning_rate": 1e-5, "global_batch_size": 8},
        "data": {"max_length": 512},
    },
    "PEFT, QLoRA with FSDP": {
        **EIGHT,
        "fsdp": "full_shard",
        "training": {"method": "qlora", "learning_rate": 1e-4, "gradient_checkpointing": True},
        "lora": {"r": 8, "alpha": 16, "dropout": 0.1},
        "data": {"max_length": 2048},
    },
    "Axolotl, QLoRA 8B": {
        "gpus": 1,
        "training": {"method": "qlora", "learning_rate": 2e-4, "global_batch_size": 8, "num_train_epochs": 4},
        "lora": {"r": 32, "alpha": 16, "dropout": 0.05},
        "data": {"max_length": 4096},
    },
    "QLoRA paper, guanaco": {
        "gpus": 1,
        "training": {"method": "qlora", "learning_rate": 2e-4, "lr_scheduler_type": "constant",
                     "max_grad_norm": 0.3, "max_steps": 1875, "global_batch_size": 16},
        "lora": {"r": 64, "alpha": 16, "dropout": 0.1},
        "data": {"max_length": 512, "packing": False},
    },
    "LLaMA-Factory, pre-training with LoRA": {
        "gpus": 2,
        "training": {"task": "pretrain", "method": "lora", "learning_rate": 1e-4, "warmup_ratio": 0.1},
        "lora": {"r": 8, "alpha": 16},
    },
    "LLaMA-Factory, ZeRO-3 with off-load": {
        "gpus": 4,
        "deepspeed": "zero3_offload",
        "training": {"learning_rate": 1e-5, "warmup_ratio": 0.1, "per_device_train_batch_size": 1},
        "recovery": {"save_steps": 2},
    },
    "DeepSpeed-Chat, step 1": {
        **EIGHT,
        "deepspeed": "zero2",
        "training": {"learning_rate": 9.65e-6, "global_batch_size": 64, "num_train_epochs": 2, "warmup_ratio": 0},
        "data": {"max_length": 512},
    },
    "OpenRLHF, SFT": {
        **EIGHT,
        "deepspeed": "zero2",
        "training": {"learning_rate": 5e-6, "global_batch_size": 256, "max_grad_norm": 1.0},
        "data": {"max_length": 2048},
    },
    "torchtune, full distributed 8B": {
        "gpus": 2,
        "fsdp": "full_shard",
        "training": {"learning_rate": 2e-5, "gradient_checkpointing": True, "optimizer": "adamw_torch_fused"},
        "data": {"packing": False},
    },
    "torchtune, DoRA": {
        "gpus": 1,
        "training": {"method": "lora", "learning_rate": 3e-4},
        "lora": {"r": 8, "alpha": 16, "use_dora": True},
    },
    "rsLoRA with a large rank": {
        "gpus": 2,
        "training": {"method": "lora", "learning_rate": 1e-4},
        "lora": {"r": 256, "alpha": 32, "use_rslora": True},
    },
    "TÜLU 3, SFT": {
        **EIGHT,
        "deepspeed": "zero3",
        "training": {"learning_rate": 5e-6, "lr_scheduler_type": "linear", "warmup_ratio": 0.03,
                     "global_batch_size": 128, "num_train_epochs": 2},
        "data": {"max_length": 4096},
        "recovery": {"save_total_limit": 1},
    },
    "a run on CPU ranks": {
        "gpus": 2,
        "device": "cpu",
        "deepspeed": "zero2",
        "training": {"method": "lora", "learning_rate": 1e-4, "report_to": []},
        "lora": {"merge_adapter": True},
    },
}  # fmt: skip
