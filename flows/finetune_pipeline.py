"""Fine-tuning as a stage of your own pipeline: the five tasks, called one by one.

    python flows/finetune_pipeline.py [PRESET] [OUTPUT_DIR]

Prepares its data in a task of its own, trains under `PRESET` (zero2) on two CPU ranks, and hands the model on to
a task that would evaluate or register it. Replace `prepare_rows` and `hand_on` by yours.
"""

import json
import sys
from pathlib import Path

from prefect import flow, get_run_logger, task

from soup_flows import (
    detect_hardware,
    launch_distributed_train,
    parse_spec,
    resolve_sharding_config,
    validate_strategy,
    write_temp_config,
)
from soup_flows.demo import build_demo_data, build_demo_model, demo_parameters


@task
def prepare_rows(folder: Path, most: int) -> tuple[str, str]:
    """Pick rows for training and evaluation; here the shortest answers of the demo data."""
    chosen = []
    for path in build_demo_data(folder):
        rows = sorted(path.read_text(encoding="utf-8").splitlines(), key=len)[:most]
        target = folder / f"short-{path.name}"
        target.write_text("\n".join(rows) + "\n", encoding="utf-8")
        chosen.append(str(target))
    return chosen[0], chosen[1]


@task
def hand_on(model: str) -> dict[str, object]:
    """Use the model: anything that opens a folder made by save_pretrained() can."""
    config = json.loads((Path(model) / "config.json").read_text())
    get_run_logger().info("Got a %s in %s", config["architectures"][0], model)
    return {"model": model, "architecture": config["architectures"][0]}


@flow(name="finetune-pipeline")
def finetune_pipeline(preset: str = "zero2", output_dir: str = "demo-output") -> dict[str, object]:
    """Prepare data, fine-tune, hand the model on."""
    folder = Path(output_dir).absolute() / "demo"
    train_path, eval_path = prepare_rows(folder, most=400)
    model = build_demo_model(folder / "tiny-llama", Path(train_path))
    values = demo_parameters(preset, output_dir) | {"model": str(model), "dataset": train_path}
    values["data"] |= {"eval_dataset": eval_path}

    spec = parse_spec(values)
    hardware = detect_hardware(spec.device, [spec.output_dir])
    plan = resolve_sharding_config(spec, hardware)
    problems = validate_strategy(spec, hardware, plan)
    launch = write_temp_config(spec, hardware, plan)
    report = launch_distributed_train(launch, problems)

    return hand_on(report.model)


if __name__ == "__main__":
    finetune_pipeline(*sys.argv[1:])
