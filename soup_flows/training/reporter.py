"""What a rank tells while it trains: events, heartbeats, the proof of the first step."""

from __future__ import annotations

import math
import resource
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from soup_flows.launch import rank
from soup_flows.sharding import ShardingPlan
from soup_flows.training.proof import collect

if TYPE_CHECKING:
    from soup_flows.training.run import Job


class ProofFailed(RuntimeError):
    """What runs is not what was planned."""

    failure_class = "proof_failed"
    advice = "Do not trust the run. Keep its folder and report it: a library did not do what it was told."


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite."""

    failure_class = "nan_loss"
    advice = "Lower training.learning_rate, look at the rows of this step, or use bf16 instead of fp16."


class Reporter(TrainerCallback):
    """Writes what happens as events, beats the heart, proves the first step, and stops at a NaN."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.trainer: Any = None
        self.proved = False
        self.last = self.step_ended = time.monotonic()
        self.drill = job.drill
        self.logged = 0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Say what loading and sharding took; remember the step that is resumed; start the first one's clock."""
        self.job.events.write("loaded", **peak_memory(self.job.plan))
        self.logged = state.global_step
        self.step_ended = time.monotonic()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Beat; after the first step of this process compare the ranks with the plan."""
        rank.heartbeat(state.global_step)
        self._write_step(state.global_step)
        self.drill.at_step(state.global_step, self.trainer)
        if self.proved:
            return
        self.proved = True
        proof = collect(self.trainer, self.job.plan)
        if self.job.is_main:
            self.job.events.write("proof", **proof.model_dump(mode="json"))
        if proof.failures:
            raise ProofFailed("; ".join(proof.failures))

    def _write_step(self, step: int) -> None:
        """Write what this rank's step took; every rank does, at the cost of one line."""
        now = time.monotonic()
        self.job.events.write(
            "step",
            step=step,
            seconds=now - self.step_ended,
            work_seconds=self.trainer.clock.take(),
            tokens=self.trainer.step_tokens,
            **_memory_now(self.job.plan),
        )
        self.step_ended = now

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Write the metrics on rank 0; every rank sees the same numbers and stops at a NaN."""
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        loss = numbers.get("loss", numbers.get("eval_loss", 0.0))
        if self.job.is_main:
            now = time.monotonic()
            kind = "evaluation" if "eval_loss" in numbers else "metrics"
            finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
            self.job.events.write(kind, step=state.global_step, seconds=now - self.last, **finite)
            self.last = now
            print(_line(state, numbers), flush=True)  # noqa: T201 (the rank's log)
        if not math.isfinite(loss):
            first, last = self.logged + 1, state.global_step
            where = f"step {last}" if first >= last else f"steps {first} to {last}"
            raise NonFiniteLoss(f"the loss is {loss}, not finite in {where}")
        self.logged = state.global_step


def _line(state: Any, numbers: dict[str, float]) -> str:
    """One readable line of metrics."""
    values = "  ".join(f"{key} {value:.6g}" for key, value in numbers.items() if key != "epoch")
    return f"step {state.global_step}/{state.max_steps}  {values}"


def _memory_now(plan: ShardingPlan) -> dict[str, int]:
    """Memory this rank holds at the moment, in bytes; the second field of `statm` counts resident pages."""
    with open("/proc/self/statm", encoding="ascii") as file:
        found = {"host_bytes": int(file.read().split()[1]) * resource.getpagesize()}
    if plan.device == "cuda":
        found["device_bytes"] = torch.cuda.memory_reserved()
    return found


def peak_memory(plan: ShardingPlan) -> dict[str, int]:
    """Peak memory of this rank, in bytes; `ru_maxrss` counts KiB."""
    found = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if plan.device == "cuda":
        found["device_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["device_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found
