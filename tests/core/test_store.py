"""The checkpoint store: what is confirmed is there, what is not does not count, and it comes back whole."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from soup_flows.checkpoints import seal, verify
from soup_flows.errors import Refused
from soup_flows.launch.events import tail_events
from soup_flows.launch.rank import EventWriter
from soup_flows.manifest import Manifest
from soup_flows.mirror import LINKS, Mirror
from soup_flows.paths import RunPaths
from soup_flows.run_events import read_attempt
from soup_flows.store import Store

RUN = "run-1"


class LossyFileSystem(LocalFileSystem):
    """A store that says yes and keeps something else."""

    protocol = "lossy"

    def put_file(self, path1: str, path2: str, callback: Any = None, **kwargs: Any) -> None:
        super().put_file(path1, path2, **kwargs)
        target = Path(self._strip_protocol(path2))
        if target.suffix == ".safetensors":
            content = target.read_bytes()
            target.write_bytes(b"\0" + content[1:])


fsspec.register_implementation("lossy", LossyFileSystem, clobber=True)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.of(tmp_path / "here", RUN).create()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/share", {})


def make_checkpoint(paths: RunPaths, step: int) -> Path:
    folder = paths.checkpoints / f"checkpoint-{step}"
    (folder / "inner").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(_one_tensor(step))
    (folder / "inner" / "more.txt").write_text("more")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in ("rng_state.pth", "scheduler.pt", "optimizer.pt"):
        (folder / name).write_bytes(bytes([step]) * 100)
    manifest = Manifest(run_id=RUN, step=step, total_steps=9, strategy="single", engine="single", world_size=1,
                        dtype="fp32", adapters=False, identity={}, spec_hash="")  # fmt: skip
    seal(folder, manifest)
    return folder


def _one_tensor(step: int) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes([step, 0, 0, 0])


def test_a_checkpoint_comes_back_whole_on_another_host(store: Store, paths: RunPaths, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        store.push_checkpoint(make_checkpoint(paths, step), RUN, f"checkpoint-{step}")
    assert store.steps(RUN) == [6, 4]  # the oldest went
    other = RunPaths.of(tmp_path / "there", RUN).checkpoints
    found = store.fetch_newest(RUN, other)
    assert found == other / "checkpoint-6"
    assert verify(found, RUN) == []
    assert (found / "inner" / "more.txt").read_text() == "more"
    assert store.fetch_newest(RUN, other) is None  # nothing newer
    assert store.steps("run-2") == []


def test_memory_stores_work_too(paths: RunPaths, tmp_path: Path) -> None:
    store = Store("memory://soup", {}, keep=1)
    done = store.push_checkpoint(make_checkpoint(paths, 3), RUN, "checkpoint-3")
    assert done.url == f"memory://soup/{RUN}/checkpoints/checkpoint-3"
    assert store.fetch_newest(RUN, tmp_path / "c") is not None


@pytest.mark.parametrize("confirm", ["content", "size"])
def test_what_arrived_otherwise_does_not_count(paths: RunPaths, tmp_path: Path, confirm: Any) -> None:
    store = Store(f"lossy://{tmp_path}/share", {}, confirm=confirm)
    folder = make_checkpoint(paths, 2)
    other = tmp_path / "c"
    if confirm == "content":
        with pytest.raises(OSError, match=r"model\.safetensors differs"):
            store.push_checkpoint(folder, RUN, "checkpoint-2")
        assert store.steps(RUN) == []
    else:  # a wrong byte of the right size is seen when it comes back
        store.push_checkpoint(folder, RUN, "checkpoint-2")
    assert store.fetch_newest(RUN, other) is None
    assert not (other / "checkpoint-2").exists()


def test_an_upload_that_was_cut_off_does_not_count(store: Store, paths: RunPaths, tmp_path: Path) -> None:
    for step in (2, 4):
        store.push_checkpoint(make_checkpoint(paths, step), RUN, f"checkpoint-{step}")
    cut = tmp_path / "share" / RUN / "checkpoints" / "checkpoint-4"
    (cut / "manifest.json").unlink()
    assert store.steps(RUN) == [2]
    damaged = cut.with_name("checkpoint-2") / "optimizer.pt"
    damaged.write_bytes(b"x" * 100)
    other = tmp_path / "c"
    assert store.fetch_newest(RUN, other) is None
    (aside,) = (other / "broken").iterdir()
    assert "optimizer.pt has changed" in (aside / "reason.json").read_text()


def test_a_manifest_cannot_name_files_elsewhere(store: Store, paths: RunPaths, tmp_path: Path) -> None:
    store.push_checkpoint(make_checkpoint(paths, 2), RUN, "checkpoint-2")
    file = tmp_path / "share" / RUN / "checkpoints" / "checkpoint-2" / "manifest.json"
    file.write_text(file.read_text().replace("inner/more.txt", "../../../../evil.txt"))
    assert store.fetch_newest(RUN, tmp_path / "c") is None
    assert not list(tmp_path.rglob("evil.txt"))
    store.push_checkpoint(make_checkpoint(paths, 1), RUN, "checkpoint-1")
    assert store.fetch_newest(RUN, tmp_path / "c") == tmp_path / "c" / "checkpoint-1"


@pytest.mark.parametrize("url", ["nosuch://x", "s3://bucket/x"])
def test_a_url_that_cannot_be_opened_is_refused(url: str) -> None:
    if url.startswith("s3") and "s3fs" in str(shutil.which("s3fs")):
        pytest.skip("s3fs is here")
    with pytest.raises(Refused, match=r"STORE001.*" + url.split(":", maxsplit=1)[0]):
        Store(url, {})


class TalkativeFileSystem(LocalFileSystem):
    """A store whose errors say everything it was given."""

    protocol = "talkative"

    def put_file(self, path1: str, path2: str, callback: Any = None, **kwargs: Any) -> None:
        raise OSError(f"403 for {path2} with {self.storage_options}")


fsspec.register_implementation("talkative", TalkativeFileSystem, clobber=True)


def test_what_the_store_says_holds_no_secret(paths: RunPaths, tmp_path: Path) -> None:
    secret = {"key": "planted-key", "client": {"password": "planted-inner"}}
    store = Store(f"talkative://{tmp_path}/share", {"endpoint": "http://e"}, secret_options=secret)
    with pytest.raises(OSError, match="planted-key") as caught:
        store.push_checkpoint(make_checkpoint(paths, 2), RUN, "checkpoint-2")
    assert "planted-inner" in str(caught.value)
    words = store.words(caught.value)
    assert "planted" not in words
    assert "'key': '<key>'" in words
    assert "http://e" in words
    with pytest.raises(Refused, match="STORE001") as refused:
        Store("nosuch://user:planted-word@host/x?sig=planted-sig", {}, secret_options=secret)
    assert "planted" not in str(refused.value)
    assert "nosuch://host/x" in str(refused.value)


def test_the_mirror_follows_the_run(store: Store, paths: RunPaths) -> None:
    attempt = paths.attempt(1)
    attempt.root.mkdir()
    mirror = Mirror(store, paths, 1)
    for step in (2, 4):
        folder = make_checkpoint(paths, step)
        mirror.on_events([{"kind": "checkpoint", "rank": 0, "path": str(folder)}, {"kind": "step"}])
        shutil.rmtree(folder)  # rotation may be faster than the upload
    paths.model.mkdir()
    (paths.model / "model.safetensors").write_bytes(_one_tensor(9))
    attempt.result.write_text(json.dumps({"model": str(paths.model), "step": 9, "saved": {}}))
    mirror.finish(lambda: None)
    found = read_attempt(attempt)
    assert [m.what for m in found["mirrored"]] == ["checkpoint-2", "checkpoint-4", "model"]
    assert found["mirror_failures"] == ()
    assert not (paths.root / LINKS).exists()
    model = Path(found["mirrored"][-1].url.removeprefix("file://"))
    assert (model / "model.safetensors").read_bytes() == _one_tensor(9)
    assert "model.safetensors" in json.loads((model / "soup-mirror.json").read_text())["files"]


def test_a_store_that_refuses_costs_only_the_copy(paths: RunPaths, tmp_path: Path) -> None:
    attempt = paths.attempt(1)
    attempt.root.mkdir()
    (tmp_path / "share").write_text("a file where a folder should be")
    mirror = Mirror(Store(f"file://{tmp_path}/share", {}), paths, 1)
    mirror.on_events([{"kind": "checkpoint", "rank": 0, "path": str(make_checkpoint(paths, 2))}])
    mirror.finish(lambda: None)
    (failure,) = read_attempt(attempt)["mirror_failures"]
    assert failure.startswith("checkpoint-2: ")


def test_a_stop_does_not_wait_for_a_slow_store(
    store: Store, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = paths.attempt(1)
    attempt.root.mkdir()

    def slow(*_: object) -> None:
        time.sleep(60)
        raise OSError("too late")

    monkeypatch.setattr(Store, "push_checkpoint", slow)
    mirror = Mirror(store, paths, 1)
    mirror.on_events([{"kind": "checkpoint", "rank": 0, "path": str(make_checkpoint(paths, 2))}])
    mirror.finish(lambda: "cancelled")
    EventWriter(attempt.events, 0).write("after")
    assert [event["kind"] for event in tail_events(attempt.events).poll()] == ["after"]
