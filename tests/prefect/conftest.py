"""What the tests that deploy share: one server serves all of them, in any order."""

from __future__ import annotations

import pytest
from prefect.client.orchestration import get_client


@pytest.fixture
def nothing_deployed(prefect_server: None) -> None:
    """Take away deployments, automations and blocks that other tests have left on the server."""
    with get_client(sync_client=True) as client:
        for deployment in client.read_deployments():
            client.delete_deployment(deployment.id)
        for automation in client.read_automations():
            client.delete_automation(automation.id)
        for block in client.read_block_documents():
            client.delete_block_document(block.id)
