"""One attempt as the task runs it: devices leased, ranks started, what they say passed on to Prefect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soup_flows.hardware import Hardware, detect
from soup_flows.launch.devices import Device, core_slots, gpu_devices
from soup_flows.launch.leases import Lease, holder, lease_folder, leased
from soup_flows.launch.plan import LaunchPlan, LeaseSettings
from soup_flows.launch.run import Outcome, run
from soup_flows.live import LiveView
from soup_flows.mirror import Mirror
from soup_flows.paths import write_json
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.store import Store

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


def run_attempt(
    launch: LaunchPlan, logger: Logger, should_stop: Callable[[], str | None], store: Store | None = None
) -> Outcome:
    """Lease the devices, run the attempt on them and return how it ended; see `soup_flows.launch.run.run`.

    Args:
        launch: the attempt; with a lease its CUDA_VISIBLE_DEVICES is replaced by the leased devices.
        logger: takes rank 0's lines in batches, and for whom the run waits.
        should_stop: asked about once a second, also while waiting for devices and uploads.
        store: where checkpoints and the model are copied to.

    Raises:
        Refused: if the machine has too few healthy devices.
        TrainingFailed: if the devices did not become free in time.
    """
    view = LiveView(launch)
    mirror = Mirror(store, launch.paths, launch.attempt) if store is not None else None

    def on_events(events: Sequence[dict[str, Any]]) -> None:
        if mirror is not None:
            mirror.on_events(events)
        view.on_events(events)

    def start(plan: LaunchPlan, fds: tuple[int, ...] = ()) -> Outcome:
        return run(
            plan,
            on_lines=lambda lines: logger.info("%s", "\n".join(lines)),
            on_events=on_events,
            should_stop=should_stop,
            lease_fds=fds,
        )

    try:
        outcome = _start_on_devices(launch, start, logger, should_stop)
    except BaseException:
        if mirror is not None:
            mirror.abandon()
        raise
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
    with leased(
        launch.nproc_per_node,
        finder(launch.lease),
        launch.run_id,
        max_wait_s=launch.lease.max_wait_s,
        on_wait=lambda text: logger.info("%s", text),
        should_stop=should_stop,
    ) as lease:
        logger.info("Leased %s after %.0f s", ", ".join(lease.devices), lease.waited_s)
        return start(on_devices(launch, lease), lease.fds)


def finder(settings: LeaseSettings) -> Callable[[], list[Device]]:
    """Return what lists the devices of a kind as they are now."""
    if settings.kind == "core":
        return core_slots
    return lambda: gpu_devices(detect("cuda").gpus)


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
    if spec.gpus != "auto" or spec.device == "cpu" or spec.launcher.lease == "off" or not hardware.gpus:
        return hardware
    free = free_devices(gpu_devices(hardware.gpus))
    gpus = tuple(gpu for gpu in hardware.gpus if gpu.uuid in free)
    return hardware.model_copy(update={"gpus": gpus}) if gpus else hardware


def lease_settings(spec: TrainingSpec, plan: ShardingPlan) -> LeaseSettings | None:
    """GPUs are leased unless that is turned off; CPU cores only when asked for, since ranks may share them."""
    if spec.launcher.lease == "off" or (spec.launcher.lease == "auto" and plan.device == "cpu"):
        return None
    wait_min = spec.launcher.max_wait_min
    return LeaseSettings(
        kind="core" if plan.device == "cpu" else "gpu",
        max_wait_s=None if wait_min is None else wait_min * 60,
    )
