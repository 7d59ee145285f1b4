"""No setting is dead: each is read, outside of what only describes settings, by code that acts on it.

The uses are found in the syntax tree: `spec.training.max_steps`, `training.max_steps` where `training` is a parameter
of the type `TrainingSettings`, or a name that was given `spec.training` before.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from soup_flows.spec import TrainingSpec

PACKAGE = Path(__file__).parents[2] / "soup_flows"
DESCRIBES = {
    "blocks.py", "migrate", "accelerate_config.py", "drill", "resume_fit.py", "stored_job.py", "demo.py",
    "spec.py", "settings.py", "slurm_settings.py", "spec_problems.py", "other_words.py", "group.py",
}  # fmt: skip
"""Where settings are defined, translated or filled in: to be read there is no effect."""


def leaves(kind: type[BaseModel], above: str = "") -> Iterator[tuple[type[BaseModel], str, str]]:
    """Yield class, name and dotted path of every setting that is no group."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{above}{name}.")
        else:
            yield kind, name, above + name


def groups(kind: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {"spec": kind} if kind is TrainingSpec else {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= {name: field.annotation} | groups(field.annotation)
    return found


GROUPS = groups(TrainingSpec)
CLASSES = {kind.__name__: kind for kind in GROUPS.values()}
LEAVES = list(leaves(TrainingSpec))


class Uses(ast.NodeVisitor):
    """Collects (class of a group, setting) for every setting that is read in a file."""

    def __init__(self) -> None:
        self.names: list[dict[str, type[BaseModel]]] = [{}]
        self.found: set[tuple[type[BaseModel], str]] = set()

    def kind(self, node: ast.expr) -> type[BaseModel] | None:
        """Return which group an expression is."""
        if isinstance(node, ast.Name):
            known = next((names[node.id] for names in reversed(self.names) if node.id in names), None)
            return known or (TrainingSpec if node.id == "spec" else None)
        if isinstance(node, ast.Attribute):
            above = self.kind(node.value)
            if node.attr in ("spec", "_spec"):
                return TrainingSpec
            if above is None and node.attr in (
                "slurm",
                "ray",
            ):  # of a launch plan, which carries the groups on
                return GROUPS[node.attr]
            field = above.model_fields.get(node.attr) if above is not None else None
            return GROUPS.get(node.attr) if field is not None else None
        return None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        kind = CLASSES.get(node.name)
        self.names.append({"self": kind} if kind is not None else {})
        self.generic_visit(node)
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        typed = {
            a.arg: CLASSES.get(ast.unparse(a.annotation).split(" ")[0].split(".")[-1])
            for a in arguments
            if a.annotation
        }
        self.names.append({name: kind for name, kind in typed.items() if kind is not None})
        self.generic_visit(node)
        self.names.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                kind = self.kind(value)
                if isinstance(name, ast.Name) and kind is not None:
                    self.names[-1][name.id] = kind
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        kind = self.kind(node.value)
        if kind is not None and node.attr in kind.model_fields:
            self.found.add((kind, node.attr))
        self.generic_visit(node)


def uses() -> dict[tuple[type[BaseModel], str], list[str]]:
    found: dict[tuple[type[BaseModel], str], list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        part = file.relative_to(PACKAGE).parts[0]
        if part in DESCRIBES:
            continue
        seen = Uses()
        seen.visit(ast.parse(file.read_text(encoding="utf-8")))
        for use in seen.found:
            found[use].append(str(file.relative_to(PACKAGE)))
    return found


USES = uses()
BY_NAME = {
    **{
        f"launcher.{engine}.{name}": ("spec.py", text, f"spec.{carried}")
        for engine in ("slurm", "ray")
        for name, text, carried in (
            ("nodes", "self.launcher.cluster.nodes", "nodes"),
            ("hardware", "cluster.hardware", "recorded_machine"),
        )
    },
    "launcher.allow_drill": ("settings.py", "allow_drill", "launcher.drill"),
    "blocks.hugging_face": (
        "block_use.py",
        '("hugging_face", HuggingFaceCredentials)',
        "getattr(spec.blocks",
    ),
    "blocks.ray_cluster": ("block_use.py", '("ray_cluster", RayCluster)', "getattr(spec.blocks"),
    **{
        f"launcher.ray.{name}": ("ray_settings.py", text, "launch.ray.wanted(")
        for name, text in (
            ("cpus_per_node", "self.cpus_per_node or"),
            ("memory_gib", "if self.memory_gib"),
            ("resources", "| self.resources"),
        )
    },
}
"""What is read in another way: the file, the text in it, and what carries it on."""


@pytest.mark.parametrize(("kind", "name", "path"), LEAVES, ids=[path for *_, path in LEAVES])
def test_every_setting_acts(kind: type[BaseModel], name: str, path: str) -> None:
    if path in BY_NAME:
        file, text, _ = BY_NAME[path]
        assert text in (PACKAGE / file).read_text(encoding="utf-8")
        return
    where = USES.get((kind, name), [])
    assert where, f"nothing reads {path}"
    acting = [file for file in where if not file.startswith(("validation/", "pages", "plan_page"))]
    assert acting or path.startswith("validation."), f"{path} is only checked and shown, in {where}"


def test_a_setting_that_nothing_reads_is_found() -> None:
    seen = Uses()
    seen.visit(
        ast.parse(
            "def f(spec: TrainingSpec, given: LauncherSettings, other: Other):\n"
            "    data, lora = spec.data, spec.lora\n"
            "    return spec.training.max_steps, given.stop_budget_s, data.packing, other.seed, lora.r\n"
            "def g(self):\n"
            "    return self.spec.gpus\n"
        )
    )
    paths = {path for kind, name, path in LEAVES if (kind, name) in seen.found}
    assert {"training.max_steps", "launcher.stop_budget_s", "data.packing", "lora.r", "gpus"} <= paths
    assert "training.seed" not in paths
