"""Figures of GPUs that are not here, for planning before renting: memory, peak, bandwidth, links."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from soup_flows.errors import nearest, refuse

GIB = 1 << 30


class GpuSpec(BaseModel):
    """One kind of GPU. Peaks are dense (no sparsity) tensor-core figures of its maker."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name in this table, such as `h100-80gb`."""
    device_name: str
    """Name the driver reports."""
    nominal_gb: int = Field(gt=0)
    """Memory on the label."""
    memory_bytes: int = Field(gt=0)
    """Memory a CUDA program sees, from the "total capacity" of torch's out-of-memory messages in public
    issues; the lower figure where drivers differ."""
    half_tflops: float = Field(gt=0)
    """Dense 16-bit peak with fp32 accumulation, TFLOP/s: bf16 where the GPU has it, else fp16."""
    bf16: bool
    """Whether bf16 runs in hardware (compute capability 8.0 and above)."""
    memory_gb_s: float = Field(gt=0)
    """Memory bandwidth, GB/s."""
    link: Literal["nvlink", "pcie", "infinity-fabric"]
    """Fastest link to other GPUs of the machine as usually built."""
    link_gb_s: float = Field(gt=0)
    """Bandwidth of that link, both directions together, GB/s per GPU."""
    pcie_gb_s: float = Field(gt=0)
    """Bandwidth to the host, both directions together, GB/s."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None for other makers."""
    supported: bool = True
    """Whether training is supported here."""
    source: str
    """Where peak and bandwidths come from."""


def _spec(
    name: str,
    device: str,
    memory: tuple[int, float],
    peaks: tuple[float, float],
    link: tuple[Literal["nvlink", "pcie", "infinity-fabric"], float, float],
    capability: tuple[int, int] | None,
    source: str,
) -> GpuSpec:
    """Build a row from (label GB, seen GiB), (TFLOP/s, GB/s), (link, its GB/s, PCIe GB/s)."""
    return GpuSpec(
        name=name,
        device_name=device,
        nominal_gb=memory[0],
        memory_bytes=int(memory[1] * GIB),
        half_tflops=peaks[0],
        bf16=capability is None or capability >= (8, 0),
        memory_gb_s=peaks[1],
        link=link[0],
        link_gb_s=link[1],
        pcie_gb_s=link[2],
        capability=capability,
        supported=capability is not None,
        source=source,
    )


_GEN3, _GEN4, _GEN5 = 32.0, 64.0, 128.0

