"""Work that needs torch or transformers, done in a process of its own: this one imports neither."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soup_flows.errors import Problem, Refused, refuse
from soup_flows.json_text import parse_json
from soup_flows.lent import run_environment
from soup_flows.paths import write_json

_TAIL_LINES = 5


def call(module: str, request: str, *, rule: str, field: str, what: str) -> dict[str, Any]:
    """Run `python -m MODULE REQUEST ANSWER` and return the answer.

    Args:
        module: its main function is `answer`.
        request: text of the file REQUEST.
        rule: id of the problem when the process ends without an answer.
        field: the setting that is to blame then.
        what: what could not be done, for the message.

    Raises:
        Refused: what the process refused; or the last lines of what it printed when it failed.
    """
    with tempfile.TemporaryDirectory(prefix="soup-flows-") as folder:
        question, reply = Path(folder, "request.json"), Path(folder, "answer.json")
        question.write_text(request)
        argv = [sys.executable, "-m", module, str(question), str(reply)]
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=run_environment()
        )
        try:
            value: dict[str, Any] = parse_json(reply.read_text())
        except (OSError, ValueError):
            tail = (
                "\n".join(done.stderr.strip().splitlines()[-_TAIL_LINES:]) or f"exit code {done.returncode}"
            )
            fix = "pip install 'soup-flows[train]' on this machine; more memory if it was killed"
            raise refuse(rule, field, f"{what}: {tail}", fix) from None
    if "problems" in value:
        raise Refused([Problem.model_validate(problem) for problem in value["problems"]])
    return value


def answer(argv: Sequence[str], work: Callable[[str], dict[str, Any]]) -> int:
    """Be the other side of `call`: do `work` on the request and write what becomes of it; return 0."""
    question, reply = map(Path, argv)
    try:
        write_json(reply, work(question.read_text()))
    except Refused as refused:
        write_json(reply, {"problems": [problem.model_dump() for problem in refused.problems]})
    return 0
