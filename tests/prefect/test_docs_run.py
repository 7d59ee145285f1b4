"""Every command of the pages is run, or the table of the others says why not and what runs it instead."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from soup_flows import cli
from soup_flows.deploy.deployments import definitions
from soup_flows.hardware import Hardware, detect
from soup_flows.hardware.probe import RecordedProbe
from soup_flows.paths import RunPaths
from soup_flows.stop import requested

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("soup-flows", "prefect", "make", "python", "python3", "docker", "pip")

MACHINE = ["--hardware", "machine.json"]
"""Added where a page plans on a machine with GPUs: the recording of one with eight H100."""
ASKED = ["--model", "./llama", "--dataset", "rows.jsonl"]
"""Added where a page's text leaves out what is planned."""

ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
num_machines: 1
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""

# Command, what is added to it here, its exit codes, and words that it prints.
RUN: dict[str, tuple[list[str], set[int], tuple[str, ...]]] = {
    "soup-flows doctor": ([], {0, 1}, ("CPU cores", "host memory", "shared memory")),
    "soup-flows doctor --json": ([], {0, 1}, ('"hardware"', '"cpu_cores"', '"problems"')),
    "soup-flows plan --model ./llama --dataset rows.jsonl --deepspeed zero3 --gpus 4": (
        MACHINE,
        {0},
        ("the preset you named", "4 × cuda", "memory of a rank", "you asked for zero3"),
    ),
    "soup-flows plan --model /models/llama --dataset /data/rows.jsonl": (
        MACHINE,
        {0},
        ("the least sharding that fits", "8 × cuda", "memory of a rank"),
    ),
    "soup-flows plan --gpu h100-80gb --gpus 8": (ASKED, {0}, ("8 × cuda", "GiB: activations 0.")),
    "soup-flows plan --model models/llama-8b --dataset rows.jsonl --gpu h100-80gb --gpus 8 --nodes 2": (
        [],
        {0},
        ("16 × cuda", "on each of 2 nodes", "hybrid_shard"),
    ),
    "soup-flows plan --model models/llama-8b --dataset rows.jsonl --gpu a100-80gb --fit": (
        [],
        {0},
        ("longest rows", "largest micro batch", "fewest GPUs"),
    ),
    "soup-flows plan --model models/llama-8b --dataset rows.jsonl --hardware machine.json": (
        [],
        {0},
        ("8 × cuda", "why not"),
    ),
    "soup-flows plan --from-soup soup.yaml": ([*MACHINE, *ASKED], {0}, ("taken over", "lora.r = 64")),
    "soup-flows plan --from-soup soup.yaml --deepspeed zero3 --gpus 4": (
        [*MACHINE, *ASKED],
        {0},
        ("training.num_train_epochs = 3", "the preset you named", "4 × cuda"),
    ),
    "soup-flows plan --from-axolotl config.yml --gpus 8 --gpu h100-80gb": (
        ASKED,
        {0},
        ("taken over", "8 × cuda"),
    ),
    "soup-flows plan --from-llama-factory sft.yaml --gpus 4 --save spec.yaml": (
        [*MACHINE, *ASKED],
        {0},
        ("taken over", "4 × cuda", "the same as a spec"),
    ),
    "soup-flows plan --accelerate-config accelerate.yaml --model ./llama --dataset rows.jsonl": (
        MACHINE,
        {0},
        ("full_shard", "8 × cuda"),
    ),
    "soup-flows data rows.jsonl --tokenizer ./llama --max-length 2048": (
        [],
        {0},
        ("192 of 192 rows are trained", "trained tokens"),
    ),
    "soup-flows data FILE": ([], {0}, ("192 of 192 rows are trained",)),
    "soup-flows data FILE --tokenizer MODEL": ([], {0}, ("192 of 192 rows are trained", "trained tokens")),
    "soup-flows explain DS014": ([], {0}, ("DS014 (", "Why:", "Fix:", "Evidence:")),
    "soup-flows explain DS063": ([], {0}, ("DS063 (", "Why:", "Fix:")),
    "soup-flows presets": ([], {0}, ("zero3_offload", "full_shard", "ddp")),
    "soup-flows presets zero3 --diff zero2": ([], {0}, ("stage", "parameters")),
    "soup-flows drill": ([], {0}, ("kill_rank", "SIGKILL to rank 1")),
    "soup-flows completion bash": ([], {0}, ("complete -o bashdefault -F", "zero3_offload")),
    "soup-flows stop RUN_DIR": ([], {0}, ("Asked the run", "within seconds")),
    "soup-flows stop RUN_DIR --save": ([], {0}, ("after its present step, with a checkpoint",)),
}
DEPLOY = "soup-flows deploy"
"""Commands that begin so are run against a server, all of them."""

