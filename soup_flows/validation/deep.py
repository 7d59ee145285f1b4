"""The second tier: what only the model class, the tokenizer and encoded rows show. Takes seconds.

What is there to see comes from `seen.py`; here are the rules about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from soup_flows.errors import Problem
from soup_flows.spec import TrainingSpec
from soup_flows.validation.seen import Seen, look
from soup_flows.validation.table import PEFT, TRANSFORMERS, Found, Rule, rule, rules_in


@dataclass(frozen=True)
class Sight:
    """What the rules of this tier look at."""

    seen: Seen
    spec: TrainingSpec
    engine: str


@rule(
    "DP001",
    "error",
    "model",
    "the ranks would stop before the first row",
    fix="save the tokenizer again with save_pretrained()",
    source="transformers/models/auto/tokenization_auto.py",
    versions=TRANSFORMERS,
)
def tokenizer_broken(sight: Sight) -> Iterator[Found]:
    """A tokenizer that cannot be loaded."""
    if sight.seen.tokenizer_error:
        yield Found(f"the tokenizer cannot be loaded ({sight.seen.tokenizer_error})")


@rule(
    "DP002",
    "error",
    "model",
    "the ranks would stop while building it",
    fix="check config.json against the installed transformers",
    source="transformers/models/auto/auto_factory.py",
    versions=TRANSFORMERS,
)
def model_broken(sight: Sight) -> Iterator[Found]:
    """A model that cannot be built from its config."""
    if sight.seen.model_error:
        yield Found(f"the model cannot be built ({sight.seen.model_error})")


@rule(
    "DP003",
    "error",
    "model",
    "looking them up is an index error, on GPUs a device-side assert",
    fix="resize the embeddings and save the model, or use the tokenizer that belongs to it",
    source="transformers/modeling_utils.py, resize_token_embeddings",
    versions=TRANSFORMERS,
)
def ids_beyond(sight: Sight) -> Iterator[Found]:
    """Rows with token ids that the embedding does not have."""
    rows = sight.seen.embedding_rows
    if rows is not None and sight.seen.kept and sight.seen.largest_id >= rows:
        yield Found(f"rows hold the token id {sight.seen.largest_id} and the embedding has {rows} rows")


@rule(
    "DP004",
    "error",
    "lora.target_modules",
    "no adapter could be trained",
    fix="use all-linear, or names from the model",
    source="peft/tuners/tuners_utils.py, inject_adapter",
    versions=PEFT,
)
def no_adapters(sight: Sight) -> Iterator[Found]:
    """Adapters that cannot be made, or that have no weight."""
    if sight.seen.adapter_error:
        yield Found(f"adapters cannot be made ({sight.seen.adapter_error})")
    elif sight.seen.adapters == 0:
        yield Found("the adapters have no weight")


@rule(
    "DP005",
    "error",
    "fsdp",
    "accelerate finds no layer to wrap, and stops or gathers the whole model at once",
    fix="use deepspeed=zero3",
    source="accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy",
    versions=TRANSFORMERS,
)
def nothing_to_wrap(sight: Sight) -> Iterator[Found]:
    """FSDP on a model that names no class to wrap, or one that it does not have."""
    built = not sight.seen.model_error and sight.seen.embedding_rows is not None
    if sight.engine == "fsdp" and built and not sight.seen.wrap_found:
        named = ", ".join(sight.seen.wrap_classes) or "none"
        yield Found(f"_no_split_modules of the model are: {named}")


@rule(
    "DP006",
    "warning",
    "model",
    "the model never learns to end an answer",
    fix="use a chat template that closes the assistant's turn, or rows that end in the end-of-text token",
    source="huggingface/trl#5988",
    versions=TRANSFORMERS,
)
def no_stop(sight: Sight) -> Iterator[Found]:
    """Rows in which no token that ends the answer is trained."""
    if sight.seen.kept and not sight.seen.stop_trained:
        yield Found(f"none of the first {sight.seen.kept} rows trains a token that ends the answer")


@rule(
    "DP007",
    "error",
    "data.max_length",
    "there would be nothing to train on",
    fix="raise data.max_length, or mend the rows",
    source="huggingface/trl#6668, #3927: a loss of 0 that looks like success",
)
def no_trained_row(sight: Sight) -> Iterator[Found]:
    """No row with a trained token, among the first ones."""
    if sight.seen.rows_error:
        yield Found(sight.seen.rows_error, "dataset")
    elif sight.seen.lost and not sight.seen.kept:
        yield Found(f"all of the first {sum(sight.seen.lost.values())} rows are left out ({_reasons(sight)})")


@rule(
    "DP008",
    "warning",
    "data.max_length",
    "they are not trained",
    fix="raise data.max_length, or mend the rows; `soup-flows data FILE --tokenizer MODEL` lists them",
    source="huggingface/trl#6668",
)
def lost_rows(sight: Sight) -> Iterator[Found]:
    """Rows without a trained token, among the first ones."""
    if sight.seen.lost and sight.seen.kept:
        total = sight.seen.kept + sum(sight.seen.lost.values())
        yield Found(f"{total - sight.seen.kept} of the first {total} rows are left out ({_reasons(sight)})")


@rule(
    "DP009",
    "warning",
    "model",
    "what only model class, tokenizer and rows show was not checked",
    fix="run `python -m soup_flows.training.look` with the spec as JSON on its standard input",
    source="this package",
)
def not_seen(_: Sight) -> Iterator[Found]:
    """A look that could not be taken."""
    yield from ()


@rule(
    "DP010",
    "error",
    "data.packing",
    "the ranks would stop: rows laid end to end would see each other, and the losses would look fine",
    fix="set data.packing=false: rows are then padded",
    source="huggingface/trl#1230, #3067, #5316; this package: every row attends to itself alone",
    versions=TRANSFORMERS,
)
def rows_mixed(sight: Sight) -> Iterator[Found]:
    """Packing for a model that cannot keep rows apart."""
    if sight.seen.packing_error:
        yield Found(sight.seen.packing_error)


@rule(
    "DP011",
    "warning",
    "model",
    "adapters leave the embeddings as they are, so the model cannot learn to read or to write them",
    fix="use the instruct variant of the model, training.method=full, or a chat template of words it knows",
    source="huggingface/trl#1668, unslothai/unsloth#658: Llama 3 base models have such rows",
    versions=PEFT,
)
def unlearnt_tokens(sight: Sight) -> Iterator[Found]:
    """Adapters, and trained tokens whose embedding the model's makers never trained."""
    if sight.seen.unlearnt:
        shown = ", ".join(sight.seen.unlearnt[:5])
        yield Found(f"the rows train {len(sight.seen.unlearnt)} token(s) with an empty embedding ({shown})")


def _reasons(sight: Sight) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in sight.seen.lost.items())


RULES: tuple[Rule[Sight], ...] = rules_in(globals())


def check_deep(spec: TrainingSpec, engine: str) -> list[Problem]:
    """Return what a look at model class, tokenizer and encoded rows shows."""
    seen = look(spec)
    if isinstance(seen, str):
        return [not_seen.problem(Found(f"no look could be taken ({seen})"))]
    sight = Sight(seen, spec, engine)
    return [problem for each in RULES for problem in each.apply(sight)]
