"""What the user asks for: `TrainingSpec`, and how a wrong one is explained."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from soup_flows.errors import Problem, Refused, nearest
from soup_flows.other_words import OTHER_WORDS
from soup_flows.roots import problems_with_roots

DeepSpeedPreset = Literal[
    "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme", "zero++", "zero_pp"
]
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


class Group(BaseModel):
    """Base of the spec and its groups: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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
    num_train_epochs: float = Field(1.0, gt=0, title="Epochs")
    """Passes over the training rows; ignored when `max_steps` is set."""
    max_steps: int | None = Field(None, ge=1, title="Maximum optimizer steps")
    """Stop after this many optimizer steps, whatever the number of epochs."""
    global_batch_size: int = Field(16, ge=1, title="Global batch size (rows per optimizer step)")
    """Rows per optimizer step over all ranks. It is kept for any number of GPUs."""
    per_device_train_batch_size: int | None = Field(None, ge=1, title="Micro batch (rows per rank and pass)")
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
    logging_steps: int = Field(1, ge=1, title="Log every n optimizer steps")
    """Optimizer steps between two metric events."""
    eval_steps: int | None = Field(None, ge=1, title="Evaluate every n optimizer steps")
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
    save_steps: int | None = Field(None, ge=0, title="Save a checkpoint every n optimizer steps")
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

    stop_budget_s: float = Field(20.0, ge=1, le=28, title="Stop budget (seconds)")
    """Seconds between the request to stop and the last process being gone; Prefect kills after 30."""
    timeout_min: float | None = Field(None, gt=0, title="Time limit (minutes)")
    """The run is stopped after this many minutes."""
    omp_num_threads: int | None = Field(None, ge=1, title="CPU threads per rank")
    """Threads of each rank; cores divided by ranks when empty."""
    stall_floor_s: float = Field(300.0, gt=0, title="Shortest stall (seconds)")
    """A run without a step for this long, and for ten times its longest step, is stopped as stalled."""
    lease: Literal["auto", "on", "off"] = Field("auto", title="Lease devices")
    """Hold the run's devices by a lock on this host: `auto` leases GPUs; `on` leases CPU cores too."""
    max_wait_min: float | None = Field(None, ge=0, title="Longest wait for devices (minutes)")
    """How long to wait for devices that other runs hold; for as long as it takes when empty."""
    drill: DrillName | None = Field(None, title="Fault drill")
    """Make this run suffer on purpose, to see what happens; needs `allow_drill`."""
    allow_drill: bool = Field(False, validate_default=True, title="Allow the fault drill")
    """A drill ends the run, and some drills end the flow itself: say that it is meant."""

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
    checkpoint_store: str | None = Field(None, min_length=1, title="Checkpoint store")
    """Block of the type Soup Checkpoint Store; checkpoints and the model are copied there, and a run that comes
    back on another machine goes on from there."""
    placement: str | None = Field(None, min_length=1, title="Placement")
    """Block of the type Soup Placement, with the defaults of a GPU host."""


def titled(title: str, **limits: Any) -> Any:
    """Return a field of a flow's parameter with a title; Prefect would show the bare name (prefect 3.9.1)."""
    return Field(title=title, json_schema_extra={"title": title}, **limits)


# The types of the spec's fields and of the flows' parameters, with the titles that Prefect's form shows.
Model = Annotated[str, titled("Model", min_length=1)]
Dataset = Annotated[str, titled("Data set", min_length=1)]
OutputDir = Annotated[str, titled("Output folder", min_length=1)]
DeepSpeedChoice = Annotated[DeepSpeedPreset | None, titled("DeepSpeed preset")]
FSDPChoice = Annotated[FSDPPreset | None, titled("FSDP preset")]
DeepSpeedFile = Annotated[str | None, titled("DeepSpeed JSON")]
Strategy = Annotated[PlainStrategy, titled("Strategy without a preset")]
Gpus = Annotated[GpuCount, titled("GPUs")]
DeviceChoice = Annotated[Device, titled("Device")]
NvmeFolder = Annotated[str | None, titled("NVMe folder")]
TrustRemoteCode = Annotated[bool, titled("Run the model's own Python code")]
Training = Annotated[TrainingSettings, titled("Training")]
Lora = Annotated[LoraSettings, titled("LoRA")]
Data = Annotated[DataSettings, titled("Data")]
Recovery = Annotated[RecoverySettings, titled("Recovery")]
Launcher = Annotated[LauncherSettings, titled("Launcher")]
Validation = Annotated[ValidationSettings, titled("Validation")]
Blocks = Annotated[BlockNames, titled("Blocks")]


