"""Read published measurements: one CSV row becomes an `Architecture` and a `Setup`, or a reason to skip it.

What differs between the programs that were measured is in `memory_programs`.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory_programs import number, settings_of
from soup_flows.architecture import Architecture, Layer, Linear
from soup_flows.errors import Refused
from soup_flows.memory import MemoryEstimate, Setup, predict
from soup_flows.memory.setup import parse_setup

GIB = 1 << 30
USABLE = 0.99
"""Share of the nominal GiB of a card that CUDA reports as total memory (A100-80GB: 79.2 GiB)."""


@dataclass(frozen=True)
class Row:
    """One measurement and the prediction for it."""

    cells: dict[str, str]
    model: Architecture
    setup: Setup
    estimate: MemoryEstimate
    peak_gib: float | None
    card_gb: float | None

    @property
    def measured(self) -> float | None:
        """Peak in bytes, None where the run failed."""
        return self.peak_gib * GIB if self.peak_gib else None

    @property
    def kind(self) -> str:
        """What was measured: `allocated`, `reserved`, `device` (nvidia-smi and unnamed) or `other`."""
        metric = self.cells.get("metric", "")
        if "smi" in metric or "GPU Mem" in metric:
            return "device"
        if "reserved" in metric:
            return "reserved"
        return (
            "allocated" if any(w in metric for w in ("allocated", "active", "torch peak memory")) else "other"
        )

    @property
    def predicted(self) -> float:
        """The predicted figure of the same kind, bytes."""
        if self.kind in ("reserved", "device"):
            context = self.estimate.context_bytes if self.kind == "device" else 0
            return self.estimate.reserved_bytes + context
        return self.estimate.allocated_bytes

    @property
    def oom(self) -> bool:
        """Whether the run ended out of memory."""
        return self.cells.get("oom", "").strip() in ("1", "1.0", "true", "True")

    @property
    def device_bytes(self) -> float | None:
        """Memory of the card, None if unknown."""
        return self.card_gb * GIB * USABLE if self.card_gb else None


def read(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows that can be predicted, and (id, reason) of the others.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it lacks the columns of `memory_measured.csv`.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"hidden", "n_params", "method", "strategy", "seq_len", "metric"} - set(
            reader.fieldnames or ()
        )
        if missing:
            raise ValueError(f"{path} lacks the columns {', '.join(sorted(missing))}")
        lines = [{key: (value or "") for key, value in cells.items() if key} for cells in reader]
    rows, skipped = [], []
    for cells in lines:
        try:
            model = architecture(cells)
            settings = parse_setup(settings_of(cells))
            peak, card = real(cells, "peak_GiB"), real(cells, "gpu_mem_GB")
            rows.append(Row(cells, model, settings, predict(model, setup=settings), peak, card))
        except (KeyError, ValueError, ArithmeticError, Refused) as error:
            skipped.append((cells.get("id", "?"), str(error).splitlines()[0][:100]))
    return rows, skipped


def real(cells: dict[str, str], key: str) -> float | None:
    """Return a cell as a positive number, None when it is empty; ValueError names the column otherwise."""
    text = cells.get(key, "")
    try:
        value = float(text) if text else None
    except ValueError:
        raise ValueError(f"{key} is {text!r}") from None
    if value is not None and not 0 < value < 1e9:
        raise ValueError(f"{key} is {text!r}")
    return value


def architecture(cells: dict[str, str]) -> Architecture:
    """Return the architecture that the shape columns describe; `n_params` decides what they leave open."""
    names = ("hidden", "inter", "layers", "heads", "kv_heads", "head_dim", "vocab", "n_params")
    hidden, inter, count, heads, kv, dim, vocab, total = (number(cells, name) for name in names)
    tied = bool(number(cells, "tied", 0))
    if "litgpt" in cells.get("framework", "") and tied:  # litgpt keeps a head of its own
        tied, total = False, total + vocab * hidden
    gated = bool(number(cells, "gated_mlp", 1))
    q, k = heads * dim, kv * dim
    if "qkv" in cells.get("lora_targets", "").split("+"):
        linears = [Linear(name="qkv", d_in=hidden, d_out=q + 2 * k)]
    else:
        linears = [Linear(name=n, d_in=hidden, d_out=w) for n, w in (("q", q), ("k", k), ("v", k))]
    linears.append(Linear(name="o", d_in=q, d_out=hidden))
    mlp = [Linear(name=n, d_in=hidden, d_out=inter) for n in (["gate", "up"] if gated else ["up"])]
    mlp.append(Linear(name="down", d_in=inter, d_out=hidden))
    dense = sum(x.parameters for x in mlp)
    outer = vocab * hidden * (1 if tied else 2)
    rest = total - outer - count * sum(x.parameters for x in linears)
    experts = round(rest / (count * dense))
    if experts > 1:  # transformers 4: each expert has linear layers of its own, which quantisation replaces
        mlp = [x.model_copy(update={"count": experts}) for x in mlp]
    rest -= count * sum(x.parameters for x in mlp)
    layer = Layer(
        count=count,
        linears=(*linears, *mlp),
        other_parameters=rest // count,
        rms_norm=gated,
        q_width=q,
        k_width=k,
        v_width=k,
        out_width=q,
        heads=heads,
        mlp_width=2 * inter if experts > 1 else inter,
        gated=gated,
        inner_tensors=3 if gated else 1,
        routed=2 if experts > 1 else 0,
    )
    return Architecture(
        model_type="row",
        hidden_size=hidden,
        vocab_size=vocab,
        tied=tied,
        embedding_parameters=vocab * hidden,
        head_parameters=0 if tied else vocab * hidden,
        root_parameters=rest % count,
        layers=(layer,),
    )
