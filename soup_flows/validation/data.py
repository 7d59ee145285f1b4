"""Rules about data and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from soup_flows.data.encoding import COMPARED
from soup_flows.validation.table import ANY, TRANSFORMERS, Context, Found, rule, rules_in

ABSOLUTE = ("n_positions", "n_ctx")
MANY_COPIES = 0.5


@rule(
    "DA001",
    "warning",
    "data.eval_split",
    "eval_dataset wins, and nothing is held out of the training rows",
    fix="drop one of them",
    source="this package: data settings",
)
def split_and_set(run: Context) -> Iterator[Found]:
    """Both `eval_split` and `eval_dataset`."""
    if run.spec.data.eval_split and run.spec.data.eval_dataset:
        yield Found(f"eval_split={run.spec.data.eval_split:g} and eval_dataset are both set")


@rule(
    "DA002",
    "warning",
    "training.eval_steps",
    "there is nothing to evaluate",
    fix="set data.eval_dataset or data.eval_split",
    source="this package: data settings",
)
def nothing_held_out(run: Context) -> Iterator[Found]:
    """`eval_steps` without held-out rows."""
    data = run.spec.data
    if run.spec.training.eval_steps and not data.eval_dataset and not data.eval_split:
        yield Found(f"eval_steps={run.spec.training.eval_steps} without held-out rows")


@rule(
    "DA003",
    "error",
    "data.eval_dataset",
    "the evaluation measures what was learnt by heart",
    fix="use other rows, or eval_split",
    source="this package: held-out rows are never trained on",
)
def same_rows(run: Context) -> Iterator[Found]:
    """The same file for training and evaluation."""
    held_out = run.spec.data.eval_dataset
    if held_out and Path(held_out).resolve() == Path(run.spec.dataset).resolve():
        yield Found("dataset and eval_dataset are the same")


@rule(
    "DA004",
    "error",
    "model",
    "conversations cannot be written as text, and guessing a template trains the wrong one",
    fix="use the instruct variant of the model, or add chat_template.jinja to its folder",
    source="transformers/tokenization_utils_base.py, get_chat_template",
    versions=TRANSFORMERS,
)
def no_template(run: Context) -> Iterator[Found]:
    """Conversations, and a tokenizer without a chat template."""
    knows = bool(run.model.tokenizer_config) or "tokenizer.json" in run.model.files
    if "chat" in run.data.kinds and knows and not run.model.has_chat_template:
        yield Found(f"{run.spec.dataset} holds conversations and {run.model.name} has no chat template")


@rule(
    "DA005",
    "error",
    "model",
    "the embedding has no row for them: an index error, on GPUs a device-side assert",
    fix="resize the embeddings and save the model with its tokenizer",
    source="transformers/modeling_utils.py, resize_token_embeddings",
    versions=TRANSFORMERS,
)
def tokens_beyond(run: Context) -> Iterator[Found]:
    """Added tokens whose ids are not below the vocabulary size of the model."""
    size = run.model.number("vocab_size")
    beyond = {i: text for i, text in run.model.added_tokens.items() if size is not None and i >= size}
    if beyond:
        last = max(beyond)
        yield Found(
            f"{len(beyond)} added token(s), such as {beyond[last]!r} with id {last}, and a vocabulary of {size}"
        )


@rule(
    "DA006",
    "error",
    "data.max_length",
    "positions beyond that have no embedding: an index error, on GPUs a device-side assert",
    fix="lower data.max_length",
    source="transformers/models/gpt2/modeling_gpt2.py: learnt positions",
    versions=TRANSFORMERS,
)
def beyond_table(run: Context) -> Iterator[Found]:
    """A `max_length` above the learnt positions of a model such as GPT-2."""
    limit = run.model.number(*ABSOLUTE)
    if limit and run.spec.data.max_length > limit:
        yield Found(f"max_length={run.spec.data.max_length}, and the model has {limit} positions")


@rule(
    "DA007",
    "warning",
    "data.max_length",
    "the model has never seen positions that far, and learns them badly",
    fix="lower data.max_length, or extend the model's rope scaling first",
    source="transformers model configs: max_position_embeddings",
    versions=TRANSFORMERS,
)
def beyond_training(run: Context) -> Iterator[Found]:
    """A `max_length` above the model's `max_position_embeddings`."""
    limit = run.model.number("max_position_embeddings")
    if limit and not run.model.number(*ABSOLUTE) and run.spec.data.max_length > limit:
        yield Found(f"max_length={run.spec.data.max_length}, and the model was trained up to {limit}")