# Commands, or how they begin, and why they are not run here; what is named with `::` runs them.
ELSEWHERE = {
    "soup-flows train --model ./llama --dataset rows.jsonl --deepspeed zero3 --gpus 4 "
    "--set training.learning_rate=1e-5": (
        "needs four GPUs; tests/prefect/test_flow.py::test_a_run_leaves_its_config_report_and_log_and_no_secret "
        "runs its flow on two CPU ranks"
    ),
    "soup-flows train --model M --dataset D --output-dir /shared/runs --deepspeed zero3 --gpus 8 "
    "--set launcher.engine=slurm --set launcher.slurm.nodes=2 --set launcher.slurm.partition=a100": (
        "needs a Slurm with GPUs; tests/engines/test_clusters.py::test_two_machines"
    ),
    "soup-flows train --model M --dataset D --output-dir /shared/runs --deepspeed zero3 --gpus 8 "
    "--set launcher.engine=ray --set launcher.ray.address=http://FIRST:8265 --set launcher.ray.nodes=2": (
        "needs a Ray with GPUs; tests/engines/test_clusters.py::test_two_machines"
    ),
    "soup-flows plan --rehearse": (
        "starts ranks; tests/training/test_rehearse.py::test_plan_rehearses_a_good_run_and_leaves_nothing"
    ),
    "soup-flows plan --model ./llama --dataset rows.jsonl --deepspeed zero3 --gpu h100-80gb --gpus 8 --rehearse": (
        "starts ranks; tests/training/test_rehearse.py::test_plan_rehearses_a_good_run_and_leaves_nothing"
    ),
    "soup-flows plan --trace": "imports torch; tests/training/test_trace.py::test_trace_and_closed_form_agree",
    "soup-flows train --spec spec.yaml": (
        "trains; one is planned from in "
        "tests/core/test_plan_command.py::test_a_config_of_another_tool_gives_the_plan_of_the_same_spec"
    ),
    "soup-flows train --spec FILE": "the same",
    "python -m soup_flows.migrate": "tests/core/test_migrate.py::test_the_page_is_current",
    "soup-flows diagnose RUN_DIR": "tests/drills/test_processes.py::test_the_command_prints_one_object",
    "soup-flows drill all": "takes minutes; tests/drills/test_training.py::test_a_drill_ends_with_the_right_class",
    "soup-flows drill NAME ...": "tests/drills/test_processes.py::test_the_command_prints_one_object",
    "prefect server start": "tests/prefect/test_deployment.py::test_deployment_run_ends_with_a_model",
    "prefect worker start --pool gpu": (
        "tests/prefect/test_deployment.py::test_deployment_run_ends_with_a_model"
    ),
    "prefect flow-run": "needs runs; tests/prefect/test_wheel.py::test_the_page_from_an_empty_folder",
    "prefect deployment schedule": (
        "needs a server; tests/prefect/test_wheel.py::test_the_page_from_an_empty_folder"
    ),
    "prefect deployment run": (
        "needs a worker; tests/prefect/test_docs.py::test_runs_of_deployments_are_accepted checks each, "
        "tests/prefect/test_deployment.py::test_deployment_run_ends_with_a_model runs one"
    ),
    "prefect --no-prompt deploy --prefect-file deployments/prefect.yaml --all": (
        "tests/prefect/test_deployment.py::test_deployment_run_ends_with_a_model"
    ),
    "prefect deploy --prefect-file deployments/prefect.yaml --all": (
        "asks questions on a terminal; the same as above without them"
    ),
    "python benchmarks/": "measures for minutes; the page has its figures",
    "python -m benchmarks": "measures for minutes; tests/core/test_benchmarks.py::test_the_page_is_current",
    "python -m soup_flows.training.look": "tests/validation/test_deep.py::test_validate_looks_only_when_asked",
    "python -m soup_flows.validation": "tests/validation/test_pages.py::test_page_is_current",
    "python3 -m venv": "sets a machine up",
    "make": "builds an environment from an index; continuous integration runs it",
    "pip install": "needs an index; tests/core/test_structure.py::test_the_wheel_holds_soup_flows_alone",
    "docker run": "needs Docker and a GPU",
}


