"""The same job under several presets, one page: loss, tokens per second, memory, cost.

    python flows/compare_presets.py zero2 full_shard ddp            # the demo, on two CPU ranks
    python flows/compare_presets.py zero2 zero3 --job job.yaml      # your job, on this machine's GPUs

The runs come one after another, so that none disturbs another's figures. The page is the artifact
soup-train-comparison of this flow's run.
"""

import argparse
from typing import Any

from prefect import flow, get_run_logger

from soup_flows import soup_train
from soup_flows.artifacts import create_artifact
from soup_flows.compare import Compared, comparison_page, measured
from soup_flows.demo import demo_parameters
from soup_flows.errors import SoupFlowsError
from soup_flows.presets import strategy_settings
from soup_flows.spec_file import merge
from soup_flows.stored_job import read_job


@flow(name="compare-presets")
def compare_presets(presets: list[str], job: dict[str, Any]) -> list[Compared]:
    """Run `job` under each preset and compare.

    Args:
        presets: Presets of DeepSpeed and FSDP, ddp, single.
        job: The job's settings; its own strategy is left out.

    Returns:
        A row per preset, in the order given; a run that fails is a row too.
    """
    rows = []
    for preset in presets:
        values = {
            k: v for k, v in job.items() if k not in ("deepspeed", "fsdp", "deepspeed_config", "strategy")
        }
        try:
            row = measured(preset, soup_train(**merge(values, strategy_settings(preset))))
        except SoupFlowsError as error:
            row = measured(preset, error)
        get_run_logger().info("%s: %s", preset, row.state)
        rows.append(row)
        create_artifact("soup-train-comparison", "markdown", comparison_page(rows), "Presets side by side.")
    return rows


def main() -> None:
    """Read the command line and compare."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("presets", nargs="+")
    words.add_argument(
        "--job", metavar="NAME", help="block of the type Soup Training Job, or a JSON or YAML file"
    )
    words.add_argument("--output-dir", default="comparison", metavar="DIR", help="of the demo")
    given = words.parse_args()
    job = dict(read_job(given.job)) if given.job else demo_parameters("ddp", given.output_dir)
    print(comparison_page(compare_presets(given.presets, job)))


if __name__ == "__main__":
    main()
