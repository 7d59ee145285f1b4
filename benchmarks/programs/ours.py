"""This package, by its tasks without a Prefect server: `ours.py ASSETS OUT [STEPS]`.

Two CPU ranks, one thread each, fp32, 16 rows per optimizer step, at most 512 tokens a row: what plain `Trainer`
with 8 rows a rank does.
"""

import sys

from soup_flows import tasks
from soup_flows.spec import parse_spec

assets, out = sys.argv[1:3]
training = {
    "learning_rate": 1e-3,
    "global_batch_size": 16,
    "warmup_ratio": 0.0,
    "logging_steps": 10,
    "lr_scheduler_type": "linear",
    "seed": 1,
}
if len(sys.argv) > 3:
    training["max_steps"] = int(sys.argv[3])
spec = parse_spec(
    {
        "model": f"{assets}/model",
        "dataset": f"{assets}/messages.jsonl",
        "output_dir": out,
        "strategy": "ddp",
        "gpus": 2,
        "device": "cpu",
        "training": training,
        "data": {"max_length": 512},
        "launcher": {"omp_num_threads": 1},
    }
)
hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
data = tasks.prepare_dataset.fn(spec)
plan = tasks.resolve_sharding_config.fn(spec, hardware, data)
problems = tasks.validate_strategy.fn(spec, hardware, plan)
launch = tasks.write_temp_config.fn(spec, hardware, plan, data=data)
report = tasks.launch_distributed_train.fn(launch, problems)
print(report.state, report.final_loss, report.seconds)
