"""An error in one line, whatever it says: many say nothing."""

from __future__ import annotations

import pytest

from soup_flows.errors import first_line, kind_and_line


@pytest.mark.parametrize(
    ("error", "line", "named"),
    [
        (OSError("no space\nmore"), "no space", "OSError: no space"),
        (ValueError("\n  at line 3\n"), "at line 3", "ValueError: "),
        (TimeoutError(), "TimeoutError", "TimeoutError: "),
    ],
)
def test_an_error_in_one_line(error: Exception, line: str, named: str) -> None:
    assert first_line(error) == line
    assert first_line(error, 4) == line[:4]
    assert kind_and_line(error) == named
