"""Counts what a training run does: put this folder first on PYTHONPATH and set BENCH_OUT to a folder.

Every program that is built on Transformers' `Trainer` gets one more callback, and its `training_step` counts the
tokens it is given before it does what it always does. Each rank writes `rank<r>.json` at the end of training.
Nothing is imported before the program itself imports `transformers.trainer`.
"""

# ruff: noqa: ARG002 (the signatures are those of transformers and importlib)

import importlib.abc
import importlib.util
import os
import sys

PAD = int(os.environ.get("BENCH_PAD_ID", "0"))


def install(trainer):  # noqa: D103
    import json
    import resource
    import time

    from transformers.trainer_callback import TrainerCallback

    seen = {"slots": 0, "real": 0, "trained": 0, "losses": []}

    def now(name):
        seen.setdefault(name, time.time())

    class Count(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            now("train_begin")
            seen["cpu_begin"] = time.process_time()

        def on_step_begin(self, args, state, control, **kwargs):
            now("first_step_begin")

        def on_step_end(self, args, state, control, **kwargs):
            now("first_step_end")

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                seen["losses"].append(round(float(logs["loss"]), 4))

        def on_train_end(self, args, state, control, **kwargs):
            seen.update(train_end=time.time(), cpu_end=time.process_time(), steps=state.global_step)
            seen["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            with open(
                os.path.join(os.environ["BENCH_OUT"], f"rank{os.environ.get('RANK', '0')}.json"), "w"
            ) as file:
                json.dump(seen, file)

    trainer.DEFAULT_CALLBACKS.append(Count)
    step = trainer.Trainer.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        ids = inputs.get("input_ids")
        if ids is not None:
            seen["slots"] += ids.numel()
            seen["real"] += int((ids != PAD).sum())
            labels = next((inputs[name] for name in ("labels", "shift_labels") if name in inputs), None)
            seen["trained"] += 0 if labels is None else int((labels != -100).sum())
        return step(self, model, inputs, *args, **kwargs)

    trainer.Trainer.training_step = training_step


class Finder(importlib.abc.MetaPathFinder):  # noqa: D101
    def find_spec(self, name, path, target=None):  # noqa: D102
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            install(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("BENCH_OUT"):
    sys.meta_path.insert(0, Finder())
