"""Other estimators on the same rows: accelerate's and DeepSpeed's formulas, restated with their source.

Both look at model states of full training, so only rows of full training are given to them.
"""

from __future__ import annotations

from benchmarks.memory_rows import Row


def accelerate(row: Row) -> float:
    """Return what `accelerate estimate-memory` calls "Training w/ Adam", bytes.

    Four times the size of the model in its loaded dtype (accelerate 1.15, `commands/estimate.py`). It
    knows no sharding; the figure is divided by the ranks that share all state, which is kinder than it is.
    """
    pure = row.setup.master_weights is False
    return (8.0 if pure else 16.0) * row.model.parameters / row.setup.shards[0]


def deepspeed(row: Row) -> float:
    """Return DeepSpeed's `estimate_zero{2,3}_model_states_mem_needs` for the row's ranks, bytes on the GPU.

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
