"""What a run leaves, after a full disk, a crash, or by another's hand: every file of a run directory can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from soup_flows.attempts import reconcile
from soup_flows.checkpoints import newest_good, verify
from soup_flows.compare import tokens_per_second
from soup_flows.diagnose import diagnose, diagnosis_text
from soup_flows.hardware.energy import used_joules
from soup_flows.launch.engines import finished
from soup_flows.launch.events import (
    LINE_LIMIT_BYTES,
    EventTail,
    LineTail,
    last_lines,
    parse_event,
    read_events,
)
from soup_flows.launch.hosts import Hosts
from soup_flows.launch.hosts import missing as hosts_without_receipt
from soup_flows.launch.outcome import classify, warn_of_exit
from soup_flows.launch.receipt import collect_receipts, read_receipt, read_receipt_file
from soup_flows.ledger import Attempt, append, read_ledger
from soup_flows.live_state import LiveState, live_page, summary
from soup_flows.manifest import MANIFEST, missing, read_manifest
from soup_flows.measured import needed_at_oom
from soup_flows.pages import report_page
from soup_flows.paths import AttemptPaths, RunPaths
from soup_flows.report import TrainReport
from soup_flows.run_events import read_attempt
from soup_flows.spec import RecoverySettings
from soup_flows.stop import asked_to_stop
from tests.core.checkpoint_files import make_spec, write_checkpoint
from tests.fuzz.spoil import documents, fuzz, lines, little_memory, put, spoilt, value_or_refusal

PROOF = {
    "world_size": 2,
    "failures": [],
    "ranks": [
        {"rank": 0, "host": "a", "pid": 7, "device": "cpu", "wrapper": "FSDPModule", "zero_stage": 0,
         "optimizer": "AdamW",
         "parameters_total": 10, "parameters_held": 5, "trainable_total": 10, "optimizer_held": 5, "slack": 0,
         "dtypes": {"float32": 5}, "step": 1}
    ],
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"v": 1, "rank": 0, "time": 1700000000.5 + number, **event}
    for number, event in enumerate(
        (
            {"kind": "started", "world_size": 2, "pid": 7, "from_step": 0, "set_aside": ["x: y"]},
            {"kind": "data", "train_rows": 10, "eval_rows": 2, "total_steps": 20},
            {"kind": "proof", **PROOF},
            {
                "kind": "metrics",
                "step": 1,
                "loss": 2.5,
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "seconds": 0.5,
            },
            {
                "kind": "step",
                "step": 1,
                "seconds": 0.5,
                "work_seconds": 0.4,
                "tokens": 100,
                "host_bytes": 1 << 30,
            },
            {
                "kind": "step",
                "step": 2,
                "seconds": 0.5,
                "work_seconds": 0.4,
                "tokens": 100,
                "device_bytes": 1 << 30,
            },
            {"kind": "evaluation", "step": 2, "eval_loss": 2.0},
            {"kind": "checkpoint", "step": 2, "path": "/x", "bytes": 9, "seconds": 0.1},
            {"kind": "save_failed", "step": 2, "reason": "full"},
            {"kind": "mirrored", "what": "model", "url": "s3://x", "bytes": 9, "seconds": 0.1},
            {"kind": "mirror_failed", "what": "model", "reason": "no"},
            {"kind": "memory", "host_peak_bytes": 9, "device_peak_allocated_bytes": 9},
            {"kind": "resumed", "step": 3, "from_step": 2, "checkpoint": "/x", "weights_only": False},
            {"kind": "stopped", "step": 3, "saved": True},
            {"kind": "early_stop", "step": 3, "best_step": 2, "waited": 3},
            {"kind": "best", "step": 2, "eval_loss": 2.0, "last_step": 3, "last_eval_loss": 2.1},
            {"kind": "warning", "message": "careful"},
            {"kind": "finished", "step": 3},
        )
    )
]
RECEIPT: dict[str, Any] = {
    "v": 1, "run_id": "run", "reason": "rank_died", "detail": "d", "started": 1.0, "stop_time": 9.0, "exit_code": 1,
    "seconds": 8.0, "signalled": [{"pid": 8, "signal": "SIGTERM", "rank": 1}],
    "dead_ranks": [{"rank": 0, "pid": 7, "time": 8.0}], "first_failure": {"rank": 0, "pid": 7, "exit_code": -9},
    "stall": {"rank": 1, "step": 3, "phase": "train", "quiet_s": 9.0, "threshold_s": 5.0,
              "beats": [{"rank": 1, "step": 3, "phase": "train", "quiet_s": 9.0}]},
    "oom_kills_before": 0, "oom_kills_after": 1, "scheduler": "Slurm",
    "kernel": ["Out of memory: Killed process 7 (python)"],
    "survivors": [], "log_bytes_lost": 0,
}  # fmt: skip
ERROR: dict[str, Any] = {
    "rank": 0, "type": "builtins.ValueError", "types": ["ValueError"], "message": "no", "traceback": "Traceback",
    "time": 7.0,
    "failure_class": "bad_data", "advice": "look",
}  # fmt: skip
RESULT: dict[str, Any] = {
    "finished": True,
    "step": 3,
    "total_steps": 3,
    "model": "/m",
    "saved": {"tensors": 3},
}
ROW: dict[str, Any] = json.loads(Attempt(number=1, started=1.0, state="failed").model_dump_json())
REPORT: dict[str, Any] = json.loads(
    TrainReport(run_id="run", run_dir="/r", state="completed", model="/m", seconds=3.0).model_dump_json()
)


def attempt_of(folder: Path) -> AttemptPaths:
    paths = RunPaths(folder / "run").attempt(1)
    paths.errors.mkdir(parents=True, exist_ok=True)
    return paths


@fuzz(150)
@given(content=lines(EVENTS), cuts=st.lists(st.integers(0, 400), max_size=4))
@example(content=b'{"v": 1, "kind": "data", "total_steps": 1e999}\n', cuts=[])
@example(content=b'{"v": 1, "kind": "metrics", "loss": 1, "step": "\\ud800"}\n', cuts=[])
@example(content=b'{"v": 1, "kind": "started", "set_aside": 3}\n{"v": 1, "kind": ["a"]}\n', cuts=[])
@example(content=b"[" * 100_000 + b"\n", cuts=[3])
def test_events_while_they_are_written(content: bytes, cuts: list[int], tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"")
    tail, state, seen = EventTail(file), LiveState(), []
    with file.open("ab", buffering=0) as writer, little_memory():
        begin = 0
        for cut in [*sorted(cuts), len(content)]:
            writer.write(content[begin:cut])
            begin = max(begin, cut)
            while events := tail.poll():
                seen += events
                state.update(events)
                summary(state).encode()
                live_page(state).encode()
    whole = [parse_event(line.decode("utf-8", "replace")) for line in content.split(b"\n")[:-1]]
    assert seen == [event for event in whole if event is not None]
    assert list(read_events(file)) == seen


@fuzz(60)
@given(
    parts=st.lists(
        st.lists(
            st.sampled_from(("a", "\N{LATIN SMALL LETTER A WITH DIAERESIS}b", "", "c" * 50)), max_size=6
        ),
        max_size=5,
    ),
    limit=st.integers(1, 30),
)
def test_no_line_is_lost_or_read_twice_when_a_log_is_rotated(
    parts: list[list[str]], limit: int, tmp_path: Path
) -> None:
    """Each part is a file of its own; before the next one it is read up to its end, as the poll does in time."""
    log = tmp_path / "rank_0.log"
    log.unlink(missing_ok=True)
    tail, found = LineTail(log), []
    for part in parts:
        with log.open("a", encoding="utf-8") as writer:
            writer.writelines(f"{line}\n" for line in part)
        while read := tail.poll(limit):
            found += read
        log.replace(tmp_path / "rank_0.log.1")
    assert found == [line for part in parts for line in part]
    assert tail.finish() == []


def test_a_line_without_end_is_given_out_in_parts(tmp_path: Path) -> None:
    file = put(tmp_path / "log", b"x" * (3 * LINE_LIMIT_BYTES) + b"\nend\n")
    tail, found = LineTail(file), []
    while read := tail.poll():
        found += read
    assert "".join(found) == "x" * (3 * LINE_LIMIT_BYTES) + "end"
    assert all(len(line) <= 2 * LINE_LIMIT_BYTES for line in found)


def test_events_are_read_to_the_end_however_many_there_are(tmp_path: Path) -> None:
    """A long run has more than one MiB of them; its report once had the first MiB alone."""
    attempt = attempt_of(tmp_path)
    steps = 9000
    rows = [
        {"v": 1, "time": 1.0 + n, "kind": "metrics", "step": n + 1, "loss": 1.0, "note": "x" * 60}
        for n in range(steps)
    ]
    put(attempt.events, "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert attempt.events.stat().st_size > LINE_LIMIT_BYTES
    found = read_attempt(attempt)
    assert (found["steps"], len(found["train"])) == (steps, steps)
    long_rubbish = put(tmp_path / "e", b'{"v": 9}\n' * 200_000 + json.dumps(rows[0]).encode() + b"\n")
    assert [event["step"] for event in read_events(long_rubbish)] == [1]


@fuzz(60)
@given(
    events=lines(EVENTS),
    receipt=documents(RECEIPT),
    error=documents(ERROR),
    result=documents(RESULT),
    report=documents(REPORT),
    ledger=lines([ROW]),
)
def test_a_folder_is_explained_whatever_is_in_it(
    events: bytes, receipt: bytes, error: bytes, result: bytes, report: bytes, ledger: bytes, tmp_path: Path
) -> None:
    attempt = attempt_of(tmp_path)
    paths = RunPaths(tmp_path / "run")
    put(attempt.events, events)
    put(attempt.receipt, receipt)
    put(attempt.errors / "rank_0.json", error)
    put(attempt.result, result)
    put(attempt.root / "heartbeat" / "rank_0", result[:40])
    put(attempt.rank_log(0), events)
    put(paths.report, report)
    put(paths.attempts, ledger)
    put(attempt.energy, receipt)
    put(paths.stop_request, result)
    with little_memory():
        diagnosis_text(diagnose(paths.root)).encode()
        diagnose(paths.root).model_dump_json()
        tokens_per_second(paths, 1)
        finished(attempt)
        used_joules(attempt.energy)
        asked_to_stop(paths)
        paths.report.unlink()
        diagnose(paths.root)
        rows = reconcile(paths, RecoverySettings())
        assert read_ledger(paths.attempts) == rows
        made = TrainReport(
            run_id="run", run_dir=str(paths.root), state="failed", ledger=rows, **read_attempt(attempt)
        )
        made.save()
        assert TrainReport.load(paths.root) == made
        report_page(made).encode()


@fuzz(200)
@given(receipt=spoilt(RECEIPT, most=4), second=spoilt(RECEIPT))
def test_receipts(receipt: Any, second: Any, tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path)
    put(attempt.receipt, json.dumps(receipt).encode())
    put(attempt.receipt_of(1), json.dumps(second).encode())
    for found in (
        read_receipt_file(attempt.receipt),
        collect_receipts(attempt),
        read_receipt(json.dumps(receipt)),
    ):
        verdict = classify(attempt, found)
        verdict.cause.encode()
        warn_of_exit(found)


@fuzz(100)
@given(beat=st.binary(max_size=30) | st.sampled_from((b"a runs", b"a ended", b"a runs\n" * 100)))
def test_signs_of_life(beat: bytes, tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path)
    put(attempt.root / "heartbeat" / "node_1", beat)
    put(attempt.root / "heartbeat" / "node_x", beat)
    attempt.receipt_of(1).unlink(missing_ok=True)
    here = Hosts(attempt.root, 0, 2, floor_s=1.0)
    here.lost(0.0, 0.0)
    words = here.lost(10.0, 10.0)
    names = hosts_without_receipt(attempt.root)
    assert (words is None) is (not names)
    "".join([words or "", *names]).encode()


@fuzz(150)
@given(
    report=documents(
        REPORT | {"train": [{"step": 1, "loss": 2.0}], "memory": [{"rank": 0, "host_peak_bytes": 3}]}
    )
)
def test_reports(report: bytes, tmp_path: Path) -> None:
    put(tmp_path / "report.json", report)
    found = value_or_refusal(lambda: TrainReport.load(tmp_path), ValueError)
    if found is not None:
        report_page(found).encode()
        found.model_dump_json()


@fuzz(150)
@given(rows=lines([ROW, ROW | {"number": 2}]))
def test_ledgers(rows: bytes, tmp_path: Path) -> None:
    file = put(tmp_path / "attempts.jsonl", rows)
    before = read_ledger(file)
    append(file, Attempt(number=10**6, started=1.0, state="failed"))
    assert read_ledger(file)[: len(before)] == before
    assert read_ledger(file)[-1].number >= 10**6


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints", make_spec(tmp_path), 10)


def test_manifests(checkpoint: Path) -> None:
    good = json.loads((checkpoint / MANIFEST).read_text())

    @fuzz(200)
    @given(content=documents(good))
    @example(content=b"[" * 100_000)
    @example(content=json.dumps(good | {"world_size": 10**12}).encode())
    @example(content=json.dumps(good | {"files": {"\x00": {"size": 1, "sha256": ""}}}).encode())
    @example(content=json.dumps(good | {"files": {"a" * 5000: {"size": 1, "sha256": ""}}}).encode())
    def check(content: bytes) -> None:
        put(checkpoint / MANIFEST, content)
        manifest = value_or_refusal(lambda: read_manifest(checkpoint), ValueError)
        if manifest is not None:
            with little_memory():
                missing(manifest)
        with little_memory():
            assert all(reason.strip() and reason.encode() for reason in verify(checkpoint, "run"))
        state = checkpoint / "trainer_state.json"
        kept = state.read_bytes()
        put(state, content)
        with little_memory():
            verify(checkpoint)
        put(state, kept)

    check()


def test_a_checkpoint_with_any_manifest_is_used_or_set_aside(checkpoint: Path) -> None:
    content, told = (checkpoint / MANIFEST).read_text(), []

    def tell(folder: Path, reasons: list[str]) -> None:
        told.extend(reasons)

    for spoiled in (
        content.replace('"step": 10', '"step": "ten"'),
        content[:-9],
        "[]",
        "[" * 100_000,
        '{"v": 99}',
    ):
        (checkpoint / MANIFEST).write_text(spoiled)
        told.clear()
        assert newest_good(checkpoint.parent, on_broken=tell) is None
        assert told
        next((checkpoint.parent / "broken").glob("checkpoint-10*")).rename(checkpoint)
    (checkpoint / MANIFEST).write_text(content)
    assert newest_good(checkpoint.parent) == checkpoint


@fuzz(100)
@given(text=st.text(max_size=40), number=st.sampled_from(("1.2.3", "9" * 400, "0", "1.5", ".", "1e5")))
@example(text="", number="1.2.3")
@example(text="", number="9" * 400)
def test_messages_of_a_full_gpu(text: str, number: str) -> None:
    message = f"{text} Tried to allocate {number} GiB. {number} MiB is allocated by PyTorch, {text}"
    needed = needed_at_oom(message)
    assert needed is None or needed >= 0


@fuzz(100)
@given(content=st.binary(max_size=200), count=st.integers(1, 50))
def test_last_lines(content: bytes, count: int, tmp_path: Path) -> None:
    file = put(tmp_path / "log", content)
    found = last_lines(file, count)
    assert len(found) <= count
    assert all(isinstance(line, str) for line in found)
