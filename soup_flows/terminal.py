"""What a terminal shows: problems, and a bar of a running training."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from soup_flows.errors import Problem

WIDEST = 110
"""Columns beyond which a line of text is hard to read."""
BAR_COLUMNS = 20


def problems_text(problems: Sequence[Problem], width: int | None = None) -> str:
    """Return one block per problem: severity, id and setting; what was found; what to do.

    Args:
        problems: in the order in which they are shown.
        width: columns; those of the terminal when None.
    """
    columns = width or min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    lines: list[str] = []
    for problem in problems:
        lines.append(f"{problem.severity:<8} {problem.id:<8} {problem.field}")
        for text, mark in ((problem.message, ""), (problem.fix, "fix: ")):
            lines += textwrap.wrap(
                mark + text if text else "",
                columns,
                initial_indent=" " * 9,
                subsequent_indent=" " * (9 + len(mark)),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


class Bar:
    """A bar in the last line of a terminal; log lines push it down.

    Args:
        stream: the terminal.
        loggers: names of loggers whose handlers write there too.
    """

    def __init__(self, stream: TextIO, loggers: Sequence[str] = ("", "prefect")) -> None:
        self._stream = stream
        self._shown = False
        self._handlers = [
            handler
            for name in loggers
            for handler in logging.getLogger(name or None).handlers
            if hasattr(handler, "stream") or hasattr(handler, "console")
        ]
        for handler in self._handlers:
            handler.addFilter(self._make_room)

    def show(self, percent: float, text: str) -> None:
        """Draw the bar anew.

        Args:
            percent: 0 to 100.
            text: what stands behind it, cut to the terminal's width.
        """
        full = round(percent / 100 * BAR_COLUMNS)
        line = f"[{'#' * full}{'-' * (BAR_COLUMNS - full)}] {percent:3.0f} %  {text}"
        columns = shutil.get_terminal_size((WIDEST, 24)).columns - 1
        self._write(f"\r\x1b[K{line[:columns]}")
        self._shown = True

    def end(self) -> None:
        """Take the bar away."""
        self._clear()
        for handler in self._handlers:
            handler.removeFilter(self._make_room)

    def _make_room(self, _record: logging.LogRecord) -> bool:
        self._clear()
        return True

    def _clear(self) -> None:
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal has gone; the training has not
            self._shown = False


def new_bar() -> Bar | None:
    """Return a bar on standard error; None where that is no terminal."""
    return Bar(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None
