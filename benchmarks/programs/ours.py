"""This package on two CPU ranks: `ours.py ASSETS OUT tasks|seen|flow [STEPS]`.

One thread a rank, fp32, 16 rows per optimizer step, at most 512 tokens a row, no checkpoints: what plain `Trainer`
with 8 rows a rank does. `tasks` calls the tasks without Prefect's server, `flow` is the flow with the server of
PREFECT_API_URL. `seen` is `tasks` with what an earlier run of the same model left in the cache, and rows that are not
in it. When each part began is left in OUT/phases.json, Unix seconds.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

phases = {"command": time.time()}

from soup_flows import tasks  # noqa: E402
from soup_flows.launch.events import tail_events  # noqa: E402
from soup_flows.spec import parse_spec  # noqa: E402

assets, out, how = sys.argv[1:4]
training: dict[str, Any] = {
    "learning_rate": 1e-3,
    "global_batch_size": 16,
    "warmup_ratio": 0.0,
    "logging_steps": 10,
    "lr_scheduler_type": "linear",
    "seed": 1,
}
if len(sys.argv) > 4:
    training["max_steps"] = int(sys.argv[4])
values: dict[str, Any] = {
    "model": f"{assets}/model",
    "dataset": f"{assets}/messages.jsonl",
    "output_dir": out,
    "strategy": "ddp",
    "gpus": 2,
    "device": "cpu",
    "training": training,
    "data": {"max_length": 512},
    "recovery": {"save_steps": 0},
    "launcher": {"omp_num_threads": 1},
}
if how == "seen":
    kept = Path(assets, "seen")
    values["data"]["cache_dir"] = str(kept)
    shutil.rmtree(kept / "data", ignore_errors=True)
    for rows in kept.glob("look/rows-*"):
        rows.unlink()


def timed(name, task, *arguments, **more):
    """Call a task and note when it began."""
    phases[name] = time.time()
    return task.fn(*arguments, **more)


if how == "flow":
    from soup_flows.flows import soup_train

    phases["flow"] = time.time()
    report = soup_train(**values)
else:
    spec = parse_spec(values)
    hardware = timed("detect hardware", tasks.detect_hardware, spec.device, [spec.output_dir])
    data = timed("prepare dataset", tasks.prepare_dataset, spec)
    plan = timed("resolve sharding config", tasks.resolve_sharding_config, spec, hardware, data)
    problems = timed("validate strategy", tasks.validate_strategy, spec, hardware, plan)
    launch = timed("write temp config", tasks.write_temp_config, spec, hardware, plan, data=data)
    report = timed("launch distributed train", tasks.launch_distributed_train, launch, problems)
kinds = {"started": "ranks have imported", "model": "model is built", "loaded": "first step"}
attempt = Path(report.run_dir) / "attempt-1"
for event in tail_events(attempt / "events.jsonl").poll():
    if event["kind"] in kinds:
        phases[kinds[event["kind"]]] = event["time"]
    elif event["kind"] == "step":
        phases.setdefault("first step is done", event["time"])
(Path(out) / "phases.json").write_text(json.dumps(phases))
print(report.state, report.final_loss, report.seconds)
sys.exit(
    json.loads((attempt / "receipt.json").read_text())["exit_code"]
)  # a rank that aborts at its exit counts
