"""`soup-flows deploy` on a real server: everything is there, twice is the same as once, what people set stays."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import jsonschema
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from prefect.server.events.schemas.automations import AutomationUpdate
from prefect.server.events.schemas.automations import EventTrigger as ServerTrigger
from prefect.settings import PREFECT_API_URL, temporary_settings

from soup_flows import cli
from soup_flows.deploy import DeployRequest, block_types, deploy
from soup_flows.deploy.automations import _spelled_out, automations
from soup_flows.deploy.deployments import definitions, job_variables
from soup_flows.deploy.documents import read_documents
from soup_flows.deploy.pools import ensure_pool, job_template
from soup_flows.errors import Refused
from soup_flows.stored_job import read_job

ROOT = Path(__file__).parents[2]
SERVER = [pytest.mark.server, pytest.mark.usefixtures("prefect_server")]
DEPLOYMENTS = {
    "soup-train/gpu",
    "soup-train/demo",
    "soup-train/nightly",
    "soup-train-job/gpu",
    "soup-plan/any",
    "finetune-pipeline/demo",
}


@pytest.fixture
def client(prefect_server: None) -> Any:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def pool() -> str:
    return f"pool-{uuid4().hex[:8]}"


def nightly(client: SyncPrefectClient) -> tuple[Any, DeploymentSchedule]:
    found = client.read_deployment_by_name("soup-train/nightly")
    (schedule,) = found.schedules
    return found, schedule


def made_automations(client: SyncPrefectClient) -> dict[str, Any]:
    return {a.name: (a.enabled, a.trigger, a.actions) for a in client.read_automations()}


@pytest.mark.server
@pytest.mark.usefixtures("nothing_deployed")
def test_everything_is_there_and_twice_is_once(client: SyncPrefectClient, pool: str) -> None:
    request = DeployRequest(pool=pool, automations=True)
    shown = deploy(request, dry_run=True)
    assert not client.read_work_pools() or pool not in {p.name for p in client.read_work_pools()}
    first, made_first = deploy(request), made_automations(client)
    second = deploy(request)
    assert made_automations(client) == made_first
    actions = {name: action.type for name, (_, _, (action,)) in made_first.items()}
    assert actions == {
        "soup-flows: restart a crashed run": "change-flow-run-state",
        "soup-flows: cancel on a loss that is not finite": "cancel-flow-run",
        "soup-flows: end a lost run": "change-flow-run-state",
    }
    assert [(s.kind, s.name) for s in shown] == [(s.kind, s.name) for s in first]
    assert {step.action for step in second} <= {"keep", "update", "leave out"}
    made = client.read_work_pool(pool)
    assert made.type == "process"
    assert made.base_job_template == job_template("process")
    assert made.concurrency_limit == 8
    assert {s.name for s in first if s.kind == "deployment"} == DEPLOYMENTS
    for entry in definitions():
        name = next(n for n in DEPLOYMENTS if n.endswith("/" + entry["name"]) and n in _names(entry))
        found = client.read_deployment_by_name(name)
        assert found.entrypoint == entry["entrypoint"]  # dotted: no clone, no storage
        assert not found.pull_steps
        assert found.path is None
        assert found.work_pool_name == pool
        assert found.enforce_parameter_schema
        assert found.job_variables["stream_output"] is False
    found, schedule = nightly(client)
    assert not schedule.active
    assert found.global_concurrency_limit is not None
    assert found.global_concurrency_limit.limit == 1
    for kind in block_types():
        assert client.read_block_type_by_slug(kind.get_block_type_slug())
    assert [s.action for s in first if s.name == "soup-training-job/demo-job"] == ["create"]
    assert [s.action for s in second if s.name == "soup-training-job/demo-job"] == ["keep"]
    assert read_job("demo-job")["model"] == "demo://tiny-llama"


def _names(entry: dict[str, Any]) -> set[str]:
    from soup_flows.deploy.deployments import load_flow

    return {f"{load_flow(entry['entrypoint']).name}/{entry['name']}"}


@pytest.mark.server
def test_what_people_set_stays(client: SyncPrefectClient, pool: str) -> None:
    deploy(
        DeployRequest(
            pool=pool,
            schedule="30 3 * * *",
            timezone="Europe/Berlin",
            parameters={"model": "m", "dataset": "d"},
        )
    )
    found, schedule = nightly(client)
    assert schedule.active
    client.update_deployment_schedule(
        found.id, schedule.id, active=False, schedule=CronSchedule(cron="5 5 * * *", timezone="Asia/Tokyo")
    )
    template = json.loads(json.dumps(job_template("process")))
    template["variables"]["properties"]["env"]["default"]["MINE"] = "1"
    from prefect.client.schemas.actions import WorkPoolUpdate

    client.update_work_pool(pool, WorkPoolUpdate(base_job_template=template))
    steps = deploy(DeployRequest(pool=pool, limit=3))
    found, schedule = nightly(client)
    assert found.parameters == {"model": "m", "dataset": "d"}
    assert not schedule.active
    assert schedule.schedule == CronSchedule(cron="5 5 * * *", timezone="Asia/Tokyo")
    kept = client.read_work_pool(pool)
    assert kept.base_job_template == template
    assert kept.concurrency_limit == 3
    assert "--reset-pool" in steps[0].detail
    deploy(DeployRequest(pool=pool, reset_pool=True))
    assert client.read_work_pool(pool).base_job_template == job_template("process")


@pytest.mark.server
@pytest.mark.usefixtures("nothing_deployed")
def test_documents_become_blocks(client: SyncPrefectClient, pool: str, tmp_path: Path) -> None:
    (tmp_path / "demo-job.yaml").write_text("{model: m, dataset: d, gpus: 3}")
    (tmp_path / "box.placement.yaml").write_text("output_dir: /data/out")
    request = DeployRequest(pool=pool, blocks=str(tmp_path))
    steps = {s.name: s.action for s in deploy(request) if s.kind == "block"}
    assert steps == {"soup-training-job/demo-job": "create", "soup-placement/box": "create"}
    assert read_job("demo-job") == {"model": "m", "dataset": "d", "gpus": 3}
    deploy(DeployRequest(pool=pool))
    assert read_job("demo-job")["gpus"] == 3  # what is there is kept
    (tmp_path / "demo-job.yaml").write_text("{model: m, dataset: d, gpus: 5}")
    steps = {s.name: s.action for s in deploy(request) if s.kind == "block"}
    assert set(steps.values()) == {"update"}
    assert read_job("demo-job")["gpus"] == 5  # but the file is what counts where it is named


def test_every_wrong_document_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"DEPLOY009.*--blocks: there is no"):
        read_documents(tmp_path)
    for name, text in {
        "a.yaml": "{model: m, dataset: d, gpus: 0}",
        "b.placment.yaml": "output_dir: x",
        "c.placement.yaml": "{output_dirs: x, omp_num_threads: 0}",
        "d.checkpoint-store.yaml": "{url: 's3://b', secret_options: {key: k}}",
        "e.yaml": "[",
        "f.experiment-tracker.yaml": "kind: mlflow",
    }.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(Refused) as caught:
        read_documents(tmp_path)
    found = [(p.field, p.message + " " + p.fix) for p in caught.value.problems]
    for field, words in (
        ("a.yaml: gpus", "0"),
        ("b.placment.yaml: file", "did you mean 'placement'"),
        ("c.placement.yaml: output_dirs", "did you mean 'output_dir'"),
        ("c.placement.yaml: output_dir", "required"),
        ("c.placement.yaml: omp_num_threads", "greater than or equal to 1"),
        ("d.checkpoint-store.yaml: secret_options", "give it in Prefect's page"),
        ("e.yaml: file", "line 1"),
    ):
        assert any(f == field and words in text for f, text in found), (field, found)
    assert not any("f.experiment" in field for field, _ in found)


@pytest.mark.server
@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_server_takes_the_other_templates(client: SyncPrefectClient, pool: str, kind: Any) -> None:
    request = DeployRequest(pool=pool, pool_type=kind, image="box:1")
    ensure_pool(client, request, dry_run=False)
    made = client.read_work_pool(pool)
    assert made.type == kind
    assert made.base_job_template == job_template(kind, "box:1")
    assert all("working_dir" not in job_variables(request, entry) for entry in definitions())
    with pytest.raises(Refused, match=f"is of type {kind}"):
        deploy(DeployRequest(pool=pool))


@pytest.mark.server
@pytest.mark.usefixtures("nothing_deployed")
def test_a_notification_block_has_to_be_there(client: SyncPrefectClient, pool: str) -> None:
    with pytest.raises(Refused, match="no block 'slack-webhook/ops'"):
        deploy(DeployRequest(pool=pool, automations=True, notify="slack-webhook/ops"))


@pytest.mark.server
def test_the_command(client: SyncPrefectClient, pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["deploy", "--pool", pool, "--json"]
    assert cli.main([*given, "--dry-run"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["dry_run"]
    assert {s["name"] for s in value["steps"] if s["kind"] == "deployment"} == DEPLOYMENTS
    assert (
        cli.main(
            [*given, "--model", "m", "--dataset", "d", "--deepspeed", "zero3", "--schedule", "0 1 * * *"]
        )
        == 0
    )
    assert nightly(client)[0].parameters == {"model": "m", "dataset": "d", "deepspeed": "zero3"}
    capsys.readouterr()
    for wrong, rule in (
        (["--deepspeed", "zero9", "--model", "m", "--dataset", "d"], "SPEC001"),
        (["--limit", "0"], "DEPLOY007"),
        (["--notify", "a/b"], "DEPLOY005"),
        (["--type", "docker"], "DEPLOY006"),
        (["--schedule", "at noon"], "DEPLOY008"),
        (["--blocks", "no/such/folder"], "DEPLOY009"),
        (["--schedule", "0 1 * * *", "--timezone", "Mars/Base"], "DEPLOY008"),
    ):
        assert cli.main([*given, *wrong]) == 2
        assert json.loads(capsys.readouterr().out)["problems"][0]["id"] == rule


@pytest.mark.parametrize(("url", "rule"), [(None, "DEPLOY001"), ("http://127.0.0.1:9/api", "DEPLOY002")])
def test_without_a_server_it_says_so(url: str | None, rule: str) -> None:
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(Refused, match=rule):
        deploy(DeployRequest())


@pytest.mark.parametrize(("code", "words"), [(401, "PREFECT_API_AUTH_STRING"), (422, "version")])
def test_a_server_that_refuses_is_told(code: int, words: str) -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(b"not you")

        def log_message(self, *_: Any) -> None:
            """Be quiet."""

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/api"
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(Refused, match="DEPLOY010") as caught:
        deploy(DeployRequest())
    server.shutdown()
    assert f"answers {code}: not you" in str(caught.value)
    assert words in str(caught.value)


def test_the_server_takes_an_automation_as_it_was_meant() -> None:
    """What the client sends for an update, read as the server reads it."""
    for wanted in automations(DeployRequest(automations=True), uuid4()):
        sent = _spelled_out(wanted, enabled=False).model_dump(mode="json", exclude_unset=True)
        taken = AutomationUpdate.model_validate(sent)
        assert not taken.enabled
        assert [a.type for a in taken.actions] == [a.type for a in wanted.actions]
        meant = ServerTrigger.model_validate(wanted.trigger.model_dump(mode="json"))
        # Compared as Python's values: `expect` is a set, and its JSON lists it in any order.
        assert taken.trigger.model_dump(exclude={"id"}) == meant.model_dump(exclude={"id"})


def test_the_classic_file_is_the_same_file() -> None:
    file = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    assert file["deployments"] == definitions()
    for entry in file["deployments"]:
        assert entry["pull"] == []


# -- the form --------------------------------------------------------------------------------------


def schema_of(entrypoint: str) -> dict[str, Any]:
    from prefect.utilities.callables import parameter_schema

    from soup_flows.deploy.deployments import load_flow

    return parameter_schema(load_flow(entrypoint).fn).model_dump_for_openapi()


@pytest.mark.parametrize("entry", definitions(), ids=lambda e: e["entrypoint"])
def test_the_form_has_titles_and_help(entry: dict[str, Any]) -> None:
    schema = schema_of(entry["entrypoint"])
    properties = schema["properties"]
    positions = [p["position"] for p in properties.values()]
    assert positions == sorted(positions)
    wrong = []

    def walk(name: str, value: dict[str, Any]) -> None:
        if not value.get("title") or (value["title"] == name.split(".")[-1] and "." not in name):
            wrong.append(f"{name}: title {value.get('title')!r}")
        group = schema.get("definitions", {}).get(value.get("$ref", "").rpartition("/")[2], {})
        if not value.get("description") and not group.get("description"):
            wrong.append(f"{name}: no description")

    for name, value in properties.items():
        walk(name, value)
    for group in schema.get("definitions", {}).values():
        for name, value in group.get("properties", {}).items():
            walk(f"{group['title']}.{name}", value)
    assert not wrong, wrong


def test_the_form_offers_choices_and_refuses_at_submission() -> None:
    schema = schema_of("soup_flows.flows.soup_train")
    properties = schema["properties"]
    assert list(properties)[:5] == ["model", "dataset", "output_dir", "deepspeed", "fsdp"]
    assert schema["required"] == ["model", "dataset"]
    choices = properties["deepspeed"]["anyOf"][0]["enum"]
    assert {"zero1", "zero2", "zero3", "zero++"} <= set(choices)
    for name, value in schema["definitions"]["LauncherSettings"]["properties"].items():
        if name.endswith("_s"):
            assert "(seconds)" in value["title"]
        if name.endswith("_min"):
            assert "(minutes)" in value["title"]
    good = {
        "model": "m",
        "dataset": "d",
        "deepspeed": "zero3",
        "gpus": 4,
        "training": {"learning_rate": 1e-5},
    }
    jsonschema.validate(good, schema)
    for bad in ({"deepspeed": "zero9"}, {"gpus": 0}, {"gpus": "many"}, {"device": "tpu"}, {"training": {"lr": 1}},
                {"training": {"learning_rate": -1}}, {"launcher": {"stop_budget_s": 60}}):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | bad, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "m"}, schema)
