"""A model whose weights take no memory, for the FSDP ranks that get theirs from rank 0.

accelerate sends rank 0's weights to all ranks, tensor by tensor, and drops what the others had (accelerate 1.15,
`fsdp2_load_full_state_dict`). Yet every rank reads all weights in `from_pretrained` of transformers 5.24, whatever
`cpu_ram_efficient_loading` says (huggingface/transformers#43749), and on the meta device the optimizer loses its
parameters, which accelerate tells apart by their addresses. Memory that was asked for and never written has an
address and takes no page of the machine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from soup_flows.launch import rank
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec


class OtherLayout(RuntimeError):
    """The model of rank 0 has other weights than its config says."""

    failure_class = "bad_config"
    advice = "Make config.json fit the weights (tied embeddings, vocabulary), or use a DeepSpeed preset."


def gets_weights(spec: TrainingSpec, plan: ShardingPlan) -> bool:
    """Return whether this rank is sent its weights by rank 0; 4-bit weights are read by every rank."""
    return plan.engine == "fsdp" and rank.rank_number() != 0 and spec.training.method != "qlora"


def hollow_model(source: str, **given: Any) -> PreTrainedModel:
    """Build the model without reading or initialising its weights; buffers have their values.

    Args:
        source: folder or Hub id of the model.
        given: what `from_pretrained` takes on rank 0: `dtype`, `trust_remote_code`, `attn_implementation`.
    """
    config = AutoConfig.from_pretrained(source, trust_remote_code=given["trust_remote_code"])
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **given)
    model.tie_weights()
    return model.eval()


def agree_on_layout(model: PreTrainedModel) -> None:
    """Give every weight the dtype it has on rank 0 (some stay in fp32); a collective call of all FSDP ranks.

    Raises:
        OtherLayout: if names or shapes differ, for which the broadcast of the weights would wait for ever.
    """
    weights = model.state_dict()
    layout = [{name: (tuple(value.shape), value.dtype) for name, value in weights.items()}]
    dist.broadcast_object_list(layout, src=0)
    wanted = layout[0]
    differ = sorted(set(wanted) ^ set(weights))
    differ += [n for n, (shape, _) in wanted.items() if n in weights and tuple(weights[n].shape) != shape]
    if differ:
        raise OtherLayout(f"{len(differ)} weights differ between the files and the config, {differ[0]} first")
    for name, parameter in model.named_parameters():
        _, dtype = wanted[name]
        if parameter.dtype != dtype:
            parameter.data = torch.empty(parameter.shape, dtype=dtype)
