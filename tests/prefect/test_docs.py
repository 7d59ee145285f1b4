"""Every command of the pages exists: what `soup-flows` gets parses, what Prefect gets names what is deployed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prefect.utilities.callables import parameter_schema

from soup_flows import cli
from soup_flows.cli_spec import value_of
from soup_flows.deploy.deployments import definitions, load_flow

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


def lines_of(page: str, command: str) -> list[list[str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += [found.replace("\n", " ") for found in re.findall(rf"`({command} [^`]+)`", prose)]
    return [
        shlex.split(line, comments=True) for line in map(str.strip, lines) if line.startswith(command + " ")
    ]


@pytest.mark.parametrize("page", PAGES)
def test_soup_flows_commands_parse(page: str) -> None:
    # "`soup-flows stop` does ..." names a command and is none.
    lines = [line for line in lines_of(page, "soup-flows") if "..." not in line and len(line) > 2]
    for _, *argv in lines:
        if "--help" not in argv:
            cli._parser().parse_args(argv)


def test_pictures_are_there_and_small() -> None:
    shown = set()
    for page in [*PAGES, *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*/*.md"))]:
        for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            file = (ROOT / page).parent / link
            assert file.stat().st_size < 150_000, (page, link)
            shown.add(file.resolve())
    assert shown == set((ROOT / "docs" / "images").glob("*"))


def deployed() -> dict[str, dict[str, Any]]:
    found = {}
    for entry in definitions():
        flow = load_flow(entry["entrypoint"])
        found[f"{flow.name}/{entry['name']}"] = entry | {
            "schema": parameter_schema(flow.fn).model_dump_for_openapi()
        }
    return found


@pytest.mark.parametrize("page", PAGES)
def test_runs_of_deployments_are_accepted(page: str) -> None:
    runs = [
        argv for argv in lines_of(page, "prefect") if argv[1:3] == ["deployment", "run"] and len(argv) > 3
    ]
    if page in ("README.md", "docs/gpu-box.md", "docs/operations.md"):
        assert runs
    known = deployed() if runs else {}
    for argv in runs:
        entry = known[argv[3]]
        given = [argv[i + 1].split("=", 1) for i, word in enumerate(argv) if word == "-p"]
        values = {name: value_of(text) for name, text in given}
        jsonschema.validate(entry.get("parameters", {}) | values, entry["schema"])
        unknown = set(values) - set(entry["schema"]["properties"])
        assert not unknown, argv
