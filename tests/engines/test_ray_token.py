"""A real Ray that wants a token: who has it may submit, and it is found nowhere afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import HttpUrl, SecretStr

from soup_flows.blocks import RayCluster as RayClusterBlock
from soup_flows.errors import Refused
from soup_flows.launch import proc
from soup_flows.launch.engines.ray_http import Dashboard
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import follow
from soup_flows.ray_settings import RaySettings
from soup_flows.report import TrainReport
from tests.engines import ray_cluster as real_ray
from tests.engines.conftest import Light, Maker, Run, job_of, losses, marked
from tests.engines.ray_cluster import RayCluster

pytestmark = [pytest.mark.ranks, pytest.mark.long]

TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RayCluster]:
    """A head with RAY_AUTH_MODE=token."""
    reason = real_ray.why_not()
    if reason is not None:
        pytest.skip(reason)
    with real_ray.cluster(token=TOKEN) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_token_here(guarded: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", guarded.address)
    monkeypatch.setenv("HOME", str(tmp_path))  # where a token file may be
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("token", "words"), [(None, "wants a token"), (secrets.token_hex(32), "refuses this token")]
)
def test_without_it_nothing_is_submitted(
    token: str | None, words: str, guarded: RayCluster, light: Light, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    found, plan = light.on("ray", "ready()\n")
    for ask in (lambda: follow(found, plan), lambda: found.submit(plan)):
        with pytest.raises(Refused, match=words) as refused:
            ask()
        assert refused.value.problems[0].id == "ENGINE005"
        assert "ray get-auth-token" in str(refused.value)
        assert token is None or token not in str(refused.value)
    knows = Dashboard(RaySettings(address=guarded.address), {"RAY_AUTH_TOKEN": TOKEN})
    assert knows.json("GET", "/api/jobs/", list) == []


def test_a_run_with_the_token_of_a_block(
    guarded: RayCluster, make: Maker, undisturbed: TrainReport, prefect_server: None
) -> None:
    RayClusterBlock(address=HttpUrl(guarded.address), token=SecretStr(TOKEN)).save("guarded", overwrite=True)
    argv: list[bytes] = []
    environments: list[bytes] = []

    def look(run: Run, launch: LaunchPlan) -> None:
        run.wait_for(1, "checkpoint", 3)
        argv.extend(p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline"))
        environments.extend(Path(f"/proc/{pid}/environ").read_bytes() for pid in proc.marked(run.run_id))

    run = make("ray")
    run.spec = run.spec.model_copy(
        update={"blocks": run.spec.blocks.model_copy(update={"ray_cluster": "guarded"})}
    )
    report = run.attempt(look)
    assert (report.state, report.attempts) == ("completed", 1), report.cause
    assert losses(report) == losses(undisturbed)
    assert not marked(run.run_id)

    assert environments
    secret = TOKEN.encode()
    assert not [text for text in (*argv, *environments) if secret in text]
    assert not [p for p in run.paths.root.rglob("*") if p.is_file() and secret in p.read_bytes()]
    dashboard = Dashboard(RaySettings(address=guarded.address), {"RAY_AUTH_TOKEN": TOKEN})
    for path in (f"/api/jobs/{job_of(run)}", f"/api/jobs/{job_of(run)}/logs"):
        assert TOKEN not in dashboard.call("GET", path)[1]
    assert not [p for p in guarded.root.rglob("*") if p.is_file() and secret in p.read_bytes()]
