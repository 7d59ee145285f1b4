"""FSDP presets: both halves say the same, and hybrid sharding follows the nodes."""

from __future__ import annotations

import copy

import pytest

from soup_flows.errors import Refused
from soup_flows.fsdp import FSDP_PRESETS, fsdp_config_of, get_fsdp_config, resolve_fsdp_config


def test_the_documented_example() -> None:
    assert get_fsdp_config("shard_grad")["fsdp"]["sharding_strategy"] == "SHARD_GRAD_OP"


def test_the_presets() -> None:
    found = {
        name: (
            cfg["fsdp"]["sharding_strategy"],
            cfg["fsdp"]["offload_params"],
            cfg["fsdp_config"]["reshard_after_forward"],
            cfg["fsdp_config"]["cpu_offload"],
        )
        for name in FSDP_PRESETS
        if (cfg := get_fsdp_config(name))
    }
    assert found == {
        "full_shard": ("FULL_SHARD", False, True, False),
        "shard_grad": ("SHARD_GRAD_OP", False, False, False),
        "full_offload": ("FULL_SHARD", True, True, True),
        "hybrid_shard": ("HYBRID_SHARD", False, True, False),
    }


@pytest.mark.parametrize("preset", FSDP_PRESETS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_two_halves_never_disagree(preset: str, nodes: int) -> None:
    for cfg in (get_fsdp_config(preset), resolve_fsdp_config(get_fsdp_config(preset), 4 * nodes, 4)[0]):
        assert cfg["fsdp_config"] == fsdp_config_of(cfg["fsdp"])
        assert "activation_checkpointing" not in cfg["fsdp_config"]


def test_every_call_returns_a_fresh_dict() -> None:
    cfg = get_fsdp_config("full_shard")
    cfg["fsdp"]["offload_params"] = cfg["fsdp_config"]["version"] = "changed"
    assert get_fsdp_config("full_shard")["fsdp"]["offload_params"] is False
    assert get_fsdp_config("full_shard")["fsdp_config"]["version"] == 2


def test_hybrid_shard_follows_the_nodes() -> None:
    cfg = get_fsdp_config("hybrid_shard")
    before = copy.deepcopy(cfg)
    found, notes = resolve_fsdp_config(cfg, 16, 8)
    assert found["parallelism"] == {"dp_replicate_size": 2, "dp_shard_size": 8}
    assert len(notes) == 1
    assert cfg == before


def test_hybrid_shard_on_one_node_becomes_full_shard_with_a_note() -> None:
    found, notes = resolve_fsdp_config(get_fsdp_config("hybrid_shard"), 4)
    assert found == get_fsdp_config("full_shard")
    (note,) = notes
    assert note.startswith('fsdp.sharding_strategy: "HYBRID_SHARD" -> "FULL_SHARD": ')


def test_hybrid_shard_with_one_rank_per_node_is_refused() -> None:
    with pytest.raises(Refused, match="nothing to shard"):
        resolve_fsdp_config(get_fsdp_config("hybrid_shard"), 4, 1)
    with pytest.raises(Refused, match="ranks_per_node"):
        resolve_fsdp_config(get_fsdp_config("full_shard"), 4, 3)


def test_full_shard_needs_no_change() -> None:
    assert resolve_fsdp_config(get_fsdp_config("full_shard"), 16, 8) == (get_fsdp_config("full_shard"), [])


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("sharding_strategy", "NO_SHARD", "fsdp.sharding_strategy"),
        ("auto_wrap_policy", "SIZE_BASED_WRAP", "fsdp.auto_wrap_policy"),
        ("offload_params", "false", "fsdp.offload_params"),
    ],
)
def test_values_fsdp2_does_not_take_are_refused(key: str, value: object, field: str) -> None:
    with pytest.raises(Refused) as caught:
        fsdp_config_of({**get_fsdp_config("full_shard")["fsdp"], key: value})
    assert caught.value.problems[0].field == field


@pytest.mark.parametrize("wrong", ["full_sharded", "", None, 3])
def test_an_unknown_preset_lists_all(wrong: object) -> None:
    with pytest.raises(ValueError, match="presets: full_shard, shard_grad, full_offload, hybrid_shard"):
        get_fsdp_config(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'full_shard'"):
        get_fsdp_config("full_sharded")
