"""Which events set the automations off, by the server's own code; `test_automations.py` has them on a server."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from prefect.server.events.schemas.automations import AutomationCore
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.types._datetime import now

from soup_flows.deploy.automations import PREFIX, automations
from soup_flows.deploy.values import DeployRequest

RUN = "prefect.flow-run.00000000-0000-4000-8000-000000000001"
TRAIN = "soup.train.00000000-0000-4000-8000-000000000001"


def event(name: str, resource: str, flow: str = "soup-train", **labels: str) -> ReceivedEvent:
    related = [
        {"prefect.resource.id": "prefect.flow.1", "prefect.resource.role": "flow", "prefect.resource.name": flow},
        # A deployment of another flow may be called as ours is.
        {"prefect.resource.id": "prefect.deployment.1", "prefect.resource.role": "deployment",
         "prefect.resource.name": "soup-train"},
    ]  # fmt: skip
    values: dict[str, Any] = {"prefect.resource.id": resource, **labels}
    moment = now("UTC")
    return ReceivedEvent(
        id=uuid4(), occurred=moment, received=moment, event=name, resource=values, related=related, payload={}
    )


EVENTS = {
    "crashed": event("prefect.flow-run.Crashed", RUN, **{"prefect.run-count": "1"}),
    "crashed at its fourth start": event("prefect.flow-run.Crashed", RUN, **{"prefect.run-count": "4"}),
    "another flow crashed": event("prefect.flow-run.Crashed", RUN, "other", **{"prefect.run-count": "1"}),
    "a stored job crashed": event(
        "prefect.flow-run.Crashed", RUN, "soup-train-job", **{"prefect.run-count": "2"}
    ),
    "failed": event("prefect.flow-run.Failed", RUN, **{"prefect.run-count": "1"}),
    "completed": event("prefect.flow-run.Completed", RUN, **{"prefect.run-count": "1"}),
    "heartbeat": event("prefect.flow-run.heartbeat", RUN),
    "heartbeat of another flow": event("prefect.flow-run.heartbeat", RUN, "other"),
    "nan": event("soup.train.nan", TRAIN),
    "progress": event("soup.train.progress", TRAIN),
    "ended": event("soup.train.failed.cuda_oom", TRAIN),
}
STATES = {"crashed", "crashed at its fourth start", "a stored job crashed", "failed", "completed"}
EXPECTED = {
    "restart a crashed run": ({"crashed", "a stored job crashed"}, set()),
    "cancel on a loss that is not finite": ({"nan"}, set()),
    "end a lost run": (STATES | {"heartbeat"}, {"heartbeat"}),
    "tell of a failure": (STATES - {"completed"}, set()),
    "tell of a stall": ({"nan", "progress", "ended"}, {"progress"}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_right_events_count(name: str) -> None:
    (ours,) = [a for a in automations(DeployRequest(), uuid4()) if a.name == PREFIX + name]
    trigger: Any = AutomationCore.model_validate(ours.model_dump(mode="json")).trigger
    covered = {what: one for what, one in EVENTS.items() if trigger.covers(one)}
    counted = {what for what, one in covered.items() if trigger.expects(one.event)}
    # Without `after` every event begins the trigger.
    begins = {what for what, one in covered.items() if trigger.after and trigger.starts_after(one.event)}
    assert (counted, begins) == EXPECTED[name]


def test_without_a_notification_block_nobody_is_told() -> None:
    assert {a.name.removeprefix(PREFIX) for a in automations(DeployRequest(), None)} == set(EXPECTED) - {
        "tell of a failure",
        "tell of a stall",
    }
