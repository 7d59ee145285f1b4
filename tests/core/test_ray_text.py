"""What is sent to a Ray cluster and what comes back, with what ray 2.60 really answered; no Ray is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from soup_flows.cli import GOOD, main
from soup_flows.cli_plan import machine
from soup_flows.cluster_hosts import differences
from soup_flows.errors import Refused
from soup_flows.hardware.imagined import imagined
from soup_flows.launch.engines.cluster import Unanswered
from soup_flows.launch.engines.ray import RayEngine, per_machine, submission
from soup_flows.launch.engines.ray_http import (
    Dashboard,
    Machine,
    RayJob,
    find_token,
    read_machines,
    why_infeasible,
)
from soup_flows.launch.plan import PASSED_SECRETS, LaunchPlan, build_launch_plan
from soup_flows.paths import RunPaths
from soup_flows.ray_elastic import Sizes
from soup_flows.ray_elastic import count as machines_with
from soup_flows.ray_host import Seen, interface_variables
from soup_flows.ray_settings import RaySettings
from soup_flows.sharding import make_plan
from soup_flows.spec import parse_spec
from tests.validation.world import run

HOSTILE = 'it\'s a "bad" dir; echo $HOME `id` 100% \\'
NODES = {
    "result": True,
    "msg": "",
    "data": {
        "result": {
            "total": 3,
            "result": [
                {
                    "node_id": "a", "node_ip": "10.0.0.1", "is_head_node": True, "state": "ALIVE", "node_name": "a",
                    "state_message": None, "labels": {},
                    "resources_total": {"CPU": 16.0, "GPU": 8.0, "memory": 64 * 2.0**30, "node:10.0.0.1": 1.0},
                },
                {
                    "node_id": "b", "node_ip": "10.0.0.2", "is_head_node": False, "state": "ALIVE",
                    "node_name": "b", "state_message": None, "labels": {},
                    "resources_total": {"CPU": 8.0, "memory": 32 * 2.0**30, "node:10.0.0.2": 1.0},
                },
                {
                    "node_id": "c", "node_ip": "10.0.0.3", "is_head_node": False, "state": "DEAD", "node_name": "c",
                    "state_message": "health check failed", "labels": {}, "resources_total": {"CPU": 16.0},
                },
            ],
        }
    },
}  # fmt: skip


def launch(folder: Path, device: Any = "cuda", nodes: int = 1, **ray: Any) -> LaunchPlan:
    return build_launch_plan(
        paths=RunPaths.of(folder, "run-1"),
        run_id="run-1",
        attempt=3,
        nproc_per_node=4,
        device=device,
        config_path=None,
        omp_num_threads=8,
        stop_budget_s=20,
        timeout_s=None,
        nodes=nodes,
        cluster=RaySettings(nodes=nodes, **ray),
    )


def test_the_request_says_what_was_meant_and_no_secret(tmp_path: Path) -> None:
    """A shell itself says what it would run; a folder's name is one word of it whatever it holds."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    plan = launch(folder).model_copy(update={"env": {"PYTHONPATH": f"/a:{HOSTILE}"}})
    secrets = dict.fromkeys((*PASSED_SECRETS, "PREFECT_API_KEY", "RAY_AUTH_TOKEN", "ANYTHING"), "s3cret")
    environ = {**secrets, "HF_HOME": "/hf", "PATH": "/mine"}
    body = submission(plan, str(folder), environ, "token")
    assert "s3cret" not in json.dumps(body)
    variables = body["runtime_env"]["env_vars"]
    assert (variables["HF_HOME"], variables["PYTHONPATH"]) == ("/hf", f"/a:{HOSTILE}")
    assert "PATH" not in variables  # the machines have their own
    assert variables["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE" not in submission(plan, "/", environ, None)["runtime_env"]["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > plan.stop_budget_s
    assert body["submission_id"] == "run-1.3"
    show = body["entrypoint"].replace("exec ", "printf '%s\\n' \"$PWD\" ")
    got = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True).stdout.splitlines()
    assert got == [str(folder), sys.executable, "-m", "soup_flows.ray_job", str(folder / "runs" / "run-1")]
    assert "/opt/py -m" in submission(launch(folder, python="/opt/py"), "/", {}, None)["entrypoint"]


def test_plan_shows_the_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "one", "completion": "two"}\n' * 40)
    model = Path(__file__).parents[1] / "data" / "models" / "llama-8b"
    recorded = tmp_path / "node.json"
    recorded.write_text(imagined("h100-80gb", 8).model_dump_json())
    asked = ["plan", "--model", str(model), "--dataset", str(data), "--output-dir", str(tmp_path / "out"),
             "--hardware", str(recorded), "--gpus", "8", "--set", "launcher.engine=ray",
             "--set", "launcher.ray.nodes=2", "--set", "launcher.ray.memory_gib=3"]  # fmt: skip
    assert main([*asked, "--json"]) == GOOD
    value = json.loads(capsys.readouterr().out)
    assert (value["plan"]["nodes"], value["plan"]["world_size"]) == (2, 16)
    assert "CUDA_VISIBLE_DEVICES" not in value["launch"]["env"]  # Ray hands out its machines' own
    assert value["request"]["on_each_machine"] == {
        "CPU": value["launch"]["cpus_per_node"],
        "GPU": 8,
        "memory": 3 * 2**30,
    }
    assert main(asked) == GOOD
    assert "soup_flows.ray_job" in capsys.readouterr().out
    spec = {"model": "m", "dataset": "d", "launcher": {"engine": "ray", "ray": {"hardware": str(recorded)}}}
    assert len(machine(parse_spec(spec), None).gpus) == 8
    recorded.write_text("{}")
    with pytest.raises(Refused, match=r"launcher\.ray\.hardware"):
        machine(parse_spec(spec), None)