class TrainingSpec(Group):
    """One fine-tuning job. Strict: unknown keys and contradictions are errors.

    Raises:
        pydantic.ValidationError: use `parse_spec` to get `Refused` with readable problems instead.
    """

    model: Model
    """Folder with `config.json`, or a Hub id; `demo://tiny-llama` builds a tiny random model."""
    dataset: Dataset
    """File or folder (JSON lines, JSON, CSV, text, Parquet, Arrow), Hub data set
    `owner/name[@revision][/path][:split]`, or URL that fsspec opens (`s3://`, `https://`);
    `demo://stdlib-qa` is made from the standard library."""
    output_dir: OutputDir = "outputs"
    """Runs are kept in `<output_dir>/runs/<run id>/`."""
    deepspeed: DeepSpeedChoice = None
    """DeepSpeed ZeRO preset; not together with `fsdp` or `deepspeed_config`."""
    fsdp: FSDPChoice = None
    """PyTorch FSDP2 preset; not together with `deepspeed` or `deepspeed_config`."""
    deepspeed_config: DeepSpeedFile = None
    """Path of your own DeepSpeed JSON, used byte for byte."""
    strategy: Strategy = "auto"
    """`auto` picks the least sharding that fits; `single` and `ddp` are strategies without a preset."""
    gpus: Gpus = "auto"
    """GPUs of this machine (one rank each), or CPU ranks with `device=cpu`."""
    device: DeviceChoice = "auto"
    """`cpu` runs the ranks on CPU over gloo: rehearsals, tests, the demo."""
    nvme_path: NvmeFolder = None
    """Folder on a local NVMe disk for `zero3_nvme`."""
    trust_remote_code: TrustRemoteCode = False
    """Off unless you asked for it: the model repository's code runs with your rights."""
    training: Training = TrainingSettings()
    """How the model is trained."""
    lora: Lora = LoraSettings()
    """Adapter settings, used when `training.method` is `lora` or `qlora`."""
    data: Data = DataSettings()
    """What the rows mean and how long they may be."""
    recovery: Recovery = RecoverySettings()
    """What is saved on the way, what a run goes on from, and what happens after a failure."""
    launcher: Launcher = LauncherSettings()
    """How the processes are started, watched and stopped."""
    validation: Validation = ValidationSettings()
    """Which findings of the validation count."""
    blocks: Blocks = BlockNames()
    """Settings and secrets that are kept in Prefect as blocks, by name."""

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus_from_text(cls, value: object) -> object:
        """Accept `"4"` as well as 4, since command lines and forms send text."""
        if isinstance(value, bool):
            raise ValueError("true and false are not numbers of GPUs; use a whole number or auto")
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    def local_paths(self) -> dict[str, str]:
        """Return the fields that may name files of this machine, with what was given for them."""
        resume = self.recovery.resume if "/" in self.recovery.resume else None
        written = {
            "output_dir": self.output_dir,
            "deepspeed_config": self.deepspeed_config,
            "nvme_path": self.nvme_path,
            "data.cache_dir": self.data.cache_dir,
            "recovery.resume": resume,
        }
        absolute = {field: str(Path(p).expanduser().absolute()) for field, p in written.items() if p}
        named = {"model": self.model, "dataset": self.dataset, "data.eval_dataset": self.data.eval_dataset}
        return {field: value for field, value in named.items() if value} | absolute

    @property
    def compares_answers(self) -> bool:
        """True for tasks that learn from better and worse answers, with TRL's trainers."""
        return self.training.task in ("dpo", "kto", "orpo")

    @property
    def trains_adapters(self) -> bool:
        """True when the weights of the model stay frozen."""
        return self.training.method != "full"

    @model_validator(mode="after")
    def _one_strategy(self) -> TrainingSpec:
        words = _contradiction(vars(self))
        if words:
            raise ValueError(words)
        return self


def _contradiction(values: Mapping[str, Any]) -> str:
    """Say which of the settings that name a strategy exclude each other; empty if none do."""
    named = [name for name in ("deepspeed", "fsdp", "deepspeed_config") if values.get(name) is not None]
    strategy = values.get("strategy", "auto")
    named += [f"strategy={strategy}"] if named and strategy != "auto" else []
    return f"{' and '.join(named)} exclude each other; keep one of them" if len(named) > 1 else ""


