"""Values of other tools as values of this package; whatever has no counterpart raises `NotTaken`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from soup_flows.errors import nearest
from soup_flows.migrate.values import NOTHING, NotTaken

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def number(value: Any) -> Any:
    """Return a finite number; YAML 1.1 reads `2e-5`, without a point, as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise NotTaken(f"{value!r} is no number", "write a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise NotTaken(f"{value!r} is no number", "write a number")
    return value


def count(value: Any) -> int:
    """Return a whole number above 0."""
    found = number(value)
    if found != int(found) or found < 1:
        raise NotTaken(f"{value!r} is no whole number above 0", "write a whole number")
    return int(found)


def steps(value: Any) -> int:
    """Return a number of optimizer steps; shares of the run are not known before the data is read."""
    found = number(value)
    if 0 < found < 1:
        message = f"{value!r} is a share of the steps, which are known only after the data is read"
        raise NotTaken(message, "write a number of steps", "warning")
    return count(value)


def steps_or_all(value: Any) -> int | None:
    """Return a limit of optimizer steps; 0 and -1 set none."""
    return count(value) if number(value) > 0 else None


def share(value: Any) -> float:
    """Return a share of the rows; a number of rows is not one."""
    found = number(value)
    if found >= 1:
        message = f"{value!r} is a number of rows; a share of them is held out here"
        raise NotTaken(message, "set data.eval_split, or data.eval_dataset to a file of them", "warning")
    return float(found)


def yes(value: Any) -> bool:
    """Return true or false."""
    found = WORDS.get(str(value).strip().lower())
    if found is None:
        raise NotTaken(f"{value!r} is neither true nor false", "write true or false")
    return found


def inverted(value: Any) -> bool:
    """Return the opposite, for keys that turn off what is turned on here."""
    return not yes(value)


def one_of(
    names: Mapping[str, Any],
    *,
    others: Mapping[str, str] | None = None,
    severity: Any = "error",
    instead: Any = NOTHING,
) -> Callable[[Any], Any]:
    """Return a reader of a closed choice.

    Args:
        names: the tool's word, in lower case -> the value here.
        others: words the tool has and this package has not -> what to do about them.
        severity: of a word that is not in `names`.
        instead: the value that is taken for such a word, if it is not an error.
    """
    known = dict(others or {})

    def read(value: Any) -> Any:
        word = str(value).strip().lower()
        if word in names:
            return names[word]
        fix = known.get(word) or nearest(word, [*names, *known]) or "use " + ", ".join(names)
        what = "has no counterpart here" if word in known else "is not known to this reader"
        taken = f"; {instead!r} is taken" if instead is not NOTHING else ""
        raise NotTaken(f"{value!r} {what}{taken}", fix, severity, instead)

    return read


SCHEDULES = one_of(
    {name: name for name in ("linear", "cosine", "constant", "constant_with_warmup")},
    others=dict.fromkeys(
        (
            *(
                "cosine_with_restarts",
                "polynomial",
                "inverse_sqrt",
                "reduce_lr_on_plateau",
                "rex",
                "one_cycle",
            ),
            *("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
        ),
        "use linear, cosine, constant or constant_with_warmup",
    ),
    severity="warning",
    instead="cosine",
)

ADAMW = {"adamw_torch": "adamw_torch", "adamw_torch_fused": "adamw_torch_fused"}
ADAMW |= dict.fromkeys(("adamw", "adamw_hf"), "auto")
SMALL_ADAMW = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw", "adamw_torch_8bit"),
    *("adamw_torch_4bit", "adamw_torch_fp8", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8", "adamw_apex_fused"),
    "adamw_anyprecision",
)  # fmt: skip
OTHER_OPTIMIZERS = (
    *(
        "adafactor",
        "lion",
        "lion_8bit",
        "lion_32bit",
        "sgd",
        "adagrad",
        "rmsprop",
        "muon",
        "came_pytorch",
        "dion",
    ),
    *(
        "adopt_adamw",
        "optimi_adamw",
        "galore_adamw",
        "apollo_adamw",
        "schedule_free_adamw",
        "lomo",
        "adalomo",
    ),
    *("grokadamw", "stable_adamw"),
)


def optimizer(value: Any) -> str:
    """Return the optimizer; AdamW with a smaller state becomes AdamW in 32 bits."""
    if str(value).strip().lower() in SMALL_ADAMW:
        message = (
            f"{value!r} is AdamW with a smaller state; AdamW in 32 bits is taken, which needs more memory"
        )
        raise NotTaken(message, "nothing, where the plan fits", "warning", "auto")
    advice = "use AdamW (training.optimizer=auto), with a learning rate for it"
    found: str = one_of(ADAMW, others=dict.fromkeys(OTHER_OPTIMIZERS, advice))(value)
    return found


def target_modules(value: Any) -> str | list[str]:
    """Return the modules that get an adapter."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
        raise NotTaken(f"{value!r} names no modules", "write a list of module names, or all-linear")
    return "all-linear" if names[0] in ("all", "all-linear", "all_linear") else names


TRACKERS = {
    name: name for name in ("tensorboard", "wandb", "mlflow", "comet_ml", "neptune", "clearml", "trackio")
}
TRACKERS |= {"comet": "comet_ml"}


def trackers(value: Any) -> list[str]:
    """Return the trackers that are reported to."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list):
        raise NotTaken(f"{value!r} names no trackers", "use " + ", ".join(TRACKERS))
    words = [str(name).strip().lower() for name in names if str(name).lower() not in ("none", "false")]
    good = [TRACKERS[word] for word in words if word in TRACKERS]
    if len(good) < len(words):
        lost = ", ".join(word for word in words if word not in TRACKERS)
        raise NotTaken(f"{lost} cannot be reported to", "use " + ", ".join(TRACKERS), "warning", good)
    return good


def resume(value: Any) -> str:
    """Return what a run goes on from; `auto` here means the newest checkpoint that verifies."""
    word = str(value).strip()
    return "auto" if word.lower() in ("true", "auto", "latest") else word
