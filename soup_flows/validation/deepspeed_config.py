"""A DeepSpeed JSON as the rules see it: the dict, and the run around it where there is one."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from soup_flows.validation.table import Context, Found

FIELD = "deepspeed_config"


@dataclass(frozen=True)
class DeepSpeedJson:
    """A user's DeepSpeed JSON.

    Attributes:
        values: the parsed file.
        run: the run that would use it; None when the file is checked alone.
    """

    values: Mapping[str, Any]
    run: Context | None = None

    def get(self, path: str) -> Any:
        """Return the value at a dotted path, None where there is none."""
        value: Any = self.values
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def has(self, path: str) -> bool:
        """Whether the dotted path is written in the file."""
        *parents, key = path.split(".")
        block = self.get(".".join(parents)) if parents else self.values
        return isinstance(block, Mapping) and key in block

    def number(self, path: str) -> float | None:
        """Return a number at a dotted path; None for anything else, true and false included."""
        value = self.get(path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if isinstance(value, int) and abs(value) > sys.float_info.max:  # digits that no float holds
            return math.inf if value > 0 else -math.inf
        return value

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None where it is not a number."""
        stage = self.number("zero_optimization.stage")
        return (
            int(stage)
            if stage is not None and math.isfinite(stage)
            else (None if self.has("zero_optimization.stage") else 0)
        )

    def zero(self, key: str) -> Any:
        """Return a ZeRO value under its name with or without `stage3_`."""
        value = self.get(f"zero_optimization.stage3_{key}")
        return self.get(f"zero_optimization.{key}") if value is None else value

    def device(self, block: str) -> str:
        """Return the device of `offload_optimizer` or `offload_param`; `none` without one."""
        return str(self.get(f"zero_optimization.{block}.device") or "none")

    @property
    def world_size(self) -> int | None:
        """Ranks of the run."""
        return self.run.plan.world_size if self.run else None

    @property
    def dtype(self) -> str | None:
        """Compute dtype: the run's, else what the file says in literals."""
        if self.run:
            return self.run.plan.dtype
        on = [name for name in ("bf16", "fp16") if self.get(f"{name}.enabled") is True]
        return on[0] if on else None

    def walk(self) -> Iterator[tuple[str, Any]]:
        """Yield every dotted path with its value, blocks included."""
        waiting = deque((str(key), value) for key, value in self.values.items())
        while waiting:
            path, value = waiting.popleft()
            yield path, value
            if isinstance(value, Mapping):
                waiting.extend((f"{path}.{key}", item) for key, item in value.items())


def at(path: str, what: str, fix: str = "") -> Found:
    """Return a finding at a dotted path of the file."""
    return Found(what, f"{FIELD}.{path}".rstrip("."), fix)
