"""The `TrainingArguments` of a run."""

from __future__ import annotations

from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from transformers import TrainingArguments

from soup_flows.batch import Steps
from soup_flows.launch import rank
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec


def training_arguments(
    spec: TrainingSpec,
    plan: ShardingPlan,
    steps: Steps,
    output_dir: str,
    config_path: str | None,
    evaluate: bool,
    evaluate_first: bool,
) -> Any:
    """Build the arguments; for DeepSpeed and FSDP this also starts the process group.

    Args:
        spec: what the user asked.
        plan: the resolved plan; its numbers win over the spec's.
        steps: the real optimizer steps, counted from the rows that are trained on.
        output_dir: folder of the checkpoints.
        config_path: the DeepSpeed JSON of this attempt.
        evaluate: whether there are held-out rows.
        evaluate_first: whether they are evaluated before the first step.

    Returns:
        `TrainingArguments`, or what TRL has in its place for `dpo`, `kto` and `orpo`.
    """
    kind: Any = TrainingArguments
    train, on_cpu = spec.training, plan.device == "cpu"
    engine: dict[str, Any] = {}
    if plan.engine == "deepspeed":
        engine["deepspeed"] = config_path
    elif plan.engine == "fsdp":
        engine.update(fsdp=True, fsdp_config=dict(plan.config))
        if plan.parallelism is not None:
            engine["parallelism_config"] = ParallelismConfig(**plan.parallelism)
        # Else whole gradients pile up on every rank between micro batches, in the compute dtype (accelerate 1.15
        # `no_sync`); reduced each time, they stay sharded and are summed in the parameters' own fp32.
        engine["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if spec.compares_answers:
        from soup_flows.training.preference import classes_of

        kind, _ = classes_of(train.task)
        engine.update(max_length=spec.data.max_length, beta=train.preference_beta)
        engine.update(gradient_checkpointing=False)
    return kind(
        output_dir=output_dir,
        per_device_eval_batch_size=plan.batch.per_device_train_batch_size,
        per_device_train_batch_size=plan.batch.per_device_train_batch_size,
        gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
        max_steps=steps.total_steps,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        warmup_steps=steps.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        optim=plan.optimizer,
        bf16=plan.dtype == "bf16",
        fp16=plan.dtype == "fp16",
        use_cpu=on_cpu,
        activation_checkpointing=plan.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if plan.gradient_checkpointing else None,
        seed=train.seed,
        data_seed=train.seed,
        logging_steps=train.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        eval_on_start=evaluate_first,
        eval_strategy="steps" if evaluate and train.eval_steps else "no",
        eval_steps=train.eval_steps,
        save_strategy="no",  # Checkpointer says when
        report_to=list(train.report_to) if rank.rank_number() == 0 else [],
        disable_tqdm=True,
        ddp_backend=_backend(plan),
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
        **engine,
    )


def _backend(plan: ShardingPlan) -> str | None:
    """Name the collectives' backends.

    FSDP moves tensors through CPU memory when it off-loads and saves, and needs gloo beside NCCL
    (pytorch/pytorch#148532).
    """
    if plan.device == "cpu":
        return "gloo" if plan.world_size > 1 else None
    return "cuda:nccl,cpu:gloo" if plan.engine == "fsdp" else None
