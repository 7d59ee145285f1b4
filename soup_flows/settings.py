"""The groups of settings of a `TrainingSpec`, and the choices of its flat fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from soup_flows.group import MANY, Group
from soup_flows.ray_settings import RaySettings
from soup_flows.slurm_settings import SlurmSettings

DeepSpeedPreset = Literal[
    "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme", "zero++", "zero_pp"
]
EngineName = Literal["local", "slurm", "ray"]
FSDPPreset = Literal["full_shard", "shard_grad", "full_offload", "hybrid_shard"]
PlainStrategy = Literal["auto", "single", "ddp"]
Device = Literal["auto", "cuda", "cpu"]
GpuCount = Annotated[int, Field(ge=1, le=1024)] | Literal["auto"]

DrillName = Literal[
    "kill_rank", "kill_supervisor", "kill_flow", "sigterm", "ignore_sigterm", "hang_rank", "hang_collective",
    "cuda_oom", "host_oom", "disk_full", "nan_loss", "exit_abort", "log_flood",
]  # fmt: skip
"""Drills that the ranks carry out themselves; `soup-flows drill` knows those that need more than a run."""

DEMO_MODEL = "demo://tiny-llama"
DEMO_DATASET = "demo://stdlib-qa"


class LoraSettings(Group):
    """Adapter settings, used when `training.method` is `lora` or `qlora`."""

    r: int = Field(16, ge=1, le=1024, title="Rank")
    """Rank of the adapter matrices."""
    alpha: int = Field(32, ge=1, title="Alpha")
    """Scale of the adapter: its output is multiplied by alpha / r."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0, title="Dropout")
    """Dropout on the adapter's input, a share between 0 and 1."""
    target_modules: str | list[str] = Field("all-linear", title="Target modules")
    """Module names that get an adapter, or `all-linear` for every linear layer except the output head."""
    use_dora: bool = Field(False, title="DoRA")
    """Train the length of each weight column apart from its direction (DoRA); slower than plain LoRA."""
    use_rslora: bool = Field(False, title="rsLoRA")
    """Scale by alpha / sqrt(r) instead of alpha / r (rsLoRA), which keeps large ranks learning."""
    merge_adapter: bool = Field(False, title="Merge the adapter")
    """After training, add the adapter to the weights: the model folder is then a whole model."""


class TrainingSettings(Group):
    """How the model is trained."""

    task: Literal["sft", "pretrain", "dpo", "kto", "orpo"] = Field("sft", title="Task")
    """`sft` learns the answers, `pretrain` every token (long documents are divided, not cut). `dpo` and `orpo`
    prefer the chosen answer of a pair to the rejected one, `orpo` without a reference model; `kto` learns from
    single answers that are good or bad."""
    preference_beta: float = Field(0.1, gt=0, title="Beta (DPO, KTO, ORPO)")
    """`beta` of TRL's trainers. `dpo`, `kto`: the higher, the closer the model stays to what it was. `orpo`: the
    weight of the preference beside the loss on the chosen answer."""
    method: Literal["full", "lora", "qlora"] = Field("full", title="Method")
    """`full` trains every weight, `lora` trains low-rank adapters beside frozen weights, `qlora` beside frozen
    weights in 4 bits (GPUs only)."""
    num_train_epochs: float = Field(1.0, gt=0, le=10_000, title="Epochs")
    """Passes over the training rows; ignored when `max_steps` is set."""
    max_steps: int | None = Field(None, ge=1, le=MANY, title="Maximum optimizer steps")
    """Stop after this many optimizer steps, whatever the number of epochs."""
    global_batch_size: int = Field(
        16, ge=1, le=10_000_000, title="Global batch size (rows per optimizer step)"
    )
    """Rows per optimizer step over all ranks. It is kept for any number of GPUs."""
    per_device_train_batch_size: int | None = Field(
        None, ge=1, le=65_536, title="Micro batch (rows per rank and pass)"
    )
    """Rows a rank computes at once; derived when empty, lowered to a divisor when it does not fit."""
    learning_rate: float = Field(2e-5, gt=0, lt=10, title="Peak learning rate")
    """Peak learning rate after warm-up."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        "cosine", title="Learning-rate schedule"
    )
    """Shape of the learning rate after warm-up."""
    warmup_ratio: float = Field(0.03, ge=0, lt=1, title="Warm-up (share of the optimizer steps)")
    """Share of the optimizer steps in which the learning rate rises from zero."""
    weight_decay: float = Field(0.0, ge=0, title="Weight decay")
    """Decoupled weight decay; biases and norms are left out."""
    max_grad_norm: float = Field(1.0, ge=0, title="Gradient clipping (norm)")
    """Gradients are scaled down to this norm; 0 turns it off."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", title="Compute dtype")
    """`auto`: bf16 where the GPU has it (compute capability 8.0), else fp16; fp32 on CPU."""
    optimizer: Literal["auto", "adamw_torch", "adamw_torch_fused"] = Field("auto", title="Optimizer")
    """`auto`: fused AdamW on GPUs, plain AdamW on CPU and under CPU off-load of FSDP."""
    gradient_checkpointing: bool | Literal["auto"] = Field("auto", title="Gradient checkpointing")
    """Recompute activations in the backward pass: less memory, about a third more time. `auto`: where the
    prediction says that it is needed or pays."""
    seed: int = Field(42, ge=0, lt=2**31, title="Seed")
    """Seed of weights, dropout and data order."""
    logging_steps: int = Field(1, ge=1, le=MANY, title="Log every n optimizer steps")
    """Optimizer steps between two metric events."""
    eval_steps: int | None = Field(None, ge=1, le=MANY, title="Evaluate every n optimizer steps")
    """Optimizer steps between evaluations; the held-out set is always evaluated before and after training."""
    early_stopping_patience: int | None = Field(None, ge=1, title="Early stopping: patience (evaluations)")
    """Stop after this many evaluations in a row without an improvement; needs `eval_steps` and held-out rows."""
    early_stopping_threshold: float = Field(0.0, ge=0, title="Early stopping: threshold (held-out loss)")
    """Smallest fall of the held-out loss that counts as an improvement for `early_stopping_patience`."""
    load_best_model_at_end: bool = Field(False, title="Keep the best model")
    """Save a checkpoint at each best evaluation, keep it, and make the one with the lowest held-out loss the
    final model; needs `eval_steps` and held-out rows."""
    report_to: list[
        Literal["tensorboard", "wandb", "mlflow", "comet_ml", "neptune", "clearml", "trackio"]
    ] = Field([], title="Trackers")
    """Trackers of Transformers' Trainer that rank 0 reports to; each needs its own package."""


