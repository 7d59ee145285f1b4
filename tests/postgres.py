"""A throw-away PostgreSQL cluster for tests: in a temporary folder, with a socket there, removed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soup_flows.launch.proc import PR_SET_PDEATHSIG, prctl

USER = "soup"
GENEROUS_S = 120


class Cluster:
    """A running cluster; `Cluster.start()` gives one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[Cluster]:
        """Make and start a cluster; the test is skipped where PostgreSQL is not installed."""
        programs = find_programs()
        if programs is None:
            pytest.skip("PostgreSQL is not installed: no initdb in PATH or /usr/lib/postgresql/*/bin")
        folder = Path(tempfile.mkdtemp(prefix="soup-postgres-"))
        started = None
        try:
            owner = _owner(folder)
            made = subprocess.run(
                [programs / "initdb", "-D", folder / "data", "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync"],
                capture_output=True, text=True, check=False, cwd=folder, **owner,
            )  # fmt: skip
            assert made.returncode == 0, made.stdout + made.stderr
            with (folder / "log").open("wb") as log:
                started = subprocess.Popen(
                    [programs / "postgres", "-D", folder / "data", "-k", folder,
                     *("-c", "listen_addresses="), *("-c", "fsync=off"), *("-c", "max_connections=200")],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True,
                    preexec_fn=_end_with_parent, **owner,
                )  # fmt: skip
            cluster = cls(folder)
            cluster._wait(started)
            yield cluster
        finally:
            if started is not None:
                started.send_signal(signal.SIGINT)  # a "fast" shutdown: sessions are ended
                started.wait(GENEROUS_S)
            shutil.rmtree(folder, ignore_errors=True)

    def new_database(self) -> str:
        """Make a database and return its URL for Prefect."""
        name = f"prefect_{len(self.databases()) + 1}"
        self.query("postgres", f"CREATE DATABASE {name}")
        return f"postgresql+asyncpg://{USER}@/{name}?host={self.folder}"

    def databases(self) -> list[str]:
        """Return the names of the databases that were made."""
        rows = self.query("postgres", "SELECT datname FROM pg_database WHERE datname LIKE 'prefect_%'")
        return [row["datname"] for row in rows]

    def dump(self, database: str) -> bytes:
        """Return everything in a database as SQL."""
        programs = find_programs()
        assert programs is not None
        argv = [programs / "pg_dump", "-h", self.folder, "-U", USER, "--inserts", database]
        return subprocess.run(argv, check=True, capture_output=True).stdout

    def query(self, database: str, sql: str) -> list[Any]:
        """Return the rows of a query."""
        import asyncpg

        async def ask() -> list[Any]:
            connection = await asyncpg.connect(user=USER, database=database, host=str(self.folder))
            try:
                return list(await connection.fetch(sql))
            finally:
                await connection.close()

        return asyncio.run(ask())

    def _wait(self, started: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + GENEROUS_S
        while True:
            try:
                self.query("postgres", "SELECT 1")
            except Exception:
                log = (self.folder / "log").read_text()
                assert started.poll() is None, log
                assert time.monotonic() < end, log
                time.sleep(0.2)
            else:
                return


def find_programs() -> Path | None:
    """Return the folder of initdb and postgres; Debian keeps it out of PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((f for f in folders if (f / "initdb").exists() and (f / "postgres").exists()), None)


def _owner(folder: Path) -> dict[str, Any]:
    """Return the user that the programs run as: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    users = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = users.get("postgres") or users["nobody"]
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _end_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGINT)
