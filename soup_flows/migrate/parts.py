"""What several keys say together: the batch, the warm-up, checkpoints, evaluations, number formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from soup_flows.errors import Severity
from soup_flows.migrate.convert import count, number, steps, yes
from soup_flows.migrate.reading import SETTINGS, Reading
from soup_flows.migrate.values import NotTaken

Step = Callable[[Reading], None]

GLOBAL = "training.global_batch_size"
MICRO = "training.per_device_train_batch_size"


def ranks_of(reading: Reading) -> int:
    """Return the GPUs that the batch is meant for, and say so where nobody did."""
    given = str(reading.given.get("gpus", ""))
    if given.isdecimal() and int(given) > 0:
        return int(given)
    asked = reading.tool.gpus
    note = f"{reading.tool.name} takes {asked or 'every GPU it sees'} where its command does not say"
    if "gpus" not in reading.given:
        reading.put("gpus", asked or 1, "--gpus", written=False, note=note)
    if asked is None and not reading.decided(GLOBAL):
        message = "neither the file nor the command line says how many GPUs; the batch is counted for one"
        reading.say("gpus", "MIG006", "warning", message, "add --gpus N")
    return asked or 1


def batch(
    micro: str, accumulation: str, defaults: tuple[int | str, int], packing: tuple[str, ...] = ()
) -> Step:
    """Return a part for the batch, which other tools count per GPU.

    Args:
        micro: key of the rows per GPU and pass.
        accumulation: key of the passes per optimizer step.
        defaults: what the tool takes for them; `auto` leaves the rows open.
        packing: keys under which the tool's batch counts packs of rows, not rows.
    """

    def read(reading: Reading) -> None:
        ranks = ranks_of(reading)
        passes = reading.read(accumulation, count, GLOBAL, defaults[1])
        if str(reading.values.get(micro, defaults[0])).lower() == "auto":
            message = f"{micro}: auto leaves the rows per step open; the global batch here is "
            message += f"{reading.given.get(GLOBAL, 16)} rows per optimizer step, over all GPUs"
            severity: Severity = "note" if reading.decided(GLOBAL) else "warning"
            reading.say(micro, "MIG006", severity, message, "set training.global_batch_size")
            reading.settle(accumulation)
            return
        rows = reading.read(micro, count, MICRO, defaults[0])
        written = micro in reading.values
        reading.put(MICRO, rows, micro, written=written)
        note = f"{rows} a GPU and pass x {passes} x {ranks} GPU{'s' * (ranks > 1)}"
        reading.put(GLOBAL, rows * passes * ranks, micro, accumulation, written=written, note=note)
        packed = [key for key in packing if reading.asked(key)]
        if packed and not reading.decided(GLOBAL):
            message = f"with {packed[0]} a batch counts packs there and rows here, so that a step holds less"
            fix = "raise training.global_batch_size by the rows of a pack; soup-flows data shows the lengths"
            reading.say(f"{micro} ({packed[0]})", "MIG006", "warning", message, fix)

    return read


def warmup(steps_key: str, ratio_key: str, max_key: str, default: float | None = None) -> Step:
    """Return a part for the warm-up, a share of the steps here; a number of them is one of `max_steps`.

    Args:
        steps_key: key of a number of steps, or of a share below 1.
        ratio_key: key of a share.
        max_key: key of all steps.
        default: the tool's share where the file says nothing, if it is not this package's.
    """
    field = "training.warmup_ratio"

    def read(reading: Reading) -> None:
        if reading.written(ratio_key):
            reading.put(field, reading.read(ratio_key, number, field, 0.03), ratio_key)
        elif not reading.written(steps_key) and default is not None and not reading.decided(field):
            reading.put(field, default, ratio_key, written=False)
        if not reading.written(steps_key):
            return
        asked, total = reading.read(steps_key, number, field, 0), reading.values.get(max_key)
        if asked < 1:
            reading.put(field, float(asked), steps_key)
        elif isinstance(total, int) and not isinstance(total, bool) and total > asked:
            reading.put(field, exact_share(int(asked), total), steps_key, max_key)
        else:
            message = (
                f"{asked} steps; here it is a share, of steps that are known only after the data is read"
            )
            wrong = NotTaken(message, f"set {field}, or {max_key} in the file", "warning")
            reading.wrong(steps_key, wrong, field)

    return read


def exact_share(part: int, whole: int) -> float:
    """Return the share of which `ceil(whole * share)`, the rule of Transformers' Trainer, is `part` again."""
    found = part / whole
    while math.ceil(whole * found) > part:
        found = math.nextafter(found, 0)
    return found


