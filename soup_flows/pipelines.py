"""The deployed example of a pipeline: `soup-train` as a subflow, its report handed on to the next task.

`flows/finetune_pipeline.py` is the same with the tasks called one by one, to copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from soup_flows.demo import build_demo_data, demo_parameters
from soup_flows.flows import soup_train
from soup_flows.json_text import parse_json
from soup_flows.report import TrainReport
from soup_flows.spec import titled
from soup_flows.user_file import expanded


@task(name="prepare rows", cache_policy=NO_CACHE)
def prepare_rows(folder: Path, most: int) -> str:
    """Pick rows for training: the shortest answers of the demo data.

    Args:
        folder: where the files go.
        most: rows to keep.

    Returns:
        The path of the file.
    """
    train_path, _ = build_demo_data(folder)
    rows = sorted(train_path.read_text(encoding="utf-8").splitlines(), key=len)[:most]
    chosen = folder / "short-rows.jsonl"
    chosen.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(chosen)


@task(name="hand the model on", cache_policy=NO_CACHE)
def hand_on(report: TrainReport) -> dict[str, Any]:
    """Use the model: here its architecture is read; evaluate, register or deploy it instead."""
    config = parse_json((Path(str(report.model)) / "config.json").read_text())
    get_run_logger().info("Got a %s in %s", config["architectures"][0], report.model)
    return {
        "model": report.model,
        "architecture": config["architectures"][0],
        "held_out_loss": report.eval_loss,
        "strategy": report.plan.strategy if report.plan else None,
    }


@flow(name="finetune-pipeline")
def finetune_pipeline(
    preset: Annotated[str, titled("Preset")] = "zero2",
    output_dir: Annotated[str, titled("Output folder", min_length=1)] = "demo-output",
    rows: Annotated[int, titled("Rows to train on", ge=64)] = 400,
    max_steps: Annotated[int | None, titled("Maximum optimizer steps", ge=1)] = None,
) -> dict[str, Any] | State:
    """Prepare data, fine-tune as a subflow on two CPU ranks, hand the model on.

    Args:
        preset: A DeepSpeed or FSDP preset, or ddp.
        output_dir: Data and runs are kept below this folder.
        rows: Rows of the demo data to train on, the shortest first.
        max_steps: Stop after this many optimizer steps; empty makes one pass over the rows.

    Returns:
        Where the model is, and what it is; the state Cancelled of a subflow that was cancelled.
    """
    chosen = prepare_rows(expanded(output_dir).absolute() / "demo", rows)
    values = demo_parameters(preset, output_dir) | {"dataset": chosen}
    values["training"] |= {"max_steps": max_steps}
    values["data"] |= {"eval_split": 0.1}
    report = soup_train(**values)
    return hand_on(report) if isinstance(report, TrainReport) else report
