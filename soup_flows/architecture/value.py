"""What the planner knows about a model: `Architecture`, its layers and its linear maps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LinearKind = Literal["linear", "expert", "router"]
Source = Literal["config", "files", "meta"]

PLAIN_HEADS = frozenset(
    ("deepseek_v2", "deepseek_v3", "gemma", "gpt2", "gpt_neox", "llama", "ministral", "mistral", "mixtral", "olmo",
     "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2")
)  # fmt: skip
"""Known families whose logits are the head's output as it is; `training.loss.has_plain_head` decides for a model."""


class Value(BaseModel):
    """Base of the values here: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Linear(Value):
    """One weight matrix of a layer (or `count` alike ones, for experts)."""

    name: str
    """Last part of the module's name, such as `q_proj`: what LoRA targets are matched with."""
    d_in: int = Field(ge=1)
    """Width of the input."""
    d_out: int = Field(ge=1)
    """Width of the output."""
    bias: bool = False
    """Whether it has a bias of `d_out` elements."""
    count: int = Field(1, ge=1)
    """How many alike ones there are."""
    kind: LinearKind = "linear"
    """`expert` and `router` are plain parameters in transformers 5, which `all-linear` does not match."""

    @property
    def parameters(self) -> int:
        """Elements of the weights and biases."""
        return self.count * (self.d_in * self.d_out + self.d_out * self.bias)


class Layer(Value):
    """One kind of decoder layer and how many of it there are."""

    count: int = Field(ge=1)
    """Layers of this kind."""
    linears: tuple[Linear, ...]
    """Its weight matrices."""
    other_parameters: int = 0
    """Elements of norms and everything else that is not a matrix."""
    norms: int = 2
    """Norms over the hidden width."""
    rms_norm: bool = True
    """RMSNorm in PyTorch operations (keeps an fp32 copy of its input), else the fused LayerNorm."""
    wide_norm: bool = False
    """RMSNorm that multiplies by its weight before the cast back, and so keeps an fp32 product."""
    q_width: int
    """Width of all queries together."""
    k_width: int
    """Width of all keys together, as stored."""
    v_width: int
    """Width of all values together."""
    out_width: int
    """Width of the attention output before its projection."""
    heads: int
    """Attention heads."""
    mlp_width: int
    """Intermediate width a token passes: the dense one, or active routed and shared experts together."""
    gated: bool = True
    """Gated MLP (two projections up and a product), else one projection up."""
    inner_tensors: int = 3
    """Tensors of the intermediate width kept besides the last projection's input: three for a gated MLP
    (gate, its activation, up), one for a fused activation, four for `gelu_new`, which is in Python."""
    fused_qkv: bool = False
    """One projection gives queries, keys and values; the values are a view that keeps all of it alive."""
    qk_norm_width: int = 0
    """Width of queries and keys that pass a norm of their own."""
    routed: int = 0
    """Experts a token is sent to; 0 for a dense layer."""

    @property
    def parameters(self) -> int:
        """Elements of one layer of this kind."""
        return sum(linear.parameters for linear in self.linears) + self.other_parameters

    @property
    def matrix_parameters(self) -> int:
        """Elements of the matrices that quantisation replaces (`nn.Linear` weights only)."""
        return sum(x.d_in * x.d_out * x.count for x in self.linears if x.kind == "linear")


class Architecture(Value):
    """Shapes and parameter counts of a causal language model, exact to the parameter.

    Built from `config.json`, from the headers of weight files, or by counting on the meta device; never
    from the model's name. `notes` says what is not known exactly.
    """

    model_type: str
    """`model_type` of the config."""
    hidden_size: int = Field(ge=1)
    """Width of the residual stream."""
    vocab_size: int = Field(ge=1)
    """Rows of the output projection, that is logits per token."""
    tied: bool
    """Whether the output projection shares the input embedding's weights."""
    embedding_parameters: int
    """Elements of the input embeddings, learned positions included."""
    head_parameters: int
    """Elements of the output projection; 0 when tied."""
    root_parameters: int
    """Elements outside layers, embedding and head: the final norm and the like."""
    layers: tuple[Layer, ...]
    """Kinds of layers in order of appearance."""
    sdpa: bool = True
    """Whether the class can run PyTorch's fused attention; without it, attention is `eager` by default."""
    source: Source = "config"
    """Where the shapes come from: the config, weight files, or a count on the meta device."""
    known: bool = True
    """Whether the family is one whose shapes are written down here."""
    checkpoint_dtype: str = ""
    """`dtype` of the config, such as `bfloat16`; empty when it names none."""
    notes: tuple[str, ...] = ()
    """What a reader should know about these figures."""

    @property
    def parameters(self) -> int:
        """All parameters, shared ones counted once."""
        return self.outer_parameters + sum(layer.count * layer.parameters for layer in self.layers)

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: FSDP's root unit."""
        return self.embedding_parameters + self.head_parameters + self.root_parameters

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def largest_layer(self) -> Layer:
        """The layer with the most parameters."""
        return max(self.layers, key=lambda layer: layer.parameters)

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest single tensor (all experts of a layer are one tensor)."""
        inner = (x.d_in * x.d_out * x.count for layer in self.layers for x in layer.linears)
        return max(self.embedding_parameters, self.head_parameters, *inner)

    @property
    def plain_head(self) -> bool:
        """Whether the logits are the head's output as it is, so that the loss can be made in pieces."""
        return self.model_type in PLAIN_HEADS

    @property
    def moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return any(layer.routed for layer in self.layers)

    def adapted(self, targets: str | Iterable[str]) -> tuple[tuple[Layer, tuple[Linear, ...]], ...]:
        """Return each kind of layer with the matrices that LoRA adapts.

        Args:
            targets: `all-linear` (every `nn.Linear` but the head, as peft does) or module names.

        Returns:
            Pairs of layer and matrices, in order.

        Raises:
            ValueError: if a name matches nothing; names the modules there are.
        """
        if isinstance(targets, str) and targets == "all-linear":
            return tuple(
                (layer, tuple(x for x in layer.linears if x.kind == "linear")) for layer in self.layers
            )
        wanted = {targets} if isinstance(targets, str) else set(targets)
        names = {x.name for layer in self.layers for x in layer.linears if x.kind == "linear"}
        if missing := wanted - names - {"lm_head"}:
            raise ValueError(
                f"no module is called {', '.join(sorted(missing))}; this model has {', '.join(sorted(names))}"
            )
        return tuple(
            (layer, tuple(x for x in layer.linears if x.name in wanted and x.kind == "linear"))
            for layer in self.layers
        )

    def lora_parameters(self, r: int, targets: str | Iterable[str] = "all-linear") -> int:
        """Return the number of adapter parameters: `r * (d_in + d_out)` for each adapted matrix.

        Raises:
            ValueError: if a target names no module.
        """
        inner = sum(
            layer.count * r * (x.d_in + x.d_out) * x.count
            for layer, linears in self.adapted(targets)
            for x in linears
        )
        named = () if targets == "all-linear" else tuple([targets] if isinstance(targets, str) else targets)
        return inner + (r * (self.hidden_size + self.vocab_size) if "lm_head" in named else 0)
