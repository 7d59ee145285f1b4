"""A flow that submits the launch to a thread, where no signal is ever raised."""

from __future__ import annotations

from typing import Any

from prefect import flow

from soup_flows.demo import resolve_demo
from soup_flows.spec import parse_spec
from soup_flows.tasks import (
    detect_hardware,
    launch_distributed_train,
    resolve_sharding_config,
    validate_strategy,
    write_temp_config,
)


@flow(name="submitting", validate_parameters=False)
def submit_training(values: dict[str, Any]) -> None:
    spec = resolve_demo(parse_spec(values))
    hardware = detect_hardware(spec.device, [spec.output_dir])
    plan = resolve_sharding_config(spec, hardware)
    problems = validate_strategy(spec, hardware, plan)
    launch = write_temp_config(spec, hardware, plan)
    launch_distributed_train.submit(launch, problems).result()
