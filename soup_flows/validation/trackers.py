"""Rules about the trackers that a run reports to."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from soup_flows.user_file import expanded
from soup_flows.validation.table import ANY, TRANSFORMERS, Context, Found, rule, rules_in

PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "comet_ml": ("comet_ml",),
    "neptune": ("neptune",),
    "clearml": ("clearml",),
    "trackio": ("trackio",),
}
"""Tracker -> modules of which one must be there (transformers/integrations/integration_utils.py)."""


@rule(
    "EN011",
    "error",
    "training.report_to",
    "the ranks stop when the trainer is made, after the model was loaded",
    fix="install the package on the machine that trains, or leave the tracker out",
    source="transformers/integrations/integration_utils.py, is_*_available",
    versions=TRANSFORMERS,
    local=True,
)
def no_tracker(run: Context) -> Iterator[Found]:
    """A tracker whose package is not installed."""
    for name in run.spec.training.report_to:
        if not any(importlib.util.find_spec(module) for module in PACKAGES[name]):
            yield Found(f"{name} cannot be found", fix=f"pip install {name}, or leave it out of report_to")


@rule(
    "EN012",
    "error",
    "training.report_to",
    "nobody is there to be asked for it, and rank 0 stops when the tracker starts",
    fix="set WANDB_API_KEY (WANDB_MODE=offline needs none), COMET_API_KEY or NEPTUNE_API_TOKEN",
    source="hiyouga/LlamaFactory#1372: api_key not configured (no-tty); Comet and Neptune documentation",
    versions=ANY,
    local=True,
)
def no_key(run: Context) -> Iterator[Found]:
    """A tracker of a service without its key."""
    home = expanded(run.environ.get("HOME", "~"))
    asked = set(run.spec.training.report_to)
    if "wandb" in asked and not run.environ.get("WANDB_API_KEY"):
        offline = run.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
        files = [Path(run.environ["NETRC"])] if "NETRC" in run.environ else [home / ".netrc", home / "_netrc"]
        hosts = ("wandb", run.environ.get("WANDB_BASE_URL", "wandb").split("//")[-1])
        if not offline and not any(host in _text(file) for file in files for host in hosts):
            yield Found("wandb without WANDB_API_KEY")
    if "comet_ml" in asked and not run.environ.get("COMET_API_KEY") and not (home / ".comet.config").exists():
        yield Found("comet_ml without COMET_API_KEY")
    if "neptune" in asked and not run.environ.get("NEPTUNE_API_TOKEN"):
        yield Found("neptune without NEPTUNE_API_TOKEN")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return ""


RULES = rules_in(globals())