def parse_spec(values: Mapping[str, Any]) -> TrainingSpec:
    """Build a `TrainingSpec`, or explain everything that is wrong with `values` at once.

    Args:
        values: field names to values; groups may be mappings or group objects.

    Raises:
        Refused: with one problem per wrong field, each naming the nearest valid value where there is one; and
            for paths outside `SOUP_FLOWS_ROOTS`.
    """
    try:
        spec = TrainingSpec.model_validate(dict(values))
    except ValidationError as error:
        problems = _problems(error)
        words = _contradiction(values)
        if words:  # pydantic looks at single fields first, and goes no further when one is wrong
            problems = [p for p in problems if "exclude each other" not in p.message]
            fix = "remove the other; `soup-flows presets` tells them apart"
            problems.append(
                Problem(id="SPEC001", severity="error", field=words.split(" ", 1)[0], message=words, fix=fix)
            )
        raise Refused(problems) from None
    outside = problems_with_roots(spec.local_paths())
    if outside:
        raise Refused(outside)
    return spec


def _problems(error: ValidationError) -> list[Problem]:
    """Turn pydantic's errors into problems, one per field (a union reports one error per branch)."""
    by_field: dict[str, Problem] = {}
    for item in error.errors(include_url=False, include_context=True):
        parts = [str(part) for part in item["loc"]]
        field, model, annotation = _locate(parts)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            names = list(model.model_fields)
            message = f"{field!r} is not a setting"
            fix = _right_name(parts, names)
        elif item["type"] == "missing":
            message, fix = "is required", f"give {field}"
        elif not parts:
            continue  # what contradicts each other, which `parse_spec` says
        elif item["type"] == "value_error":
            fix = ""
        else:
            message, fix = f"got {item['input']!r}", _expected(annotation, item["input"], message)
        rule = {"extra_forbidden": "SPEC002", "missing": "SPEC003"}.get(item["type"], "SPEC001")
        by_field.setdefault(field, Problem(id=rule, severity="error", field=field, message=message, fix=fix))
    return list(by_field.values())


def _right_name(parts: Sequence[str], names: Sequence[str]) -> str:
    """Say what a setting that does not exist is called here: in other tools' words, elsewhere, or nearly so."""
    near = nearest(parts[-1], names)
    known = OTHER_WORDS.get(parts[-1])
    if known is not None and known.split(" ")[0] != ".".join(parts):
        return f"here it is {known}"
    groups = {name: field.annotation for name, field in TrainingSpec.model_fields.items()}
    homes = [
        f"{name}.{parts[-1]}"
        for name, kind in groups.items()
        if isinstance(kind, type) and issubclass(kind, Group) and parts[-1] in kind.model_fields
    ]
    homes += [parts[-1]] if parts[-1] in TrainingSpec.model_fields else []
    return f"did you mean {' or '.join(homes)}?" if homes else near or "valid here: " + ", ".join(names)


def _locate(parts: list[str]) -> tuple[str, type[BaseModel], Any]:
    """Follow an error location down to its field; what comes after it (a union branch) is dropped."""
    model: type[BaseModel] = TrainingSpec
    annotation: Any = None
    taken: list[str] = []
    for part in parts:
        taken.append(part)
        field = model.model_fields.get(part)
        if field is None:
            break
        annotation = field.rebuild_annotation()
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return ".".join(taken), model, annotation


def _expected(annotation: Any, value: object, message: str) -> str:
    """Say what a field takes: its choices and its range, with the nearest one to what was given."""
    choices: list[str] = []
    ranges: list[str] = []
    kinds: list[str] = []

    def walk(node: Any) -> None:
        origin = typing.get_origin(node)
        if origin is Literal:
            choices.extend(str(choice) for choice in typing.get_args(node))
        elif origin is Annotated:
            inner, *meta = typing.get_args(node)
            walk(inner)
            ranges.extend(text for item in meta for text in _bounds(item))
        elif origin in (typing.Union, types.UnionType):
            for branch in typing.get_args(node):
                walk(branch)
        elif isinstance(node, type) and node is not type(None):
            words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
            kinds.append(words.get(node, "a group of settings"))

    walk(annotation)
    parts = [" ".join([*kinds, *ranges])] if kinds else []
    if choices:
        parts.append("one of " + ", ".join(choices))
    near = nearest(str(value), choices)
    return "use " + " or ".join(parts) + (f"; {near}" if near else "") if parts else message


def _bounds(item: Any) -> list[str]:
    """Return the limits that a `Field(...)` or one of its constraints states."""
    words = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    found = [f"{sign} {getattr(item, name)}" for name, sign in words if getattr(item, name, None) is not None]
    return found + [text for inner in getattr(item, "metadata", ()) for text in _bounds(inner)]
