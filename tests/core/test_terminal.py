"""A bar on a terminal, and none in a pipe."""

from __future__ import annotations

import logging
import os
import pty
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from soup_flows.launch.plan import build_launch_plan
from soup_flows.live import LiveView
from soup_flows.paths import RunPaths
from soup_flows.terminal import Bar, new_bar

EVENTS = [{"kind": "data", "rank": 0, "total_steps": 40},
          {"kind": "metrics", "rank": 0, "step": 10, "loss": 2.5}]  # fmt: skip


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, int]]:
    """A pseudo-terminal, and the descriptor that a person would look at."""
    person, program = pty.openpty()
    with os.fdopen(program, "w") as stream:
        monkeypatch.setenv("COLUMNS", "60")
        yield stream, person
    os.close(person)


def read(person: int, end: str) -> str:
    """Return what the terminal shows, up to `end`; what is written at once may arrive in pieces."""
    seen = ""
    while not seen.endswith(end):
        seen += os.read(person, 4096).decode()
    return seen


def view(folder: object) -> LiveView:
    plan = build_launch_plan(
        paths=RunPaths.of(str(folder), "run"), run_id="run", attempt=1, nproc_per_node=2, device="cpu",
        config_path=None, omp_num_threads=1, stop_budget_s=20, timeout_s=None,
    )  # fmt: skip
    return LiveView(plan)


def test_a_terminal_gets_a_bar_and_log_lines_above_it(
    terminal: tuple[TextIO, int], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, person = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    logger = logging.getLogger("prefect")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        shown = view(tmp_path)
        shown.on_events(EVENTS)
        logger.error("a line")
        shown.leave_terminal()
        shown.leave_terminal()
        logger.error("another")
    finally:
        logger.removeHandler(handler)
    seen = read(person, "another\r\n").replace("\r\n", "\n")
    clear = "\r\x1b[K"
    assert seen == f"{clear}[#####---------------]  25 %  step 10 of 40, loss 2.5{clear}a line\nanother\n"
    assert handler.filters == []


def test_a_bar_fits_its_terminal_and_survives_it(terminal: tuple[TextIO, int]) -> None:
    stream, person = terminal
    bar = Bar(stream)
    bar.show(100, "x" * 100)
    assert read(person, "x" * 29).split("\x1b[K")[1] == f"[{'#' * 20}] 100 %  {'x' * 29}"
    stream.close()
    bar.show(100, "x")
    bar.end()


def test_a_pipe_gets_none(capfd: pytest.CaptureFixture[str], tmp_path: object) -> None:
    assert new_bar() is None
    shown = view(tmp_path)
    shown.on_events(EVENTS)
    shown.leave_terminal()
    assert capfd.readouterr() == ("", "")