@rule(
    "DA008",
    "warning",
    "dataset",
    "they are not trained",
    fix="mend or remove the rows; `soup-flows data FILE` lists them",
    source="this package: data reading",
)
def dropped_rows(run: Context) -> Iterator[Found]:
    """Rows that cannot be trained, among the first ones."""
    if run.data.dropped:
        yield Found(
            f"{len(run.data.dropped)} of the first {run.data.read} rows are dropped; {run.data.dropped[0]}"
        )


@rule(
    "DA009",
    "error",
    "dataset",
    "they are compared, not learnt",
    fix="set training.task to dpo or orpo (chosen and rejected answers) or kto (labels), or keep the better "
    "answer as a conversation",
    source="Rafailov et al. 2023 (DPO): pairs need a loss of their own",
)
def preference_rows(run: Context) -> Iterator[Found]:
    """Preference rows where answers are learnt."""
    pairs = sorted(run.data.kinds & {"preference", "kto"})
    if pairs and not set(pairs) <= set(COMPARED.get(run.spec.training.task, ())):
        yield Found(f"{run.spec.dataset} holds {' and '.join(pairs)} rows")


@rule(
    "DA010",
    "warning",
    "dataset",
    "the model learns them by heart",
    fix="remove the copies",
    source="Lee et al. 2022, Deduplicating Training Data Makes Language Models Better",
)
def copies(run: Context) -> Iterator[Found]:
    """Mostly identical rows, among the first ones."""
    data = run.data
    if data.kept >= 4 and data.distinct < MANY_COPIES * data.kept:
        yield Found(f"only {data.distinct} of the first {data.kept} rows differ")


@rule(
    "DA011",
    "warning",
    "training.eval_steps",
    "the held-out rows are evaluated before and after training only",
    fix="lower eval_steps",
    source="transformers/trainer_callback.py, DefaultFlowCallback",
    versions=TRANSFORMERS,
)
def rare_evaluation(run: Context) -> Iterator[Found]:
    """More steps between evaluations than the run has."""
    steps, every = run.plan.steps, run.spec.training.eval_steps
    if (
        steps
        and every
        and every > steps.total_steps
        and (run.spec.data.eval_dataset or run.spec.data.eval_split)
    ):
        yield Found(f"eval_steps={every}, and the run has {steps.total_steps} steps")


@rule(
    "DA012",
    "error",
    "data.eval_split",
    "nothing would be left to train on",
    fix="lower eval_split, or add rows",
    source="this package: at least one row is held out",
    versions=ANY,
)
def all_held_out(run: Context) -> Iterator[Found]:
    """A held-out share that takes every row."""
    split = run.spec.data.eval_split
    few = run.data.read < 1000  # all rows were read
    if (
        split
        and not run.spec.data.eval_dataset
        and few
        and 0 < run.data.kept <= max(1, round(run.data.kept * split))
    ):
        yield Found(f"eval_split={split:g} of {run.data.kept} row(s)")


@rule(
    "DA013",
    "error",
    "dataset",
    "there is nothing to compare",
    fix="give rows with `chosen` and `rejected` (kto also takes `completion` and `label`), or set "
    "training.task=sft",
    source="Rafailov et al. 2023 (DPO): pairs of answers; Ethayarajh et al. 2024 (KTO): answers with a label",
)
def no_pairs(run: Context) -> Iterator[Found]:
    """Rows without pairs of answers for DPO and ORPO, or without pairs and labels for KTO."""
    task = run.spec.training.task
    others = sorted(run.data.kinds - set(COMPARED.get(task, run.data.kinds)))
    if others:
        yield Found(f"{run.spec.dataset} holds {' and '.join(others)} rows")


@rule(
    "DA014",
    "error",
    "training.eval_steps",
    "nothing is evaluated during training, so there is no best step and no reason to stop",
    fix="set training.eval_steps, and data.eval_dataset or data.eval_split",
    source="transformers/trainer_callback.py, EarlyStoppingCallback: needs evaluations",
)
def nothing_to_compare(run: Context) -> Iterator[Found]:
    """Early stopping or the best checkpoint without evaluations."""
    train, held_out = run.spec.training, run.spec.data.eval_dataset or run.spec.data.eval_split
    asked = [
        name
        for name, on in (
            ("early_stopping_patience", train.early_stopping_patience is not None),
            ("load_best_model_at_end", train.load_best_model_at_end),
        )
        if on
    ]
    if asked and not (train.eval_steps and held_out):
        what = "no held-out rows" if train.eval_steps else "no eval_steps"
        yield Found(f"{' and '.join(asked)} with {what}")


RULES = rules_in(globals())
