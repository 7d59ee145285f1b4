"""DeepSpeed presets, how they are fitted to a run, and how configs are written and read."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soup_flows.deepspeed import (
    DEEPSPEED_PRESETS,
    get_deepspeed_config,
    load_deepspeed_config,
    resolve_deepspeed_config,
    write_deepspeed_config,
)
from soup_flows.errors import Refused

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def numbers(cfg: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cfg.get(key) for key in BATCH)


def problems(caught: pytest.ExceptionInfo[Refused]) -> set[str]:
    return {problem.field for problem in caught.value.problems}


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cfg = get_deepspeed_config("zero3_offload")
    assert numbers(cfg) == (16, 8, 2)
    cfg, notes = resolve_deepspeed_config(cfg, gpu_count=2)
    assert numbers(cfg) == (16, 8, 1)
    assert notes == [
        "gradient_accumulation_steps: 2 -> 1: keeps the global batch 16 = micro batch 8 x 1 x 2 GPUs"
    ]
    path = write_deepspeed_config(cfg)
    assert isinstance(path, str)
    assert Path(path).parent == tmp_path
    assert json.loads(Path(path).read_text()) == cfg


@pytest.mark.parametrize("preset", DEEPSPEED_PRESETS)
def test_presets_hold_what_every_run_needs(preset: str) -> None:
    cfg = get_deepspeed_config(preset)
    total, micro, accumulation = numbers(cfg)
    assert total == micro * accumulation
    assert cfg["bf16"] == cfg["fp16"] == {"enabled": "auto"}
    assert cfg["gradient_clipping"] == "auto"
    assert not {"optimizer", "scheduler", "activation_checkpointing"} & set(cfg)
    zero = cfg["zero_optimization"]
    # These are silently ignored below stage 3.
    only_stage_3 = {key for key in zero if key.startswith(("stage3_", "zero_"))} | {"offload_param"}
    if zero["stage"] < 3:
        assert not only_stage_3 & set(zero)
        assert zero["overlap_comm"] is False
    else:
        assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    zero["stage"] = 7
    assert get_deepspeed_config(preset)["zero_optimization"]["stage"] != 7


def test_stages_and_offload() -> None:
    found = {
        name: tuple(
            zero.get(key, {}).get("device") if key != "stage" else zero[key]
            for key in ("stage", "offload_optimizer", "offload_param")
        )
        for name in DEEPSPEED_PRESETS
        if (zero := get_deepspeed_config(name)["zero_optimization"])
    }
    assert found == {
        "zero1": (1, None, None),
        "zero2": (2, None, None),
        "zero2_offload": (2, "cpu", None),
        "zero3": (3, None, None),
        "zero3_offload": (3, "cpu", "cpu"),
        "zero3_nvme": (3, "nvme", "nvme"),
        "zero++": (3, None, None),
    }
    assert get_deepspeed_config("zero_pp") == get_deepspeed_config("zero++")


@pytest.mark.parametrize("wrong", ["zero33", "ZeRO-3", "", None, 3, ["zero3"]])
def test_an_unknown_preset_lists_all(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"presets: zero1, zero2, .*zero\+\+, zero_pp"):
        get_deepspeed_config(wrong)
    with pytest.raises(ValueError, match="did you mean 'zero3'"):
        get_deepspeed_config("zero33")


def test_nvme_is_one_switch_away_and_needs_a_path() -> None:
    offload, nvme = get_deepspeed_config("zero3_offload"), get_deepspeed_config("zero3_nvme")
    for block in ("offload_optimizer", "offload_param"):
        offload["zero_optimization"][block]["device"] = "nvme"
    assert offload["aio"] == nvme["aio"]
    offload["zero_optimization"]["sub_group_size"] = nvme["zero_optimization"]["sub_group_size"]
    assert offload == nvme
    for refused in (
        lambda: resolve_deepspeed_config(nvme, 1),
        lambda: write_deepspeed_config("zero3_nvme"),
        lambda: get_deepspeed_config("zero3_nvme", nvme_path="relative"),
        lambda: resolve_deepspeed_config(nvme, 1, nvme_path="relative"),
    ):
        with pytest.raises(Refused) as caught:
            refused()
        assert problems(caught) == {"nvme_path"}
    ready = get_deepspeed_config("zero3_nvme", nvme_path="/nvme")
    assert resolve_deepspeed_config(nvme, 1, nvme_path="/nvme")[0] == ready
    assert resolve_deepspeed_config(ready, 1) == (ready, [])
    kept = get_deepspeed_config("zero3_offload", nvme_path="/nvme")["zero_optimization"]["offload_param"]
    assert (kept["device"], kept["nvme_path"]) == ("cpu", "/nvme")


@given(
    share=st.integers(1, 200),
    gpus=st.integers(1, 16),
    nodes=st.integers(1, 4),
    micro=st.none() | st.integers(1, 40),
    accumulation=st.none() | st.integers(1, 40),
    preset=st.sampled_from(["zero1", "zero2_offload", "zero3", "zero++"]),
)
def test_the_batch_always_adds_up(
    share: int, gpus: int, nodes: int, micro: int | None, accumulation: int | None, preset: str
) -> None:
    cfg, world = get_deepspeed_config(preset), gpus * nodes
    before = copy.deepcopy(cfg)
    found, notes = resolve_deepspeed_config(
        cfg,
        world,
        ranks_per_node=gpus,
        train_batch_size=share * world,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
    )
    total, got_micro, got_accumulation = numbers(found)
    assert total == share * world == got_micro * got_accumulation * world
    if micro is not None:
        assert got_micro == max(d for d in range(1, micro + 1) if share % d == 0)
    elif accumulation is not None and share % accumulation == 0:
        assert got_accumulation == accumulation
    assert cfg == before
    changed = {key for key in BATCH if found[key] != cfg[key]}
    assert changed == {note.split(":")[0] for note in notes} & set(BATCH)


def with_batch(total: Any, micro: Any, accumulation: Any) -> dict[str, Any]:
    values = dict(zip(BATCH, (total, micro, accumulation), strict=True))
    given = {key: value for key, value in values.items() if value is not None}
    return {"zero_optimization": {"stage": 2}, **given}


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        (("auto", "auto", "auto"), {}, ("auto", "auto", "auto")),
        ((None, None, None), {}, ("auto", "auto", "auto")),
        ((None, 4, 2), {}, (16, 4, 2)),  # no global batch stated: it is what DeepSpeed would compute
        ((24, 5, "auto"), {}, (24, 4, "auto")),
        ((24, "auto", 5), {}, (24, "auto", 6)),
        ((24, None, None), {}, (24, 6, 2)),
        (("auto", 4, 2), {}, ("auto", 4, 2)),
        (("auto", "auto", "auto"), {"train_batch_size": 32}, (32, 8, 2)),
        (("auto", "auto", "auto"), {"per_device_train_batch_size": 4}, ("auto", 4, "auto")),
        (("auto", "auto", 3), {"per_device_train_batch_size": 4}, (24, 4, 3)),
        ((16, 8, 2), {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, (32, 4, 4)),
        ((16, 8, 2), {"gradient_accumulation_steps": 4}, (16, 2, 4)),
        ((16, 8, 2), {"train_batch_size": 6, "per_device_train_batch_size": 2}, (6, 1, 3)),
    ],
)
def test_batch_keys_by_example(config: Any, arguments: dict[str, int], expected: tuple[Any, ...]) -> None:
    assert numbers(resolve_deepspeed_config(with_batch(*config), 2, **arguments)[0]) == expected


def test_an_impossible_batch_names_the_nearest_ones() -> None:
    with pytest.raises(ValueError, match=r"16 rows .* 3 ranks.*15 or 18, or 2 or 4 ranks"):
        resolve_deepspeed_config(get_deepspeed_config("zero2"), 3)


@pytest.mark.parametrize("wrong", [0, -1, "many", "2", 2.0, True, None])
def test_a_wrong_gpu_count_is_refused(wrong: Any) -> None:
    with pytest.raises(Refused) as caught:
        resolve_deepspeed_config(get_deepspeed_config("zero2"), wrong)
    assert problems(caught) == {"gpus"}


@pytest.mark.parametrize("wrong", [None, "zero2", [], {}, {"zero_optimization": True}])
def test_what_is_no_config_is_refused(wrong: Any) -> None:
    with pytest.raises(Refused, match="DSR001"):
        resolve_deepspeed_config(wrong, 1)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(Refused) as caught:
        resolve_deepspeed_config(
            get_deepspeed_config("zero3_nvme"),
            3,
            ranks_per_node=2,
            dtype="bf61",
            gradient_clipping=-1,
            has_compiler=False,
            hidden_size=0,
        )
    assert problems(caught) == {
        *("global_batch_size", "ranks_per_node", "dtype", "gradient_clipping"),
        *("nvme_path", "deepspeed", "hidden_size"),
    }
    assert "did you mean 'bf16'" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "bf16", "fp16"), [("bf16", True, False), ("fp16", False, True), ("fp32", False, False)]
)
def test_dtype_becomes_literal(dtype: str, bf16: bool, fp16: bool) -> None:
    cfg, _ = resolve_deepspeed_config(get_deepspeed_config("zero2"), 1, dtype=dtype)
    assert (cfg["bf16"]["enabled"], cfg["fp16"]["enabled"]) == (bf16, fp16)


def test_the_run_s_other_values() -> None:
    cfg, notes = resolve_deepspeed_config(
        get_deepspeed_config("zero3_offload"), 1, gradient_clipping=0, hidden_size=64, pin_memory=False
    )
    zero = cfg["zero_optimization"]
    assert cfg["gradient_clipping"] == 0
    assert zero["reduce_bucket_size"] == 4096
    assert zero["stage3_prefetch_bucket_size"] == 3686
    assert zero["stage3_param_persistence_threshold"] == 640
    assert zero["offload_param"]["pin_memory"] is zero["offload_optimizer"]["pin_memory"] is False
    assert len(notes) == 6
    zero2, _ = resolve_deepspeed_config(get_deepspeed_config("zero2"), 1, hidden_size=64, pin_memory=False)
    assert zero2 == get_deepspeed_config("zero2")


def test_zero_plus_plus_follows_nodes() -> None:
    cfg = get_deepspeed_config("zero++")
    two, _ = resolve_deepspeed_config(cfg, 16, ranks_per_node=8)
    assert two["zero_optimization"]["zero_hpz_partition_size"] == 8
    one, notes = resolve_deepspeed_config(cfg, 8)
    assert "zero_hpz_partition_size" not in one["zero_optimization"]
    assert any("zero_hpz_partition_size: 1 -> dropped" in note for note in notes)
    cfg["zero_optimization"]["zero_hpz_partition_size"] = 4  # a part of the node is a choice, and kept
    kept, _ = resolve_deepspeed_config(cfg, 16, ranks_per_node=8)
    assert kept["zero_optimization"]["zero_hpz_partition_size"] == 4
    cfg["zero_optimization"]["zero_hpz_partition_size"] = 3
    repaired, _ = resolve_deepspeed_config(cfg, 16, ranks_per_node=8)
    assert repaired["zero_optimization"]["zero_hpz_partition_size"] == 8
    plain, _ = resolve_deepspeed_config(get_deepspeed_config("zero3"), 16, ranks_per_node=8)
    assert "zero_hpz_partition_size" not in plain["zero_optimization"]


@pytest.mark.parametrize(
    ("dtype", "nodes", "weights", "gradients"),
    [
        ("fp16", 2, True, True),
        ("fp16", 1, True, False),
        ("bf16", 2, False, False),
        ("fp32", 2, False, False),
        (None, 2, False, False),
    ],
)
def test_quantisation_follows_dtype_and_nodes(
    dtype: str | None, nodes: int, weights: bool, gradients: bool
) -> None:
    cfg = get_deepspeed_config("zero++")
    cfg["zero_optimization"] |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    found, notes = resolve_deepspeed_config(cfg, 2 * nodes, ranks_per_node=2, dtype=dtype)
    zero = found["zero_optimization"]
    assert (zero["zero_quantized_weights"], zero["zero_quantized_gradients"]) == (weights, gradients)
    assert sum("quantized" in note for note in notes) == 2 - weights - gradients


def test_offload_without_a_compiler() -> None:
    for preset, changed in (("zero3_offload", True), ("zero2_offload", True), ("zero3", False)):
        cfg, notes = resolve_deepspeed_config(get_deepspeed_config(preset), 1, has_compiler=False)
        assert (cfg.get("zero_force_ds_cpu_optimizer") is False) is changed
        assert any("no C++ compiler" in note for note in notes) is changed
    for known in (None, True):
        cfg, _ = resolve_deepspeed_config(get_deepspeed_config("zero3_offload"), 1, has_compiler=known)
        assert "zero_force_ds_cpu_optimizer" not in cfg
    with pytest.raises(Refused, match="async_io"):
        resolve_deepspeed_config(get_deepspeed_config("zero3_nvme"), 1, nvme_path="/n", has_compiler=False)


def test_write_by_name_is_private_and_atomic(tmp_path: Path) -> None:
    folder = tmp_path / 'new "folder"' / "deep"
    first, second = write_deepspeed_config("zero2", folder), write_deepspeed_config("zero2", str(folder))
    assert first != second
    assert sorted(os.listdir(folder)) == sorted(Path(p).name for p in (first, second))
    assert first.endswith(".json")
    assert stat.S_IMODE(os.stat(first).st_mode) == 0o600
    assert load_deepspeed_config(first) == get_deepspeed_config("zero2")


@pytest.mark.parametrize(
    ("value", "place"),
    [(float("nan"), "a.b[1]"), (float("inf"), "a.b[1]"), ({1, 2}, "a.b[1]"), ({1: 2}, "a.b[1]")],
)
def test_what_json_cannot_hold_is_not_written(value: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        write_deepspeed_config({"a": {"b": [1, value]}}, tmp_path)
    assert problems(caught) == {place}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [None, 3, ["zero2"]])
def test_only_a_config_or_a_name_is_written(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="give a dict or a preset name"):
        write_deepspeed_config(wrong, tmp_path)
    with pytest.raises(ValueError, match="is not a DeepSpeed preset"):
        write_deepspeed_config("zero9", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n  "b": }', "line 2 column 8"),
        (b'{"a": 1,\n  // no\n "b": 2}', "line 2 column 3"),
        (b"{'a': 1}", "line 1 column 2"),
        (b'{"a": 1,}', "line 1"),
        (b"", "line 1 column 1"),
        (
            b'{"a": {"b": 1,\n\n "b" : 2}}',
            "'b' is there twice in one object, found at line 1 column 8, line 3 col",
        ),
        (b'{"a":\n NaN}', "NaN is not JSON, found at line 2 column 2"),
        (b'{"a":\n -Infinity}', "-Infinity is not JSON, found at line 2 column 2"),
        (b"[1]", "holds a JSON list"),
        (b"null", "holds a JSON NoneType"),
        (b'{"a":\n "\xff"}', "line 2 column 3: not UTF-8"),
        (b'{"a": ' + b"[" * 200_000, "cannot be parsed"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "is too large for a number, found at line 1 column 7"),
        (b'{"a":\n -1e999}', "-1e999 is too large for a number, found at line 2 column 2"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "more than 1048576 bytes"),
    ],
)
def test_a_broken_file_is_explained(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(Refused) as caught:
        load_deepspeed_config(path)
    assert problems(caught) == {"deepspeed_config"}
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_no_readable_file_is_explained(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, message in (
        (tmp_path, "is not a regular file"),
        (pipe, "is not a regular file"),  # and does not wait for a writer
        ("/dev/zero", "is not a regular file"),
        (tmp_path / "none.json", "No such file"),
        ("nul\0byte", "cannot be opened"),
    ):
        with pytest.raises(Refused, match=message) as caught:
            load_deepspeed_config(path)
        assert problems(caught) == {"deepspeed_config"}
