"""Entry of a rank: `python -m soup_flows.training RUN_DIR`, started by torch elastic."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from soup_flows.launch import rank
from soup_flows.training.lean import leave_out_of_rank


def main() -> int:
    """Run one rank; a failure leaves its own words in the attempt's folder before the process ends."""
    rank.attach()
    attempt_dir = Path(os.environ["SOUP_FLOWS_ATTEMPT_DIR"])
    try:
        run_dir = Path(sys.argv[1])
        leave_out_of_rank(run_dir)
        from soup_flows.training.run import train

        train(run_dir, attempt_dir)
    except BaseException as error:
        rank.write_error(error)
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # what is torn down now may wait for ranks that are gone
        raise
    finally:
        _leave_group()
    return 0


def _leave_group() -> None:
    """Close the process group; a rank that ends with it open may abort at exit."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
