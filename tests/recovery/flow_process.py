"""Runs a flow run that the server knows, in a process of its own: `flow_process.py FLOW_RUN_ID SOCKET [HOOK]`.

The ranks are forked from the zygote behind SOCKET, and run HOOK first.
"""

import sys
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow_sync

from benchmarks.preloaded import forked
from soup_flows import own_run, run_files
from soup_flows.flows import soup_train

if __name__ == "__main__":
    real, socket, hook = (
        run_files.build_launch_plan,
        Path(sys.argv[2]),
        Path(sys.argv[3]) if sys.argv[3:] else None,
    )
    run_files.build_launch_plan = lambda **values: forked(real(**values), socket, hook)
    own_run.WATCH_EVERY_S = 0.2
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(sys.argv[1])
    run_flow_sync(soup_train, flow_run=flow_run, parameters=flow_run.parameters)
