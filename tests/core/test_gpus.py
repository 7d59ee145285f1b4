"""The table of GPUs for planning."""

import pytest

from soup_flows.errors import Refused
from soup_flows.gpus import ALIASES, GPUS, gpu_spec

NAMED = (
    "t4 v100 a10g l4 l40s rtx-3090 rtx-4090 rtx-5090 a100-40gb a100-80gb "
    "h100-80gb h100-80gb-pcie h200 b200 mi300x"
)


def test_the_named_gpus_are_there() -> None:
    assert set(NAMED.split()) <= set(GPUS)
    assert all(name in GPUS for name in ALIASES.values())


@pytest.mark.parametrize("name", sorted(GPUS))
def test_rows_are_plausible(name: str) -> None:
    gpu = GPUS[name]
    assert 0.85 * gpu.nominal_gb * 1e9 < gpu.memory_bytes < gpu.nominal_gb * 2**30
    assert gpu.link_gb_s >= gpu.pcie_gb_s
    assert gpu.source
    assert gpu.bf16 == (gpu.capability is None or gpu.capability >= (8, 0))
    assert gpu.supported == (gpu.capability is not None)
    assert gpu_spec(gpu.device_name) == gpu_spec(name.upper()) == gpu


def test_aliases_and_refusal() -> None:
    assert gpu_spec("H100 SXM").name == "h100-80gb"
    assert gpu_spec("RTX_4090").name == "rtx-4090"
    with pytest.raises(Refused, match="h100"):
        gpu_spec("h10")
