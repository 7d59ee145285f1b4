"""The pages of a run in Prefect: its config as JSON, its report as markdown."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from pydantic import BaseModel, ConfigDict

from soup_flows.attempts_page import attempts_page
from soup_flows.data.page import markdown
from soup_flows.data.report import DataReport
from soup_flows.errors import Problem
from soup_flows.hardware import Hardware
from soup_flows.json_text import parse_json
from soup_flows.launch.plan import LaunchPlan
from soup_flows.pages import report_page, validation_page
from soup_flows.plan_page import plan_page
from soup_flows.report import TrainReport
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec

logger = logging.getLogger(__name__)

CONFIG_KEY = "soup-train-config"
REPORT_KEY = "soup-train-report"
PLAN_KEY = "soup-train-plan"
DATA_KEY = "soup-train-data"
ATTEMPTS_KEY = "soup-train-attempts"
VALIDATION_KEY = "soup-train-validation"


class RunConfig(BaseModel):
    """Everything a run was configured with: enough to plan and launch it again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: TrainingSpec
    hardware: Hardware
    plan: ShardingPlan
    launch: LaunchPlan


def save_run_config(config: RunConfig) -> None:
    """Keep `config` as the JSON artifact `soup-train-config` of the current run; no run, no artifact."""
    data = config.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    create_artifact(
        CONFIG_KEY, "json", data, "Spec, plan and sharding config of the run.", {"sha256": digest}
    )


def save_report(report: TrainReport) -> None:
    """Keep `report` as the markdown artifact `soup-train-report` of the current run."""
    _save_page(REPORT_KEY, report_page(report), "What ran, what was proven, where things are.")


def save_attempts(report: TrainReport, decision: str = "") -> None:
    """Keep the ledger as the markdown artifact `soup-train-attempts`, with what was decided after the last one."""
    _save_page(ATTEMPTS_KEY, attempts_page(report, decision), "Every attempt, why it ended, what it cost.")


def save_validation(problems: Sequence[Problem], silenced: Mapping[str, str]) -> None:
    """Keep the findings before the launch as the markdown artifact `soup-train-validation`."""
    _save_page(VALIDATION_KEY, validation_page(problems, silenced), "What was found before the launch.")


def _save_page(key: str, page: str, description: str) -> None:
    """Keep a page of the current run.

    What it says is in the run directory too, so a server that does not answer is no reason to fail the run.
    """
    try:
        create_artifact(key, "markdown", page, description)
    except Exception as error:
        logger.warning("the artifact %s could not be saved: %s", key, error)


def save_data_report(report: DataReport) -> None:
    """Keep the data report as the markdown artifact `soup-train-data` of the current run."""
    create_artifact(
        DATA_KEY, "markdown", markdown(report), "Rows, drops, tokens, lengths, one row with its mask."
    )


def save_plan(plan: ShardingPlan) -> None:
    """Keep `plan` as the markdown artifact `soup-train-plan` of the current run: all candidates, and why not."""
    create_artifact(
        PLAN_KEY, "markdown", plan_page(plan), "What will run, what else was considered, predicted memory."
    )


def load_run_config(flow_run_id: UUID | str) -> RunConfig:
    """Return the spec, hardware, plan and launch of a flow run as values.

    Raises:
        LookupError: if the flow run has no such artifact.
    """
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(str(flow_run_id))]),
                key=ArtifactFilterKey(any_=[CONFIG_KEY]),
            ),
            sort=ArtifactSort.CREATED_DESC,
            limit=1,
        )
    if not found:
        raise LookupError(f"flow run {flow_run_id} has no artifact {CONFIG_KEY!r}")
    data = found[0].data
    return RunConfig.model_validate(parse_json(data) if isinstance(data, str) else data)


def create_artifact(
    key: str, kind: str, data: Any, description: str, metadata: dict[str, str] | None = None
) -> UUID | None:
    """Create an artifact of the current flow and task run and return its id; None outside a flow run.

    `Artifact.create` would encode JSON a second time, and its page would show one escaped line.
    """
    flow_run_id, task_run_id = runtime.flow_run.id, runtime.task_run.id
    if flow_run_id is None:
        return None
    with get_client(sync_client=True) as client:
        artifact = client.create_artifact(
            ArtifactCreate(
                type=kind,
                key=key,
                data=data,
                description=description,
                metadata_=metadata,
                flow_run_id=UUID(flow_run_id),
                task_run_id=UUID(task_run_id) if task_run_id else None,
            )
        )
    return artifact.id


def update_artifact(artifact_id: UUID, data: Any, description: str) -> None:
    """Replace the data and the description of an artifact; no new version of its key is made."""
    with get_client(sync_client=True) as client:
        client.update_artifact(artifact_id, ArtifactUpdate(data=data, description=description))
