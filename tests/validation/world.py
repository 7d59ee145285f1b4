"""Machines, model folders and runs for the rule tests: real files and real values, built small."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from soup_flows.hardware import Disk, Gpu, Hardware, HostMemory
from soup_flows.sharding import make_plan
from soup_flows.spec import parse_spec
from soup_flows.validation import count_rows, make_context
from soup_flows.validation.table import Context

GIB = 1 << 30

GPUS = {
    "T4": ("Tesla T4", 15, (7, 5)),
    "A100": ("NVIDIA A100-SXM4-80GB", 80, (8, 0)),
    "H100": ("NVIDIA H100 80GB HBM3", 80, (9, 0)),
    "4090": ("NVIDIA GeForce RTX 4090", 24, (8, 9)),
}

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "lm_head.weight",
)
CHAT = {"messages": [{"role": "user", "content": "Hi {}"}, {"role": "assistant", "content": "Hello {}"}]}

GOOD_JSON: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 500_000_000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def machine(name: str = "A100", count: int = 2, **changes: Any) -> Hardware:
    """Return a healthy machine with `count` GPUs of the table, or without any for `CPU`."""
    gpus: tuple[Gpu, ...] = ()
    if name != "CPU":
        title, gib, capability = GPUS[name]
        gpus = tuple(
            Gpu(
                index=i,
                uuid=f"GPU-{i}",
                name=title,
                memory_total_bytes=gib * GIB,
                memory_free_bytes=gib * GIB,
                compute_capability=capability,
            )
            for i in range(count)
        )
    values: dict[str, Any] = {
        "device": "cuda" if gpus else "cpu",
        "gpus": gpus,
        "interconnect": "nvswitch" if count > 1 else "none",
        "cpu_cores": 64,
        "host_memory": HostMemory(total_bytes=512 * GIB, available_bytes=500 * GIB),
        "shm": Disk(path="/dev/shm", total_bytes=64 * GIB, free_bytes=64 * GIB, filesystem="tmpfs"),
        "cuda_toolkit": "12.8",
        "cxx": "/usr/bin/c++",
        "ninja": True,
        "torch_cuda": "12.8",
        "driver_version": "570.10",
        "driver_cuda": "12.8",
        "memlock": "unlimited",
    }
    return Hardware(**{**values, **changes})


def edited(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with dotted paths set; None removes one."""
    result = copy.deepcopy(dict(config))
    for path, value in changes.items():
        *parents, key = path.split(".")
        block = result
        for parent in parents:
            block = block.setdefault(parent, {})
        if value is None:
            block.pop(key, None)
        else:
            block[key] = value
    return result


def write_safetensors(path: Path, tensors: Mapping[str, bytes], extra: int = 0) -> None:
    """Write bf16 tensors as flat bytes; `extra` adds a tensor of that many elements, as a hole in the file."""
    header, offset = {}, 0
    sizes = {name: len(content) for name, content in tensors.items()}
    for name, size in {
        **sizes,
        **({"model.layers.1.mlp.up_proj.weight": 2 * extra} if extra else {}),
    }.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
        file.truncate(8 + len(text) + offset)


def model_folder(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, bytes] | None = None,
    parameters: int = 0,
    files: Mapping[str, str | None] | None = None,
    cut: int = 0,
) -> Path:
    """Write a model folder.

    Args:
        folder: its name.
        config: changes to `LLAMA`.
        tensors: content of the weight file.
        parameters: weights in bf16 to add, as a hole in the file.
        files: content of other files; None removes one.
        cut: bytes to take away from the end of the weight file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(edited(LLAMA, config or {})))
    content = tensors if tensors is not None else {name: name.encode().ljust(64) for name in TENSORS}
    weights = folder / "model.safetensors"
    write_safetensors(weights, content, parameters)
    os.truncate(weights, weights.stat().st_size - cut)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": {}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    for name, text in (files or {}).items():
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)
    return folder


def rows_file(path: Path, rows: list[dict[str, Any]] | int = 64) -> Path:
    """Write a JSONL file with the rows, or with that many different conversations."""
    if isinstance(rows, int):
        rows = [json.loads(json.dumps(CHAT).replace("{}", str(i))) for i in range(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(
    folder: Path,
    *,
    spec: Mapping[str, Any] | None = None,
    on: Hardware | None = None,
    model: Mapping[str, Any] | None = None,
    rows: list[dict[str, Any]] | int = 64,
    deepspeed_json: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Context:
    """Return the context of a planned run: everything is good unless the arguments say otherwise.

    Args:
        folder: an empty folder.
        spec: values of the spec.
        on: the machine; two A100s by default.
        model: arguments of `model_folder`, or `{"id": ...}` for a Hub id.
        rows: the training rows.
        deepspeed_json: changes to `GOOD_JSON`; the run then uses that file.
        plan: changes to the plan.
        environ: the environment of the ranks.
    """
    model = dict(model or {})
    name = model.pop("id", None) or str(model_folder(folder / "model", **model))
    values: dict[str, Any] = {
        "model": name,
        "dataset": str(rows_file(folder / "rows.jsonl", rows)),
        "output_dir": str(folder / "out"),
        **(spec or {}),
    }
    if deepspeed_json is not None:
        file = folder / "ds.json"
        file.write_text(json.dumps(edited(GOOD_JSON, deepspeed_json)))
        values["deepspeed_config"] = str(file)
    parsed = parse_spec(values)
    hardware = on or machine()
    planned = make_plan(parsed, hardware, count_rows(parsed)).model_copy(update=dict(plan or {}))
    context, problems = make_context(parsed, hardware, planned, environ=environ or {})
    assert not problems, problems
    return context


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Make `module` one that can be found, if it is not installed here."""
    if importlib.util.find_spec(module) is None:
        (folder / "site" / module).mkdir(parents=True)
        (folder / "site" / module / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(folder / "site"))
