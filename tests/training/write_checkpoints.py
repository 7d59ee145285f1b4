"""Train a tiny Llama for two steps and save it sharded: `torchrun write_checkpoints.py KIND MODEL OUT`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

kind, model_dir, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
rank = 0
ids = torch.arange(2, 34).reshape(2, 16)


def loss_of(model):
    return model(ids, labels=ids).loss


if kind == "dcp":
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    states, optimizer_states = get_state_dict(model, optimizer)
    dcp.save(
        {"model": states, "optim": optimizer_states},
        checkpoint_id=out / "checkpoint" / "pytorch_model_fsdp_0",
    )
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, out / "pytorch_model_fsdp.bin")
else:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(kind[-1])},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    engine.save_checkpoint(str(out / "checkpoint"))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        whole = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
if rank == 0:
    save_file({name: value.contiguous().clone() for name, value in whole.items()}, out / "wanted.safetensors")
dist.barrier()
dist.destroy_process_group()
