"""The live probe, through the real pynvml, against a stand-in for the driver's library (see its head)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from soup_flows.hardware import Hardware, NvidiaReading

SOURCE = Path(__file__).parents[1] / "data/hardware/nvml_stand_in.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    argv = [compiler, "-shared", "-fPIC", "-w", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(argv, check=True)
    return folder


def python(library: Path, code: str, **environ: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    env |= {"LD_LIBRARY_PATH": str(library)} | environ
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


READ = "from soup_flows.hardware import NvmlProbe; print(NvmlProbe().read().model_dump_json())"
DETECT = "from soup_flows.hardware import detect; print(detect().model_dump_json())"


def test_every_reading(library: Path) -> None:
    reading = NvidiaReading.model_validate_json(python(library, READ))
    assert (reading.driver_version, reading.cuda_version, reading.error) == ("535.183.01", "12.2", None)
    first, second, divided, lost = reading.gpus
    assert (first.uuid, first.name) == ("GPU-00000000-aaaa", "NVIDIA A100-SXM4-80GB")
    assert (first.memory_total_bytes, first.memory_free_bytes) == (80 << 30, 50 << 30)
    assert (first.compute_capability, first.mig_enabled) == ((8, 0), False)
    assert (first.pcie_generation, first.pcie_width, first.pcie_width_max) == (4, 16, 16)
    assert [(p.pid, p.used_bytes) for p in first.processes] == [(4242, 20 << 30), (4343, None)]
    assert [(link.remote_bus_id, link.remote_type) for link in first.nvlinks or ()] == [
        ("00000000:0f:00.0", "gpu")
    ] * 2
    assert (first.peers, second.peers, divided.peers) == ((1,), (0,), ())
    assert (first.ecc_errors, second.ecc_errors) == (0, 2)
    assert first.faults == ()
    assert (first.energy_mj, second.energy_mj) == (123456789, None)
    assert ["remapped" in fault or "fabric" in fault for fault in second.faults] == [True, True]
    assert divided.nvlinks == ()
    assert [part.uuid for part in divided.slices] == ["MIG-33333333-dddd", "MIG-44444444-eeee"]
    assert divided.slices[1].memory_total_bytes == 40 << 30
    assert (lost.uuid, lost.unread) == (None, {"handle": "GPU is lost"})


def test_detect_on_top_of_it(library: Path) -> None:
    both = Hardware.model_validate_json(python(library, DETECT, CUDA_VISIBLE_DEVICES="1,0"))
    assert [gpu.index for gpu in both.gpus] == [1, 0]
    assert (both.device, both.interconnect, both.peer_access) == ("cuda", "nvlink", True)
    assert both.gpus[0].nvlinks == (0,)
    assert "2 uncorrected ECC" in (both.gpus[0].sick or "")
    assert both.gpus[1].sick is None
    assert {(gpu.index, gpu.why) for gpu in both.unused if gpu.index is not None} == {
        (2, "hidden"),
        (3, "hidden"),
    }
    one_slice = Hardware.model_validate_json(python(library, DETECT))
    assert [gpu.uuid for gpu in one_slice.gpus] == ["MIG-33333333-dddd"]


@pytest.mark.parametrize(
    ("code", "text"), [("9", "Driver Not Loaded"), ("18", "version mismatch"), ("999", "Unknown Error")]
)
def test_a_driver_that_does_not_start(library: Path, code: str, text: str) -> None:
    reading = NvidiaReading.model_validate_json(python(library, READ, STAND_IN_INIT=code))
    assert text in (reading.error or "")
    assert reading.gpus == ()
    refused = "from soup_flows.hardware import detect\ntry: detect('cuda')\nexcept ValueError as e: print(e)"
    assert "broken or not loaded" in python(library, refused, STAND_IN_INIT=code)


ATTEMPT = """
import logging, sys
from soup_flows.attempt import run_attempt
from soup_flows.hardware.energy import used_joules
from soup_flows.launch.plan import build_launch_plan
from soup_flows.paths import RunPaths
paths = RunPaths.of(sys.argv[1], "run").create()
launch = build_launch_plan(paths=paths, run_id="run", attempt=1, nproc_per_node=1, device="cuda", config_path=None,
                           omp_num_threads=1, stop_budget_s=5, timeout_s=None,
                           cuda_visible_devices="GPU-00000000-aaaa")
launch = launch.model_copy(update={"argv": ("/bin/true",), "lease": None})
run_attempt(launch, logging.getLogger(), lambda: None)
print(used_joules(paths.attempt(1).energy))
"""


def test_an_attempt_is_measured(library: Path, tmp_path: Path) -> None:
    """The stand-in's counter grows by 5 J with each look."""
    code = f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{ATTEMPT}"
    assert python(library, code).splitlines()[-1] == "5.0"
