"""Every rule catches its case and lets the nearest good one through."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from soup_flows.validation import RULES, RUN_RULES, variables
from soup_flows.validation.deep import RULES as DEEP_RULES
from soup_flows.validation.deepspeed_config import DeepSpeedJson
from soup_flows.validation.deepspeed_json import RULES as DEEPSPEED_RULES
from soup_flows.validation.fsdp_config import RULES as FSDP_RULES
from soup_flows.validation.table import Rule
from tests.validation.deep_pairs import SEEN_PAIRS
from tests.validation.json_pairs import FSDP_PAIRS, GOOD_FSDP, JSON_PAIRS
from tests.validation.run_pairs import PAIRS, RUN_PAIRS
from tests.validation.world import GOOD_JSON, edited, install, machine, rows_file, run

BY_ID: dict[str, Rule[Any]] = {rule.id: rule for rule in RULES}
INSTALLATION = {
    "EN001",
    "EN002",
    "EN003",
    "EN004",
    "EN006",
    "EN007",
    "EN008",
    "EN009",
    "EN010",
    "EN011",
    "EN026",
    "EN027",
    "SL001",
    "SL004",
    "RAY001",
    "RAY002",
    "RAY003",
    "RAY008",
}
"""Rules about what is installed here: tested one by one below."""


def test_ids_are_unique_and_every_rule_has_a_pair() -> None:
    assert len(BY_ID) == len(RULES)
    assert {rule.id for rule in DEEPSPEED_RULES} == set(JSON_PAIRS)
    assert {rule.id for rule in FSDP_RULES} == set(FSDP_PAIRS)
    assert {rule.id for rule in DEEP_RULES} == set(SEEN_PAIRS) | {"DP009"}
    assert {rule.id for rule in RUN_RULES} == set(RUN_PAIRS) | INSTALLATION


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_rules_are_complete(rule: Rule[Any]) -> None:
    assert rule.when, "the check has no docstring"
    assert rule.when.count("\n") == 0
    assert all([rule.consequence, rule.fix, rule.source, rule.versions, rule.field])
    assert not rule.consequence.endswith(".")


@pytest.mark.parametrize("rule_id", JSON_PAIRS)
def test_deepspeed_json_pair(rule_id: str, tmp_path: Path) -> None:
    bad, good, arguments = JSON_PAIRS[rule_id]
    context = (
        None
        if arguments is None
        else run(tmp_path, **{"spec": {"deepspeed": "zero3"}} | _with_zero(arguments))
    )
    found = list(BY_ID[rule_id].apply(DeepSpeedJson(edited(GOOD_JSON, bad), context)))
    assert found
    assert all(problem.field.startswith("deepspeed_config") for problem in found)
    assert not BY_ID[rule_id].apply(DeepSpeedJson(edited(GOOD_JSON, good), context))
    assert not BY_ID[rule_id].apply(DeepSpeedJson(GOOD_JSON, context))


def _with_zero(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "spec": {"deepspeed": "zero3", **arguments.get("spec", {})}}


@pytest.mark.parametrize("rule_id", FSDP_PAIRS)
def test_fsdp_config_pair(rule_id: str) -> None:
    bad, good = FSDP_PAIRS[rule_id]
    assert BY_ID[rule_id].apply(edited(GOOD_FSDP, bad))
    assert not BY_ID[rule_id].apply(edited(GOOD_FSDP, good))


def _fires(rule_id: str, arguments: dict[str, Any], folder: Path) -> bool:
    folder.mkdir()
    rows_file(folder / "eval.jsonl", 5)
    values = dict(arguments)
    before = values.pop("before", None)
    if before:
        before(folder)
    values = {key: value(folder) if callable(value) else value for key, value in values.items()}
    return bool(BY_ID[rule_id].apply(run(folder, **values)))


@pytest.mark.parametrize("rule_id", RUN_PAIRS)
def test_run_pair(rule_id: str, tmp_path: Path) -> None:
    bad, good = RUN_PAIRS[rule_id]
    assert _fires(rule_id, bad, tmp_path / "bad")
    assert not _fires(rule_id, good, tmp_path / "good")


@pytest.mark.parametrize(
    ("rule_id", "module", "spec"),
    [
        ("EN001", "accelerate", {}),
        ("EN002", "deepspeed", {"deepspeed": "zero2"}),
        ("EN003", "peft", {"training": {"method": "lora"}}),
        ("EN010", "trl", {"training": {"task": "dpo"}}),
        ("EN010", "trl", {"training": {"task": "kto"}}),
        ("EN010", "trl", {"training": {"task": "orpo"}}),
        ("EN011", "tensorboard", {"training": {"report_to": ["tensorboard"]}}),
    ],
)
def test_missing_package(
    rule_id: str, module: str, spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = run(tmp_path, spec=spec)
    monkeypatch.delitem(sys.modules, module, raising=False)
    install(tmp_path, monkeypatch, module)
    assert not BY_ID[rule_id].apply(context)
    monkeypatch.setitem(sys.modules, module, None)
    assert BY_ID[rule_id].apply(context)


SINFO = "a100*|4|128|1031000|gpu:a100:8(S:0-1)|2-00:00:00\ncpu|20|64+|257000+|(null)|infinite\n"
"""As sinfo 22.05 prints the format that is asked for."""


@pytest.mark.parametrize(
    ("settings", "gpus", "words"),
    [
        ({}, 8, ""),
        ({"nodes": 4, "time_min": 2880}, 8, ""),
        ({"nodes": 5}, 8, "at most 4"),
        ({"time_min": 2881}, 8, "at most 0"),
        ({"cpus_per_node": 129}, 8, "at most 0"),
        ({"memory_gib": 1007}, 8, "at most 0"),
        ({"memory_gib": 1006}, 8, ""),
    ],
)
def test_what_no_partition_has(
    settings: dict[str, Any], gpus: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.parent.mkdir()
    spec = {"gpus": gpus, "launcher": {"engine": "slurm", "slurm": settings}}
    context = run(tmp_path, spec=spec, on=machine("A100", 8), plan={"nodes": settings.get("nodes", 1)})
    monkeypatch.setenv("PATH", str(sinfo.parent))
    assert BY_ID["SL001"].apply(context)
    assert not BY_ID["SL004"].apply(context)  # nothing is known without the command
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sinfo"):
        command = sinfo.with_name(name)
        command.write_text(f"#!/bin/sh\nprintf '{SINFO}'\n")
        command.chmod(0o700)
    assert not BY_ID["SL001"].apply(context)
    found = " ".join(problem.message for problem in BY_ID["SL004"].apply(context))
    assert bool(found) == bool(words)
    assert words in found


class RayDashboard(BaseHTTPRequestHandler):
    """Says what ray 2.60 says of a cluster of one machine with 8 cores."""

    def do_GET(self) -> None:
        machine = {"node_ip": "10.0.0.1", "state": "ALIVE", "resources_total": {"CPU": 8.0}}
        nodes = {"data": {"result": {"result": [machine]}}}
        answer = {"ray_version": "2.59.1"} if self.path == "/api/version" else nodes
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        return


def test_what_the_ray_cluster_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(rule_id: str, environ: dict[str, str], **ray: Any) -> str:
        spec = {"gpus": 2, "device": "cpu", "launcher": {"engine": "ray", "ray": ray, "omp_num_threads": 4}}
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        context = run(
            folder, spec=spec, on=machine("CPU", 0), environ=environ, plan={"nodes": ray.get("nodes", 1)}
        )
        return " ".join(problem.message for problem in BY_ID[rule_id].apply(context))

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert found("RAY002", {})
    assert not found("RAY002", {}, python="/opt/python")
    assert found("RAY001", {})
    assert not found("RAY001", {}, address="http://head:8265")
    server = ThreadingHTTPServer(("127.0.0.1", 0), RayDashboard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{server.server_port}"}
    try:
        assert not found("RAY001", here)
        assert not found("RAY003", here)
        assert "1 of 1" in found("RAY003", here, nodes=2)
        assert not found("RAY003", here, nodes=2, min_nodes=1)
        assert not found("RAY003", here, nodes=2, grows=True)
        assert "0 of 1" in found("RAY003", here, cpus_per_node=9)
        assert "2.59.1" in found("RAY008", here)
    finally:
        server.shutdown()
        server.server_close()
    assert not found("RAY003", here, nodes=2)  # nobody answers now: the submission says so
    assert not found("RAY008", here)


def test_missing_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = {"config": {"quantization_config": {"quant_method": "bitsandbytes"}}}
    cases = {
        "loaded": run(tmp_path / "a", model=quantised),
        "made": run(tmp_path / "b", spec={"training": {"method": "qlora"}}),
        "neither": run(tmp_path / "c", spec={"training": {"method": "lora"}}),
    }
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert [name for name, context in cases.items() if BY_ID["EN007"].apply(context)] == ["loaded", "made"]
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    install(tmp_path, monkeypatch, "bitsandbytes")
    assert not any(BY_ID["EN007"].apply(context) for context in cases.values())


def test_trackers_without_a_key(tmp_path: Path) -> None:
    asked = {"training": {"report_to": ["wandb", "comet_ml", "neptune"]}}
    found = BY_ID["EN012"].apply(run(tmp_path / "a", spec=asked, environ={"HOME": str(tmp_path)}))
    assert [problem.message.split(" ")[0] for problem in found] == ["wandb", "comet_ml", "neptune"]
    keys = {"WANDB_MODE": "offline", "COMET_API_KEY": "x", "NEPTUNE_API_TOKEN": "x", "HOME": str(tmp_path)}
    assert not BY_ID["EN012"].apply(run(tmp_path / "b", spec=asked, environ=keys))


def test_unwritable_output(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert BY_ID["EN004"].apply(run(tmp_path / "a", spec={"output_dir": str(tmp_path / "file/out")}))
    assert not BY_ID["EN004"].apply(run(tmp_path / "b", spec={"output_dir": str(tmp_path / "new/out")}))


def test_old_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = run(tmp_path)
    assert not BY_ID["EN006"].apply(context)
    old = tmp_path / "site/accelerate-1.9.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert "1.9.0" in BY_ID["EN006"].apply(context)[0].message


def test_stale_lock(tmp_path: Path) -> None:
    lock = tmp_path / "ext/py311_cu128/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    offload = {
        "spec": {"deepspeed": "zero2_offload"},
        "environ": {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")},
    }
    context = run(tmp_path / "run", **offload)
    assert not BY_ID["EN008"].apply(context)
    import os

    os.utime(lock, (time.time() - 3600,) * 2)
    assert BY_ID["EN008"].apply(context)


@pytest.mark.parametrize(
    ("nodes", "names", "environ", "fires"),
    [
        (2, ["eth0", "ib0", "lo"], {}, True),
        (2, ["eth0", "ib0", "lo"], {"NCCL_SOCKET_IFNAME": "ib0"}, True),
        (2, ["eth0", "ib0", "lo"], {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}, False),
        (2, ["docker0", "eth0", "lo", "veth12"], {}, False),
        (1, ["eth0", "ib0", "lo"], {}, False),
    ],
)
def test_several_interfaces(
    nodes: int,
    names: list[str],
    environ: dict[str, str],
    fires: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variables, "interfaces", lambda: names)  # a test cannot add an interface
    assert bool(BY_ID["EN026"].apply(run(tmp_path, plan={"nodes": nodes}, environ=environ))) is fires


def test_the_machine_has_a_loopback_interface() -> None:
    assert "lo" in variables.interfaces()


def test_rows_that_kto_cannot_compare(tmp_path: Path) -> None:
    asked = {"training": {"task": "kto"}}
    labels = [{"prompt": "Q", "completion": f"A{i}", "label": i % 2 == 0} for i in range(8)]
    found = BY_ID["DA013"].apply(run(tmp_path / "sft", spec=asked))
    assert "holds chat rows" in found[0].message
    assert not BY_ID["DA013"].apply(run(tmp_path / "pairs", spec=asked, rows=PAIRS))
    assert not BY_ID["DA013"].apply(run(tmp_path / "labels", spec=asked, rows=labels))


@pytest.mark.parametrize("rule_id", ["EN009", "EN027"])
def test_caches_on_a_network_disk(rule_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from soup_flows.hardware.values import Disk
    from soup_flows.validation import environment

    context = run(
        tmp_path, spec={"deepspeed": "zero2_offload"}, environ={"HOME": str(tmp_path)}, on=machine()
    )
    assert not BY_ID[rule_id].apply(context)
    nfs = Disk(path="/home", total_bytes=1, free_bytes=1, filesystem="nfs4")
    monkeypatch.setattr(
        environment, "disk", lambda *_: nfs
    )  # no network file system can be mounted in a test
    assert BY_ID[rule_id].apply(context)