def commands() -> Iterator[tuple[str, str]]:
    """Yield page and command, as written but for comments, environment variables before it and line breaks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
        fenced = [block for language, block in blocks if language in ("", "sh", "bash", "console")]
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        inline = [found.replace("\n", " ") for found in re.findall(r"`([^`]+)`", prose)]
        for line in [*"\n".join(fenced).splitlines(), *inline]:
            for part in re.split(r"&&|\$\(|\)\"", line):
                words = part.split(" #")[0].split(" > ")[0].split()
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words.pop(0)
                if len(words) > 1 and words[0] in PROGRAMS:
                    yield str(page.relative_to(ROOT)), " ".join(words)


FOUND = sorted({command for _, command in commands()})
BARE = re.compile(r"soup-flows [a-z]+")
"""Names a command and needs not be one: `soup-flows plan` does this and that."""


def elsewhere(command: str) -> bool:
    """A command of ours has to be in the table as it is, of another program as it begins."""
    ours = command.startswith("soup-flows ")
    return command in ELSEWHERE if ours else any(command.startswith(key) for key in ELSEWHERE)


def test_every_command_is_run_or_said_to_be_run_elsewhere() -> None:
    names = cli._parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for page, command in commands():
        if BARE.fullmatch(command):
            assert command.split()[1] in names, (page, command)
        else:
            assert command in RUN or command.startswith(DEPLOY) or elsewhere(command), (page, command)


def test_the_tables_hold_no_command_that_no_page_has() -> None:
    assert set(RUN) <= set(FOUND)
    for key, reason in ELSEWHERE.items():
        assert any(command.startswith(key) for command in FOUND), key
        for path, name in re.findall(r"(tests/\S+\.py)::(\w+)", reason):
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (key, path, name)


@pytest.fixture(scope="module")
def folder(assets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages name: models, rows, recorded machines, a run."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "models").mkdir()
    (folder / "data").mkdir()
    for name in ("llama", "models/llama"):
        shutil.copytree(assets["model"], folder / name)
    shutil.copytree(DATA / "models" / "llama-8b", folder / "models" / "llama-8b")
    for name in ("rows.jsonl", "data/rows.jsonl"):
        shutil.copy(assets["dataset"], folder / name)
    probe = RecordedProbe(DATA / "hardware" / "8xh100-nvswitch.json")
    here = {"torch_cuda": "12.8", "cpu_cores": 64}  # the rest of that machine, as far as the rules look at it
    recorded = detect("auto", ["."], probe, environ={}).model_copy(update=here)
    (folder / "machine.json").write_text(json.dumps({"hardware": recorded.model_dump(mode="json")}))
    for name, file in (
        ("soup", "soup_lora.yaml"),
        ("config", "axolotl_lora.yml"),
        ("sft", "llama_factory_lora.yaml"),
    ):
        source = DATA / "migrate" / file
        shutil.copy(source, folder / (name + source.suffix))
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    return folder


def arguments(command: str, folder: Path) -> list[str]:
    """Return the command's arguments, with the page's absolute paths and placeholders in the test's folder."""
    meant = {"FILE": "rows.jsonl", "MODEL": "./llama", "RUN_DIR": "runs/one", "DIR": str(ROOT / "blocks")}
    words = [meant.get(word, word) for word in shlex.split(command)[1:]]
    return [re.sub(r"^/(models|data)/", rf"{folder}/\1/", word) for word in words]


@pytest.mark.parametrize("command", RUN)
def test_a_command_does_what_the_page_says(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    added, codes, printed = RUN[command]
    monkeypatch.chdir(folder)
    run = RunPaths(folder / "runs" / "one")
    run.launch.parent.mkdir(parents=True, exist_ok=True)
    run.launch.write_text("{}")
    run.stop_request.unlink(missing_ok=True)
    code = cli.main([*arguments(command, folder), *added])
    out, err = capsys.readouterr()
    assert code in codes, out + err
    for words in printed:
        assert words in out, out + err
    if "stop" in command:
        request = requested(run)
        assert request is not None
        assert request["save"] == ("--save" in command)
    if "--json" in command:
        Hardware.model_validate(json.loads(out)["hardware"])  # what --hardware reads


@pytest.mark.server
@pytest.mark.usefixtures("nothing_deployed")
def test_the_deploy_commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of their length: what is shown first, what is done later."""
    from prefect.blocks.notifications import SlackWebhook

    SlackWebhook(url="https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX").save(
        "ops", overwrite=True
    )  # type: ignore[arg-type]
    monkeypatch.chdir(folder)
    names = {entry["name"] for entry in definitions()}
    found = [command for command in FOUND if command.startswith(DEPLOY)]
    assert len(found) >= 6
    for command in sorted(found, key=len):
        argv = arguments(command, folder)
        if any(set(argv) < set(arguments(other, folder)) for other in found):
            argv.append("--dry-run")  # a longer command does the same and more
        assert cli.main(argv) == 0, command
        out = capsys.readouterr().out
        assert all(f"/{name}" in out for name in names), out
        assert ("Now start a worker" in out) != ("--dry-run" in argv)
        assert ("soup-flows: restart a crashed run" in out) == ("--automations" in argv)
        assert ("create     automation  soup-flows: tell of a stall" in out) == ("--notify" in argv), out


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", python_blocks(), ids=["presets", "pipeline"])
def test_the_python_of_the_readme_runs(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow of the second block needs four GPUs: it is defined, and its tasks are those of `soup_flows.flows`."""
    monkeypatch.chdir(folder)
    scope: dict[str, object] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), scope)
    if "path" in scope:
        assert json.loads(Path(str(scope["path"])).read_text())["zero_optimization"]["stage"] == 3
    else:
        assert callable(scope["nightly"])
