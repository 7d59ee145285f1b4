"""The demo: a data set that is on every machine (the standard library's documentation) and a tiny model.

Nothing is downloaded. The data is the same for the same Python version, the model for the same data.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soup_flows.errors import refuse
from soup_flows.json_text import parse_json
from soup_flows.paths import write_atomic, write_json
from soup_flows.presets import strategy_settings
from soup_flows.spec import DEMO_DATASET, DEMO_MODEL, TrainingSpec
from soup_flows.user_file import expanded

DEMO_ROWS = 2000
"""Question-answer pairs in the demo data, the held-out ones included."""

HELD_OUT_ONE_IN = 20
"""One question in this many is held out."""

ANSWER_CHARACTERS = 400
"""Longest answer."""

_SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "turtledemo",
    "__pycache__",
    "idle_test",
    "config",
}
_LAYOUT = 1
_QUESTIONS = {
    "module": (
        "What is the Python module {name} for?",
        "Describe the module {name} in one paragraph.",
        "I found the module {name} in the standard library. What does it do?",
    ),
    "class": (
        "What is the class {name} in Python?",
        "Explain the class {name}.",
        "When would I use the class {name}?",
    ),
    "function": (
        "What does the Python function {name} do?",
        "Explain the function {name}.",
        "Summarise the function {name} for me.",
    ),
    "method": (
        "What does the method {name} do?",
        "Explain the method {name}.",
        "Summarise the method {name} for me.",
    ),
}


_BUILDING = threading.Lock()
"""Held while the demo is built: the command starts that early, and the flow waits for it."""


def build_demo_data(folder: Path) -> tuple[Path, Path]:
    """Write the demo data set below `folder`, unless it is there already and complete.

    About 2,000 chat rows (`messages`, JSON lines) from the documentation strings of the standard library,
    read as text: no module is imported. One question in 20 is held out, chosen by its hash; no question and
    no answer stands in both files.

    Args:
        folder: created when missing.

    Returns:
        The paths of the training file and of the held-out file.

    Raises:
        Refused: if this Python has no readable standard library (a zipped one, for instance).
        OSError: if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train_path, eval_path, done_path = (
        folder / name for name in ("demo-train.jsonl", "demo-eval.jsonl", "demo-data.json")
    )
    if _is_complete(done_path, (train_path, eval_path)):
        return train_path, eval_path
    pairs = sorted(_pairs(), key=lambda pair: _number(pair[0]))[:DEMO_ROWS]
    if not pairs:
        where = sysconfig.get_path("stdlib")
        raise refuse(
            "DEMO001", "dataset", f"no documentation strings in {where}", "give a data set of your own"
        )
    done: dict[str, Any] = _stamp()
    for path, held_out in ((train_path, False), (eval_path, True)):
        lines = [_line(*pair) for pair in pairs if (_number(pair[0]) % HELD_OUT_ONE_IN == 0) == held_out]
        write_atomic(path, "".join(lines), mode=0o644)
        done[path.name] = {"rows": len(lines), "sha256": _sha256(path)}
    write_json(done_path, done, mode=0o644)
    return train_path, eval_path


