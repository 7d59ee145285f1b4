"""Print the mean loss of a saved model over the answers of a chat file: `evaluate_model.py MODEL FILE`."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
total = tokens = 0.0
for line in Path(sys.argv[2]).read_text(encoding="utf-8").splitlines():
    encoded = tokenizer.apply_chat_template(
        json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = torch.tensor([encoded["input_ids"][:256]])
    mask = torch.tensor(encoded["assistant_masks"][:256], dtype=torch.bool)[1:]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    total += loss[mask].sum().item()
    tokens += mask.sum().item()
print(total / tokens)
