"""`python -m soup_flows.training.look PART...`: look at what a spec names, importing what that takes alone.

Reads a `TrainingSpec` as JSON from standard input and prints one JSON object: for each part, `rows` and `model`
unless they are named, the fields of that part in `soup_flows.validation.seen`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from soup_flows.spec import TrainingSpec
from soup_flows.training.lean import leave_out, leave_out_of_tokenising, unneeded
from soup_flows.validation.seen import PARTS


def main() -> None:
    """Look, and print what was seen."""
    parts = sys.argv[1:] or list(PARTS)
    spec = TrainingSpec.model_validate_json(sys.stdin.read())
    leave_out(unneeded(spec.model_dump(mode="json"), engine=""))
    if parts == ["rows"]:
        leave_out_of_tokenising(spec)
    with contextlib.redirect_stdout(sys.stderr):
        seen = {part: _look(part, spec) for part in parts}
    json.dump(seen, sys.stdout)


def _look(part: str, spec: TrainingSpec) -> dict[str, Any]:
    if part == "model":
        from soup_flows.training.looking import look_at_model

        return look_at_model(spec)
    from soup_flows.training.look_rows import look_at_rows

    return look_at_rows(spec)


if __name__ == "__main__":
    main()
