"""Which keys DeepSpeed 0.19.8 accepts, block by block, with the kind of value of each.

A test compares the tables with the installed library: pydantic's fields for the strict blocks, recorded
look-ups for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Kinds: b true or false, i whole number (2e8 is one), n number, s text, d block, l list, * anything,
# s? and the like: or null.
_ZERO: dict[str, str] = {
    "stage": "i",
    **dict.fromkeys(
        [
            *("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"),
            *("allgather_partitions", "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint"),
            *("ignore_unused_parameters", "legacy_stage1", "round_robin_gradients", "parameter_alignment"),
            *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
            *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
            *("log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
            *("stage3_gather_16bit_weights_on_model_save", "stage3_use_all_reduce_for_fetch_params"),
            *("stage3_allgather_sequential", "stage3_gather_fp16_weights_on_model_save"),
        ],
        "b",
    ),
    **dict.fromkeys(
        [
            *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "zero_hpz_partition_size"),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
            *("stage3_model_persistence_threshold", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
        ],
        "i",
    ),
    **dict.fromkeys(["overlap_comm", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"], "b?"),
    **dict.fromkeys(["offload_param", "offload_optimizer", "zenflow"], "d?"),
    "leaf_module": "d",
}
ALIASED = tuple(
    key.removeprefix("stage3_")
    for key in _ZERO
    if key.startswith("stage3_") and key != "stage3_gather_fp16_weights_on_model_save"
)
"""ZeRO keys that are accepted without their `stage3_` as well."""
_ZERO |= {name: _ZERO[f"stage3_{name}"] for name in ALIASED}

_OFFLOAD = {"device": "s", "nvme_path": "s?", "buffer_count": "i", "pin_memory": "b"}

STRICT: Mapping[str, dict[str, str]] = {
    "zero_optimization": _ZERO,
    "zero_optimization.offload_param": {**_OFFLOAD, "buffer_size": "i", "max_in_cpu": "i"},
    "zero_optimization.offload_optimizer": {
        **_OFFLOAD,
        **dict.fromkeys(["pipeline_read", "pipeline_write", "fast_init", "super_offload"], "b"),
        **dict.fromkeys(["ratio", "cpuadam_cores_perc"], "n"),
    },
    "zero_optimization.leaf_module": {"classes": "l", "names": "l", "name_suffixes": "l"},
    "bf16": dict.fromkeys(
        [
            *("enabled", "immediate_grad_update", "check_grad_overflow"),
            *("bf16_master_weights_and_grads", "bf16_optimizer_states"),
        ],
        "b",
    ),
    "fp16": {
        **dict.fromkeys(
            ["enabled", "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"], "b"
        ),
        "loss_scale": "n",
        **dict.fromkeys(["initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"], "i"),
    },
    "comms_logger": {**dict.fromkeys(["enabled", "prof_all", "verbose", "debug"], "b"), "prof_ops": "l"},
    "tensorboard": {"enabled": "b", "output_path": "s", "job_name": "s"},
    "wandb": {"enabled": "b", "group": "s?", "team": "s?", "project": "s"},
    "csv_monitor": {"enabled": "b", "output_path": "s", "job_name": "s"},
    "comet": {
        "enabled": "b",
        "samples_log_interval": "i",
        **dict.fromkeys(
            ["project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"], "s?"
        ),
        "online": "b?",
    },
    "compile": {
        **dict.fromkeys(
            [
                *("deepcompile", "autoep_non_moe", "free_activation", "offload_activation"),
                *("offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory"),
                *("debug_log", "offload_parameters", "sync_before_reduce", "sync_after_reduce"),
                *("sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors"),
                "keep_all_input_tensors",
            ],
            "b",
        ),
        "free_activation_threshold": "i",
        "passes": "l?",
    },
    "tensor_parallel": {
        **dict.fromkeys(
            [
                *("dtype", "injection_policy_tuple", "vocab_parallel_lm_head"),
                *("partition_config", "preset_model", "tensor_parallel", "tp"),
            ],
            "*",
        ),
        "autotp_size": "i",
        **dict.fromkeys(
            [
                *("tp_overlap_comm", "keep_module_on_host", "replace_with_kernel_inject"),
                "kernel_inject",
            ],
            "b",
        ),
        "vocab_parallel_ce_backend": "s",
    },
    "hybrid_engine": {
        **dict.fromkeys(["enabled", "release_inference_cache", "pin_parameters", "enable_cuda_graph"], "b"),
        **dict.fromkeys(["max_out_tokens", "inference_tp_size", "tp_gather_partition_size"], "i"),
    },
}
"""Blocks whose unknown keys DeepSpeed rejects (pydantic, `extra="forbid"`)."""

LENIENT: Mapping[str, dict[str, str]] = {
    "aio": {
        **dict.fromkeys(["block_size", "queue_depth", "intra_op_parallelism"], "i"),
        **dict.fromkeys(["single_submit", "overlap_events", "use_gds"], "b"),
    },
    "activation_checkpointing": {
        **dict.fromkeys(
            [
                *("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing"),
                *("synchronize_checkpoint_boundary", "profile"),
            ],
            "b",
        ),
        "number_checkpoints": "i?",
    },
    "optimizer": {"type": "s", "params": "d", "legacy_fusion": "b"},
    "scheduler": {"type": "s", "params": "d"},
    "checkpoint": {
        "tag_validation": "s",
        **dict.fromkeys(["load_universal", "use_node_local_storage", "checkpoint_serialization"], "b"),
        "parallel_write": "d",
        "writer": "d?",
    },
    "data_types": {
        "grad_accum_dtype": "s?",
        "param_dtype": "s?",
        "buffer_dtype": "s?",
        "keep_in_fp32_modules": "*",
    },
    "flops_profiler": {
        **dict.fromkeys(["enabled", "detailed"], "b"),
        "recompute_fwd_factor": "n",
        **dict.fromkeys(["profile_step", "module_depth", "top_modules"], "i"),
        "output_file": "s?",
    },
    "torch_autocast": {"enabled": "b", "dtype": "s", "lower_precision_safe_modules": "l"},
}
"""Blocks whose unknown keys DeepSpeed ignores without a word."""

TOP: Mapping[str, str] = {
    **{name: "d" for name in (*STRICT, *LENIENT) if "." not in name},
    **dict.fromkeys(
        [
            *("datastates_ckpt", "expert_parallel", "pipeline", "data_efficiency", "timers", "autotuning"),
            "weight_quantization",
        ],
        "d",
    ),
    **dict.fromkeys(
        [
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
            *("sequence_parallel_size", "vocabulary_size"),
        ],
        "i",
    ),
    **dict.fromkeys(["gradient_clipping", "gradient_predivide_factor", "steps_per_print"], "n"),
    **dict.fromkeys(
        [
            *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last"),
            *("prescale_gradients", "disable_allgather", "managed_gradient_accumulation"),
            *("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"),
            "use_data_before_expert_parallelism",
        ],
        "b",
    ),
    **dict.fromkeys(
        [
            *("communication_data_type", "seq_parallel_communication_data_type"),
            *("gradient_allreduce_op", "log_level"),
        ],
        "s?",
    ),
    "bfloat16": "d",  # the old name of bf16, still read (runtime/precision_config.py)
}
"""Top-level keys that DeepSpeed reads."""

REMOVED: Mapping[str, str] = {
    "nebula": "delete it; checkpoints are written by torch",
    "compression_training": "delete it; the compression library is gone",
    "amp": 'use {"bf16": {"enabled": "auto"}} or fp16',
    "quantize_training": "delete it",
    "sparse_gradients": "delete it; embeddings with sparse=True need no flag",
    "eigenvalue": "delete it",
    "sparse_attention": "delete it; the model's own attention is used",
    "elasticity": "delete it and set the batch keys",
    "graph_harvesting": "delete it",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "delete it",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size, or delete it",
    "zero_optimization.mics_hierarchical_params_gather": "delete it",
    "zero_optimization.zeropp_loco_param": "delete it",
}
"""Blocks that DeepSpeed refuses even when they are switched off, and what to do (runtime/config.py)."""

DEPRECATED: Mapping[str, str] = {
    "zero_optimization.cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "pin_memory in the off-load blocks",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "bfloat16": "bf16",
}
"""Old names that still work, and the new ones."""

LEFTOVERS: Mapping[str, str] = {
    "comms_config": "comms_logger",
    "monitor_config": "wandb, tensorboard or csv_monitor at the top level",
}
"""Keys that files of other projects carry and DeepSpeed never read (attribute names of its own classes)."""

AUTO = frozenset(
    {
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("gradient_clipping", "fp16.enabled", "bf16.enabled"),
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(
            f"scheduler.params.{name}"
            for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        ),
        *(
            f"zero_optimization.{name}"
            for name in (
                *("reduce_bucket_size", "stage3_prefetch_bucket_size"),
                "stage3_param_persistence_threshold",
            )
        ),
        "data_types.keep_in_fp32_modules",  # DeepSpeed's own word there (runtime/constants.py)
        "pipeline.stages",
        # accelerate makes it false there, which DS071 judges by what is trained
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    }
)
"""Where `"auto"` means something (transformers/integrations/deepspeed.py)."""


def table_of(block: str) -> dict[str, str]:
    """Return key -> kind of a block such as `zero_optimization.offload_param`; the top level for an empty name."""
    found: dict[str, str] = {**TOP} if not block else {**STRICT, **LENIENT}.get(block, {})
    return found


def home_of(key: str) -> list[str]:
    """Return the blocks in which `key` would be right; the top level is an empty name."""
    tables: dict[str, Mapping[str, str]] = {"": TOP, **STRICT, **LENIENT}
    return [block for block, table in tables.items() if key in table]


def blocks_of(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the blocks of a config that have a table, outermost first, with their names."""
    found: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    for name in (*STRICT, *LENIENT):
        value: Any = config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            found.append((name, value))
    return found