def test_every_setting_is_asked_for() -> None:
    assert per_machine(launch(Path("/x"))) == {"CPU": 32, "GPU": 4}
    assert per_machine(launch(Path("/x"), device="cpu")) == {"CPU": 32}
    asked = launch(Path("/x"), cpus_per_node=3, memory_gib=2, resources={"accelerator_type:H100": 0.001})
    assert per_machine(asked) == {"CPU": 3, "GPU": 4, "memory": 2**31, "accelerator_type:H100": 0.001}


@pytest.mark.parametrize(
    ("nodes", "wanted", "words"),
    [
        (1, {"CPU": 16, "GPU": 8}, ""),
        (2, {"CPU": 8}, ""),
        (3, {"CPU": 8}, "2 of 2"),
        (2, {"CPU": 9}, "1 of 2"),
        (2, {"CPU": 1, "GPU": 1}, "1 of 2"),
        (1, {"CPU": 1, "memory": 65 * 2.0**30}, "65 GiB memory"),
        (1, {"CPU": 1, "accelerator_type:H100": 0.001}, "0.001 accelerator_type:H100"),
    ],
)
def test_what_the_cluster_has_not(nodes: int, wanted: dict[str, float], words: str) -> None:
    found = why_infeasible(read_machines(NODES), nodes, wanted)
    assert bool(found) == bool(words)
    assert words in found


def test_an_answer_without_machines_is_no_answer() -> None:
    assert [machine.name for machine in read_machines(NODES)] == ["10.0.0.1", "10.0.0.2"]
    for broken in (None, {}, {"data": None}, {"data": {"result": {"result": [{}]}}}):
        with pytest.raises(Unanswered, match="tells no machines"):
            read_machines(broken)
    assert why_infeasible([Machine("a", {})], 1, {"CPU": 1})


def test_states_in_our_words() -> None:
    assert [RayJob(s).here for s in ("PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED", "NEW")] == [
        "QUEUED", "RUNNING", "CANCELLED", "FAILED", "FAILED", None
    ]  # fmt: skip
    assert RayJob("RUNNING", "2 machines", waits=True).here == "QUEUED"
    assert RayJob("STOPPED", "x", waits=True).here == "CANCELLED"


