"""Charts of the pages, in Mermaid, as Prefect's page draws them."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TypeVar

T = TypeVar("T")

CHART = (
    '```mermaid\n%%{init: {"themeVariables": {"xyChart": {"plotColorPalette": "#2563eb"}}}}%%\nxychart-beta\n'
)
"""How a Mermaid chart begins; the colours of its default theme cannot be seen on Prefect's page."""
CHART_POINTS = 40
"""Points of a chart; more are not seen."""


def curve(title: str, points: Sequence[tuple[int, float]]) -> str:
    """Return a Mermaid chart of a value over optimizer steps, at most `CHART_POINTS` of them.

    The axis has the first and the last step alone, since Mermaid writes every step that is named, one over the other;
    and its numbers have no exponents (mermaid, xychart.jison, NUMBER_WITH_DECIMAL).
    """
    points = thin(points, CHART_POINTS)
    values = ", ".join(f"{Decimal(f'{value:.6g}'):f}" for _, value in points)
    return (
        f"{CHART}"
        f'    title "{title}"\n'
        f'    x-axis "optimizer step" {points[0][0]} --> {points[-1][0]}\n'
        f'    y-axis "{title.lower()}"\n'
        f"    line [{values}]\n```"
    )


def thin(points: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of `points`, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
