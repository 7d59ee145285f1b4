"""One attempt as the task runs it: devices leased, ranks started, what they say passed on to Prefect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soup_flows.hardware import Hardware, detect
from soup_flows.hardware.energy import metered
from soup_flows.launch.devices import Device, core_slots, gpu_devices
from soup_flows.launch.engines import Engine, Status, finished
from soup_flows.launch.engines.local import LocalEngine
from soup_flows.launch.engines.ray import RayEngine
from soup_flows.launch.engines.slurm import SlurmEngine
from soup_flows.launch.events import strip_ansi
from soup_flows.launch.leases import Lease, holder, lease_folder, leased
from soup_flows.launch.plan import LaunchPlan, LeaseSettings
from soup_flows.launch.run import Outcome, follow
from soup_flows.ledger import read_ledger
from soup_flows.live import LiveView, Waiting
from soup_flows.mirror import Mirror
from soup_flows.paths import RunPaths, write_json
from soup_flows.run_lock import run_lock
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.store import Store

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]

ERROR_LINES = 400
"""Most lines of tracebacks in one record; the files in `errors/` have all of them."""


CLEANING_S = 15.0
"""Longer than the stop budget, for a runner of the same run that is just being ended."""


def run_attempt(
    launch: LaunchPlan, logger: Logger, should_stop: Callable[[], str | None], store: Store | None = None
) -> Outcome:
    """Lease the devices, run the attempt on them and return how it ended; see `soup_flows.launch.run.run`.

    The run is held meanwhile, so that no other process can launch into its directory.

    Args:
        launch: the attempt; with a lease its CUDA_VISIBLE_DEVICES is replaced by the leased devices.
        logger: takes rank 0's lines in batches, the errors of every rank, and for whom the run waits.
        should_stop: asked about once a second, also while waiting for devices and uploads.
        store: where checkpoints and the model are copied to.

    Raises:
        Refused: if the machine has too few healthy devices, or another process is running this run.
        TrainingFailed: if the devices did not become free in time.
    """
    with run_lock(launch.paths, launch.stop_budget_s + CLEANING_S) as lock:
        return _run_locked(launch, logger, should_stop, store, lock)


def _run_locked(
    launch: LaunchPlan, logger: Logger, should_stop: Callable[[], str | None], store: Store | None, lock: int
) -> Outcome:
    view, waiting = LiveView(launch), Waiting()
    mirror = Mirror(store, launch.paths, launch.attempt) if store is not None else None

    def on_events(events: list[dict[str, Any]]) -> None:
        if errors := error_lines(events):
            logger.error("%s", "\n".join(errors))
        if mirror is not None:
            mirror.on_events(events)
        view.on_events(events)

    def on_status(status: Status) -> None:
        if launch.engine == "local":
            return
        words = f": {status.reason}" if status.reason else ""
        logger.info("%s: %s%s (attempt %d)", launch.engine, status.state, words, status.attempt)
        waiting.say(f"{launch.engine}: waits{words}" if status.state == "QUEUED" else "")

    def start(plan: LaunchPlan, fds: tuple[int, ...] = ()) -> Outcome:
        gpus = [uuid for uuid in plan.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
        with metered(gpus, plan.attempt_paths.energy):
            return follow(
                engine(plan, (lock, *fds)),
                plan,
                on_lines=lambda lines: logger.info("%s", "\n".join(lines)),
                on_events=on_events,
                on_status=on_status,
                should_stop=should_stop,
            )

    try:
        outcome = _start_on_devices(launch, start, logger, should_stop)
    except BaseException:
        if mirror is not None:
            mirror.abandon()
        raise
    finally:
        view.leave_terminal()
    view.end()
    if mirror is not None:
        mirror.finish(should_stop)
    return outcome


def _start_on_devices(
    launch: LaunchPlan,
    start: Callable[..., Outcome],
    logger: Logger,
    should_stop: Callable[[], str | None],
) -> Outcome:
    """Lease what the attempt needs, then start it."""
    if launch.lease is None:
        return start(launch)
    waiting = Waiting()

    def on_wait(text: str) -> None:
        logger.info("%s", text)
        waiting.say(text)

    with leased(
        launch.nproc_per_node,
        finder(launch.lease),
        launch.run_id,
        max_wait_s=launch.lease.max_wait_s,
        on_wait=on_wait,
        should_stop=should_stop,
    ) as lease:
        logger.info("Leased %s after %.0f s", ", ".join(lease.devices), lease.waited_s)
        waiting.say("")
        return start(on_devices(launch, lease), lease.fds)


def engine(launch: LaunchPlan, lease_fds: Sequence[int] = ()) -> Engine:
    """Return what runs a launch.

    Args:
        launch: it names its engine.
        lease_fds: locks that a supervisor on this machine holds too.
    """
    if launch.engine == "local":
        return LocalEngine(lease_fds)
    if launch.engine == "slurm":
        return SlurmEngine(silence_s=launch.silence_s)
    return RayEngine(launch.ray, silence_s=launch.silence_s)


def running_elsewhere(paths: RunPaths) -> LaunchPlan | None:
    """Return the launch of an attempt that outlived the flow that submitted it; None if there is none.

    It may have finished by now; that it did is then still to be told.
    """
    try:
        launch = LaunchPlan.model_validate_json(paths.launch.read_bytes())
    except (OSError, ValueError):
        return None
    if launch.engine == "local" or any(row.number == launch.attempt for row in read_ledger(paths.attempts)):
        return None
    found = finished(launch.attempt_paths) or engine(launch).attach(paths) is not None
    return launch if found else None


def error_lines(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tracebacks among `events`, each line with its rank; rank 0's stand in its own lines already."""
    return [
        f"rank {event.get('rank')}: {line}"
        for event in events
        if event["kind"] == "error" and event.get("rank") != 0
        for line in strip_ansi(str(event.get("traceback") or event.get("message"))).splitlines()
    ][:ERROR_LINES]


