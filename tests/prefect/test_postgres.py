"""The tests with a server run against PostgreSQL too; this one shows it with the events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres import Cluster, find_programs

ROOT = Path(__file__).parents[2]


@pytest.mark.server
@pytest.mark.long
@pytest.mark.skipif(find_programs() is None, reason="PostgreSQL is not installed")
def test_events_and_pages_on_postgres() -> None:
    """The fixture itself checks that the server's tables are in PostgreSQL."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/prefect/test_events.py"],
        env=os.environ | {"SOUP_FLOWS_TEST_DATABASE": "postgres"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_cluster_leaves_nothing() -> None:
    with Cluster.start() as cluster:
        assert cluster.new_database().endswith(f"prefect_1?host={cluster.folder}")
        assert cluster.databases() == ["prefect_1"]
        assert cluster.query("prefect_1", "SELECT 1 AS one")[0]["one"] == 1
        processes = {int(row["pid"]) for row in cluster.query("postgres", "SELECT pid FROM pg_stat_activity")}
    assert not cluster.folder.exists()
    assert processes
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
