"""Train a folder's `model` on its `messages.jsonl` for one epoch, to be measured from outside.

    python benchmarks/train_chat.py FOLDER OUT [STRATEGY]

Two CPU ranks, one thread each, fp32, 16 rows per optimizer step, at most 512 tokens a row: what plain `Trainer`
with 8 rows a rank does. The tasks are called through `.fn`, without Prefect's server.
"""

import sys

from soup_flows import tasks
from soup_flows.spec import parse_spec

folder, out = sys.argv[1:3]
spec = parse_spec(
    {
        "model": f"{folder}/model",
        "dataset": f"{folder}/messages.jsonl",
        "output_dir": out,
        "strategy": sys.argv[3] if len(sys.argv) > 3 else "ddp",
        "gpus": 2,
        "device": "cpu",
        "training": {"learning_rate": 1e-3, "global_batch_size": 16, "warmup_ratio": 0.0, "logging_steps": 10,
                     "lr_scheduler_type": "linear", "seed": 1},
        "data": {"max_length": 512},
        "launcher": {"omp_num_threads": 1},
    }
)  # fmt: skip
hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
data = tasks.prepare_dataset.fn(spec)
plan = tasks.resolve_sharding_config.fn(spec, hardware, data)
problems = tasks.validate_strategy.fn(spec, hardware, plan)
launch = tasks.write_temp_config.fn(spec, hardware, plan, data=data)
report = tasks.launch_distributed_train.fn(launch, problems)
print(report.state, report.final_loss, report.seconds)