class DataSettings(Group):
    """What the rows mean and how long they may be."""

    eval_dataset: str | None = Field(None, title="Held-out data set")
    """Rows for evaluation, named as `dataset` is; they are never trained on."""
    eval_split: float = Field(0.0, ge=0, lt=1, title="Held-out share")
    """Share of the training rows to hold out when `eval_dataset` is empty."""
    max_length: int = Field(1024, ge=8, le=4_194_304, title="Maximum length (tokens)")
    """Rows are truncated to this many tokens."""
    train_on: Literal["assistant", "all"] = Field("assistant", title="Train on")
    """`assistant`: the loss counts the answers only; `all`: every token."""
    packing: bool = Field(True, title="Packing")
    """Lay rows end to end, each attending to itself alone, and compute no padding; off pads each batch, for
    models that cannot keep rows apart."""
    bad_rows: Literal["drop", "refuse"] = Field("drop", title="Rows that cannot teach")
    """`drop` counts and names them in the data report; `refuse` stops before anything is started."""
    cache_dir: str | None = Field(None, title="Cache folder")
    """Tokenised data is kept here, by content; `<output_dir>/cache` when empty."""
    workers: int | None = Field(None, ge=1, title="Tokenising processes")
    """Most processes that tokenise; the cores, within the free memory, when empty."""


class RecoverySettings(Group):
    """What is saved on the way, what a run goes on from, and what happens after a failure."""

    resume: str = Field("auto", min_length=1, title="Resume from")
    """`auto`: a retry, or the same flow run coming back, goes on from its newest checkpoint that verifies.
    A run id, a checkpoint or a run directory: go on from there. `never`: always start from the model."""
    save_steps: int | None = Field(None, ge=0, le=MANY, title="Save a checkpoint every n optimizer steps")
    """Optimizer steps between checkpoints: about ten checkpoints a run when empty, none with 0."""
    save_total_limit: int = Field(2, ge=1, title="Checkpoints to keep")
    """Older ones are removed; the last one that verifies never is."""
    max_retries: int = Field(3, ge=0, le=100, title="Most retries per cause")
    """Most retries after each kind of failure; kinds that come back at once are never retried."""
    backoff_s: float = Field(10.0, ge=0, le=3600, title="Wait before a retry (seconds)")
    """Doubled with each further retry after the same cause, up to an hour."""
    on_oom: Literal["smaller_batch", "shard_more", "stop"] = Field("smaller_batch", title="Out of GPU memory")
    """`smaller_batch`: halve the micro batch, then checkpoint activations; the global batch and the result are
    kept. `shard_more`: after that also more sharding and off-load, which goes on from the weights with a new
    optimizer. `stop`: no retry."""
    on_nan: Literal["stop", "lower_learning_rate", "skip_batch"] = Field("stop", title="Loss not finite")
    """`stop`: no retry. Else go back one checkpoint, and halve the learning rate or leave the batch out."""
    reuse: Literal["never", "finished", "any"] = Field("never", title="Reuse of equal runs")
    """`finished`: a run with equal settings, data content and code in the same output folder is not repeated,
    its report is returned. `any`: an unfinished one is continued too. `never`: a new run trains."""
    gpu_hour_price: float | None = Field(None, ge=0, title="Price of a GPU-hour")
    """In any currency; the attempts table then shows what each attempt cost."""


