"""Where every file of a run is, and the one way files are written."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soup_flows.user_file import expanded


@dataclass(frozen=True)
class RunPaths:
    """Names every file of one run, below `output_dir/runs/<run id>/`.

    The folder alone is enough to understand, resume and audit the run. Nothing is created by naming it;
    `create()` makes the folder with mode 0700.
    """

    root: Path

    @classmethod
    def of(cls, output_dir: str | Path, run_id: str) -> RunPaths:
        """Return the paths of run `run_id` below `output_dir` (made absolute)."""
        return cls(expanded(output_dir).absolute() / "runs" / run_id)

    def create(self) -> RunPaths:
        """Create the run directory, readable by its owner only."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)
        return self

    @property
    def spec(self) -> Path:
        """The `TrainingSpec` of the run, JSON."""
        return self.root / "spec.json"

    @property
    def hardware(self) -> Path:
        """The `Hardware` the plan was made for, JSON."""
        return self.root / "hardware.json"

    @property
    def plan(self) -> Path:
        """The `ShardingPlan`, JSON."""
        return self.root / "plan.json"

    @property
    def launch(self) -> Path:
        """The `LaunchPlan`, JSON; environment values that are secret appear as references."""
        return self.root / "launch.json"

    @property
    def report(self) -> Path:
        """The `TrainReport`, JSON."""
        return self.root / "report.json"

    @property
    def attempts(self) -> Path:
        """One JSON line per attempt."""
        return self.root / "attempts.jsonl"

    @property
    def data(self) -> Path:
        """What the ranks train on and the data report, JSON (`soup_flows.data.prepare.PreparedData`)."""
        return self.root / "data.json"

    @property
    def orders(self) -> Path:
        """Where the present attempt starts from, JSON; see `soup_flows.resume.Orders`."""
        return self.root / "orders.json"

    @property
    def stop_request(self) -> Path:
        """Written by `soup-flows stop`, JSON."""
        return self.root / "stop.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """Folder of the final model."""
        return self.root / "model"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's files, with `training.report_to=["tensorboard"]`."""
        return self.root / "tensorboard"

    @property
    def rehearsal(self) -> Path:
        """Folder of the rehearsal; it stays only if that failed."""
        return self.root / "rehearsal"

    @property
    def temp(self) -> Path:
        """Folder of files that live as long as an attempt, the temp config among them."""
        return self.root / "tmp"

    def config(self, engine: str) -> Path:
        """The kept copy of the sharding config: `ds_config.json` or `fsdp_config.json`."""
        return self.root / ("ds_config.json" if engine == "deepspeed" else "fsdp_config.json")

    def attempt(self, number: int) -> AttemptPaths:
        """Return the paths of attempt `number`, counted from 1."""
        return AttemptPaths(self.root / f"attempt-{number}")


@dataclass(frozen=True)
class AttemptPaths:
    """Names every file of one attempt of a run."""

    root: Path

    @property
    def events(self) -> Path:
        """Structured events of the ranks, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.root / "logs"

    def rank_log(self, rank: int) -> Path:
        """Everything rank `rank` printed."""
        return self.logs / f"rank_{rank}.log"

    @property
    def launcher_log(self) -> Path:
        """Everything the elastic agent printed."""
        return self.logs / "launcher.log"

    @property
    def error(self) -> Path:
        """The failed attempt's first error, JSON."""
        return self.root / "error.json"

    @property
    def errors(self) -> Path:
        """Folder with one error file per failed rank."""
        return self.root / "errors"

    @property
    def receipt(self) -> Path:
        """What the supervisor signalled and what was left (nothing), JSON."""
        return self.root / "receipt.json"

    def receipt_of(self, node: int) -> Path:
        """The receipt of one of several hosts; that of host 0 is in `receipt` until all are put together there."""
        return self.receipt if node == 0 else self.root / f"receipt_node_{node}.json"

    @property
    def devices(self) -> Path:
        """The devices that the attempt leased, JSON."""
        return self.root / "devices.json"

    @property
    def energy(self) -> Path:
        """The energy counters of the GPUs before and after, JSON."""
        return self.root / "energy.json"

    @property
    def result(self) -> Path:
        """Written last by rank 0 when training finished and the model was saved, JSON."""
        return self.root / "result.json"


def write_atomic(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    """Write `text` beside `path` and rename it into place, so that no reader ever sees half of it.

    Args:
        path: the final name; its folder must exist.
        text: the content; `str` is encoded as UTF-8.
        mode: the permission bits of the new file.

    Returns:
        `path`.

    Raises:
        OSError: if the folder is missing or full; the temporary file is removed.
    """
    data = text.encode() if isinstance(text, str) else text
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path, value: Any, mode: int = 0o600) -> Path:
    """Write `value` as indented JSON, atomically; see `write_atomic`."""
    return write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", mode)


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest of its parents that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def is_writable_folder(path: Path) -> bool:
    """Whether this user may make files in `path`."""
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
