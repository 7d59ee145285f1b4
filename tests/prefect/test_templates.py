"""The base job templates: complete, known to the workers, and with what GPU training needs.

The docker and kubernetes workers are packages of their own; where they are not installed, their variables are
compared with the metadata that Prefect ships for them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from importlib import resources
from typing import Any, get_args

import pytest
from prefect.workers.process import ProcessJobConfiguration

from soup_flows.deploy.pools import job_template
from soup_flows.deploy.values import PoolType
from soup_flows.spec import LauncherSettings

TYPES = get_args(PoolType)
PLACEHOLDER = re.compile(r"\{\{ (\w+) \}\}")
LEFT_OUT = {"container_wait_timeout"}  # a training has no such limit; launcher.timeout_min is one
OWN_KEYS = {"container_create_kwargs"}  # prefect-docker has it, the shipped metadata is older


def published(kind: str) -> dict[str, Any]:
    file = resources.files("prefect.server.api.collections_data.views") / "aggregate-worker-metadata.json"
    packages = json.loads(file.read_text())
    package = "prefect" if kind == "process" else f"prefect-{kind}"
    found: dict[str, Any] = packages[package][kind]["default_base_job_configuration"]
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_every_variable_is_used_and_known(kind: PoolType) -> None:
    template, theirs = job_template(kind), published(kind)
    variables = template["variables"]["properties"]
    assert set(PLACEHOLDER.findall(json.dumps(template["job_configuration"]))) == set(variables)
    assert set(theirs["variables"]["properties"]) - LEFT_OUT <= set(variables)
    assert set(template["job_configuration"]) <= set(theirs["job_configuration"]) | OWN_KEYS
    for name, variable in variables.items():
        assert variable["title"], name
        assert variable["description"].endswith("."), name
        known = theirs["variables"]["properties"].get(name)
        assert known is None or known.get("type") == variable.get("type"), name
    assert variables["stream_output"]["default"] is False


def test_the_image_is_the_one_asked_for() -> None:
    assert job_template("docker", "box:1")["variables"]["properties"]["image"]["default"] == "box:1"


def filled(configuration: Any, kind: PoolType, **values: Any) -> Any:
    return asyncio.run(configuration.from_template_and_values(job_template(kind), values))


@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_process_workers_take_it() -> None:
    found = filled(ProcessJobConfiguration, "process", env={"MINE": "1"})
    assert not found.stream_output
    assert str(found.working_dir) == "."
    assert found.env["MINE"] == "1"
    assert found.env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"


@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_docker_containers_get_what_gpus_need() -> None:
    pytest.importorskip("prefect_docker", reason="without it only the names of the variables are checked")
    containers = pytest.importorskip("docker.models.containers")
    from prefect_docker.worker import DockerWorkerJobConfiguration

    found = filled(DockerWorkerJobConfiguration, "docker")
    asked = {"image": found.image, "command": "true", "version": "1.44", "volumes": found.volumes}
    host = containers._create_container_args({**asked, **found.container_create_kwargs})["host_config"]
    assert host["ShmSize"] == 16 * 2**30
    assert {"Name": "memlock", "Soft": -1, "Hard": -1} in host["Ulimits"]
    assert host["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    assert host["IpcMode"] == "private"
    assert any(bind.startswith("/srv/soup-flows/cache:/cache") for bind in host["Binds"])


@pytest.mark.server
@pytest.mark.usefixtures("prefect_server")
def test_kubernetes_jobs_get_what_gpus_need() -> None:
    values = {"gpus": 4, "node_selector": {"gpu": "h100"}, "secret_name": "tokens"}
    if importlib.util.find_spec("prefect_kubernetes"):
        from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

        manifest = filled(KubernetesWorkerJobConfiguration, "kubernetes", **values).job_manifest
    else:  # the same filling in, without the worker's own checks of the manifest
        from prefect.utilities.templating import apply_values

        template = job_template("kubernetes")
        defaults = {
            name: v["default"] for name, v in template["variables"]["properties"].items() if "default" in v
        }
        manifest = apply_values(template["job_configuration"], defaults | values)["job_manifest"]
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]
    assert container["envFrom"] == [{"secretRef": {"name": "tokens", "optional": True}}]
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    assert pod["nodeSelector"] == {"gpu": "h100"}
    budget = next(m.le for m in LauncherSettings.model_fields["stop_budget_s"].metadata if hasattr(m, "le"))
    assert pod["terminationGracePeriodSeconds"] > budget
    assert manifest["spec"]["backoffLimit"] == 0  # Prefect and the ledger decide about restarts
