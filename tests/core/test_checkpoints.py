"""Broken checkpoints are refused by name and set aside; the next older one is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from soup_flows.checkpoints import (
    hash_files,
    list_checkpoints,
    newest_good,
    rotate,
    seal,
    set_aside,
    verify,
)
from soup_flows.manifest import MANIFEST, read_manifest
from soup_flows.safetensors_header import read_header
from tests.core.checkpoint_files import make_spec, safetensors, write_checkpoint

STRATEGIES = {
    "single": {"gpus": 1, "strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
    "full_shard": {"fsdp": "full_shard"},
    "lora": {"strategy": "ddp", "training": {"method": "lora"}},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_whole_checkpoint_verifies_and_each_missing_file_is_named(tmp_path: Path, name: str) -> None:
    good = write_checkpoint(tmp_path / "c", make_spec(tmp_path, **STRATEGIES[name]), 4)
    assert verify(good) == []
    files = list(read_manifest(good).files)
    assert len(files) >= 4
    for file in files:
        kept = good / file
        hidden = tmp_path / "hidden"
        kept.rename(hidden)
        assert verify(good) == [f"{file} is missing"]
        hidden.rename(kept)


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "full_shard", "lora"])
def test_a_save_without_a_rank_is_not_sealed(tmp_path: Path, name: str) -> None:
    good = write_checkpoint(tmp_path / "c", make_spec(tmp_path, **STRATEGIES[name]), 4)
    manifest = read_manifest(good)
    (good / MANIFEST).unlink()
    needed = [f for f in manifest.files if "rank_1" in f or f == "rng_state_1.pth" or "safetensors" in f]
    assert needed
    for file in needed:
        if "safetensors" in file and manifest.engine == "deepspeed":
            continue  # weights for people; DeepSpeed resumes from its own files
        (good / file).rename(tmp_path / "hidden")
        with pytest.raises(ValueError, match=Path(file).name):
            seal(good, manifest)
        assert not (good / MANIFEST).exists()
        (tmp_path / "hidden").rename(good / file)


def truncate(folder: Path) -> str:
    file = folder / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-1])
    return "optimizer.pt has"


def flip(folder: Path) -> str:
    file = folder / "rng_state_1.pth"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(bytes(data))
    return "rng_state_1.pth has changed"


def no_manifest(folder: Path) -> str:
    (folder / MANIFEST).unlink()
    return "manifest.json is missing"


def cut_manifest(folder: Path) -> str:
    file = folder / MANIFEST
    file.write_bytes(file.read_bytes()[:100])
    return "manifest.json cannot be read"


def other_run(folder: Path) -> str:
    file = folder / MANIFEST
    file.write_text(file.read_text().replace('"run"', '"another"'))
    return "of another run, another"


def other_step(folder: Path) -> str:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("checkpoint-4"), folder)
    return "of step 4"


def no_tensors(folder: Path) -> str:
    """A save that lied: an adapter without tensors, with hashes that fit."""
    (folder / "model.safetensors").write_bytes(safetensors({}))
    manifest = read_manifest(folder).model_copy(update={"files": hash_files(folder)})
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return "model.safetensors holds no tensors"


@pytest.mark.parametrize(
    "damage", [truncate, flip, no_manifest, cut_manifest, other_run, other_step, no_tensors]
)
def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_used(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    spec = make_spec(tmp_path, strategy="ddp")
    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        write_checkpoint(folder, spec, step)
    reason = damage(folder / "checkpoint-6")
    told: list[tuple[Path, list[str]]] = []
    found = newest_good(folder, run_id="run", on_broken=lambda path, reasons: told.append((path, reasons)))
    assert found == folder / "checkpoint-4"
    ((moved, reasons),) = told
    assert moved == folder / "broken" / "checkpoint-6"
    assert any(reason in text for text in reasons), reasons
    assert json.loads((moved / "reason.json").read_text())["reasons"] == reasons
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-4", "checkpoint-2"]


def test_nothing_good_is_none_and_nothing_is_deleted(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "nowhere") is None
    spec, folder = make_spec(tmp_path, strategy="ddp"), tmp_path / "checkpoints"
    for step in (2, 4):
        (write_checkpoint(folder, spec, step) / "optimizer.pt").unlink()
    again = folder / "broken" / "checkpoint-4"
    again.mkdir(parents=True)
    assert newest_good(folder) is None
    assert sorted(p.name for p in (folder / "broken").iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-4.2",
    ]


def test_training_can_go_back_behind_newer_checkpoints(tmp_path: Path) -> None:
    spec, folder = make_spec(tmp_path, strategy="ddp"), tmp_path / "checkpoints"
    for step in (2, 4, 6):
        write_checkpoint(folder, spec, step)
    assert newest_good(folder, max_step=4) == folder / "checkpoint-4"
    assert (folder / "broken" / "checkpoint-6").is_dir()


def test_rotation_keeps_the_newest_and_never_the_last_good_one_goes(tmp_path: Path) -> None:
    spec, folder = make_spec(tmp_path, strategy="ddp"), tmp_path / "checkpoints"
    for step in (9, 10, 11):
        write_checkpoint(folder, spec, step)
    assert rotate(folder, 2) == ["checkpoint-9"]
    truncate(folder / "checkpoint-11")
    assert rotate(folder, 1) == []
    assert len(list_checkpoints(folder)) == 2
    write_checkpoint(folder, spec, 12)
    assert rotate(folder, 1) == ["checkpoint-11", "checkpoint-10"]
    assert verify(folder / "checkpoint-12") == []


def test_setting_aside_keeps_every_file(tmp_path: Path) -> None:
    good = write_checkpoint(tmp_path / "c", make_spec(tmp_path, strategy="ddp"), 4)
    names = {p.name for p in good.iterdir()}
    moved = set_aside(good, ["why"])
    assert {p.name for p in moved.iterdir()} == names | {"reason.json"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut off"),
        (b"\xff" * 8, "cut off"),
        (safetensors({"a": [2, 3]})[:-1], "announced"),
        (safetensors({"a": [2, 3]}) + b"x", "announced"),
        (safetensors({"a": [2, 3]}).replace(b"[2, 3]", b"[2, 4]"), "bytes for shape"),
        ((2).to_bytes(8, "little") + b"[]", "instead of an object"),
    ],
)
def test_bad_safetensors_headers_are_explained(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_header(file)


def test_a_good_header_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(safetensors({"a": [2, 3], "b": []}))
    assert read_header(file) == {"a": ("F32", (2, 3)), "b": ("F32", ())}


# -- somebody or something meddled ------------------------------------------------------------------


def rewrite(folder: Path, **fields: object) -> None:
    """Change the manifest of a checkpoint as if another program had written it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"v": 2, "shards": {}}, "has version 2, this soup-flows reads 1: a newer one wrote it"),
        ({"files": {"../../secret": {"size": 1, "sha256": "0"}}}, "outside the checkpoint, '../../secret'"),
        ({"files": {"/etc/hostname": {"size": 1, "sha256": "0"}}}, "outside the checkpoint, '/etc/hostname'"),
        ({"run_id": "another"}, "of another run, another"),
        ({"step": 6}, "of step 6"),
        ({"world_size": 4}, "rank_2"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    folder = write_checkpoint(tmp_path / "c", make_spec(tmp_path, deepspeed="zero2"), 4)
    rewrite(folder, **fields)
    assert words in "; ".join(verify(folder, "run"))


def test_the_manifest_of_an_older_version_is_read(tmp_path: Path) -> None:
    """It lacks what has a default, and knows settings that are gone."""
    folder = write_checkpoint(tmp_path / "c", make_spec(tmp_path, strategy="ddp"), 4)
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in ("v", "learning_rate_scale", "save_seconds", "saved_at", "loss"):
        del manifest[name]
    manifest["identity"]["training.gone"] = 1
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert verify(folder, "run") == []


def test_what_a_link_leads_to_is_never_deleted(tmp_path: Path) -> None:
    spec, folder = make_spec(tmp_path, strategy="ddp"), tmp_path / "c"
    elsewhere = write_checkpoint(tmp_path / "elsewhere", spec, 2)
    for step in (4, 6):
        write_checkpoint(folder, spec, step)
    (folder / "checkpoint-2").symlink_to(elsewhere)
    assert rotate(folder, 2) == ["checkpoint-2"]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    assert verify(elsewhere) == []
    (folder / "checkpoint-8").symlink_to(tmp_path / "nowhere")
    found = newest_good(folder)
    assert found == folder / "checkpoint-6"


def test_a_broken_one_that_cannot_be_moved_is_passed_over(tmp_path: Path) -> None:
    """Another user's run, or a disk that can only be read: here a file stands where `broken/` would be."""
    spec, folder = make_spec(tmp_path, strategy="ddp"), tmp_path / "c"
    for step in (4, 6):
        write_checkpoint(folder, spec, step)
    (folder / "checkpoint-6" / "optimizer.pt").unlink()
    (folder / "broken").write_text("")
    told: list[str] = []
    good = newest_good(folder, on_broken=lambda path, reasons: told.append(f"{path.name}: {reasons}"))
    assert good == folder / "checkpoint-4"
    assert "optimizer.pt is missing" in told[0]
    assert "could not be moved" in told[0]
    assert (folder / "checkpoint-6").is_dir()


def test_a_half_renamed_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    spec, folder = make_spec(tmp_path, strategy="ddp"), tmp_path / "c"
    write_checkpoint(folder, spec, 4)
    staged = write_checkpoint(folder / ".saving", spec, 6)
    (folder / ".removing-checkpoint-2").mkdir()
    (folder / "checkpoint-8").mkdir()  # its name came before its content
    assert newest_good(folder) == folder / "checkpoint-4"
    assert staged.is_dir()
    assert (folder / "broken" / "checkpoint-8").is_dir()
