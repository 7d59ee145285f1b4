"""`soup-flows deploy`: work pool, blocks, deployments and automations on a Prefect server, in one call."""

from __future__ import annotations

import httpx
import prefect
from prefect.client.orchestration import get_client
from prefect.client.schemas.schedules import CronSchedule
from prefect.settings import get_current_settings
from pydantic import ValidationError

from soup_flows.deploy.automations import ensure_automations
from soup_flows.deploy.deployments import ensure_deployments
from soup_flows.deploy.documents import block_types, ensure_block_types, ensure_documents
from soup_flows.deploy.pools import ensure_pool
from soup_flows.deploy.values import DeployRequest, Step
from soup_flows.errors import refuse

REFUSAL_TEXT = 500
"""Characters of a server's refusal that are shown."""

__all__ = ["DeployRequest", "Step", "block_types", "deploy"]


def deploy(request: DeployRequest, dry_run: bool = False) -> list[Step]:
    """Register everything; doing it twice changes nothing.

    Args:
        request: what to register.
        dry_run: only look, and say what would be done.

    Returns:
        What was done, in order.

    Raises:
        Refused: without a server, or for what is asked and cannot be.
    """
    if request.schedule is not None:
        _check_schedule(request.schedule, request.timezone)
    url = get_current_settings().api.url
    if not url:
        fix = "run `prefect server start`, then set PREFECT_API_URL=http://127.0.0.1:4200/api"
        raise refuse("DEPLOY001", "PREFECT_API_URL", "is not set, so there is no server to deploy to", fix)
    try:
        with get_client(sync_client=True) as client:
            return [
                ensure_pool(client, request, dry_run),
                *ensure_block_types(client, dry_run),
                *ensure_documents(client, request, dry_run),
                *ensure_deployments(client, request, dry_run),
                *(ensure_automations(client, request, dry_run) if request.automations else ()),
            ]
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        message = f"the server at {url} answers {code}: {error.response.text[:REFUSAL_TEXT]}"
        fix = "set PREFECT_API_AUTH_STRING (self-hosted) or PREFECT_API_KEY (Prefect Cloud)"
        if code not in (401, 403):
            fix = f"use a server of this Prefect's version ({prefect.__version__}), or the other way round"
        raise refuse("DEPLOY010", "PREFECT_API_URL", message, fix) from None
    except httpx.TransportError as error:
        message = f"the server at {url} does not answer: {error}"
        raise refuse("DEPLOY002", "PREFECT_API_URL", message, "start it, or correct the address") from None


def _check_schedule(cron: str, timezone: str) -> None:
    """Refuse a schedule before anything is registered."""
    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        message = f"got {cron!r} in {timezone!r}: {why}"
        fix = "write minute, hour, day, month, weekday, such as '0 2 * * *', and a zone such as Europe/Berlin"
        raise refuse("DEPLOY008", "--schedule", message, fix) from None
