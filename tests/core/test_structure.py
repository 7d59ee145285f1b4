"""The rules of the structure: who may import whom, what the wheel holds, what an import loads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "soup_flows"

# Each may import only what stands before it.
CORE = (
    "json_text",
    "safetensors_header",
    "units",
    "charts",
    "errors",
    "other_words",
    "user_file",
    "user_yaml",
    "terminal",
    "paths",
    "lent",
    "child",
    "roots",
    "group",
    "slurm_settings",
    "ray_settings",
    "settings",
    "spec_problems",
    "spec",
    "spec_file",
    "batch",
    "gpus",
    "hardware",
    "config_edit",
    "deepspeed_file",
    "deepspeed_resolve",
    "deepspeed",
    "accelerate_keys",
    "accelerate_config",
    "fsdp",
    "presets",
    "architecture",
    "memory",
    "data",
    "demo",
    "migrate",
    "sharding",
    "proof",
    "launch",
    "run_lock",
    "ledger",
    "manifest",
    "checkpoints",
    "resume_fit",
    "resume",
    "run_config",
    "store",
    "validation",
    "report",
    "run_events",
    "measured",
    "attempts",
    "mirror",
    "recovery",
    "stop",
    "cluster_hosts",
    "cluster_job",
    "ray_host",
    "ray_elastic",
    "ray_attempt",
    "slurm_job",
    "ray_job",
    "consolidate",
    "markdown",
    "attempts_page",
    "pages",
    "compare",
    "plan_page",
    "live_state",
    "diagnose",
)
SHELL = {
    "tasks",
    "run_files",
    "attempt_report",
    "flows",
    "artifacts",
    "blocks",
    "cli",
    "cli_completion",
    "cli_spec",
    "cli_plan",
    "cli_runs",
    "attempt",
    "rehearse",
    "live",
    "own_run",
    "hooks",
    "block_use",
    "cli_deploy",
    "deploy",
    "plan_flow",
    "pipelines",
    "stored_job",
    "drill",
}
HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "datasets",
    "trl",
    "safetensors",
    "tokenizers",
    "ray",
}


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> set[str]:
    """Every dotted name that a file imports, at any depth; TYPE_CHECKING blocks are left out."""
    found: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_keep_their_direction(file: Path) -> None:
    part, names = part_of(file), imports(file)
    ours = {name.split(".")[1] for name in names if name.startswith("soup_flows.")}
    if part != "training":
        # `soup-flows data --tokenizer` renders rows in its own process, never in a flow's.
        allowed_heavy = {"transformers"} if file == PACKAGE / "data" / "command.py" else set()
        if part in ("ray_attempt", "ray_job"):  # they run on the cluster alone
            allowed_heavy = {"ray"}
        assert not {name.split(".")[0] for name in names} & HEAVY - allowed_heavy
        assert "training" not in ours
    if part in CORE:
        assert "prefect" not in {name.split(".")[0] for name in names}
        allowed = {*CORE[: CORE.index(part)], part}
        assert ours & {*CORE, *SHELL} <= allowed
    elif part not in {"training", "__init__"}:
        assert part in SHELL, f"say in this test where {part} stands"


OUTSIDE = {
    "json.loads(": {
        "json_text.py",
        "user_file.py",
        "cli_spec.py",
        "deploy/pools.py",
        "drill/flow_process.py",
    },
    "json.load(": {"launch/supervisor.py"},
    "yaml.load(": {"user_yaml.py"},
    "yaml.safe_load(": {"deploy/deployments.py"},
    ".expanduser()": {"user_file.py", "roots.py"},
    ".isdigit()": set(),
    "pickle.load": set(),
}
"""Calls that fail on others' input in ways that nobody expects, and where they may stand. `parse_json`, `read_json`,
`read_yaml`, `expanded` and `whole` fail in known ways; the rest reads what this package ships or just wrote."""


@pytest.mark.parametrize("call", OUTSIDE)
def test_what_others_wrote_is_read_in_one_place(call: str) -> None:
    found = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if part_of(file) != "training" and call in file.read_text(encoding="utf-8")
    }
    assert found == OUTSIDE[call]


def test_import_is_light() -> None:
    program = (
        "import sys, soup_flows; heavy = {'torch', 'transformers', 'deepspeed', 'prefect', 'pydantic'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_the_flow_process_imports_no_training_stack() -> None:
    program = (
        "import sys, soup_flows; soup_flows.soup_train; import soup_flows.cli;"
        "print(sorted({'torch', 'transformers', 'deepspeed', 'peft', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_loads() -> None:
    import soup_flows

    for name in soup_flows.__all__:
        assert getattr(soup_flows, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = soup_flows.no_such_name


def test_the_wheel_holds_soup_flows_alone(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="built without isolation, so that no network is needed")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        check=True,
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        data = {f"soup_flows/deploy/templates/{kind}.json" for kind in ("process", "docker", "kubernetes")}
        assert {"soup_flows/py.typed", "soup_flows/deploy/prefect.yaml"} | data <= set(archive.namelist())
    assert tops == {"soup_flows", "soup_flows-0.1.0.dist-info"}


def test_the_folders_beside_the_package_are_no_packages() -> None:
    for folder in ("flows", "blocks", "deployments"):
        assert not (ROOT / folder / "__init__.py").exists()
    stems = [f.stem for folder in ("flows", "blocks") for f in (ROOT / folder).glob("*.py")]
    assert len(stems) == len(set(stems))


def test_the_script_is_the_packages_flow() -> None:
    import importlib.util

    from soup_flows.flows import soup_train

    location = importlib.util.spec_from_file_location("soup_train_script", ROOT / "flows" / "soup_train.py")
    assert location is not None
    assert location.loader is not None
    script = importlib.util.module_from_spec(location)
    location.loader.exec_module(script)
    copy = script.soup_train
    assert copy.fn is soup_train.fn
    assert (copy.name, copy.should_validate_parameters) == ("soup-train", False)
    assert copy.on_cancellation_hooks == soup_train.on_cancellation_hooks != []
    assert copy.on_crashed_hooks == soup_train.on_crashed_hooks != []


def test_the_flow_takes_every_field_of_the_spec() -> None:
    import inspect

    from soup_flows.flows import soup_train
    from soup_flows.spec import TrainingSpec

    parameters = inspect.signature(soup_train.fn).parameters
    assert set(parameters) == set(TrainingSpec.model_fields)
    for name, field in TrainingSpec.model_fields.items():
        default = parameters[name].default
        assert (
            default is inspect.Parameter.empty
            if field.is_required()
            else default == field.get_default(call_default_factory=True)
        )


def test_the_supervisor_needs_the_standard_library_alone() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import soup_flows.launch.supervisor"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(ROOT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
