"""`soup-flows data FILE` and `python -m soup_flows.data FILE`: the data report, without a run."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from soup_flows.data.fetch import fetch
from soup_flows.data.page import markdown
from soup_flows.data.report import report_on
from soup_flows.errors import Refused, refuse


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    words = argparse.ArgumentParser(
        "soup-flows data", description="Report on a data set before it is trained."
    )
    add_arguments(words)
    words.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return words


def add_arguments(words: argparse.ArgumentParser) -> None:
    """Add the command's arguments, but for `--json`."""
    words.add_argument("file", metavar="FILE", help="a data file, a folder, a Hub data set or a URL")
    words.add_argument("--tokenizer", metavar="DIR", help="folder of the model or tokenizer; counts tokens")
    words.add_argument(
        "--max-length", type=_length, metavar="N", help="tokens a row is cut to (needs --tokenizer)"
    )
    words.add_argument(
        "--train-on", choices=("assistant", "all"), default="assistant", help="what the loss counts"
    )
    words.add_argument(
        "--policy", choices=("drop", "refuse"), default="drop", help="what happens to faulty rows"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return 0, or 2 when the data is refused (wrong arguments exit with 2 as well)."""
    given = parser().parse_args(argv)
    try:
        if given.max_length is not None and given.tokenizer is None:
            raise refuse(
                "DATA018", "--max-length", "counts tokens, but no tokenizer is given", "add --tokenizer DIR"
            )
        fetch(given.file, field="FILE")
        tokenizer = None if given.tokenizer is None else load_tokenizer(given.tokenizer)
        report = report_on(
            given.file,
            tokenizer,
            max_length=given.max_length,
            train_on=given.train_on,
            policy=given.policy,
            field="FILE",
        )
    except Refused as error:
        if given.json:
            problems = [problem.model_dump() for problem in error.problems]
            sys.stdout.write(json.dumps({"problems": problems}, indent=2) + "\n")
        else:
            sys.stderr.write(f"{error}\n")
        return 2
    text = report.model_dump_json(indent=2) + "\n" if given.json else markdown(report)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 still gets the page
    sys.stdout.write(text)
    return 0


def load_tokenizer(folder: str) -> Any:
    """Load a tokenizer from a local folder; nothing is downloaded and no code of the folder is run.

    Raises:
        Refused: if transformers is missing or the folder holds no tokenizer.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        fix = "pip install 'soup-flows[train]'"
        raise refuse("DATA019", "--tokenizer", "transformers is not installed", fix) from None
    if not os.path.isdir(folder):
        raise refuse(
            "DATA019", "--tokenizer", f"{folder} is not a folder", "give a folder with tokenizer.json"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a folder without a tokenizer
        words = str(error).strip().splitlines()
        reason = words[0] if words else type(error).__name__
        fix = "give a folder with tokenizer.json"
        raise refuse("DATA019", "--tokenizer", f"{folder} holds no usable tokenizer: {reason}", fix) from None


def _length(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
