"""What ranks print and report holds no secret of their environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from soup_flows.launch import hide, layout
from soup_flows.launch.hide import SECRET_NAME, secrets_in
from soup_flows.launch.plan import PASSED_SECRETS
from soup_flows.launch.pump import Pump, RotatingLog
from soup_flows.launch.rank import EventWriter, write_error

SECRETS = {
    "HF_TOKEN": "hf_0123456789",
    "AWS_SECRET_ACCESS_KEY": "hf_0123456789/and more",
    "WANDB_API_KEY": "wb-0123456789",
    "AZURE_STORAGE_ACCOUNT_KEY": "az-0123456789==",
    "MLFLOW_TRACKING_URI": "http://user:mlflow-0123@host:5000",
}
OTHERS = {
    "TOKENIZERS_PARALLELISM": "false-or-not",
    "SOME_TOKEN": "true",
    "CACHE": "/cache/of/things",
    "URL": "http://host:5000/a@b",
}


def test_what_is_secret_is_told_by_its_variable() -> None:
    found = secrets_in(SECRETS | OTHERS)
    assert set(found.values()) == {f"<{name}>" for name in SECRETS}
    assert next(iter(found)) == "hf_0123456789/and more"  # before the one that is a part of it
    assert set(found) == {"mlflow-0123", *(v for v in SECRETS.values() if "://" not in v)}
    assert {name for name in PASSED_SECRETS if not SECRET_NAME.search(name)} == set()


@pytest.fixture
def with_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A text with every secret of this process's environment."""
    monkeypatch.setenv(layout.ATTEMPT_DIR, str(tmp_path / "attempt-1"))
    for name, value in (SECRETS | OTHERS).items():
        monkeypatch.setenv(name, value)
    hide._own.cache_clear()
    yield "; ".join(f"{name}={value}" for name, value in (SECRETS | OTHERS).items())
    monkeypatch.undo()
    hide._own.cache_clear()


def test_secrets_reach_no_file(with_secrets: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    pump = Pump(read, RotatingLog(tmp_path / "log", 1 << 20))
    for begin, end in ((0, 40), (40, None)):  # in pieces, as pipes give them
        os.write(write, with_secrets[begin:end].encode())
        pump.drain(0.0)
    os.write(write, f"\n50% {with_secrets}\r".encode())
    os.close(write)
    pump.finish(0.0)
    os.close(read)
    write_error(RuntimeError(with_secrets))
    EventWriter(tmp_path / "more.jsonl", 0).write("warning", inner=[{"text": with_secrets}])
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 4
    for file in files:
        text = file.read_text()
        assert "<HF_TOKEN>" in text, file
        assert not [value for value in (*secrets_in(SECRETS),) if value in text], file
        assert "/cache/of/things" in text
        assert "http://user:<MLFLOW_TRACKING_URI>@host:5000" in text
