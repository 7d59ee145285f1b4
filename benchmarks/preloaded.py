"""Starts attempts from a process that has imported the training stack: the start takes most of a short run's time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from soup_flows.launch.plan import LaunchPlan

HERE = Path(__file__).parent


@contextlib.contextmanager
def zygote() -> Iterator[Path]:
    """Keep a process that has imported the training stack; yields the socket that `forked` takes."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "zygote"
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "DS_ACCELERATOR": "cpu"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([sys.executable, str(HERE / "zygote.py"), str(path)], env=environment)
    try:
        while not path.exists():
            if process.poll() is not None:
                raise RuntimeError("the zygote ended")
            time.sleep(0.1)
        yield path
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def forked(launch: LaunchPlan, socket: Path, hook: Path | None = None) -> LaunchPlan:
    """Return the launch with ranks that are forked from the zygote, instead of torch elastic's.

    Args:
        launch: what would be started.
        socket: the zygote's.
        hook: a script that each rank runs before it trains.
    """
    argv = (sys.executable, "-I", "-S", str(HERE / "zygote_launcher.py"), str(socket))
    env = launch.env | ({"SOUP_FLOWS_TEST_HOOK": str(hook)} if hook else {})
    ranks = (str(launch.nproc_per_node), launch.run_dir)
    return launch.model_copy(update={"argv": (*argv, *ranks), "env": env})