class ValidationSettings(Group):
    """Which findings of the validation count."""

    deep: bool = Field(True, title="Look at model, tokenizer and first rows")
    """Also build the model without weights, load the tokenizer and encode the first rows, in a process of its own
    that takes some seconds: finds templates without an end of turn, adapters that match nothing, rows without a
    trained token."""
    rehearse: bool = Field(False, title="Rehearse on CPU first")
    """Before any GPU is taken: run two steps of the plan on two CPU ranks with a small copy of the model, save and
    resume. Takes a minute; a run that fails in it is refused with the cause."""
    strict: bool = Field(False, title="Warnings are errors")
    """Refuse the run for warnings too."""
    silence: dict[str, str] = Field(default_factory=dict, title="Silenced rules")
    """Rule id to the reason why it does not matter here, such as `{"DS063": "measured, no NaN"}`. The finding
    becomes a note with that reason, which is kept with the run."""

    @field_validator("silence")
    @classmethod
    def _reasons(cls, value: dict[str, str]) -> dict[str, str]:
        """Refuse a rule that is silenced without a reason."""
        empty = [rule for rule, reason in value.items() if not reason.strip()]
        if empty:
            raise ValueError(f"give a reason for {', '.join(empty)}")
        return value


class LauncherSettings(Group):
    """How the processes are started, watched and stopped."""

    engine: EngineName = Field("local", title="Engine")
    """`local`: the ranks run on this machine. `slurm`, `ray`: in a job of a cluster, with the output folder on
    storage that all share."""
    slurm: SlurmSettings = Field(SlurmSettings(), title="Slurm")
    """What the job asks for, with `engine=slurm`."""
    ray: RaySettings = Field(RaySettings(), title="Ray")
    """The same with `engine=ray`."""
    stop_budget_s: float = Field(20.0, ge=1, le=28, title="Stop budget (seconds)")
    """Seconds between the request to stop and the last process being gone; Prefect kills after 30."""
    timeout_min: float | None = Field(None, gt=0, title="Time limit (minutes)")
    """The run is stopped after this many minutes."""
    omp_num_threads: int | None = Field(None, ge=1, title="CPU threads per rank")
    """Threads of each rank; cores divided by ranks when empty."""
    stall_floor_s: float = Field(300.0, gt=0, title="Shortest stall (seconds)")
    """A run without a step for this long, and for ten times its longest step, is stopped as stalled."""
    silence_s: float = Field(1800.0, gt=0, title="Longest silence of the cluster (seconds)")
    """With `slurm` and `ray`: the flow waits no longer when there was no answer, and no sign of life in the run
    directory, for this long; the job is left alone."""
    lease: Literal["auto", "on", "off"] = Field("auto", title="Lease devices")
    """Hold the run's devices by a lock on this host: `auto` leases GPUs; `on` leases CPU cores too."""
    max_wait_min: float | None = Field(None, ge=0, title="Longest wait for devices (minutes)")
    """How long to wait for devices that other runs hold; for as long as it takes when empty."""
    drill: DrillName | None = Field(None, title="Fault drill")
    """Make this run suffer on purpose, to see what happens; needs `allow_drill`."""
    allow_drill: bool = Field(False, validate_default=True, title="Allow the fault drill")
    """A drill ends the run, and some drills end the flow itself: say that it is meant."""

    @property
    def cluster(self) -> SlurmSettings | RaySettings | None:
        """What the job asks its cluster for; None where the ranks run on this machine."""
        known: dict[str, SlurmSettings | RaySettings] = {"slurm": self.slurm, "ray": self.ray}
        return known.get(self.engine)

    @field_validator("allow_drill")
    @classmethod
    def _drill_is_meant(cls, value: bool, info: ValidationInfo) -> bool:
        drill = info.data.get("drill")
        if drill is not None and not value:
            raise ValueError(f"drill={drill!r} makes the run fail on purpose; set launcher.allow_drill=true")
        return value


class BlockNames(Group):
    """Settings and secrets that are kept in Prefect as blocks, by name."""

    hugging_face: str | None = Field(None, min_length=1, title="Hugging Face credentials")
    """Block of the type Soup Hugging Face Credentials; the ranks get its token as HF_TOKEN."""
    tracker: str | None = Field(None, min_length=1, title="Experiment tracker")
    """Block of the type Soup Experiment Tracker; rank 0 reports there."""
    ray_cluster: str | None = Field(None, min_length=1, title="Ray cluster")
    """Block of the type Soup Ray Cluster: where `launcher.engine=ray` submits to, and the token for it."""
    checkpoint_store: str | None = Field(None, min_length=1, title="Checkpoint store")
    """Block of the type Soup Checkpoint Store; checkpoints and the model are copied there, and a run that comes
    back on another machine goes on from there."""
    placement: str | None = Field(None, min_length=1, title="Placement")
    """Block of the type Soup Placement, with the defaults of a GPU host."""
