"""What is said to a Ray cluster: its dashboard's Jobs API and state API, over HTTP with the standard library.

Ray itself is not imported: `ray.init` in the flow's process would put its own handler in the place of Prefect's.
Sources: ray 2.60, `dashboard/modules/job/job_head.py`, `dashboard/modules/state/state_head.py`,
`dashboard/authentication_utils.py`.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from soup_flows.json_text import parse_json
from soup_flows.launch.engines import State
from soup_flows.launch.engines.cluster import Unanswered
from soup_flows.ray_settings import RaySettings

ANSWER_S = 30.0
"""Longest wait for an answer to begin, for its next part, and for all of them."""
ADDRESS, TOKEN, TOKEN_PATH, MODE = (
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_AUTH_MODE",
)
STATES: Mapping[str, State] = {
    "PENDING": "QUEUED",
    "RUNNING": "RUNNING",
    "STOPPED": "CANCELLED",
    "SUCCEEDED": "FAILED",  # unless the run directory says more
    "FAILED": "FAILED",
}
"""Ray's states of a job (ray 2.60, `dashboard/modules/job/common.py`, JobStatus), and what they are here."""


@dataclass(frozen=True)
class RayJob:
    """What Ray says about a job."""

    state: str
    """In Ray's words, such as `PENDING`."""
    reason: str = ""
    waits: bool = False
    """Whether its entry waits for machines."""

    @property
    def here(self) -> State | None:
        """The state in the words of an engine; None for one that this version does not know."""
        return "QUEUED" if self.waits and self.state == "RUNNING" else STATES.get(self.state)

    @property
    def text(self) -> str:
        """State and reason in one text."""
        return f"{self.state} ({self.reason})" if self.reason else self.state


T = TypeVar("T", dict[str, Any], list[Any])

MOST_BYTES = 64 * 2**20
"""Longest part of an answer that is read; the log of a job may be longer."""


class Denied(Unanswered):
    """The token is missing or wrong."""

    final = True


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing: the token would go to whoever is named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse."""
        return


class Dashboard:
    """A cluster's dashboard."""

    def __init__(self, settings: RaySettings, environ: Mapping[str, str]) -> None:
        """Find the address and the token.

        Args:
            settings: the address, if it is not in the environment.
            environ: the flow's environment, with what is lent to it.
        """
        self.address = (settings.address or environ.get(ADDRESS, "")).rstrip("/")
        self.token = find_token(environ)
        self._opener = urllib.request.build_opener(NoRedirect())

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Return status and text of an answer.

        Raises:
            Unanswered: if there is none, or none that is Ray's; `Denied` if the token is missing or wrong.
        """
        if not self.address.startswith(("http://", "https://")):
            raise Unanswered(f"no address of a Ray dashboard is known: {self.address or 'none is set'}")
        request = urllib.request.Request(  # noqa: S310 (checked above)
            f"{self.address}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {self.token}"} if self.token else {}),
        )
        try:
            with self._open(request) as answer:
                code, text = int(answer.status), _read(answer)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unanswered(f"the Ray dashboard at {self.address} does not answer: {error!r}") from None
        if code in (401, 403):
            how = "refuses this token" if self.token else "wants a token"
            raise Denied(f"the Ray cluster at {self.address} {how}")
        return code, text

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return self._opener.open(request, timeout=ANSWER_S)
        except urllib.error.HTTPError as error:  # an answer like another
            return error

    def json(self, method: str, path: str, kind: type[T] = dict) -> T | None:  # type: ignore[assignment]
        """Return the JSON of an answer, which is of this kind; None for what is not there.

        Raises:
            Unanswered: if it is no answer of Ray's.
        """
        code, text = self.call(method, path)
        if code == 404:
            return None
        try:
            if code != 200:
                raise ValueError(text[:300])
            value = parse_json(text)
            if not isinstance(value, kind):
                raise ValueError(f"a JSON {type(value).__name__} instead of a {kind.__name__}")
            return value
        except ValueError as error:
            raise Unanswered(f"the Ray dashboard at {self.address} says {code}: {error}") from None

    def machines(self) -> list[Machine]:
        """Return the machines of the cluster that are alive.

        Raises:
            Unanswered: if the dashboard does not tell them.
        """
        return read_machines(self.json("GET", "/api/v0/nodes?detail=1&limit=10000"))


def _read(answer: Any) -> str:
    """Read an answer, which may trickle in; what has not come within `ANSWER_S` is no answer."""
    end = time.monotonic() + ANSWER_S
    parts = bytearray()
    while len(parts) < MOST_BYTES and (part := answer.read1(1 << 16)):
        parts += part
        if time.monotonic() > end:
            raise TimeoutError(f"{len(parts)} bytes in {ANSWER_S:g} s, and not all of them")
    return parts.decode("utf-8", "replace")


def find_token(environ: Mapping[str, str]) -> str | None:
    """Return the token as Ray finds it (ray 2.60, `src/ray/rpc/authentication/authentication_token_loader.cc`).

    RAY_AUTH_TOKEN, the file in RAY_AUTH_TOKEN_PATH, then `~/.ray/auth_token`; none with RAY_AUTH_MODE=disabled.
    """
    if environ.get(MODE, "").lower() == "disabled":
        return None
    if environ.get(TOKEN):
        return environ[TOKEN].strip()
    path = environ.get(TOKEN_PATH) or Path(environ.get("HOME") or Path.home()) / ".ray" / "auth_token"
    try:
        return Path(path).read_text().strip() or None
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Machine:
    """One machine of a cluster, and what Ray may give of it in all, used or not."""

    name: str
    total: Mapping[str, float]


def read_machines(answer: Any) -> list[Machine]:
    """Read `/api/v0/nodes?detail=1`; machines that are dead are left out."""
    try:
        found = answer["data"]["result"]["result"]
        return [
            Machine(
                str(node["node_ip"]), {k: float(v) for k, v in node["resources_total"].items() if plain(v)}
            )
            for node in found
            if node["state"] == "ALIVE"
        ]
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise Unanswered(f"the Ray dashboard tells no machines: {error!r}") from None


def plain(value: Any) -> bool:
    """Whether a value is a number that can be compared."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def fitting(machines: Sequence[Machine], wanted: Mapping[str, float]) -> int:
    """Count the machines that have what is wanted of one."""
    return sum(all(machine.total.get(name, 0) >= n for name, n in wanted.items()) for machine in machines)


def why_infeasible(machines: Sequence[Machine], nodes: int, wanted: Mapping[str, float]) -> str:
    """Say why a cluster could never run a job with the machines that it has; empty if it could."""
    fit = fitting(machines, wanted)
    if fit >= nodes:
        return ""
    return (
        f"{nodes} machine(s) with {in_words(wanted)} are asked for, and {fit} of {len(machines)} in the cluster can "
        "give that"
    )


def in_words(wanted: Mapping[str, float]) -> str:
    """Return resources as text, such as `4 CPU, 2 GPU`."""
    return ", ".join(
        f"{n / 2**30:g} GiB memory" if name == "memory" else f"{n:g} {name}" for name, n in wanted.items()
    )
