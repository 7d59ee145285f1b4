"""`soup-flows completion`: a script that completes the command in a shell, made from its own parser by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import get_args

from soup_flows.settings import Device, PlainStrategy

SHELLS = ("bash", "zsh", "tcsh", "fish")
COMPLETION_TEXT = (
    'Print the script that completes this command in a shell: eval "$(soup-flows completion bash)".'
)

_FOLDERS = frozenset(("output_dir", "run_dir", "output", "tokenizer", "model", "blocks"))
_FILES = frozenset(
    (
        "file",
        "dataset",
        "deepspeed_config",
        "spec",
        "accelerate_config",
        "hardware",
        "checkpoint",
        "from_soup",
        "from_axolotl",
        "from_llama_factory",
        "save",
    )
)


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one shell.

    Args:
        parser: of the whole command. It is changed (choices that it otherwise leaves to later checks are set), so
            give one that nothing else uses.
        shell: one of `SHELLS`.
    """
    import shtab

    words = _words()
    for action in _actions(parser):
        if action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.choices is None and action.dest in words:
            action.choices = words[action.dest]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every argument of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _words() -> dict[str, Sequence[str]]:
    """Return what an argument may be, by its name, where a parser does not say it."""
    from soup_flows.deepspeed import DEEPSPEED_ALIASES, DEEPSPEED_PRESETS
    from soup_flows.drill.cases import DRILLS
    from soup_flows.fsdp import FSDP_PRESETS
    from soup_flows.gpus import ALIASES, GPUS
    from soup_flows.validation import RULES
    from soup_flows.validation.catalogue import CATALOGUE

    deepspeed = [*DEEPSPEED_PRESETS, *DEEPSPEED_ALIASES]
    return {
        "deepspeed": deepspeed,
        "fsdp": [*FSDP_PRESETS],
        "preset": [*deepspeed, *FSDP_PRESETS, "ddp"],
        "diff": [*deepspeed, *FSDP_PRESETS],
        "strategy": get_args(PlainStrategy),
        "device": get_args(Device),
        "gpu": [*GPUS, *ALIASES],
        "rule": sorted([*(rule.id for rule in RULES), *CATALOGUE]),
        "names": ["all", *DRILLS],
    }
