"""Reasons that several tools' tables give."""

from __future__ import annotations

from collections.abc import Iterable

from soup_flows.migrate.values import Without

REMOTE = "the model repository's own code then runs with your rights; leave it out where the model needs none"
ATTENTION = Without("the attention kernel is chosen by what is installed and fits")
COMPILE = Without("torch.compile is not supported; the result does not depend on it")
HUB = Without(
    "nothing is uploaded by itself",
    "upload `<output_dir>/runs/<id>/model`, or name a store in blocks.checkpoint_store",
)
LAUNCH = Without("the launcher of this package settles it")
LOADER = Without("rows are tokenised before the start and mapped from disk; there is nothing to tune")
CACHE = Without("tokenised rows are kept by content in data.cache_dir; nothing to name or to clear")
LOSS = Without("the loss is computed in pieces by this package's own code, without another kernel")
PROJECT = Without(
    "a tracker's project, names and keys are not in a spec",
    "use a tracker block (blocks.tracker), or its environment variables",
)
SECRET = Without(
    "secrets are not in a spec", "use blocks.hugging_face or blocks.tracker, or environment variables"
)
TEMPLATE = Without(
    "the chat template and the special tokens of the tokenizer are used",
    "change the tokenizer where they differ; soup-flows data FILE --tokenizer DIR shows what is trained",
)
TOKENIZER = Without("the tokenizer is read from the model's folder as it is")
TOKENS = Without("a vocabulary is not changed", "save model and tokenizer with the new tokens first", "error")
FREEZE = Without("layers cannot be frozen one by one", "use training.method full, lora or qlora", "error")
OTHER_METHOD = Without("this method of training is not there", "use full, lora or qlora", "error")
PARALLEL = Without(
    "tensor, context, sequence, pipeline and expert parallelism are not there",
    "remove it; shard with full_shard or zero3",
    "error",
)
EIGHT = Without("training in fp8 or with quantised weights is not there", "use bf16", "error")
WEIGHTED = Without(
    "this change of the loss is not there", "remove it where the plain loss will do", "warning"
)
INIT = Without("adapters start as peft's LoRA does", "remove it where that will do", "warning")
ADAM = Without("AdamW runs with betas 0.9 and 0.999 and epsilon 1e-8", "", "warning", (0.9, 0.999, 1e-8))
MULTIMODAL = Without("pictures, sound and video are not trained", "", "error")
MACHINES = Without("a run uses one machine; Ray is not used", "give --gpus N")
CORRECT = Without("it holds of itself here")


def same(entry: Without, *names: str, more: Iterable[str] = ()) -> dict[str, Without]:
    """Return the entry for every name."""
    return dict.fromkeys((*names, *more), entry)
