"""Rules about a run that is a job of a Ray cluster."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

from soup_flows.launch.engines.cluster import Unanswered
from soup_flows.launch.engines.ray_http import ADDRESS, Dashboard, find_token, why_infeasible
from soup_flows.ray_settings import RaySettings
from soup_flows.resume_fit import converts_any
from soup_flows.validation import cluster
from soup_flows.validation.table import Context, Found, rule, rules_in

RAY = "ray 2.60"


def _ray(run: Context) -> RaySettings | None:
    """What the job asks for; None for a run that is no job of Ray."""
    return run.spec.launcher.ray if run.spec.launcher.engine == "ray" else None


@rule(
    "RAY001",
    "error",
    "launcher.ray.address",
    "there is nothing to submit to",
    fix="set launcher.ray.address to the head's dashboard, such as http://head:8265",
    source="ray 2.60, dashboard/modules/job/cli.py",
    versions=RAY,
    local=True,
)
def no_address(run: Context) -> Iterator[Found]:
    """The engine ray without the address of a dashboard."""
    ray = _ray(run)
    if ray is not None and ray.address is None and not run.environ.get(ADDRESS):
        yield Found(f"launcher.ray.address is empty and {ADDRESS} is not set")


@rule(
    "RAY002",
    "warning",
    "launcher.ray.python",
    "unless the cluster has another environment in the same place, the job ends with `No module named ray`",
    fix="pip install 'soup-flows[ray,train]' here, or set launcher.ray.python to a Python of the cluster that has it",
    source="soup_flows/launch/engines/ray.py",
    versions=RAY,
    local=True,
)
def python_without_ray(run: Context) -> Iterator[Found]:
    """A job that runs with the flow's own Python, which has no Ray."""
    ray = _ray(run)
    if ray is not None and ray.python is None and importlib.util.find_spec("ray") is None:
        yield Found("launcher.ray.python is empty, and the Python of the flow has no ray")


@rule(
    "RAY003",
    "error",
    "launcher.ray",
    "the job would wait for ever",
    fix="ask for what `ray status` lists, or set launcher.ray.grows=true for a cluster that grows by itself",
    source="ray 2.60, a placement group that cannot be placed stays pending",
    versions=RAY,
    local=True,
)
def infeasible(run: Context) -> Iterator[Found]:
    """More machines, or more GPUs, cores, memory or other resources on each, than the cluster has."""
    ray = _ray(run)
    if ray is None or ray.grows:
        return
    try:
        machines = Dashboard(ray, run.environ).machines()
    except Unanswered:  # RAY001, or a head that is down: the submission says so
        return
    cores = ray.cpus_per_node or (run.spec.launcher.omp_num_threads or 1) * run.plan.ranks_per_node
    gpus = run.plan.ranks_per_node if run.plan.device == "cuda" else 0
    wanted = ray.wanted(cores, gpus)
    reason = why_infeasible(machines, ray.min_nodes or run.plan.nodes, wanted)
    if reason:
        yield Found(reason)


@rule(
    "RAY004",
    "note",
    "output_dir",
    "the job's machines have to see this folder under the same name; they look when they start",
    fix="choose a folder on storage that the cluster shares",
    source="docs/multi-node.md",
    versions=RAY,
)
def unproven_storage(run: Context) -> Iterator[Found]:
    """A job whose output folder is not known to be on a file system of the network."""
    if _ray(run) is not None:
        yield from cluster.unproven_storage(run)


@rule(
    "RAY005",
    "error",
    "launcher.engine",
    "none of it would be used",
    fix="set launcher.engine=ray, or leave launcher.ray out",
    source="soup_flows/ray_settings.py",
)
def settings_without_engine(run: Context) -> Iterator[Found]:
    """Settings for Ray, and another engine."""
    yield from cluster.unused_settings(run, "ray")


@rule(
    "RAY006",
    "warning",
    "launcher.engine",
    "the job does not get it: nothing secret is sent with a job, since the dashboard shows a job's environment",
    fix="set it where `ray start` runs on each machine, or log in there once, such as with `hf auth login`",
    source="ray 2.60, dashboard/modules/job/job_head.py; soup_flows/launch/engines/ray.py",
    versions=RAY,
)
def secret_stays_here(run: Context) -> Iterator[Found]:
    """A secret that ranks may need, in the environment of a flow that submits a job."""
    if _ray(run) is not None:
        yield from cluster.secrets_here(run)


@rule(
    "RAY007",
    "warning",
    "launcher.ray.address",
    "everybody on the way can read it, and with it run anything on the cluster",
    fix="use https, or a tunnel to a port of this machine (`ssh -L 8265:localhost:8265 head`)",
    source="ray 2.60, documentation: token authentication",
    versions=RAY,
)
def token_in_clear(run: Context) -> Iterator[Found]:
    """A token that goes to another machine over http."""
    ray = _ray(run)
    if ray is None:
        return
    url = urlsplit(ray.address or run.environ.get(ADDRESS, ""))
    near = (url.hostname or "").startswith("127.") or url.hostname in ("localhost", "::1")
    if url.scheme == "http" and not near and find_token(run.environ):
        yield Found(f"the token goes to {url.hostname} over http")


@rule(
    "RAY008",
    "warning",
    "launcher.ray.address",
    "this package was tried with 2.60 alone, and Ray's HTTP interface and placement change between versions",
    fix="use a cluster of Ray 2.60, or try a short run first",
    source="pyproject.toml, the extra `ray`",
    versions=RAY,
    local=True,
)
def another_version(run: Context) -> Iterator[Found]:
    """A cluster of another version of Ray than the one that was tried."""
    ray = _ray(run)
    if ray is None:
        return
    try:
        found = Dashboard(ray, run.environ).json("GET", "/api/version")
    except Unanswered:
        return
    version = str(found.get("ray_version")) if isinstance(found, dict) else json.dumps(found)
    if not version.startswith("2.60."):
        yield Found(f"the cluster runs Ray {version}")


@rule(
    "RAY009",
    "error",
    "launcher.ray.min_nodes",
    "the run could not go on with fewer machines, and not with more again",
    fix="use a preset whose checkpoints are converted (zero1, zero2, FSDP), or leave launcher.ray.min_nodes out",
    source="soup_flows/resume_fit.py; deepspeed 0.19.8 runtime/engine.py, ZeRORuntimeException",
    versions=RAY,
)
def cannot_change_size(run: Context) -> Iterator[Found]:
    """Fewer machines allowed, and a strategy whose checkpoints another number of ranks cannot read."""
    ray = _ray(run)
    if ray is None or ray.min_nodes in (None, ray.nodes):
        return
    adapters = run.spec.trains_adapters
    if run.plan.engine == "deepspeed" and not converts_any(run.plan, adapters):
        yield Found(f"min_nodes={ray.min_nodes}, and {run.plan.strategy} keeps one optimizer file per rank")


RULES = rules_in(globals())
