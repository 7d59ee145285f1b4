"""The flow `soup-train-job`: a whole job by reference, since a run's parameters may hold 512 KiB at most."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State

from soup_flows.block_use import load_block
from soup_flows.blocks import SoupTrainingJob
from soup_flows.flows import run_training
from soup_flows.hooks import sweep_run
from soup_flows.report import TrainReport
from soup_flows.spec import titled
from soup_flows.spec_file import merge, read_spec_file


@flow(name="soup-train-job", on_cancellation=[sweep_run], on_crashed=[sweep_run])
def soup_train_job(
    job: Annotated[str, titled("Job", min_length=1)],
    changes: Annotated[dict[str, Any], titled("Changes")] = {},  # noqa: B006 (Prefect copies it)
) -> TrainReport | State:
    """Fine-tune a stored job: a block of the type Soup Training Job, or a JSON or YAML file on the worker.

    Args:
        job: Name of a block of the type Soup Training Job, or the path of a JSON or YAML file that the worker can
            read (with a slash, or ending in .json, .yaml or .yml).
        changes: Settings that win over the stored ones, such as {"gpus": 2, "training": {"max_steps": 100}}.

    Returns:
        See soup-train.

    Raises:
        Refused: for a job that is not there or is wrong, with every problem.
        TrainingFailed: a started run ended badly; class, cause, advice.
    """
    return run_training(merge(read_job(job), changes))


def read_job(job: str) -> Mapping[str, Any]:
    """Return the settings of a stored job; those at their defaults are left out.

    Args:
        job: see `soup_train_job`.

    Raises:
        Refused: if there is no such block or file.
    """
    if "/" in job or Path(job).suffix in (".json", ".yaml", ".yml"):
        return read_spec_file(job, "job")
    return load_block(SoupTrainingJob, job, "job").spec.model_dump(mode="json", exclude_defaults=True)
