"""Child process that measures a step's memory by running the model's real code without memory.

`python -m soup_flows.training.trace` reads `{"config": ..., "setup": ...}` on stdin and prints
`{"allocated_bytes": ..., "operations": ...}`. The model is built under `FakeTensorMode`, so tensors have shapes
and no content; FSDP2 shards it over a fake process group of N ranks; two optimizer steps run on device "cpu"
(fake "cuda" tensors abort in PyTorch's attention kernels on a machine without CUDA); every storage is counted
from its allocation to its end. No GPU, no weights, no network.

torch 2.13's own `FSDPMemTracker` is wrong under `FakeTensorMode`: it counts the unsharded shapes that DTensor's
sharding propagation makes up in the optimizer step; here counting pauses there.
"""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from soup_flows.memory import Setup
from soup_flows.training import attention
from soup_flows.training.loss import PIECE_ELEMENTS, loss_in_head, worth_it_from

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = 2
"""Optimizer steps: moments exist from the second on."""


class Live(TorchDispatchMode):
    """Counts the bytes of live storages, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now = self.peak = self.operations = 0
        self.paused = False

    def see(self, tensor: object) -> None:
        """Count a tensor's storage, unless it is counted."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if self.paused or not isinstance(local, torch.Tensor):
            return
        storage: Any = local.untyped_storage()
        key = id(storage)
        if self._counted(storage):
            return
        self._set(key, weakref.ref(storage, lambda ref: self._gone(key, ref)), storage.size())

    def resized(self, storage: Any) -> None:
        """Count a storage anew: FSDP frees and refills gathered parameters in place."""
        if self._counted(storage):
            self._set(id(storage), self.sizes[id(storage)][0], storage.size())

    def _counted(self, storage: Any) -> bool:
        known = self.sizes.get(id(storage))
        return known is not None and known[0]() is storage

    def _set(self, key: int, ref: weakref.ref[Any], size: int) -> None:
        self.now += size - (self.sizes[key][1] if key in self.sizes else 0)
        self.sizes[key] = (ref, size)
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, ref: weakref.ref[Any]) -> None:
        known = self.sizes.get(key)
        if known is not None and known[0] is ref:
            self.now -= known[1]
            del self.sizes[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come here too
        self.operations += 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self.see(leaf)
        return result


@contextlib.contextmanager
def counting(live: Live) -> Iterator[None]:
    """Count inside the block; private hooks of torch 2.13 are replaced meanwhile."""
    resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        live.resized(storage)
        return result

    def paused(*args: Any, **kwargs: Any) -> Any:
        before, live.paused = live.paused, True
        try:
            return propagate(*args, **kwargs)
        finally:
            live.paused = before

    torch.UntypedStorage.resize_ = resize_
    ShardingPropagator._propagate_tensor_meta_non_cached = paused
    try:
        with live:
            yield
    finally:
        torch.UntypedStorage.resize_ = resize
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate


def build(config: dict[str, Any], setup: Setup) -> Any:
    """Build the model as `soup_flows.training.model.load_model` loads it, and its adapters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    known = AutoConfig.for_model(
        config["model_type"], **{k: v for k, v in config.items() if k != "model_type"}
    )
    known.use_cache = False
    dtype = torch.float32 if setup.method == "full" else DTYPES[setup.dtype]
    model = AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation=attention.NAME)
    if setup.method == "lora":
        model = _with_adapters(model, setup)
    if setup.gradient_checkpointing is True:
        base = model.get_base_model() if setup.method == "lora" else model
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if setup.method == "lora":
            model.enable_input_require_grads()
    return model.train()


def _with_adapters(model: Any, setup: Setup) -> Any:
    """Add the adapters; `Module.to` swaps tensors, which fake ones refuse, so parameters are replaced."""
    from peft import LoraConfig, get_peft_model

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        dtype = kwargs.get("dtype") or next((a for a in args if isinstance(a, torch.dtype)), None)
        for part in module.modules() if dtype is not None else ():
            for name, old in part._parameters.items():
                if old is not None and old.dtype != dtype:
                    part._parameters[name] = torch.nn.Parameter(old.detach().to(dtype), old.requires_grad)
        return module

    targets = setup.lora_targets if isinstance(setup.lora_targets, str) else list(setup.lora_targets)
    lora = LoraConfig(
        r=setup.lora_r, lora_dropout=setup.lora_dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
    original = torch.nn.Module.to
    torch.nn.Module.to = to
    try:
        return get_peft_model(model, lora)
    finally:
        torch.nn.Module.to = original


def shard(model: Any, setup: Setup, mesh: Any) -> None:
    """Wrap the model as accelerate 1.15 does: a unit per layer, embedding and head in the root unit."""
    dtype = DTYPES[setup.dtype]
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "reshard_after_forward": setup.strategy != "shard_grad",
    }
    base = model.get_base_model() if setup.method == "lora" else model
    layers = set(base._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, **settings)
    fully_shard(model, **settings)


def one_pass(model: Any, setup: Setup) -> None:
    """Run forward, loss and backward of one micro batch, as `SoupTrainer` does."""
    rows, length = setup.per_device_train_batch_size, setup.seq_len
    ids = torch.zeros((1, setup.tokens), dtype=torch.long)
    positions = torch.arange(length).repeat(rows)[None]
    keep = torch.arange(setup.tokens)
    cast = torch.autocast("cpu", dtype=DTYPES[setup.dtype], enabled=setup.dtype != "fp32")
    pieces = setup.loss == "pieces" and setup.tokens >= worth_it_from(model)
    with cast, loss_in_head(model, ids[0]) if pieces else contextlib.nullcontext():
        logits = model(
            input_ids=ids,
            position_ids=positions,
            row_borders=list(range(0, setup.tokens + 1, length)),
            logits_to_keep=keep,
            use_cache=False,
        ).logits
    loss = logits.sum() if pieces else F.cross_entropy(logits[0].float(), ids[0], reduction="sum")
    del logits
    loss.backward()


def run(config: dict[str, Any], setup: Setup) -> dict[str, int]:
    """Trace two optimizer steps.

    Returns:
        `allocated_bytes`, the peak of one rank without DDP's buckets, and the number of `operations`.
    """
    mesh = None
    if setup.fsdp:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=setup.world_size, store=FakeStore())
        mesh = init_device_mesh("cpu", (setup.world_size,))  # needs real tensors
    live = Live()
    PIECE_ELEMENTS["cpu"] = PIECE_ELEMENTS["cuda"]  # this process stands for a GPU
    with FakeTensorMode(), torch.device("cpu"):
        model = build(config, setup)
        if mesh is not None:
            shard(model, setup, mesh)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=setup.optimizer == "adamw_torch_fused")
        for tensor in (*model.parameters(), *model.buffers()):
            live.see(tensor)
        with counting(live):
            for _ in range(STEPS):
                for _ in range(min(2, setup.gradient_accumulation_steps)):
                    one_pass(model, setup)
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return {"allocated_bytes": live.peak, "operations": live.operations}


def main() -> None:
    """Read the question on stdin and print the answer; whatever libraries print goes to stderr."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answer = run(asked["config"], Setup.model_validate(asked["setup"]))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
