"""Bytes that a reader of outside input may meet: good documents with something wrong in them, and plain rubbish.

`make fuzz` runs thirty times the examples, new ones each time. A crash that it finds is kept as an `@example`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from soup_flows.errors import Problem, Refused
from soup_flows.user_file import BadFile

LONG = os.environ.get("SOUP_FLOWS_FUZZ") == "long"
MOST_MEMORY_BYTES = 1 << 30
LONGEST_MESSAGE = 20_000
T = TypeVar("T")

DEEP = "[" * 100_000
WEIRD = (
    "", " ", "auto", "nan", "1e999", "-0", "0x1F", "1_000", "²", "٣", "\u0130", "\x00", "\x1b[2J",
    "../../etc/passwd", "~", "~nobody-here/x", "/", "/dev/zero", "a/b", "x" * 5000, "\ud800",
    "\udcff.json", "zero3", "None", "null", "true", "checkpoint-1",
)  # fmt: skip
WHOLE = (0, 1, -1, 2, 7, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(10**30))
BROKEN = (0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(WHOLE),
    st.sampled_from(BROKEN),
    st.sampled_from(WEIRD),
    st.integers(-1000, 100_000),
    st.text(st.characters(exclude_categories=()), max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WEIRD) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any JSON value, and what is nearly one."""

PIECES = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3\x28", b"\xed\xa0\x80", b"\n", b"\r\n", b"{", b"}",
    b"[", b"]", b'"', b"\\", b",", b":", b" ", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b'"\\ud800"',
    b"// x\n", b"&a *a", b"*a", b"!!int ''", b"!!float ''", b"!!bool x", b"!!timestamp x", b"!!binary x",
    b"!!set {a}", b"!!python/object:os.system x", b"? [a]\n: b", b"<<: {a: 1}\n", b"<<: 1\n", b"---\n",
    b"...\n", b"%YAML 9.9\n", b"2001-99-99", b"2001-01-01 25:61:61", b"1:99:99.9", b"=", b"0b", b"0o9",
    b"-", b"#", b"|", b">", b"\t", b"[" * 3000, b'{"a":' * 3000, b"- " * 3000, DEEP.encode(),
)  # fmt: skip


def fuzz(examples: int) -> Callable[[T], T]:
    """Run a test with so many examples; always the same ones, unless the run is a long one."""
    return settings(
        max_examples=examples * 30 if LONG else examples,
        deadline=None,
        derandomize=not LONG,
        database=None,
        report_multiple_bugs=False,
        phases=[p for p in Phase if p.name != os.environ.get("FUZZ_WITHOUT", "")],
        suppress_health_check=list(HealthCheck),
    )


def _places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths of all values within one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [above, *(place for key, item in inner for place in _places(item, (*above, key)))]


@st.composite
def spoilt(draw: st.DrawFn, good: Any, most: int = 3) -> Any:
    """A good JSON value in which up to `most` values were replaced, removed or added."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, most))):
        places = _places(value)
        place = places[draw(st.integers(0, len(places) - 1))]
        if not place:
            if draw(st.integers(0, 9)) == 0:
                return draw(VALUES)
            continue
        holder = value
        for key in place[:-1]:
            holder = holder[key]
        what = draw(st.sampled_from(("replace", "replace", "remove", "add", "swap")))
        if what == "remove":
            del holder[place[-1]]
        elif what == "swap":
            other: Any = value
            for key in places[draw(st.integers(0, len(places) - 1))]:
                other = other[key]
            holder[place[-1]] = copy.deepcopy(other)
        elif what == "add" and isinstance(holder, dict):
            holder[draw(st.sampled_from(WEIRD))] = draw(VALUES)
        else:
            holder[place[-1]] = draw(VALUES)
    return value


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes that were cut, overwritten or added to."""
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(content)))
        what = draw(st.sampled_from(("cut", "put in", "overwrite", "twice")))
        if what == "cut":
            content = content[:at]
        elif what == "twice":
            content = content[:at] + content[max(0, at - 40) :]
        else:
            piece = draw(st.sampled_from(PIECES) | st.binary(min_size=1, max_size=4))
            content = content[:at] + piece + content[at + (len(piece) if what == "overwrite" else 0) :]
    return content


@st.composite
def documents(draw: st.DrawFn, good: Any) -> bytes:
    """A JSON document that is nearly `good`, or is rubbish."""
    kind = draw(st.sampled_from(("spoilt", "spoilt", "spoilt", "damaged", "rubbish")))
    if kind == "rubbish":
        return draw(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "replace")))
    if kind == "damaged":
        return draw(damaged(json.dumps(good, indent=draw(st.sampled_from((None, 1)))).encode()))
    return json.dumps(draw(spoilt(good))).encode()


@st.composite
def lines(draw: st.DrawFn, good: list[Any]) -> bytes:
    """JSON lines of which some are nearly `good` ones."""
    chosen = draw(st.lists(st.sampled_from(good), max_size=6))
    parts = [draw(documents(row)) if draw(st.booleans()) else json.dumps(row).encode() for row in chosen]
    return draw(damaged(b"\n".join(parts) + b"\n" * draw(st.integers(0, 1))))


def in_yaml(value: Any) -> bytes:
    """Write a value as JSON, which is YAML too."""
    return json.dumps(value, indent=1).encode()


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let this process take one GiB more than it has; a reader that takes all it can get raises MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def clear(text: str) -> None:
    """A message can be printed and stored, and is not as long as what it is about."""
    text.encode("utf-8")
    assert text.strip()
    assert len(text) < LONGEST_MESSAGE, text[:200]


def clear_problems(problems: list[Problem] | tuple[Problem, ...]) -> None:
    """Each says what was found, as text that can be printed and stored."""
    assert isinstance(problems, list | tuple)
    for problem in problems:
        clear(problem.message)
        clear(str(problem))
        problem.model_dump_json()


def value_or_refusal(read: Callable[[], T], *also: type[Exception]) -> T | None:
    """Return what `read` returns, or None where it raises one of our own errors or of `also`."""
    with little_memory():
        try:
            return read()
        except Refused as refused:
            clear_problems(refused.problems)
        except BadFile as bad:
            clear(str(bad))
            clear(bad.fix)
        except also as error:
            clear(str(error))
    return None


def put(path: Path, content: bytes) -> Path:
    """Write a file, and the folder it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
