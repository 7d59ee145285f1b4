"""Charts of the pages, for tests: where Mermaid is not drawn, a table has to say the same."""

from __future__ import annotations

import re

CHARTS = re.compile(r"(?:```mermaid\n[^`]*```\n\n)+")


def without_table(page: str) -> list[str]:
    """Return what follows charts of a page and is no table."""
    return [rest[:80] for rest in CHARTS.split(page)[1:] if not rest.startswith("| ")]