GPUS: dict[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        _spec(
            "t4", "Tesla T4", (16, 14.56), (65, 320), ("pcie", _GEN3, _GEN3), (7, 5), "NVIDIA T4 datasheet"
        ),
        _spec(
            "v100",
            "Tesla V100-SXM2-16GB",
            (16, 15.77),
            (125, 900),
            ("nvlink", 300, _GEN3),
            (7, 0),
            "NVIDIA V100 datasheet",
        ),
        _spec(
            "v100-32gb",
            "Tesla V100-SXM2-32GB",
            (32, 31.73),
            (125, 900),
            ("nvlink", 300, _GEN3),
            (7, 0),
            "NVIDIA V100 datasheet",
        ),
        _spec(
            "a10g",
            "NVIDIA A10G",
            (24, 21.99),
            (70, 600),
            ("pcie", _GEN4, _GEN4),
            (8, 6),
            "NVIDIA A10G datasheet",
        ),
        _spec(
            "l4", "NVIDIA L4", (24, 22.03), (121, 300), ("pcie", _GEN4, _GEN4), (8, 9), "NVIDIA L4 datasheet"
        ),
        _spec(
            "l40s",
            "NVIDIA L40S",
            (48, 44.39),
            (362, 864),
            ("pcie", _GEN4, _GEN4),
            (8, 9),
            "NVIDIA L40S datasheet",
        ),
        _spec(
            "rtx-3090",
            "NVIDIA GeForce RTX 3090",
            (24, 23.57),
            (71, 936),
            ("pcie", _GEN4, _GEN4),
            (8, 6),
            "NVIDIA Ampere GA102 whitepaper",
        ),
        _spec(
            "rtx-4090",
            "NVIDIA GeForce RTX 4090",
            (24, 23.55),
            (165, 1008),
            ("pcie", _GEN4, _GEN4),
            (8, 9),
            "NVIDIA Ada GPU architecture whitepaper",
        ),
        _spec(
            "rtx-5090",
            "NVIDIA GeForce RTX 5090",
            (32, 31.36),
            (209, 1792),
            ("pcie", _GEN5, _GEN5),
            (12, 0),
            "NVIDIA RTX Blackwell GPU architecture whitepaper",
        ),
        _spec(
            "a100-40gb",
            "NVIDIA A100-SXM4-40GB",
            (40, 39.38),
            (312, 1555),
            ("nvlink", 600, _GEN4),
            (8, 0),
            "NVIDIA A100 datasheet",
        ),
        _spec(
            "a100-80gb",
            "NVIDIA A100-SXM4-80GB",
            (80, 79.15),
            (312, 2039),
            ("nvlink", 600, _GEN4),
            (8, 0),
            "NVIDIA A100 80GB datasheet",
        ),
        _spec(
            "a100-80gb-pcie",
            "NVIDIA A100 80GB PCIe",
            (80, 79.14),
            (312, 1935),
            ("pcie", _GEN4, _GEN4),
            (8, 0),
            "NVIDIA A100 80GB datasheet",
        ),
        _spec(
            "h100-80gb",
            "NVIDIA H100 80GB HBM3",
            (80, 79.11),
            (989, 3350),
            ("nvlink", 900, _GEN5),
            (9, 0),
            "NVIDIA H100 datasheet",
        ),
        _spec(
            "h100-80gb-pcie",
            "NVIDIA H100 PCIe",
            (80, 79.11),
            (756, 2000),
            ("pcie", _GEN5, _GEN5),
            (9, 0),
            "NVIDIA H100 datasheet",
        ),
        _spec(
            "h200",
            "NVIDIA H200",
            (141, 139.71),
            (989, 4800),
            ("nvlink", 900, _GEN5),
            (9, 0),
            "NVIDIA H200 datasheet",
        ),
        _spec(
            "b200",
            "NVIDIA B200",
            (180, 178.35),
            (2250, 7700),
            ("nvlink", 1800, _GEN5),
            (10, 0),
            "NVIDIA DGX B200 datasheet, per GPU",
        ),
        _spec(
            "mi300x",
            "AMD Instinct MI300X",
            (192, 191.9),
            (1307, 5300),
            ("infinity-fabric", 896, _GEN5),
            None,
            "AMD Instinct MI300X datasheet",
        ),
    )
}
"""All GPUs of the table by name."""

ALIASES = {
    "v100-16gb": "v100",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "a100": "a100-80gb",
    "a100-80gb-sxm": "a100-80gb",
    "a100-40gb-sxm": "a100-40gb",
    "h100": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "h100-80gb-sxm": "h100-80gb",
    "h100-pcie": "h100-80gb-pcie",
    "h200-141gb": "h200",
}
"""Other ways to write a name."""


def gpu_spec(name: str) -> GpuSpec:
    """Return the row of a GPU by its name here, an alias, or the name its driver reports.

    Raises:
        Refused: `GPU001` with the nearest name and all there are.
    """
    for spec in GPUS.values():
        if spec.device_name == name.strip():
            return spec
    wanted = "-".join(name.strip().lower().replace("_", " ").replace("-", " ").split())
    wanted = wanted.removeprefix("nvidia-").removeprefix("geforce-").removeprefix("tesla-")
    found = GPUS.get(ALIASES.get(wanted, wanted))
    if found is None:
        near = nearest(wanted, [*GPUS, *ALIASES])
        fix = f"{near} " if near else ""
        raise refuse("GPU001", "gpu", f"no figures for {name!r}", f"{fix}known: {', '.join(GPUS)}")
    return found