def checkpoints(strategy: str, steps_key: str, per_epoch: str = "") -> Step:
    """Return a part for when checkpoints are saved."""

    def read(reading: Reading) -> None:
        _every(reading, "recovery.save_steps", strategy, steps_key, per_epoch, 0, "about ten a run are saved")

    return read


def evaluations(strategy: str, steps_key: str, per_epoch: str = "") -> Step:
    """Return a part for when the held-out rows are evaluated; `evaluation_strategy` is an old name of a strategy."""
    old = "evaluation_strategy"

    def read(reading: Reading) -> None:
        named = old if reading.written(old) and not reading.written(strategy) else strategy
        usual = "they are evaluated before and after training"
        _every(reading, "training.eval_steps", named, steps_key, per_epoch, None, usual)

    return read


def _every(
    reading: Reading, field: str, strategy: str, steps_key: str, per_epoch: str, never: Any, usual: str
) -> None:
    """Read a strategy, a number of steps, and a number a pass."""
    word = str(reading.values.get(strategy, "steps")).lower()
    # An unquoted `no` is false in YAML.
    if word in ("no", "false", "none") and reading.values.get(strategy) is not None:
        if never is None:
            reading.settle(strategy, steps_key, per_epoch)
        else:
            reading.put(field, never, strategy, *([steps_key] if steps_key in reading.values else []))
        return
    if reading.written(per_epoch) or word in ("epoch", "best"):
        key = per_epoch if reading.written(per_epoch) else strategy
        message = f"the steps of a pass are known only after the data is read; {usual}"
        reading.wrong(key, NotTaken(message, f"set {field} in optimizer steps", "warning"), field)
    elif word not in ("steps", "none"):
        reading.wrong(strategy, NotTaken(f"{word!r} is not known", "use no, steps or epoch"), field)
    every = reading.read(steps_key, steps, field)
    if isinstance(every, int):
        reading.put(field, every, steps_key)
    if strategy in reading.values and word == "steps":
        reading.settle(strategy)


def dtype(flags: dict[str, str], default: str = "auto") -> Step:
    """Return a part for the number format.

    Args:
        flags: key that is true or false -> the format it asks for.
        default: what the tool takes where the file says nothing.
    """
    field = "training.dtype"

    def read(reading: Reading) -> None:
        on: dict[str, str] = {}
        for key, name in flags.items():
            word = str(reading.values.get(key, "")).lower()
            if word == "auto":
                on[key] = "auto"
            elif word == "full" or reading.read(key, yes, field, False):
                on[key] = name
        certain = {key: name for key, name in on.items() if name != "auto"} or on
        for key, name in certain.items():
            reading.put(field, name, key)
        reading.settle(*(key for key in flags if key in reading.values and key not in certain))
        off = [key for key in flags if reading.values.get(key) is not None]
        if not on and off:
            reading.put(field, "fp32", *off)
        elif not on and default != SETTINGS[field] and not reading.decided(field):
            reading.put(field, default, *flags, written=False)

    return read


def tracking(signs: dict[str, str]) -> Step:
    """Return a part for trackers.

    Args:
        signs: key that is written when a tracker is used -> the tracker.
    """

    def read(reading: Reading) -> None:
        used = {key: name for key, name in signs.items() if reading.asked(key)}
        if used:
            note = "its project and keys: a tracker block (blocks.tracker), or its environment variables"
            reading.put("training.report_to", sorted(set(used.values())), *used, note=note)

    return read
