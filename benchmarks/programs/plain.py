"""Transformers' plain `Trainer`: `plain.py ASSETS OUT random|grouped [STEPS]`, under torchrun."""

import sys

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

assets, out, mode = sys.argv[1:4]
steps = int(sys.argv[4]) if len(sys.argv) > 4 else -1
tokenizer = AutoTokenizer.from_pretrained(f"{assets}/model")
model = AutoModelForCausalLM.from_pretrained(f"{assets}/model")
rows = load_dataset("json", data_files=f"{assets}/messages.jsonl", split="train", cache_dir=f"{out}/cache")


def encode(row):
    """Return ids, and labels of the answers alone."""
    found = tokenizer.apply_chat_template(
        row["messages"],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=True,
        max_length=512,
    )
    ids = found["input_ids"]
    labels = [token if keep else -100 for token, keep in zip(ids, found["assistant_masks"], strict=True)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "length": len(ids), "labels": labels}


rows = rows.map(encode, remove_columns=rows.column_names)
arguments = TrainingArguments(
    output_dir=out,
    per_device_train_batch_size=8,
    num_train_epochs=1,
    max_steps=steps,
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    ddp_backend="gloo",
    seed=1,
    disable_tqdm=True,
    train_sampling_strategy="group_by_length" if mode == "grouped" else "random",
)
collator = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator).train()

import torch.distributed as dist  # noqa: E402

if dist.is_initialized():
    dist.destroy_process_group()  # a gloo rank that keeps it now and then aborts at its exit
