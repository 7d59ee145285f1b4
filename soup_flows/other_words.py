"""What settings are called in other tools, and here: for whoever brings a config along."""

from __future__ import annotations

from collections.abc import Mapping

OTHER_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("lr", "peak_lr", "base_lr"), "training.learning_rate"),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), "training.num_train_epochs"),
    **dict.fromkeys(("steps", "num_train_steps", "max_train_steps", "train_steps"), "training.max_steps"),
    **dict.fromkeys(
        ("micro_batch_size", "train_micro_batch_size_per_gpu", "per_gpu_train_batch_size"),
        "training.per_device_train_batch_size",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum_steps", "train_batch_size", "batch_size", "gbs"),
        "training.global_batch_size (rows per optimizer step over all ranks; accumulation follows from it)",
    ),
    **dict.fromkeys(("lr_scheduler", "scheduler", "lr_schedule"), "training.lr_scheduler_type"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps", "warmup"), "training.warmup_ratio (a share of the steps)"),
    **dict.fromkeys(("gradient_clipping", "max_norm", "clip_grad"), "training.max_grad_norm"),
    **dict.fromkeys(("bf16", "fp16", "tf32", "mixed_precision", "torch_dtype", "pure_bf16"), "training.dtype"),
    **dict.fromkeys(("optim", "optimizer_type"), "training.optimizer"),
    **dict.fromkeys(("activation_checkpointing", "grad_checkpoint"), "training.gradient_checkpointing"),
    **dict.fromkeys(("stage", "objective", "loss_type"), "training.task"),
    **dict.fromkeys(("finetuning_type", "adapter", "peft_method", "use_peft", "use_lora"), "training.method"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_bit"), "training.method=qlora"),
    **dict.fromkeys(("beta", "pref_beta", "rl_beta"), "training.preference_beta"),
    **dict.fromkeys(("evaluation_strategy", "eval_strategy", "evals_per_epoch"), "training.eval_steps"),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), "lora.r"),
    **dict.fromkeys(("lora_alpha", "scaling"), "lora.alpha"),
    "lora_dropout": "lora.dropout",
    **dict.fromkeys(("lora_target_modules", "lora_target", "lora_target_linear"), "lora.target_modules"),
    **dict.fromkeys(("peft_use_dora", "dora"), "lora.use_dora"),
    **dict.fromkeys(("peft_use_rslora", "rslora"), "lora.use_rslora"),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "cutoff_len", "sequence_len", "model_max_length", "seq_len", "block_size"),
        "data.max_length",
    ),
    **dict.fromkeys(("sample_packing", "pack", "neat_packing"), "data.packing"),
    **dict.fromkeys(("train_on_inputs", "assistant_only_loss", "completion_only_loss"), "data.train_on"),
    **dict.fromkeys(("val_set_size", "test_size", "validation_split"), "data.eval_split"),
    **dict.fromkeys(("val_file", "eval_file", "validation_file"), "data.eval_dataset"),
    **dict.fromkeys(("preprocessing_num_workers", "dataset_num_proc", "num_proc"), "data.workers"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_from"), "recovery.resume"),
    **dict.fromkeys(("save_strategy", "saves_per_epoch", "checkpoint_interval"), "recovery.save_steps"),
    **dict.fromkeys(("max_checkpoints", "keep_last_n_checkpoints"), "recovery.save_total_limit"),
    **dict.fromkeys(("base_model", "model_name", "model_name_or_path", "model_id", "model_path"), "model"),
    **dict.fromkeys(("datasets", "dataset_name", "train_file", "data_path", "dataset_path"), "dataset"),
    **dict.fromkeys(("output", "save_dir", "out_dir"), "output_dir"),
    **dict.fromkeys(("num_gpus", "nproc_per_node", "num_processes", "n_gpus", "world_size"), "gpus"),
    **dict.fromkeys(("deepspeed_json", "ds_config", "deepspeed_config_file"), "deepspeed_config"),
    **dict.fromkeys(("fsdp_config", "sharding_strategy"), "fsdp (a preset: full_shard, shard_grad, ...)"),
}  # fmt: skip
"""Name in Transformers, TRL, Axolotl, LLaMA-Factory, torchtune or DeepSpeed -> the setting, by its dotted path."""
