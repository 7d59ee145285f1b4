"""How a model is trained, as far as memory depends on it: `Setup` and the tables behind its choices."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from soup_flows.errors import Problem, Refused, nearest

Method = Literal["full", "lora", "qlora"]
Strategy = Literal[
    "single",
    "ddp",
    "zero1",
    "zero2",
    "zero2_offload",
    "zero3",
    "zero3_offload",
    "zero3_nvme",
    "zero++",
    "full_shard",
    "shard_grad",
    "full_offload",
    "hybrid_shard",
]
Optimizer = Literal[
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_8bit",
    "adamw_4bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "sgd",
]
Offload = Literal["optimizer", "params", "activations"]
Quantization = Literal["nf4", "nf4_double", "gptq4", "gptq8"]
Loss = Literal["full", "fused", "chunked", "liger", "pieces"]

LOGIT_BYTES: dict[Loss, float] = {"full": 12.0, "fused": 8.0, "chunked": 0.0, "liger": 0.0, "pieces": 12.0}
"""Bytes per logit alive at the backward peak of the loss. `full`: fp32 log-softmax, its gradient and the
gradient of the logits (measured as 12.0); `fused`: a fused cross-entropy kernel over whole logits; `chunked`
and `liger` never hold all logits; `pieces` is this package's own, whole logits for few tokens
(`soup_flows.training.loss`)."""

STRANDED_LOGIT_BYTES: dict[Loss, float] = {
    "full": 3.0,
    "fused": 6.0,
    "chunked": 0.0,
    "liger": 0.0,
    "pieces": 0.0,
}
"""Bytes per logit of blocks the loss passed through and the allocator cannot reuse at once. Fitted on the
difference between nvidia-smi and allocated of published runs."""

QUANTIZED_BYTES: dict[Quantization, float] = {
    "nf4": 0.5625,
    "nf4_double": 0.516,
    "gptq4": 0.5234,
    "gptq8": 1.0234,
}
"""Bytes per weight: 4 bits plus an fp32 scale per 64 weights (bitsandbytes NF4), that scale itself quantised
(double), or fp16 scales and packed zeros per 128 weights (GPTQ)."""

OPTIMIZER_STATES: dict[Optimizer, float | None] = {
    "adamw_torch_fused": None,
    "adamw_torch": None,
    "adamw_8bit": 2.06,
    "adamw_4bit": 1.1,
    "paged_adamw_32bit": 0.0,
    "paged_adamw_8bit": 0.0,
    "sgd": 0.0,
}
"""Bytes per trained parameter; None: two moments in the parameter's own dtype. Paged states are managed
memory outside torch's counters, which the driver can move to the host."""

_OFFLOADED: dict[str, tuple[Offload, ...]] = {
    "zero2_offload": ("optimizer",),
    "zero3_offload": ("optimizer", "params"),
    "zero3_nvme": ("optimizer", "params"),
    "full_offload": ("params", "optimizer"),
}


