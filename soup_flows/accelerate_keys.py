"""The keys of an `accelerate` YAML (accelerate 1.15), and what becomes of them here."""

from __future__ import annotations

TOP_KEYS = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config"),
    *("fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm"),
    *("tpu_env", "dynamo_config", "dynamo_backend", "fp16"),
)
"""Fields of `ClusterConfig`, and the two old names that `process_config` converts."""

DEEPSPEED_KEYS = (
    *("deepspeed_config_file", "deepspeed_multinode_launcher", "deepspeed_hostfile"),
    *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names"),
    *("gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device"),
    *("offload_optimizer_nvme_path", "offload_param_device", "offload_param_nvme_path"),
    *("zero3_init_flag", "zero3_save_16bit_model", "zero_stage"),
)
"""What `accelerate config` asks for DeepSpeed, and `accelerate launch` reads."""

FSDP_KEYS = (
    *("fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_sharding_strategy"),
    *("fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap"),
    *("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_state_dict_type"),
    *("fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading"),
    *("fsdp_sync_module_states", "fsdp_activation_checkpointing", "fsdp_cpu_offload"),
)
"""What `accelerate config` asks for FSDP; `fsdp_cpu_offload` and `fsdp_backward_prefetch_policy` are old names."""

_LAUNCH = "the launcher of this package settles it"
IGNORED = {
    "main_process_ip": _LAUNCH,
    "main_process_port": f"{_LAUNCH}, with a free port",
    "enable_cpu_affinity": _LAUNCH,
    "debug": "collectives are not checked one by one",
    "deepspeed_config.gradient_accumulation_steps": "accumulation follows from training.global_batch_size",
    "deepspeed_config.deepspeed_multinode_launcher": _LAUNCH,
    "deepspeed_config.deepspeed_hostfile": _LAUNCH,
    "deepspeed_config.deepspeed_exclusion_filter": _LAUNCH,
    "deepspeed_config.deepspeed_inclusion_filter": _LAUNCH,
    "deepspeed_config.deepspeed_moe_layer_cls_names": "write leaf_module in a DeepSpeed JSON",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "the model names its layers itself",
    "fsdp_config.fsdp_backward_prefetch": "FSDP2 has no such setting",
    "fsdp_config.fsdp_backward_prefetch_policy": "FSDP2 has no such setting",
    "fsdp_config.fsdp_forward_prefetch": "FSDP2 has no such setting",
    "fsdp_config.fsdp_min_num_params": "the model is wrapped layer by layer",
}
"""Keys that change nothing here, and why."""

UNSUPPORTED = {
    "fp8_config": "training in fp8 is not supported",
    "megatron_lm_config": "Megatron-LM is not supported",
    "mpirun_config": "starting through mpirun is not supported",
    "parallelism_config": "tensor, context and sequence parallelism are not supported",
    **dict.fromkeys(
        (
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_env",
            "downcast_bf16",
            "command_file",
            "commands",
        ),
        "TPUs are not supported",
    ),
    "dynamo_config": "torch.compile is not supported",
    "dynamo_backend": "torch.compile is not supported",
}
"""Keys that ask for what this package does not do."""

_PRESET = "`deepspeed`: the preset of the stage and its off-load"
_SHARDING = "`fsdp`: the preset of the sharding and its off-load"
MAPPED = {
    "distributed_type": "`strategy` (NO, MULTI_GPU, MULTI_CPU), `deepspeed` (DEEPSPEED), `fsdp` (FSDP)",
    "num_processes": "`gpus`",
    "use_cpu": "`device=cpu`",
    "mixed_precision": "`training.dtype`",
    "fp16": "`training.dtype=fp16`",
    "gpu_ids": "no setting: `CUDA_VISIBLE_DEVICES`, said in a warning",
    "deepspeed_config.deepspeed_config_file": "`deepspeed_config`, used byte for byte",
    "deepspeed_config.zero_stage": _PRESET,
    "deepspeed_config.offload_optimizer_device": _PRESET,
    "deepspeed_config.offload_param_device": _PRESET,
    "deepspeed_config.offload_optimizer_nvme_path": "`nvme_path`",
    "deepspeed_config.offload_param_nvme_path": "`nvme_path`",
    "deepspeed_config.gradient_clipping": "`training.max_grad_norm`",
    "fsdp_config.fsdp_sharding_strategy": _SHARDING,
    "fsdp_config.fsdp_reshard_after_forward": _SHARDING,
    "fsdp_config.fsdp_offload_params": _SHARDING,
    "fsdp_config.fsdp_cpu_offload": _SHARDING,
    "fsdp_config.fsdp_activation_checkpointing": "`training.gradient_checkpointing`",
}
"""Keys that become settings, and which."""

SETTLED = {
    "compute_environment": "LOCAL_MACHINE alone",
    "num_machines": "1 alone",
    "machine_rank": "one machine",
    "rdzv_backend": "one machine",
    "same_network": "one machine",
    "main_training_function": "the ranks run this package's program",
    "deepspeed_config.zero3_init_flag": "the weights are loaded sharded",
    "deepspeed_config.zero3_save_16bit_model": "the model is saved whole",
    "fsdp_config.fsdp_version": "always 2",
    "fsdp_config.fsdp_auto_wrap_policy": "layer by layer",
    "fsdp_config.fsdp_state_dict_type": "the model is saved whole",
    "fsdp_config.fsdp_use_orig_params": "FSDP2 has no such setting",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "one rank reads the weights",
    "fsdp_config.fsdp_sync_module_states": "one rank reads the weights",
}
"""Keys that need no setting: what they usually say holds anyway, and what does not hold is reported."""
