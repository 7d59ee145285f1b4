"""On one GPU, in 8 minutes: memory predicted and measured, speed, the proof of the launch, a real lack of memory.

Random Llamas of two sizes are trained for a few steps by each method, with rows of equal length, so that every
micro batch has as many tokens as was planned for. Without a GPU nothing is run or kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.assets import make_assets
from benchmarks.harness import Result, Row, keep
from soup_flows import tasks
from soup_flows.errors import Refused, TrainingFailed
from soup_flows.gpus import gpu_spec
from soup_flows.launch.events import tail_events
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.spec import parse_spec

BUDGET_S = 480.0
"""Runs that would begin later than this, less the longest one so far, are left out and said."""
LENGTH, ROWS_A_PASS, STEPS, WARM = 2048, 4, 8, 3
"""Tokens of a row, rows of a micro batch, optimizer steps, and those that do not count for the speed."""
SHAPES: dict[str, dict[str, int]] = {
    "0.2b": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8},
}  # fmt: skip
VOCABULARY = 32_000
GRID: tuple[dict[str, Any], ...] = (
    {"model": "0.2b", "method": "full"},
    {"model": "1b", "method": "full", "gradient_checkpointing": True},
    {"model": "1b", "method": "lora"},
    {"model": "1b", "method": "full", "deepspeed": "zero2", "gradient_checkpointing": True},
    {"model": "1b", "method": "qlora"},
    {"model": "1b", "method": "full", "fsdp": "full_shard"},
    {"model": "0.2b", "method": "lora", "gradient_checkpointing": True},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds, default %(default)s")


def run(arguments: argparse.Namespace) -> Result | None:
    """Run the grid and the lack of memory; None without a GPU."""
    begun = time.monotonic()
    try:
        hardware = tasks.detect_hardware.fn("cuda")
    except Refused as refused:
        print(f"gpu: skipped, nothing is kept: {refused.problems[0].message}")
        return None
    return keep("gpu", _rows(begun + arguments.budget, hardware.gpus[0].name), add=arguments.add)


def _rows(end: float, gpu: str) -> Iterator[Row]:
    longest = 0.0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_assets(folder / "chat", 100)
        data = equal_rows(folder / "rows.jsonl")
        for cell in ({"model": "0.2b", "method": "full", "drill": "cuda_oom"}, *GRID):
            start = time.monotonic()
            if start + longest > end:
                yield cell | {"why": "no time was left"}
            else:
                yield once(folder, data, cell, gpu)
                longest = max(longest, time.monotonic() - start)


def equal_rows(path: Path) -> Path:
    """Write rows that are all longer than `LENGTH` tokens, so that each is cut to it."""
    words = [f"w{number}" for number in range(2 * LENGTH)]
    lines = [
        json.dumps({"prompt": f"{number}:", "completion": " ".join(words[number:])})
        for number in range(ROWS_A_PASS * STEPS)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def make_model(folder: Path, shape: dict[str, int], tokenizer: Path) -> Path:
    """Write a random model in bf16 with the tokenizer of another one; nothing is done when it is there."""
    if folder.exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2 * LENGTH, **shape)
    torch.manual_seed(7)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    for file in tokenizer.glob("*"):
        if file.name.startswith(("tokenizer", "chat_template", "special")):
            shutil.copy(file, folder)
    return folder


def once(folder: Path, data: Path, cell: dict[str, Any], gpu: str) -> Row:
    """Train one cell of the grid; what it predicted, measured and proved, or why it did not run."""
    model = make_model(folder / cell["model"], SHAPES[cell["model"]], folder / "chat" / "model")
    launcher: dict[str, Any] = {"drill": cell["drill"], "allow_drill": True} if "drill" in cell else {}
    out = tempfile.mkdtemp(
        dir=folder
    )  # one each: what a run measured corrects what is predicted for the next one
    spec = parse_spec(
        {
            "model": str(model),
            "dataset": str(data),
            "output_dir": out,
            "gpus": 1,
            "device": "cuda",
            **{key: cell[key] for key in ("deepspeed", "fsdp") if key in cell},
            **({} if {"deepspeed", "fsdp"} & set(cell) else {"strategy": "single"}),
            "training": {
                "method": cell["method"],
                "gradient_checkpointing": cell.get("gradient_checkpointing", False),
                "per_device_train_batch_size": ROWS_A_PASS,
                "global_batch_size": ROWS_A_PASS,
                "max_steps": STEPS,
            },
            "data": {"max_length": LENGTH, "train_on": "all"},
            "launcher": launcher,
        }
    )
    try:
        hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
        prepared = tasks.prepare_dataset.fn(spec)
        plan = tasks.resolve_sharding_config.fn(spec, hardware, prepared)
        problems = tasks.validate_strategy.fn(spec, hardware, plan)
        launch = tasks.write_temp_config.fn(spec, hardware, plan, data=prepared)
    except Refused as refused:
        return cell | {"why": "; ".join(f"{p.id} {p.message}" for p in refused.problems)[:300]}
    try:
        report = tasks.launch_distributed_train.fn(launch, problems)
    except TrainingFailed as failed:
        report = TrainReport.load(failed.run_dir)
    return cell | measured(report, gpu, SHAPES[cell["model"]], cell["method"] == "full")


def measured(report: TrainReport, gpu: str, shape: dict[str, int], full: bool) -> Row:
    """Return the figures of a run.

    Args:
        report: the run's.
        gpu: name that the driver gives the GPU.
        shape: of the model.
        full: whether every weight was trained.

    Returns:
        `state`, `failure_class`, `cause`; `proof` (True where it was made and held); `predicted_bytes` and
        `measured_bytes` (peak allocated by torch) with `error`, their relative difference; `tokens_per_s`, `mfu`.
    """
    row: Row = {"state": report.state, "failure_class": report.failure_class, "cause": report.cause[:200]}
    row["proof"] = report.proof is not None and not report.proof.failures
    peaks = [m.device_peak_allocated_bytes for m in report.memory if m.device_peak_allocated_bytes]
    if peaks and report.plan is not None and report.plan.memory is not None:
        predicted = report.plan.memory.allocated_bytes
        row |= {"predicted_bytes": predicted, "measured_bytes": max(peaks)}
        row["error"] = round(predicted / max(peaks) - 1, 4)
    events = tail_events(RunPaths(Path(report.run_dir)).attempt(max(1, report.attempts)).events).poll()
    steps = [e for e in events if e["kind"] == "step" and e["step"] > WARM]
    if steps:
        speed = median(e["tokens"] / e["seconds"] for e in steps)
        row["tokens_per_s"] = round(speed)
        with contextlib.suppress(Refused):  # a GPU that is not in the table
            peak = gpu_spec(gpu).half_tflops * 1e12
            row["mfu"] = round(speed * flops_per_token(shape, full) / peak, 4)
    return row


def flops_per_token(
    shape: dict[str, int], full: bool, *, length: int = LENGTH, vocabulary: int = VOCABULARY
) -> float:
    """Return the floating-point operations that training a token needs; recomputed activations do not count.

    A forward pass multiplies and adds once for every weight of a matrix (the embedding is looked up), and every
    token looks back over half of its row on average: 2 * length / 2 * width for the scores, as much for the values.
    The backward pass needs that again for the inputs, and again for the weights, which adapters leave out (their own
    are neglected). PaLM, https://arxiv.org/abs/2204.02311, appendix B.
    """
    hidden, layers, heads = (
        shape[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv = hidden // heads * shape["num_key_value_heads"]
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * shape["intermediate_size"])
    forward = 2.0 * (weights + hidden * vocabulary)
    attention = 2.0 * length * hidden * layers
    return (3 if full else 2) * forward + 3 * attention
