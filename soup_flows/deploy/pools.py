"""Base job templates for work pools with what GPU training needs, and the pool that is made from one."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound

from soup_flows.deploy.values import DeployRequest, PoolType, Step
from soup_flows.errors import refuse

NEW_POOL_LIMIT = 8
"""Runs at once, over all hosts, in a pool that is new. On one host the device leases decide before it."""


def job_template(pool_type: PoolType, image: str | None = None) -> dict[str, Any]:
    """Return the base job template for a kind of work pool: `{"job_configuration", "variables"}`.

    Args:
        pool_type: `process`, `docker` or `kubernetes`.
        image: default of the variable `image`, for the last two.
    """
    file = resources.files("soup_flows.deploy") / "templates" / f"{pool_type}.json"
    template: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if image is not None:
        template["variables"]["properties"]["image"]["default"] = image
    return template


def ensure_pool(client: SyncPrefectClient, request: DeployRequest, dry_run: bool) -> Step:
    """Create the work pool, or bring one that exists to what is asked.

    A template that somebody changed is kept unless `reset_pool` is set.

    Raises:
        Refused: if a pool of this name and another type exists.
    """
    template = job_template(request.pool_type, request.image)
    try:
        pool = client.read_work_pool(request.pool)
    except ObjectNotFound:
        limit = request.limit or NEW_POOL_LIMIT
        if not dry_run:
            client.create_work_pool(
                WorkPoolCreate(
                    name=request.pool,
                    type=request.pool_type,
                    description="GPU training by soup-flows.",
                    base_job_template=template,
                    concurrency_limit=limit,
                )
            )
        return _step(request, "create", f"type {request.pool_type}, at most {limit} runs at once")
    if pool.type != request.pool_type:
        raise refuse(
            "DEPLOY003",
            "--pool",
            f"the work pool {request.pool!r} exists and is of type {pool.type}, not {request.pool_type}",
            f"use --type {pool.type}, or another --pool",
        )
    return _bring_up_to_date(client, request, pool, template, dry_run)


def _bring_up_to_date(
    client: SyncPrefectClient, request: DeployRequest, pool: Any, template: dict[str, Any], dry_run: bool
) -> Step:
    """Update the limit and, if asked, the template."""
    other = pool.base_job_template != template
    changes: dict[str, Any] = {}
    if request.limit is not None and request.limit != pool.concurrency_limit:
        changes["concurrency_limit"] = request.limit
    if other and request.reset_pool:
        changes["base_job_template"] = template
    limit = request.limit or pool.concurrency_limit
    detail = f"at most {limit} runs at once" if limit else "no limit on runs at once"
    if other and not request.reset_pool:
        detail += "; its template differs from ours and is kept, --reset-pool replaces it"
    if changes and not dry_run:
        client.update_work_pool(request.pool, WorkPoolUpdate(**changes))
    return _step(request, "update" if changes else "keep", detail)


def _step(request: DeployRequest, action: Any, detail: str) -> Step:
    return Step(kind="work pool", name=request.pool, action=action, detail=detail)