def build_demo_model(folder: Path, data_path: Path) -> Path:
    """Write the demo model, a tiny random Llama with its own tokenizer, in a process of its own.

    The process keeps torch and transformers out of the caller; it takes some seconds of one core.

    Args:
        folder: where the model is written; nothing is done when a complete one is there.
        data_path: the JSON lines its tokenizer is trained on.

    Returns:
        `folder`.

    Raises:
        Refused: if the process fails; the message has its last lines.
    """
    if (folder / "demo-model.json").is_file():
        return folder
    argv = [sys.executable, "-m", "soup_flows.training.demo_model", str(folder), str(data_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        fix = "pip install 'soup-flows[train]', or give a model of your own"
        raise refuse("DEMO002", "model", f"the demo model could not be made: {tail}", fix)
    return folder


def _stamp() -> dict[str, Any]:
    return {"layout": _LAYOUT, "python": platform.python_version(), "rows": DEMO_ROWS}


def _is_complete(done_path: Path, paths: tuple[Path, ...]) -> bool:
    try:
        done = parse_json(done_path.read_text())
        same = all(done[key] == value for key, value in _stamp().items())
        return same and all(done[path.name]["sha256"] == _sha256(path) for path in paths)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _pairs() -> Iterator[tuple[str, str]]:
    """Yield (question, answer); each name and each answer once."""
    names: set[str] = set()
    answers: set[str] = set()
    for path in _sources():
        for kind, name, doc in _docstrings(path):
            answer = _first_paragraph(doc)
            if not answer or name in names or answer in answers:
                continue
            names.add(name)
            answers.add(answer)
            forms = _QUESTIONS[kind]
            yield forms[_number(name) % len(forms)].format(name=name), answer


def _sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        public = all(not part.startswith("_") or part == "__init__.py" for part in parts)
        if public and _SKIPPED.isdisjoint(parts) and not parts[0].startswith("config-"):
            found.append(path)
    return sorted(found)


def _docstrings(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, dotted name, documentation) of a module and its public classes, functions and methods."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = list(path.relative_to(root).with_suffix("").parts)
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    yield "module", module, ast.get_docstring(tree) or ""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name[0] == "_":
            continue
        name = f"{module}.{node.name}"
        yield "class" if isinstance(node, ast.ClassDef) else "function", name, ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name[0] != "_":
                    yield "method", f"{name}.{inner.name}", ast.get_docstring(inner) or ""


def _first_paragraph(doc: str) -> str:
    """Return the first paragraph on one line, cut at a sentence end; empty when it says too little."""
    text = " ".join(re.split(r"\n\s*\n", doc.strip(), maxsplit=1)[0].split())
    if len(text) > ANSWER_CHARACTERS:
        cut = text.rfind(". ", 0, ANSWER_CHARACTERS)
        text = text[: cut + 1]
    words = len(text.split())
    return text if words >= 4 and text[0].isalpha() and ">>>" not in text else ""


def _line(question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def resolve_demo(spec: TrainingSpec) -> TrainingSpec:
    """Replace `demo://` names by what they stand for, built below the output folder on first use.

    Args:
        spec: any spec; it is returned as it is when it names neither the demo's model nor its data.

    Raises:
        Refused: for another `demo://` name, or when the demo cannot be built here.
    """
    for field, value, known in (
        ("model", spec.model, DEMO_MODEL),
        ("dataset", spec.dataset, DEMO_DATASET),
    ):
        if value.startswith("demo://") and value != known:
            raise refuse("DEMO003", field, f"there is no {value!r}", f"use {known!r}")
    if spec.model != DEMO_MODEL and spec.dataset != DEMO_DATASET:
        return spec
    with _BUILDING:
        return _built(spec)


def _built(spec: TrainingSpec) -> TrainingSpec:
    """Build what `spec` names of the demo, unless it is there, and put its paths in."""
    folder = expanded(spec.output_dir).absolute() / "demo"
    train_path, eval_path = build_demo_data(folder)
    changes: dict[str, Any] = {}
    if spec.dataset == DEMO_DATASET:
        changes["dataset"] = str(train_path)
        held_out = spec.data.eval_dataset or str(eval_path)
        changes["data"] = spec.data.model_copy(update={"eval_dataset": held_out})
    if spec.model == DEMO_MODEL:
        changes["model"] = str(build_demo_model(folder / "tiny-llama", train_path))
    return spec.model_copy(update=changes)


def demo_parameters(preset: str = "zero2", output_dir: str | Path = "demo-output") -> dict[str, Any]:
    """Return the flow's parameters for the demo: a tiny model, two CPU ranks, about a minute of training.

    Args:
        preset: a DeepSpeed or FSDP preset, or `ddp`.
        output_dir: where the demo's model, data and runs go.

    Raises:
        Refused: for an unknown preset, with the nearest.
    """
    return {
        "model": DEMO_MODEL,
        "dataset": DEMO_DATASET,
        "output_dir": str(output_dir),
        **strategy_settings(preset, plain=("ddp",)),
        "gpus": 2,
        "device": "cpu",
        "training": {"learning_rate": 2e-3, "global_batch_size": 16, "num_train_epochs": 1},
        "data": {"max_length": 256},
        "validation": {"deep": False},  # the demo's model and data were made here a moment ago
    }
