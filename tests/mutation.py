"""Mutation testing of the planner and the rules: `make mutation`.

One operator, comparison or constant of a module is changed in a copy in memory, and the tests that answer for the
module run until one fails. A mutant that survives is a test that is missing, unless it changes nothing that matters.
Every mutant runs in a fork of this process, which has imported the libraries already; no file is touched.

    python -m tests.mutation [--sample 150] [--seed 1] [--only soup_flows/batch.py] [--minutes 30] [--results FILE]
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS: dict[str, tuple[str, ...]] = {
    "soup_flows/batch.py": ("tests/core/test_batch.py",),
    "soup_flows/memory": tuple(f"tests/core/test_{n}.py" for n in ("memory", "memory_accuracy", "planner")),
    "soup_flows/sharding": tuple(f"tests/core/test_{n}.py" for n in ("planner", "sharding", "presets")),
    "soup_flows/validation": tuple(
        f"tests/validation/test_{n}.py" for n in ("rules", "validate", "good_setups", "known_failures")
    ),
}  # fmt: skip
"""Modules, and the tests that answer for them."""
NOT_LOGIC = ("catalogue.py", "explain.py", "__main__.py", "trace.py", "deep.py", "seen.py")
"""Tables of texts, and what only a child process runs."""
LIMIT_S = 240.0
"""Longest run of one mutant; one that hangs is killed."""

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: which node of a file, in the order of `ast.walk`, and how it reads before and after."""

    file: str
    node: int
    line: int
    before: str
    after: str


def changed(node: ast.AST) -> ast.AST | None:
    """Return a node that says something else, or None for one that is left alone."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _COMPARE:
        new.ops[0] = _COMPARE[type(new.ops[0])]()
    elif isinstance(new, ast.BinOp) and type(new.op) in _BINARY:
        new.op = _BINARY[type(new.op)]()
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, int | float):
        new.value = new.value + 1 if isinstance(new.value, int) else new.value * 1.5 + 0.1
    else:
        return None
    return new


def passed_over(tree: ast.AST) -> set[int]:
    """Return the ids of nodes that are no logic: annotations, titles, and figures that texts are shown with."""
    found: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            parts += [node.returns, *(d for d in node.decorator_list)]
        elif isinstance(node, ast.FormattedValue):
            parts.append(node)
        found |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return found


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    skipped = passed_over(tree)
    for number, node in enumerate(ast.walk(tree)):
        new = changed(node) if id(node) not in skipped else None
        if new is not None:
            assert isinstance(node, ast.expr)
            yield Mutant(
                str(file.relative_to(ROOT)), number, node.lineno, ast.unparse(node), ast.unparse(new)
            )


def mutated(mutant: Mutant) -> ast.Module:
    """Return the syntax tree of the mutant's file with its change."""
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    wanted = next(node for number, node in enumerate(ast.walk(tree)) if number == mutant.node)

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            new = changed(node) if node is wanted else self.generic_visit(node)
            assert new is not None
            return ast.copy_location(new, node)

    Put().visit(tree)
    return ast.fix_missing_locations(tree)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant instead of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.path = str(ROOT / mutant.file)
        self.code = compile(mutated(mutant), self.path, "exec")

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        folder = [str(Path(self.path).parent)] if self.path.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=self, submodule_search_locations=folder
        )

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


def survives(mutant: Mutant) -> bool:
    """Run the mutant's tests in a fork; True when all of them pass."""
    tests = next(tests for part, tests in TESTS.items() if mutant.file.startswith(part))
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        code = 1
        try:
            import pytest

            sys.meta_path.insert(0, Finder(mutant))
            arguments = [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "-m",
                "not long and not ranks",
                "--hypothesis-seed=0",
            ]
            code = int(pytest.main([*arguments, *tests]))
        finally:
            os._exit(code)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def chosen(sample: int, seed: int, only: str) -> list[Mutant]:
    """Return the mutants to try, always in the same order."""
    files = [
        file
        for part in TESTS
        for file in sorted((ROOT / part).rglob("*.py") if (ROOT / part).is_dir() else [ROOT / part])
        if file.name not in NOT_LOGIC and str(file.relative_to(ROOT)).startswith(only)
    ]
    every = [mutant for file in files for mutant in mutants(file)]
    return random.Random(seed).sample(every, min(sample, len(every)))


def main() -> int:
    """Try mutants and print the survivors; 1 when there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--results", type=Path, help="JSON lines; what is in it already is not tried again")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import hypothesis  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401

    known: dict[Mutant, bool] = {}
    if given.results and given.results.exists():
        rows = map(json.loads, given.results.read_text(encoding="utf-8").splitlines())
        known = {Mutant(**row["mutant"]): row["survived"] for row in rows}
    end = time.monotonic() + 60 * given.minutes
    tried = []
    for mutant in chosen(given.sample, given.seed, given.only):
        if mutant not in known:
            if time.monotonic() > end:
                break
            known[mutant] = survives(mutant)
            if given.results:
                with given.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"mutant": mutant._asdict(), "survived": known[mutant]}) + "\n")
        tried.append(mutant)
        if known[mutant]:
            print(f"survived: {mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    survivors = sum(known[mutant] for mutant in tried)
    print(f"{len(tried)} mutants: {len(tried) - survivors} killed, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
