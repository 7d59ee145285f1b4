"""What is measured beside this package: how each is installed, and how it is started on the same rows."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import HOOK, ROOT, Row, quiet_environment, timed

PROGRAMS = ROOT / "benchmarks" / "programs"
RANKS = 2
LLAMA_FACTORY, SOUP = "llama-factory", "soup"
PINS = {LLAMA_FACTORY: ("llamafactory", "0.9.5"), SOUP: ("soup-cli", "0.77.0")}
"""What is installed into each environment beside this environment's torch, by name and version."""
LIBRARIES = ("torch", "transformers", "trl", "accelerate")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0")  # fmt: skip
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--multi_cpu", "--num_processes", str(RANKS),
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", "0")  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A way of training the rows: `program` is called with ASSETS, OUT and `words`, by `launcher` if there is one."""

    label: str
    program: str
    words: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    environment: str = ""
    """Key of `PINS`; empty for the environment that this package is in."""


PEERS = {
    "ours": Peer("soup-flows", "ours.py", ("tasks",)),
    "seen": Peer("soup-flows, new rows for a model seen before", "ours.py", ("seen",)),
    "flow": Peer("soup-flows, flow with a Prefect server", "ours.py", ("flow",)),
    "grouped": Peer("Trainer, grouped by length", "plain.py", ("grouped",), TORCHRUN),
    "padded": Peer("Trainer, padded", "plain.py", ("random",), TORCHRUN),
    "accelerate": Peer("Trainer under accelerate launch", "plain.py", ("random",), ACCELERATE),
    "trl": Peer("TRL, packing", "trl_sft.py", (), TORCHRUN),
    LLAMA_FACTORY: Peer("LLaMA-Factory, neat_packing", "llama_factory.py", environment=LLAMA_FACTORY),
    SOUP: Peer("Soup, packing", "soup.py", environment=SOUP),
}


class NotInstalled(Exception):
    """A peer is not there; the text says why."""


def python_of(peer: Peer, folder: Path) -> Path:
    """Return the interpreter of a peer's environment, which is made when it is missing.

    Args:
        peer: which one.
        folder: where the environments are.

    Raises:
        NotInstalled: if it cannot be installed.
    """
    if not peer.environment:
        return Path(sys.executable)
    name, version = PINS[peer.environment]
    home = (folder / peer.environment).absolute()
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    if versions_of(python, (name,)).get(name) != version:
        torch = importlib.metadata.version("torch")
        argv = [str(python), "-m", "pip", "install", "-q", f"torch=={torch}", f"{name}=={version}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotInstalled(f"{name} {version}: {done.stderr.strip().splitlines()[-1][:300]}")
    return python


def versions_of(python: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the named packages in another environment, of those that are there."""
    code = (
        "import importlib.metadata as m, json, sys\nfound = {}\nfor name in sys.argv[1:]:\n    try:\n"
        "        found[name] = m.version(name)\n    except m.PackageNotFoundError:\n        pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def peer_versions(names: list[str], folder: Path) -> dict[str, str]:
    """Return `peer: package` -> version for the peers that have environments of their own."""
    found = {}
    for key in names:
        peer = PEERS[key]
        if not peer.environment:
            continue
        try:
            python = python_of(peer, folder)
        except NotInstalled:
            continue
        of = versions_of(python, (PINS[peer.environment][0], *LIBRARIES))
        found |= {f"{peer.environment}: {package}": version for package, version in of.items()}
    return found


def run_peer(
    key: str, assets: Path, peers: Path, *, steps: int | None = None, out: Path | None = None
) -> Row:
    """Train the rows once with a peer.

    Args:
        key: of `PEERS`.
        assets: what `make_assets` wrote.
        peers: folder of the environments.
        steps: most optimizer steps; one epoch when None.
        out: an empty folder that is kept; a temporary one when None.

    Returns:
        What `timed` returns; `run`, `command`; where it trained: what the ranks counted (see `counted`); of ours also
        `phases`, Unix seconds. A peer that cannot be installed has `why` in their place.
    """
    peer = PEERS[key]
    try:
        python = python_of(peer, peers)
    except NotInstalled as missing:
        return {"run": key, "why": str(missing)}
    kept = Path(tempfile.mkdtemp(prefix="bench-")) if out is None else out
    try:
        (kept / "counts").mkdir(parents=True)
        words = [str(PROGRAMS / peer.program), str(assets.absolute()), str(kept), *peer.words]
        words += [] if steps is None else [str(steps)]
        environment = quiet_environment() | {"BENCH_OUT": str(kept / "counts"), "HF_HOME": str(kept / "hf")}
        environment["PYTHONPATH"] = f"{HOOK}:{ROOT}" if not peer.environment else str(HOOK)
        row = timed([str(python), *peer.launcher, *words], kept, environment)
        shown = ["python", *peer.launcher, f"benchmarks/programs/{peer.program}", "ASSETS", "OUT", *words[3:]]
        begun = row.pop("begun")
        ranks = [json.loads(path.read_text()) for path in sorted((kept / "counts").glob("rank*.json"))]
        row = {"run": key, "command": " ".join(shown)} | row
        if (kept / "phases.json").exists():
            row["phases"] = json.loads((kept / "phases.json").read_text())
        if len(ranks) == RANKS:  # a rank that aborts at its exit has still trained
            return row | counted(ranks, begun)
        return row | {"why": _last_line(kept / "log")}
    finally:
        if out is None:
            shutil.rmtree(kept, ignore_errors=True)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "nothing was written"


def counted(ranks: list[dict[str, Any]], begun: float) -> Row:
    """Return the figures of a run from what the hook counted on each rank.

    Args:
        ranks: the hook's files, by rank.
        begun: when the run was started, Unix seconds.

    Returns:
        `first_step_s` (start of the command to the end of the first optimizer step), `train_begin_s` (to the
        beginning of training), `train_s`, `train_cpu_s` and `start_cpu_s` (processor time of both ranks in and
        before training), `steps`, `real_tokens`, `slots` (with padding), `trained_tokens`, `padding_share`,
        `tokens_per_s`, `tokens_per_cpu_s` (real ones), `max_rss_mb` and the last logged `loss`.
    """
    seconds = max(r["train_end"] for r in ranks) - min(r["train_begin"] for r in ranks)
    cpu = sum(r["cpu_end"] - r["cpu_begin"] for r in ranks)
    real, slots = (sum(r[name] for r in ranks) for name in ("real", "slots"))
    return {
        "train_begin_s": round(min(r["train_begin"] for r in ranks) - begun, 2),
        "first_step_s": round(max(r["first_step_end"] for r in ranks) - begun, 2),
        "train_s": round(seconds, 2),
        "train_cpu_s": round(cpu, 2),
        "start_cpu_s": round(sum(r["cpu_begin"] for r in ranks), 2),
        "steps": ranks[0]["steps"],
        "real_tokens": real,
        "slots": slots,
        "trained_tokens": sum(r["trained"] for r in ranks),
        "padding_share": round(1 - real / slots, 4),
        "tokens_per_s": round(real / seconds, 1),
        "tokens_per_cpu_s": round(real / cpu, 1),
        "max_rss_mb": round(max(r["max_rss_mb"] for r in ranks)),
        "loss": ranks[0]["losses"][-1] if ranks[0]["losses"] else None,
    }