def test_the_token_is_found_where_ray_looks(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-a-file\n")
    home = tmp_path / ".ray" / "auth_token"
    assert find_token({"HOME": str(tmp_path)}) is None
    home.parent.mkdir()
    home.write_text("of-home")
    assert find_token({"HOME": str(tmp_path)}) == "of-home"
    assert find_token({"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(file)}) == "of-a-file"
    both = {"RAY_AUTH_TOKEN": "named", "RAY_AUTH_TOKEN_PATH": str(file)}
    assert find_token(both) == "named"
    assert find_token({**both, "RAY_AUTH_MODE": "disabled"}) is None


class Answers(BaseHTTPRequestHandler):
    """An HTTP server that says what it is told to, and keeps what it heard."""

    heard: list[tuple[str, str | None]]
    code, text, location = 200, "{}", ""

    def do_GET(self) -> None:
        kind = type(self)
        kind.heard.append((self.path, self.headers.get("Authorization")))
        self.send_response(kind.code)
        if kind.location:
            self.send_header("Location", kind.location)
        self.end_headers()
        self.wfile.write(kind.text.encode())

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    class Mine(Answers):
        heard = []  # noqa: RUF012

    http = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{http.server_port}/")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    yield Mine
    http.shutdown()
    http.server_close()


@pytest.mark.parametrize("code", [401, 403])
def test_a_refused_token_is_told_without_it(code: int, server: type[Answers], tmp_path: Path) -> None:
    """Before a job; one that runs goes on when its token has become another."""
    server.code = code
    plan, engine = launch(tmp_path), RayEngine(RaySettings(), 0.0)
    plan.paths.create()
    assert [problem.id for problem in engine.check(plan)] == ["ENGINE005"]
    with pytest.raises(Refused, match="ENGINE005") as refused:
        engine.submit(plan)
    assert "s3cret" not in str(refused.value)
    status = engine.status(engine._keep(plan.paths, "run-1.3"))
    assert (status.ended, "refuses this token" in status.reason) == (False, True)
    assert {said for _, said in server.heard} == {"Bearer s3cret"}


def test_the_token_follows_no_redirect(server: type[Answers]) -> None:
    server.code, server.location = 302, f"{os.environ['RAY_API_SERVER_ADDRESS']}elsewhere"
    with pytest.raises(Unanswered, match="302"):
        Dashboard(RaySettings(), os.environ).json("GET", "/api/version")
    assert [path for path, _ in server.heard] == ["/api/version"]


@pytest.mark.parametrize(("code", "text"), [(500, "oops"), (200, "<html>not Ray</html>")])
def test_what_is_no_answer_stops_nothing(code: int, text: str, server: type[Answers], tmp_path: Path) -> None:
    """A dashboard that stumbles is no end of the job, and no reason to submit another."""
    server.code, server.text = code, text
    plan = launch(tmp_path)
    plan.paths.create()
    engine = RayEngine(RaySettings(), 0.0)
    assert [problem.id for problem in engine.check(plan)] == ["ENGINE004"]
    with pytest.raises(Refused, match="ENGINE004"):
        engine.submit(plan)
    handle = engine._keep(plan.paths, "run-1.3")
    plan.paths.launch.write_text(plan.model_dump_json())
    status = engine.status(handle)
    assert (status.state, str(code) in status.reason) == ("QUEUED", True)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    for address in (None, "http://127.0.0.1:9"):
        with pytest.raises(Unanswered):
            Dashboard(RaySettings(address=address), {}).call("GET", "/api/version")


@pytest.mark.parametrize(
    ("ray", "words"),
    [
        ({"address": "head:8265"}, "http://head:8265"),
        ({"address": "ray://head:10001"}, "http://head:8265"),
        ({"address": "http://user:pw@head:8265"}, "RAY_AUTH_TOKEN"),
        ({"address": "http://head:8265/?token=x"}, "RAY_AUTH_TOKEN"),
        ({"nodes": 2, "min_nodes": 3}, "more than nodes=2"),
        ({"resources": {"GPU": 1}}, "settings of their own"),
        ({"resources": {"a b": 1}}, "settings of their own"),
        ({"resources": {"TPU": 0}}, "above 0"),
        ({"adress": "x"}, "address"),
    ],
)
def test_what_cannot_be_asked_is_refused(ray: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_spec({"model": "m", "dataset": "d", "launcher": {"engine": "ray", "ray": ray}})
    (problem,) = refused.value.problems
    assert problem.field.startswith("launcher.ray.")
    assert words in f"{problem.message} {problem.fix}"


def seen(name: str, **changes: Any) -> Seen:
    values = {"name": name, "node": name, "address": name, "port": 1, "time": time.time(), "data": "7f"}
    return Seen.model_validate({**values, "versions": {"torch": "2.13.0"}, **changes})


def test_machines_that_cannot_run_together() -> None:
    since = time.time()
    assert differences([seen("a"), seen("b")], since) == ([], [])
    faults, odd = differences(
        [
            seen("a"),
            seen("b", shares=False),
            seen("c", versions={"torch": "2.12.0"}),
            seen("d", time=since - 60),
            seen("e", data="/scratch/data/7f is not there"),
        ],
        since,
    )
    assert faults == [
        "b (b) does not share the run directory",
        "torch is 2.13.0 on a and 2.12.0 on c",
        "the prepared rows differ between a and e (/scratch/data/7f is not there)",
    ]
    assert odd == ["the clock of d differs by at least 60 s"]


def test_the_sizes_that_a_run_can_have(tmp_path: Path) -> None:
    """Of 1 to 5 machines with two ranks each, 3 and 5 cannot divide 16 rows; the batch is kept."""
    nodes = {"nodes": 4, "min_nodes": 1}
    spec = {"fsdp": "full_shard", "gpus": 2, "launcher": {"engine": "ray", "ray": nodes}}
    context = run(tmp_path, spec=spec)
    paths = RunPaths.of(tmp_path, "run-1").create()
    plan = make_plan(context.spec, context.hardware, 64, 4)
    for path, value in ((paths.spec, context.spec), (paths.plan, plan), (paths.hardware, context.hardware)):
        path.write_text(value.model_dump_json())
    sizes = Sizes(paths, launch(tmp_path).model_copy(update={"nodes": 4, "ray": context.spec.launcher.ray}))
    assert [sizes.order(alive) for alive in (0, 1, 2, 3, 4)] == [[4], [4, 1], [4, 2, 1], [4, 2, 1], [4, 2, 1]]
    assert [sizes.larger(1, free) for free in (0, 1, 2, 3, 9)] == [None, 2, 2, 4, 4]
    assert sizes.larger(4, 9) is None
    assert sizes.plan(4) == plan
    for count in (1, 2, 4):
        found = sizes.plan(count)
        assert (found.nodes, found.world_size, found.strategy) == (count, 2 * count, "full_shard")
        assert found.batch.global_batch_size == plan.batch.global_batch_size == 16
        assert found.steps == plan.steps
    some = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0}]
    assert [machines_with(some, wanted) for wanted in ({"CPU": 4}, {"CPU": 1, "GPU": 2}, {"TPU": 1})] == [
        2,
        1,
        0,
    ]


def test_the_interface_that_has_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    both = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert interface_variables("127.0.0.1") == interface_variables("127.0.0.2") == both
    assert interface_variables("192.0.2.1") == {}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
