"""What a running attempt is doing, gathered from its ranks' events, and the page `soup-train-live`."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from soup_flows.charts import CHART_POINTS, curve, thin
from soup_flows.markdown import table
from soup_flows.pages import points_table
from soup_flows.report import Point

WINDOW = 20
"""Steps over which speeds are taken."""
STRAGGLER = 1.2
"""A rank is named when its own work takes this many times the median of all ranks."""
STRAGGLER_S = 0.005
"""And at least this many seconds longer, so that noise of tiny steps names nobody."""


@dataclass
class RankLive:
    """The latest of one rank; times in seconds, memory in bytes."""

    step: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    work: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Time in its own forward passes; the step as a whole takes all ranks equally long."""
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    host_bytes: int | None = None
    device_bytes: int | None = None


@dataclass
class LiveState:
    """The state of an attempt; `update` takes events in any order and skips what it does not know."""

    total_steps: int | None = None
    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    points: list[Point] = field(default_factory=list)
    ranks: dict[int, RankLive] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    finished: bool = False
    ended_early: bool = False
    """Without having finished: a failure, a stop; the pages of attempts and of the report say which."""

    def update(self, events: Iterable[dict[str, Any]]) -> None:
        """Take in new events; fields of the wrong type are skipped with their event."""
        for event in events:
            try:
                self._take(event)
            except (KeyError, TypeError, ValueError):
                continue

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "data":
            self.total_steps = int(event["total_steps"])
        elif kind == "metrics" and "loss" in event:
            fields = ("loss", "learning_rate", "grad_norm", "seconds")
            point = Point(step=event["step"], **{name: event.get(name) for name in fields})
            self.points.append(point)
            self.step, self.loss = max(self.step, point.step), point.loss
            if len(self.points) > 50 * CHART_POINTS:
                self.points = thin(self.points, 25 * CHART_POINTS)
        elif kind == "step":
            self._take_step(event)
        elif kind == "evaluation":
            self.eval_loss = event.get("eval_loss")
        elif kind in (
            "warning",
            "error",
            "resumed",
            "save_failed",
            "mirrored",
            "mirror_failed",
        ) or kind.startswith("checkpoint"):
            text = (
                event.get("message")
                or event.get("reason")
                or event.get("url")
                or (f"step {event['step']}" if "step" in event else "")
            )
            self.notes = [*self.notes[-9:], f"{kind} {text}".strip()]
        elif kind == "finished":
            self.finished = True

    def _take_step(self, event: dict[str, Any]) -> None:
        rank = self.ranks.setdefault(int(event["rank"]), RankLive())
        rank.step = int(event["step"])
        self.step = max(self.step, rank.step)
        rank.seconds.append(float(event["seconds"]))
        rank.work.append(float(event.get("work_seconds") or 0.0))
        rank.tokens.append(int(event.get("tokens") or 0))
        rank.host_bytes, rank.device_bytes = event.get("host_bytes"), event.get("device_bytes")

    @property
    def step_seconds(self) -> float | None:
        """Median wall time of the latest optimizer steps, over all ranks."""
        times = [time for rank in self.ranks.values() for time in rank.seconds]
        return statistics.median(times) if times else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that all ranks together pass through the model per second, over the latest steps."""
        rates = [sum(r.tokens) / sum(r.seconds) for r in self.ranks.values() if sum(r.seconds)]
        return sum(rates) if rates else None

    @property
    def eta_s(self) -> float | None:
        """Seconds of training that are left at the present speed."""
        if self.total_steps is None or self.step_seconds is None:
            return None
        return (self.total_steps - self.step) * self.step_seconds

    @property
    def percent(self) -> float:
        """Share of the optimizer steps that are made, 0 to 100."""
        return min(100.0, 100.0 * self.step / self.total_steps) if self.total_steps else 0.0

    def stragglers(self) -> list[int]:
        """Return the ranks whose own work takes much longer than that of the others."""
        work = {n: statistics.median(rank.work) for n, rank in self.ranks.items() if rank.work}
        if len(work) < 2:
            return []
        usual = statistics.median_low(work.values())
        return sorted(n for n, time in work.items() if time > max(STRAGGLER * usual, usual + STRAGGLER_S))


def summary(state: LiveState) -> str:
    """Return one line: step, loss, speed, time left."""
    parts = [f"step {state.step}" + (f" of {state.total_steps}" if state.total_steps else "")]
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4g}")
    if state.tokens_per_second:
        parts.append(f"{state.tokens_per_second:,.0f} tokens/s")
    if state.eta_s is not None and not state.finished and not state.ended_early:
        parts.append(f"{duration(state.eta_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Format seconds as `2 h 03 min`, `4 min 10 s` or `9 s`."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def live_page(state: LiveState) -> str:
    """Return the page `soup-train-live`: Mermaid curves with their table below, ranks, what happened lately."""
    slow = state.stragglers()
    now = "Ended early" if state.ended_early else "Finished" if state.finished else "Training"
    parts = [f"# {now}: {summary(state)}"]
    if state.eval_loss is not None:
        parts.append(f"Held-out loss {state.eval_loss:.4g}")
    if slow:
        parts.append(f"**Slower than the others: rank {', '.join(map(str, slow))}.** All ranks wait for it.")
    losses = [(p.step, p.loss) for p in state.points if p.loss is not None]
    rates = [(p.step, p.learning_rate) for p in state.points if p.learning_rate is not None]
    parts += [
        curve(title, points)
        for title, points in (("Loss", losses), ("Learning rate", rates))
        if len(points) > 1
    ]
    if state.points:
        parts.append(points_table(state.points))
    if state.ranks:
        rows = [_rank_row(number, rank, number in slow) for number, rank in sorted(state.ranks.items())]
        head = ("rank", "step", "step time", "own work", "GPU memory", "host memory", "")
        parts.append("## Ranks\n\n" + table(head, rows))
    if state.notes:
        parts.append("## Lately\n\n" + "\n".join(f"- {note}" for note in state.notes))
    return "\n\n".join(parts) + "\n"


def _rank_row(number: int, rank: RankLive, slow: bool) -> tuple[object, ...]:
    def size(value: int | None) -> str | None:
        return None if value is None else f"{value / 2**30:.2f} GiB"

    return (
        number,
        rank.step,
        f"{statistics.median(rank.seconds) * 1000:.0f} ms" if rank.seconds else None,
        f"{statistics.median(rank.work) * 1000:.0f} ms" if any(rank.work) else None,
        size(rank.device_bytes),
        size(rank.host_bytes),
        "straggler" if slow else "",
    )
