"""Automations that self-hosted servers do not ship: what should happen when nobody looks.

The trigger of every one is an event of Prefect or one of `soup.train.*`; docs/operations.md describes them.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, CancelFlowRun, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from soup_flows.deploy.values import DeployRequest, Step
from soup_flows.errors import refuse

PREFIX = "soup-flows: "
RESTARTS = ("1", "2", "3")
"""Starts after which a Crashed run is started again. The ledger bounds it too (`recovery.max_retries`); this ends
runs that crash before they can read one."""
RUN = {"prefect.resource.id": "prefect.flow-run.*"}
OUR_FLOWS = {"prefect.resource.role": "flow", "prefect.resource.name": ["soup-train", "soup-train-job"]}
EACH_RUN = {"prefect.resource.id"}


def automations(request: DeployRequest, notify: UUID | None) -> list[AutomationCore]:
    """Return the automations, those that tell somebody only with a notification block.

    Args:
        request: `zombie_s` and `stall_s` are the limits.
        notify: id of the notification block's document.
    """
    found = [_restart(), _cancel_on_nan(), _zombies(request.zombie_s)]
    if notify is not None:
        found += [_tell_failure(notify), _tell_stall(notify, request.stall_s)]
    return found


def ensure_automations(client: SyncPrefectClient, request: DeployRequest, dry_run: bool) -> list[Step]:
    """Create or update the automations; one that somebody paused stays paused.

    Raises:
        Refused: if the notification block is not there.
    """
    notify = _notification_block(client, request.notify) if request.notify else None
    steps = []
    for wanted in automations(request, notify):
        known = client.read_automations_by_name(wanted.name)
        if not dry_run and known:
            client.update_automation(known[0].id, _spelled_out(wanted, enabled=known[0].enabled))
        elif not dry_run:
            client.create_automation(wanted)
        action = "update" if known else "create"
        steps.append(Step(kind="automation", name=wanted.name, action=action, detail=wanted.description))
    if notify is None:
        why = "needs a notification block: --notify TYPE/NAME"
        steps += [Step(kind="automation", name=PREFIX + name, action="leave out", detail=why)
                  for name in ("tell of a failure", "tell of a stall")]  # fmt: skip
    return steps


def _spelled_out(automation: AutomationCore, enabled: bool) -> AutomationCore:
    """Return it with every field of its trigger and actions set.

    The client's update sends the fields alone that were set (prefect 3.9.1,
    client/orchestration/_automations/client.py, `exclude_unset`); without its type the server takes an action
    such as CancelFlowRun for another one, DoNothing. It refuses fields of an automation that it has no update for.
    """
    given = automation.model_dump(mode="json", include=automation.model_fields_set)
    return AutomationCore.model_validate(given | {"enabled": enabled})


def _notification_block(client: SyncPrefectClient, name: str) -> UUID:
    """Return the id of a block document."""
    slug, _, document = name.partition("/")
    try:
        return client.read_block_document_by_name(document, slug, include_secrets=False).id
    except ObjectNotFound:
        fix = "create it in Prefect (page Blocks, a notification type); slack-webhook/ops, for example"
        raise refuse("DEPLOY004", "--notify", f"there is no block {name!r}", fix) from None


def _make(name: str, description: str, trigger: EventTrigger, action: ActionTypes) -> AutomationCore:
    return AutomationCore(
        name=PREFIX + name, description=description, enabled=True, trigger=trigger, actions=[action]
    )


def _restart() -> AutomationCore:
    trigger = EventTrigger(
        expect={"prefect.flow-run.Crashed"},
        match=RUN | {"prefect.run-count": list(RESTARTS)},
        match_related=OUR_FLOWS,
        for_each=EACH_RUN,
        posture=Posture.Reactive,
        threshold=1,
    )
    action = ChangeFlowRunState(
        state=StateType.SCHEDULED,
        name="AwaitingRetry",
        message="Crashed; goes on from its newest checkpoint.",
    )
    text = "A Crashed run starts again from its newest checkpoint, as often as recovery.max_retries allows."
    return _make("restart a crashed run", text, trigger, action)


def _cancel_on_nan() -> AutomationCore:
    trigger = EventTrigger(
        expect={"soup.train.nan"}, for_each=EACH_RUN, posture=Posture.Reactive, threshold=1
    )
    text = "A run whose loss is not finite is cancelled, whatever recovery.on_nan would try next."
    return _make("cancel on a loss that is not finite", text, trigger, CancelFlowRun())


def _zombies(after_s: float) -> AutomationCore:
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
        match=RUN,
        match_related=OUR_FLOWS,
        for_each=EACH_RUN,
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=after_s),
    )
    message = f"No heartbeat for {after_s:.0f} s: the worker, its machine or the flow process is gone."
    action = ChangeFlowRunState(state=StateType.CRASHED, message=message)
    return _make(
        "end a lost run", f"A run without a heartbeat for {after_s:.0f} s is Crashed.", trigger, action
    )


def _tell_failure(notify: UUID) -> AutomationCore:
    trigger = EventTrigger(
        expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"},
        match=RUN,
        match_related=OUR_FLOWS,
        for_each=EACH_RUN,
        posture=Posture.Reactive,
        threshold=1,
    )
    action = SendNotification(
        block_document_id=notify,
        subject="{{ flow.name }} {{ flow_run.name }}: {{ event.resource['prefect.state-name'] }}",
        # of the event: by now the run may have been started again
        body="{{ event.resource['prefect.state-message'] }}\n\n{{ flow_run|ui_url }}",
    )
    return _make("tell of a failure", "Class, cause and advice of a run that failed.", trigger, action)


def _tell_stall(notify: UUID, after_s: float) -> AutomationCore:
    trigger = EventTrigger(
        after={"soup.train.progress"},
        expect={"soup.train.*"},
        for_each=EACH_RUN,
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=after_s),
    )
    action = SendNotification(
        block_document_id=notify,
        subject="soup-train makes no progress",
        body="No step for " + f"{after_s:.0f} s in " + "{{ event.resource.id }}. `soup-flows diagnose` reads "
        "its run directory; launcher.stall_floor_s says when it is stopped.",
    )
    return _make("tell of a stall", f"A run that made no step for {after_s:.0f} s.", trigger, action)
