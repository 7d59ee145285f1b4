"""Problems as a terminal shows them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from soup_flows.errors import Problem

WIDEST = 110
"""Columns beyond which a line of text is hard to read."""


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
