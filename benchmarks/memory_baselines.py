"""Other estimators, on the same rows: accelerate's and DeepSpeed's formulas, restated with their source.

Both look at model states alone. Where a run trains adapters or quantised weights they are given the best
reading their own documentation allows.
"""

from __future__ import annotations

from memory_rows import Row


def accelerate(row: Row) -> float:
    """`accelerate estimate-memory`, column "Training w/ Adam": bytes, whatever the number of GPUs.

    Source: accelerate 1.15 `commands/estimate.py`, `estimate_training_usage` (the largest of its parts); its
    documentation gives four times the model's size in the dtype it is loaded in.
    """
    pure = row.setup.method == "full" and row.setup.master_weights is False
    return (
        (8.0 if pure else 16.0) * row.model.parameters
        if row.setup.method == "full"
        else 2.0 * (4 * row.model.parameters)
    )


def deepspeed(row: Row) -> float:
    """DeepSpeed's `estimate_zero{2,3}_model_states_mem_needs` for the row's world size: bytes on the GPU.

    Source: DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py` and `stage3.py`. Sharded runs are given to stage 3,
    all others to stage 2 (18 bytes per parameter over the ranks and 2 on each).
    """
    setup, total = row.setup, row.model.parameters
    ranks = setup.world_size
    if setup.shards[0] > 1 or "params" in setup.offloaded:
        layer = 4.0 * max(row.model.largest_layer.parameters, row.model.largest_parameter)
        if "params" in setup.offloaded:
            return layer
        return layer + (2 * total / ranks if "optimizer" in setup.offloaded else 18 * total / ranks)
    return 2.0 * total + (0.0 if "optimizer" in setup.offloaded else 18 * total / ranks)


BASELINES = {"accelerate": accelerate, "deepspeed": deepspeed}