def finder(settings: LeaseSettings) -> Callable[[], list[Device]]:
    """Return what lists the devices of a kind as they are now."""
    if settings.kind == "core":
        return core_slots

    def gpus() -> list[Device]:
        hardware = detect("cuda")
        return gpu_devices(hardware.gpus, hardware.unused)

    return gpus


def on_devices(launch: LaunchPlan, lease: Lease) -> LaunchPlan:
    """Return the plan for the leased devices, and keep in the attempt's folder which they are."""
    attempt = launch.attempt_paths
    attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(attempt.devices, {"devices": list(lease.devices), "waited_s": round(lease.waited_s, 1)})
    if launch.lease is None or launch.lease.kind == "core":
        return launch
    return launch.model_copy(update={"env": launch.env | {"CUDA_VISIBLE_DEVICES": ",".join(lease.devices)}})


def free_devices(devices: list[Device], folder: Path | None = None) -> set[str]:
    """Return the ids of the devices that are healthy, not leased and not used at this moment."""
    where = folder or lease_folder()
    good = [device for device in devices if device.sick is None and device.occupied is None]
    return {device.id for device in good if holder(where, device.id) is None}


def free_now(spec: TrainingSpec, hardware: Hardware) -> Hardware:
    """For `gpus="auto"`: leave out GPUs that are sick, used or leased at present, unless that is all of them."""
    here = spec.launcher.engine == "local" and spec.launcher.lease != "off"
    if spec.gpus != "auto" or spec.device == "cpu" or not here or not hardware.gpus:
        return hardware
    free = free_devices(gpu_devices(hardware.gpus))
    gpus = tuple(gpu for gpu in hardware.gpus if gpu.uuid in free)
    return hardware.model_copy(update={"gpus": gpus}) if gpus else hardware


def lease_settings(spec: TrainingSpec, plan: ShardingPlan) -> LeaseSettings | None:
    """GPUs are leased unless that is turned off; CPU cores only when asked for, since ranks may share them."""
    if spec.launcher.engine != "local":
        return None
    if spec.launcher.lease == "off" or (spec.launcher.lease == "auto" and plan.device == "cpu"):
        return None
    wait_min = spec.launcher.max_wait_min
    return LeaseSettings(
        kind="core" if plan.device == "cpu" else "gpu",
        max_wait_s=None if wait_min is None else wait_min * 60,
    )
