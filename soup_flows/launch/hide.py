"""Keep secrets out of what ranks print and report: their values are replaced by their names. Standard library.

A secret is what a variable of the environment holds whose name says so, or the password in an address that a variable
holds. Libraries print their settings and addresses, and programs their environment, when something is wrong.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping

SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW(OR)?D|PASSPHRASE|(API|ACCESS|ACCOUNT|PRIVATE)_?KEY|CREDENTIAL"
)
"""Names of the variables in `soup_flows.launch.plan.PASSED_SECRETS` and what clouds and trackers add to them."""
PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s:]*:([^/@\s]+)@")
SHORTEST = 8
"""Characters of the shortest value that is hidden; shorter ones are words such as `true`."""


def secrets_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of an environment, by value, with what is written in their place; the longest first."""
    found: dict[str, str] = {}
    for name, value in environ.items():
        values = [value.strip()] if SECRET_NAME.search(name.upper()) else PASSWORD_IN_ADDRESS.findall(value)
        found |= {secret: f"<{name}>" for secret in values if len(secret) >= SHORTEST}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


@functools.cache
def _own() -> tuple[tuple[str, str, bytes, bytes], ...]:
    return tuple((v, name, os.fsencode(v), os.fsencode(name)) for v, name in secrets_in(os.environ).items())


def without(text: str, secrets: Mapping[str, str]) -> str:
    """Return `text` with every key of `secrets` replaced by its value."""
    for value, name in secrets.items():
        text = text.replace(value, name)
    return text


def hidden(text: str) -> str:
    """Return `text` without the secrets of this process's environment, as it was at the first call."""
    return without(text, {value: name for value, name, _, _ in _own()})


def hidden_bytes(data: bytes) -> bytes:
    """Do the same for bytes."""
    for _, _, value, name in _own():
        data = data.replace(value, name)
    return data