class Setup(BaseModel):
    """One way to train: everything besides the model that peak memory depends on.

    A field that is None takes the value the strategy and the dtype imply; `resolved` properties give it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    method: Method = "full"
    """`full` trains every weight, `lora` adapters beside 16-bit weights, `qlora` beside quantised ones."""
    strategy: Strategy = "single"
    """How state is spread over the ranks."""
    world_size: int = Field(1, ge=1, le=65536)
    """Ranks, one GPU each."""
    ranks_per_node: int | None = Field(None, ge=1)
    """Ranks of one machine; all of them when empty."""
    per_device_train_batch_size: int = Field(1, ge=1)
    """Rows a rank computes at once."""
    seq_len: int = Field(1024, ge=1)
    """Tokens per row, padding included."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro batches per optimizer step; above 1, gradients live through the next forward pass."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Compute dtype."""
    master_weights: bool | None = None
    """Full training in 16 bit: keep fp32 weights (default). False: weights, gradients and moments all in
    16 bit."""
    optimizer: Optimizer = "adamw_torch_fused"
    """Optimizer implementation; `adamw_torch` is the multi-tensor one, which needs temporaries."""
    step_in_backward: bool = False
    """The optimizer steps as each gradient appears, so that gradients are never all alive."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """True: keep each layer's input only; `selective`: keep about half of what a layer saves."""
    attention: Literal["sdpa", "flash_attention_2", "rows", "eager"] = "sdpa"
    """`sdpa` expands grouped keys and values to every head when a batch is padded, which is assumed
    (transformers 5.24, `integrations/sdpa_attention.py`); `flash_attention_2` does not; nor does `rows`, this
    package's own attention over rows laid end to end, which copies its output; `eager` keeps scores."""
    loss: Loss = "full"
    """How cross-entropy is computed; see `LOGIT_BYTES`."""
    bytes_per_logit: float | None = Field(None, ge=0)
    """In place of the loss's own figure, for other training programs."""
    logits_kept: bool = False
    """The 16-bit logits stay referenced through the backward pass (transformers 4.46 to 4.50)."""
    fused_kernels: bool | None = None
    """Fused norm and gated MLP, as Liger and `torch.compile` bring; by default with loss `liger`."""
    compile: bool = False
    """`torch.compile` is on."""
    lora_r: int = Field(16, ge=1)
    """Rank of the adapters."""
    lora_targets: str | tuple[str, ...] = "all-linear"
    """`all-linear` or names of modules."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapters' input; above 0 every target keeps a copy and a mask."""
    adapters_fp32: bool | None = None
    """Adapters in fp32, as peft makes them; in 16 bit under DeepSpeed stages 1 and 2."""
    autocast: bool | None = None
    """Forward under autocast, as the Trainer does in bf16 and fp16; off under DeepSpeed."""
    modules_to_save: bool = False
    """LoRA that also trains copies of the embedding and the head."""
    quantization: Quantization = "nf4_double"
    """Storage of the frozen weights of `qlora`."""
    frozen_upcast: bool = False
    """Embedding, head and norms in fp32 (peft's `prepare_model_for_kbit_training`), and so the residual."""
    layer_inputs_kept: bool = False
    """Each layer's input and its gradient live until backward ends (FSDP1 with frozen weights: the hooks that
    reshard a unit without trained weights hold both)."""
    inputs_saved_by_quantized: bool = False
    """Quantised layers save their input although frozen (bitsandbytes of 2023 and 2024)."""
    outer_units: bool = False
    """FSDP: embedding and head are units of their own instead of one root unit."""
    loss_outside: bool = False
    """The loss is computed outside the model's forward pass, when FSDP has freed all it gathered."""
    reduce_fp32: bool = False
    """FSDP reduces gradients in fp32; accelerate reduces in the compute dtype."""
    offload: tuple[Offload, ...] | None = None
    """What lives outside the GPU; the strategy's own when empty."""
    bucket_elements: int | None = Field(None, ge=1)
    """DeepSpeed's `reduce_bucket_size`; `hidden_size` squared (the Trainer's `auto`) when empty."""

    @model_validator(mode="after")
    def _possible(self) -> Setup:
        if self.strategy == "single" and self.world_size != 1:
            raise ValueError("strategy 'single' is for world_size 1; use 'ddp' or a sharding strategy")
        per_node = self.ranks_per_node
        if per_node and self.world_size % min(per_node, self.world_size):
            raise ValueError(f"world_size {self.world_size} is not a multiple of ranks_per_node {per_node}")
        return self

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage, 0 without DeepSpeed."""
        if not self.strategy.startswith("zero"):
            return 0
        return 3 if self.strategy == "zero++" else int(self.strategy[4])

    @property
    def fsdp(self) -> bool:
        """Whether FSDP shards."""
        return self.strategy in ("full_shard", "shard_grad", "full_offload", "hybrid_shard")

    @property
    def node_ranks(self) -> int:
        """Ranks of one machine."""
        return min(self.ranks_per_node or self.world_size, self.world_size)

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.world_size // self.node_ranks

    @property
    def tokens(self) -> int:
        """Tokens a rank computes at once."""
        return self.per_device_train_batch_size * self.seq_len

    @property
    def element(self) -> int:
        """Bytes of one activation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def offloaded(self) -> tuple[Offload, ...]:
        """What lives outside the GPU."""
        return _OFFLOADED.get(self.strategy, ()) if self.offload is None else self.offload

    @property
    def fused(self) -> bool:
        """Whether norm and MLP kernels are fused."""
        return self.loss == "liger" if self.fused_kernels is None else self.fused_kernels

    @property
    def under_autocast(self) -> bool:
        """Whether the forward pass runs under autocast."""
        if self.dtype == "fp32":
            return False
        return self.zero_stage == 0 if self.autocast is None else self.autocast

    @property
    def wide_adapters(self) -> bool:
        """Whether adapters are fp32."""
        if self.adapters_fp32 is None:
            return self.zero_stage not in (1, 2) or self.dtype == "fp32"
        return self.adapters_fp32

    @property
    def wide_residual(self) -> bool:
        """Whether the residual stream is fp32."""
        return self.dtype == "fp32" or self.frozen_upcast

    @property
    def shards(self) -> tuple[int, int, int]:
        """Ranks that parameters, gradients and optimizer states are each split over."""
        n = self.node_ranks if self.strategy == "hybrid_shard" else self.world_size
        stage = self.zero_stage
        return (
            n if self.fsdp or stage == 3 else 1,
            n if self.fsdp or stage >= 2 else 1,
            n if self.fsdp or stage >= 1 else 1,
        )


def parse_setup(values: Mapping[str, Any]) -> Setup:
    """Build a `Setup`, or explain everything that is wrong with `values` at once.

    Raises:
        Refused: one `MEM003` problem per wrong field, with the nearest valid value where there is one.
    """
    try:
        return Setup.model_validate(dict(values))
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for item in error.errors(include_url=False):
            name = str(item["loc"][0]) if item["loc"] else "strategy"
            known = Setup.model_fields.get(name)
            if known is None:
                message, fix = (
                    f"{name!r} is not a setting of the predictor",
                    nearest(name, Setup.model_fields),
                )
            elif not item["loc"]:
                message, fix = item["msg"].removeprefix("Value error, "), ""
            else:
                choices = [str(x) for x in typing.get_args(known.annotation)]
                message = f"got {values.get(name)!r}: {item['msg'].lower()}"
                fix = nearest(str(values.get(name)), choices)
            problems.setdefault(
                name, Problem(id="MEM003", severity="error", field=name, message=message, fix=fix)
            )
        raise Refused(list(problems.values())) from None
