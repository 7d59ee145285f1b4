"""The deployments of `prefect.yaml` beside this file, registered without a clone."""

from __future__ import annotations

import importlib
from importlib import resources
from typing import Any

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron, Schedule
from prefect.types.entrypoint import EntrypointType

from soup_flows.deploy.values import DeployRequest, Step

PROCESS_VARIABLES = ("working_dir",)
"""Job variables that only a process worker has."""


def definitions() -> list[dict[str, Any]]:
    """Return the deployments as `prefect.yaml` has them."""
    text = (resources.files("soup_flows.deploy") / "prefect.yaml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)["deployments"]
    return found


def load_flow(entrypoint: str) -> Flow[..., Any]:
    """Return the flow at a dotted path such as `soup_flows.flows.soup_train`."""
    module, name = entrypoint.rsplit(".", 1)
    found: Flow[..., Any] = getattr(importlib.import_module(module), name)
    return found


def ensure_deployments(client: SyncPrefectClient, request: DeployRequest, dry_run: bool) -> list[Step]:
    """Create or update every deployment.

    What somebody set in Prefect stays: parameters (but those of the demos), and whether the nightly schedule is
    switched on and at what time, unless the request gives them.
    """
    return [_ensure(client, request, entry, dry_run) for entry in definitions()]


def _ensure(client: SyncPrefectClient, request: DeployRequest, entry: dict[str, Any], dry_run: bool) -> Step:
    flow = load_flow(entry["entrypoint"])
    name = f"{flow.name}/{entry['name']}"
    before: DeploymentResponse | None
    try:
        before = client.read_deployment_by_name(name)
    except ObjectNotFound:
        before = None
    parameters, schedule = entry.get("parameters", {}), _schedule(request, entry, before)
    if before is not None and "demo" not in entry["tags"]:
        parameters = before.parameters
    if schedule is not None:
        parameters = request.parameters or parameters
    if not dry_run:
        deployment: Any = flow.to_deployment(
            name=entry["name"],
            description=entry["description"],
            tags=entry["tags"],
            parameters=parameters,
            schedules=[] if schedule is None else [schedule],
            concurrency_limit=_limit(entry),
            enforce_parameter_schema=entry["enforce_parameter_schema"],
            work_pool_name=request.pool,
            job_variables=job_variables(request, entry),
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        deployment.apply()
    detail = f"pool {request.pool}"
    if schedule is not None:
        state = "on" if schedule.active else "paused"
        detail += f"; {schedule.cron} {schedule.timezone}, {state}; model {parameters.get('model')}"
    return Step(kind="deployment", name=name, action="update" if before else "create", detail=detail)


def _schedule(
    request: DeployRequest, entry: dict[str, Any], before: DeploymentResponse | None
) -> Schedule | None:
    """Return the schedule: the one asked for, else the one that is there, else the paused one of the file."""
    if not entry.get("schedules"):
        return None
    (wanted,) = entry["schedules"]
    if request.schedule is not None:
        return Cron(request.schedule, request.timezone, slug=wanted["slug"], active=True)
    for known in before.schedules if before else ():
        cron = getattr(known.schedule, "cron", None)
        if known.slug == wanted["slug"] and cron is not None:
            zone = getattr(known.schedule, "timezone", None) or wanted["timezone"]
            return Cron(cron, zone, slug=wanted["slug"], active=known.active)
    return Cron(wanted["cron"], wanted["timezone"], slug=wanted["slug"], active=wanted["active"])


def _limit(entry: dict[str, Any]) -> ConcurrencyLimitConfig | None:
    limit = entry.get("concurrency_limit")
    return None if limit is None else ConcurrencyLimitConfig.model_validate(limit)


def job_variables(request: DeployRequest, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the job variables of an entry of `definitions()`, as the kind of pool takes them."""
    variables: dict[str, Any] = entry["work_pool"]["job_variables"]
    if request.pool_type == "process":
        return variables
    return {name: value for name, value in variables.items() if name not in PROCESS_VARIABLES}
