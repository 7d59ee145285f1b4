"""Rules about FSDP runs."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.validation.table import ACCELERATE, Context, Found, rule, rules_in

EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "model.decoder.embed_tokens.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


@rule(
    "FS020",
    "note",
    "training.per_device_train_batch_size",
    "gradients stay whole on every GPU between the passes: 4 more bytes per trained parameter",
    fix="raise the micro batch so that one pass is enough, or use more GPUs",
    source="accelerate/accelerator.py, no_sync; huggingface/accelerate#2531, huggingface/transformers#29425",
    versions=ACCELERATE,
)
def whole_gradients(run: Context) -> Iterator[Found]:
    """Gradient accumulation in a full fine-tune under FSDP2."""
    steps = run.plan.batch.gradient_accumulation_steps
    if run.plan.engine == "fsdp" and run.full and steps > 1 and run.plan.world_size > 1:
        yield Found(f"{steps} passes per optimizer step")


@rule(
    "FS021",
    "error",
    "model",
    "FSDP2 cannot map the parameters to the model's (FSDP2 mapping failed)",
    fix='set "tie_word_embeddings": false in config.json, or drop one of the tensors',
    source="huggingface/accelerate#3870, #3878, #4171",
    versions=ACCELERATE,
)
def untied_checkpoint(run: Context) -> Iterator[Found]:
    """Tied embeddings in the config, and two different tensors in the weight files, under FSDP."""
    if run.plan.engine != "fsdp" or run.model.text_config.get("tie_word_embeddings") is not True:
        return
    embedding = next((name for name in EMBEDDINGS if name in run.model.shards), None)
    head = next((name for name in HEADS if name in run.model.shards), None)
    if embedding and head and run.model.head_of(embedding) != run.model.head_of(head):
        yield Found(f"config.json ties the embeddings, and {embedding} and {head} differ")


RULES = rules_in(globals())
