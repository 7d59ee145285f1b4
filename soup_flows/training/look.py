"""`python -m soup_flows.training.look`: look at what a spec names, in a process that imports what that takes alone.

Reads a `TrainingSpec` as JSON from standard input and prints one JSON object, the fields of
`soup_flows.validation.seen.Seen`.
"""

from __future__ import annotations

import contextlib
import json
import sys

from soup_flows.spec import TrainingSpec
from soup_flows.training.lean import leave_out, unneeded


def main() -> None:
    """Look, and print what was seen."""
    spec = TrainingSpec.model_validate_json(sys.stdin.read())
    leave_out(unneeded(spec.model_dump(mode="json"), engine=""))
    from soup_flows.training.looking import look_at

    with contextlib.redirect_stdout(sys.stderr):
        seen = look_at(spec)
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
