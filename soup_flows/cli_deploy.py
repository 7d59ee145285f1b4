"""`soup-flows deploy`: everything a Prefect server needs to know about this package, registered in one call."""

# ruff: noqa: T201 (a command prints)

from __future__ import annotations

import argparse
from typing import Any

from pydantic import ValidationError

from soup_flows.cli_runs import GOOD, print_json
from soup_flows.errors import refuse
from soup_flows.spec import parse_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only `deploy` has; those of a spec become parameters of `soup-train/nightly`."""
    parser.add_argument("--pool", default="gpu", metavar="NAME", help="work pool, made if missing (gpu)")
    kinds = ("process", "docker", "kubernetes")
    parser.add_argument(
        "--type", default="process", choices=kinds, dest="pool_type", help="its type (process)"
    )
    parser.add_argument("--image", metavar="IMAGE", help="image of a docker or kubernetes pool")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="most runs of the pool at once, over all hosts (a new pool: 8)"
    )
    parser.add_argument("--reset-pool", action="store_true", help="replace the template of an existing pool")
    parser.add_argument(
        "--schedule", metavar="CRON", help="switch soup-train/nightly on, such as '0 2 * * *'"
    )
    parser.add_argument("--timezone", default="UTC", metavar="ZONE", help="of the schedule (UTC)")
    parser.add_argument("--blocks", metavar="DIR", help="folder of documents (YAML) to keep as blocks")
    parser.add_argument(
        "--automations", action="store_true", help="restart, zombie, NaN and notification automations"
    )
    parser.add_argument(
        "--notify", metavar="TYPE/NAME", help="notification block that --automations tells of failures"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, do nothing")


def deploy_command(arguments: argparse.Namespace, parameters: dict[str, Any]) -> int:
    """Deploy and print what was done.

    Args:
        arguments: what `add_arguments` added.
        parameters: of `soup-train/nightly`; empty keeps what it has.

    Raises:
        Refused: for parameters that are no spec, and see `soup_flows.deploy.deploy`.
    """
    if parameters:
        parse_spec(parameters)
    if arguments.notify and not arguments.automations:
        raise refuse("DEPLOY005", "--notify", "is of use with --automations only", "add --automations")
    if (arguments.image is None) != (arguments.pool_type == "process"):
        message = f"a {arguments.pool_type} pool " + (
            "needs the image of its containers" if arguments.image is None else "has no containers"
        )
        fix = "give --type and --image together; deployments/worker.Dockerfile builds an image"
        raise refuse("DEPLOY006", "--image", message, fix)
    from soup_flows.deploy import DeployRequest, deploy

    names = DeployRequest.model_fields.keys() & vars(arguments).keys()
    try:
        request = DeployRequest(parameters=parameters, **{name: getattr(arguments, name) for name in names})
    except ValidationError as error:
        item = error.errors()[0]
        flag = "--" + str(item["loc"][0]).replace("_", "-")
        raise refuse("DEPLOY007", flag, f"got {item['input']!r}", item["msg"]) from None
    steps = deploy(request, arguments.dry_run)
    if arguments.json:
        print_json({"dry_run": arguments.dry_run, "steps": [step.model_dump() for step in steps]})
        return GOOD
    for step in steps:
        print(
            f"{step.action:<9}  {step.kind:<10}  {step.name}" + (f"  ({step.detail})" if step.detail else "")
        )
    if not arguments.dry_run:
        start = f"prefect worker start --pool {request.pool}"
        print(f"\nNow start a worker on the GPU machine: {start}")
    return GOOD
