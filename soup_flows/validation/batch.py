"""Rules about batch, steps and schedule."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.validation.table import ACCELERATE, DEEPSPEED, TRANSFORMERS, Context, Found, rule, rules_in

FULL_LR_LIMIT = 1e-3
LORA_LR_LIMIT = 1e-2
FULL_DPO_LIMIT = 5e-6


@rule(
    "BT003",
    "warning",
    "gpus",
    "nothing is sharded, and the engine only adds overhead",
    fix="use strategy=single, or more GPUs",
    source="deepspeed/runtime/zero: partitions of one rank hold everything",
    versions=f"{DEEPSPEED}, {ACCELERATE}",
)
def sharding_alone(run: Context) -> Iterator[Found]:
    """DeepSpeed without off-load, or FSDP, on one rank."""
    if run.plan.world_size == 1 and run.plan.engine in ("deepspeed", "fsdp"):
        off = run.device_of("offload_optimizer") != "none" or run.device_of("offload_param") != "none"
        if not off and not run.plan.config.get("cpu_offload"):
            yield Found(f"{run.plan.strategy} on one rank")


@rule(
    "BT004",
    "warning",
    "training.global_batch_size",
    "an epoch is one optimizer step on a batch that is not full",
    fix="lower the global batch, or add rows",
    source="this package: the last batch of an epoch may be smaller, rows are never repeated",
)
def few_rows(run: Context) -> Iterator[Found]:
    """Fewer rows than one optimizer step takes."""
    rows, size = run.plan.rows, run.plan.batch.global_batch_size
    if rows is not None and rows < size:
        yield Found(f"{rows} rows and a global batch of {size}")


@rule(
    "BT005",
    "warning",
    "gpus",
    "some ranks never see a row and only wait for the others",
    fix="use fewer GPUs",
    source="this package: ranks without a row compute a filler that trains nothing",
)
def idle_ranks(run: Context) -> Iterator[Found]:
    """Fewer rows than ranks."""
    rows, world = run.plan.rows, run.plan.world_size
    if rows is not None and rows < world:
        yield Found(f"{rows} rows for {world} ranks")


@rule(
    "BT006",
    "warning",
    "training.global_batch_size",
    "the numbers in your DeepSpeed JSON win",
    fix='write "auto" for the three batch keys, or drop the setting',
    source="this package: the JSON is used byte for byte",
)
def json_batch_wins(run: Context) -> Iterator[Found]:
    """Batch numbers in the JSON that differ from what the spec asks."""
    if run.spec.deepspeed_config is None:
        return
    train, batch = run.spec.training, run.plan.batch
    if run.said("training", "global_batch_size") and batch.global_batch_size != train.global_batch_size:
        yield Found(
            f"global_batch_size={train.global_batch_size}, and the JSON makes {batch.global_batch_size}"
        )
    micro = train.per_device_train_batch_size
    if micro is not None and run.plan.config.get("train_micro_batch_size_per_gpu") not in (
        micro,
        "auto",
        None,
    ):
        yield Found(
            f"per_device_train_batch_size={micro}, and the JSON has {batch.per_device_train_batch_size}",
            "training.per_device_train_batch_size",
        )


@rule(
    "BT007",
    "warning",
    "training.warmup_ratio",
    "the learning rate never reaches its peak",
    fix="train more steps, or lower warmup_ratio",
    source="transformers/training_args.py, get_warmup_steps",
    versions=TRANSFORMERS,
)
def only_warmup(run: Context) -> Iterator[Found]:
    """A warm-up as long as the run."""
    steps = run.plan.steps
    if steps and steps.warmup_steps >= steps.total_steps and steps.total_steps > 1:
        yield Found(f"{steps.warmup_steps} warm-up steps of {steps.total_steps}")


@rule(
    "BT008",
    "warning",
    "training.num_train_epochs",
    "max_steps wins",
    fix="drop one of them",
    source="transformers/training_args.py: max_steps overrides num_train_epochs",
    versions=TRANSFORMERS,
)
def steps_and_epochs(run: Context) -> Iterator[Found]:
    """Both `max_steps` and `num_train_epochs` chosen."""
    train = run.spec.training
    if train.max_steps is not None and run.said("training", "num_train_epochs"):
        yield Found(f"num_train_epochs={train.num_train_epochs:g} and max_steps={train.max_steps}")


@rule(
    "BT009",
    "warning",
    "training.warmup_ratio",
    "this schedule has no warm-up and ignores it",
    fix="use lr_scheduler_type=constant_with_warmup",
    source="transformers/optimization.py, get_scheduler",
    versions=TRANSFORMERS,
)
def constant_warmup(run: Context) -> Iterator[Found]:
    """A warm-up chosen for the schedule `constant`."""
    train = run.spec.training
    if train.lr_scheduler_type == "constant" and run.said("training", "warmup_ratio") and train.warmup_ratio:
        yield Found(f"lr_scheduler_type=constant with warmup_ratio={train.warmup_ratio:g}")


@rule(
    "BT010",
    "warning",
    "training.learning_rate",
    "runs usually diverge at this rate",
    fix="full fine-tuning: 1e-6 to 1e-4; LoRA: 5e-5 to 1e-3",
    source="TRL and PEFT example scripts; Hu et al. 2021 (LoRA), appendix D",
)
def high_rate(run: Context) -> Iterator[Found]:
    """A learning rate far above what the method takes."""
    rate, limit = run.spec.training.learning_rate, FULL_LR_LIMIT if run.full else LORA_LR_LIMIT
    if rate > limit:
        yield Found(f"learning_rate={rate:g} for {'full fine-tuning' if run.full else 'LoRA'}")


@rule(
    "BT011",
    "note",
    "training.per_device_train_batch_size",
    "the global batch is kept, and the micro batch must divide each rank's share of it",
    fix="choose a global batch that the micro batch times the ranks divides",
    source="this package: batch arithmetic",
)
def lowered_micro_batch(run: Context) -> Iterator[Found]:
    """A micro batch that was lowered."""
    asked, got = run.spec.training.per_device_train_batch_size, run.plan.batch.per_device_train_batch_size
    if asked is not None and asked > got and run.spec.deepspeed_config is None:
        yield Found(f"per_device_train_batch_size={asked} became {got}")


@rule(
    "BT012",
    "warning",
    "training.learning_rate",
    "preference tuning of every weight forgets the model at rates that suit supervised tuning",
    fix="use 5e-7 to 5e-6, or training.method=lora",
    source="TRL documentation, DPOConfig: 1e-6 by default; alignment-handbook, Zephyr DPO: 5e-7",
)
def high_dpo_rate(run: Context) -> Iterator[Found]:
    """A learning rate of supervised tuning in a full run of DPO."""
    train = run.spec.training
    if train.task == "dpo" and run.full and train.learning_rate > FULL_DPO_LIMIT:
        yield Found(f"learning_rate={train.learning_rate:g} for DPO")


@rule(
    "BT013",
    "warning",
    "training.preference_beta",
    "nothing reads it",
    fix="set training.task=dpo, kto or orpo, or drop it",
    source="this package: preference_beta is read for the tasks dpo, kto and orpo",
)
def idle_beta(run: Context) -> Iterator[Found]:
    """`preference_beta` chosen for a task without preferences."""
    train = run.spec.training
    if train.task in ("sft", "pretrain") and run.said("training", "preference_beta"):
        yield Found(f"preference_beta={train.preference_beta:g} with training.task={train.task}")


@rule(
    "BT014",
    "error",
    "training.per_device_train_batch_size",
    "KTO compares each answer with that of another row of the same micro batch, and there is none",
    fix="set per_device_train_batch_size to 2 or more; global_batch_size divided by the ranks must allow it",
    source="trl 1.16, KTOTrainer: 'Actual (not effective) batch size must be > 1'",
)
def lonely_answers(run: Context) -> Iterator[Found]:
    """KTO with a micro batch of one row."""
    if run.spec.training.task == "kto" and run.plan.batch.per_device_train_batch_size < 2:
        yield Found("a micro batch of 1 row")


RULES = rules_in(globals())
