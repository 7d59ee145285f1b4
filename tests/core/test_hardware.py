"""Recorded machines, replayed through the probe: what a run would get, and what doctor says."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from soup_flows.errors import Refused
from soup_flows.hardware import Gpu, Hardware, HostMemory, RecordedProbe, detect, doctor, render

DATA = Path(__file__).parents[1] / "data/hardware"
SNAPSHOTS = sorted(path.stem for path in DATA.glob("*.json"))


def machine(name: str, environ: dict[str, str] | None = None, root: Path = DATA / "no-such-root") -> Hardware:
    return detect(probe=RecordedProbe(DATA / f"{name}.json"), environ=environ or {}, root=root)


def ids(hardware: Hardware) -> set[str]:
    return {problem.id for problem in doctor(hardware)}


def healthy(hardware: Hardware, **changes: object) -> Hardware:
    """A machine whose software and host are in order, so that one change is all that is wrong."""
    base = {"torch_cuda": "12.4", "driver_cuda": "12.4", "cuda_toolkit": "12.4", "cpu_cores": 64}
    base |= {"cxx": "/usr/bin/c++", "ninja": True, "shm": {"path": "/s", "total_bytes": 8 << 30}}
    base["shm"] |= {"free_bytes": 8 << 30}
    return Hardware.model_validate(hardware.model_dump() | base | changes)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_snapshot_round_trips_and_renders(name: str) -> None:
    hardware = machine(name)
    assert Hardware.model_validate_json(hardware.model_dump_json()) == hardware
    assert pickle.loads(pickle.dumps(hardware)) == hardware
    text = render(hardware, doctor(hardware))
    for gpu in hardware.gpus:
        assert gpu.name in text
    for problem in doctor(hardware):
        assert problem.id in text
        assert problem.fix


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_reading_names_its_source(name: str) -> None:
    fields = set(Hardware.model_fields) - {"device", "sources", "notes"}
    assert fields == set(machine(name).sources)
    assert all(machine(name).sources.values())


@pytest.mark.parametrize(
    ("name", "count", "connection", "peers"),
    [
        ("8xh100-nvswitch", 8, "nvswitch", True),
        ("4xa100-pcie", 4, "pcie", True),
        ("4xa100-nvlink-pairs", 4, "pcie", True),
        ("4xa100-sxm-nvlink", 4, "nvlink", True),
        ("2xrtx4090", 2, "pcie", False),
        ("t4", 1, "none", None),
        ("mig-slices", 1, "none", None),
        ("8xh100-foreign-processes", 7, "nvswitch", True),
        ("broken-driver", 0, "none", None),
    ],
)
def test_what_a_run_gets(name: str, count: int, connection: str, peers: bool | None) -> None:
    hardware = machine(name)
    assert (len(hardware.gpus), hardware.interconnect, hardware.peer_access) == (count, connection, peers)
    assert hardware.device == ("cuda" if count else "cpu")


def test_nvlink_neighbours() -> None:
    assert machine("8xh100-nvswitch").gpus[3].nvlinks == (0, 1, 2, 4, 5, 6, 7)
    paired = machine("4xa100-nvlink-pairs")
    assert [gpu.nvlinks for gpu in paired.gpus] == [(1,), (0,), (3,), (2,)]
    assert any("only the GPUs 0-1, 2-3" in note for note in paired.notes)
    one_pair = machine("4xa100-nvlink-pairs", {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert one_pair.interconnect == "nvlink"
    apart = machine("4xa100-nvlink-pairs", {"CUDA_VISIBLE_DEVICES": "1,2"})
    assert (apart.interconnect, apart.gpus[0].nvlinks) == ("pcie", ())


def test_an_unread_link_is_unknown_not_pcie() -> None:
    reading = RecordedProbe(DATA / "4xa100-pcie.json").read()
    silent = reading.gpus[1].model_copy(update={"nvlinks": None, "unread": {"nvlinks": "Unknown Error"}})

    class Silent:
        def read(self):
            return reading.model_copy(update={"gpus": (reading.gpus[0], silent)})

    hardware = detect(probe=Silent(), environ={}, root=DATA / "no-such-root")
    assert hardware.interconnect == "unknown"
    assert any("Unknown Error" in note for note in hardware.notes)


def test_bf16_comes_from_the_capability() -> None:
    assert machine("t4").gpus[0].bf16 is False
    assert machine("4xa100-pcie").gpus[0].bf16 is True
    assert machine("t4").gpus[0].model_copy(update={"compute_capability": None}).bf16 is None


def test_mig_shows_one_slice_and_explains_the_rest() -> None:
    hardware = machine("mig-slices")
    assert hardware.gpus[0].mig
    assert hardware.gpus[0].memory_total_bytes == 20096 << 20
    assert [gpu.why for gpu in hardware.unused] == ["mig"] * 3
    second = RecordedProbe(DATA / "mig-slices.json").read().gpus[0].slices[1].uuid
    chosen = machine("mig-slices", {"CUDA_VISIBLE_DEVICES": second})
    assert [gpu.uuid for gpu in chosen.gpus] == [second]
    whole = machine("mig-slices", {"CUDA_VISIBLE_DEVICES": "1"})
    assert [(gpu.index, gpu.mig) for gpu in whole.gpus] == [(1, False)]


def test_occupied_sick_and_lost_gpus() -> None:
    hardware = machine("8xh100-foreign-processes")
    found = {problem.id: problem.message for problem in doctor(hardware)}
    assert "GPU 2" in found["HW010"]
    assert "pid 41822 with 70.3 GiB" in found["HW010"]
    assert "GPU 5" in found["HW011"]
    assert "3 uncorrected ECC" in found["HW009"]
    assert "GPU is lost" in found["HW007"]
    assert [gpu.index for gpu in hardware.gpus if gpu.sick] == [6]


def test_a_healthy_machine_has_no_problems() -> None:
    assert doctor(healthy(machine("8xh100-nvswitch"))) == []


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"torch_cuda": "none"}, "HW012"),
        ({"torch_cuda": "13.0", "cuda_toolkit": "13.0"}, "HW013"),
        ({"cuda_toolkit": "11.8"}, "HW014"),
        ({"cxx": None}, "HW016"),
        ({"ninja": False}, "HW016"),
        ({"cuda_toolkit": None}, "HW017"),
        ({"shm": {"path": "/s", "total_bytes": 64 << 20, "free_bytes": 64 << 20}}, "HW018"),
        ({"shm": None}, "HW018"),
        ({"cpu_cores": 4}, "HW019"),
        ({"disks": [{"path": "/o", "total_bytes": 1 << 40, "free_bytes": 1 << 30}]}, "HW020"),
        ({"peer_access": False}, "HW022"),
        ({"infiniband_down": ["mlx5_0 port 1: DOWN, InfiniBand, 10 Gb/sec"]}, "HW023"),
        ({"infiniband": ["mlx5_0 port 1: ACTIVE"], "memlock": 8 << 20}, "HW024"),
    ],
)
def test_one_thing_wrong_is_one_problem(changes: dict[str, object], rule: str) -> None:
    assert ids(healthy(machine("8xh100-nvswitch"), **changes)) == {rule}


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_cuda": "12.8"},
        {"torch_cuda": None},
        {"cuda_toolkit": "12.1"},
        {"memlock": 8 << 20},
        {"infiniband": ["mlx5_0 port 1: ACTIVE"], "memlock": "unlimited"},
        {"disks": [{"path": "/o", "total_bytes": 1 << 40, "free_bytes": 11 << 30}]},
        {"cpu_cores": 8},
    ],
)
def test_the_nearest_good_case_passes(changes: dict[str, object]) -> None:
    assert doctor(healthy(machine("8xh100-nvswitch"), **changes)) == []


def test_consumer_cards() -> None:
    old = machine("2xrtx4090")
    assert {"HW015", "HW021", "HW022"} <= ids(old)
    assert "HW015" not in ids(old.model_copy(update={"driver_version": "550.54.15"}))
    alone = machine("2xrtx4090", {"CUDA_VISIBLE_DEVICES": "0"})
    assert not {"HW015", "HW021"} & ids(alone)


def test_mixed_gpus() -> None:
    both = machine("t4").gpus + machine("2xrtx4090").gpus[:1]
    assert {"HW025", "HW026"} <= ids(healthy(machine("t4"), gpus=[gpu.model_dump() for gpu in both]))


@pytest.mark.parametrize(
    ("name", "environ", "words"),
    [
        ("broken-driver", {}, ["broken", "RM has detected an NVML/RM version mismatch"]),
        ("t4", {"CUDA_VISIBLE_DEVICES": ""}, ["hidden by CUDA_VISIBLE_DEVICES=''", "Tesla T4"]),
        ("t4", {"CUDA_VISIBLE_DEVICES": "-1"}, ["hidden by CUDA_VISIBLE_DEVICES='-1'"]),
        ("t4", {"NVIDIA_VISIBLE_DEVICES": "none"}, ["hidden by NVIDIA_VISIBLE_DEVICES='none'"]),
    ],
)
def test_cuda_is_refused_with_the_reason(name: str, environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        detect("cuda", probe=RecordedProbe(DATA / f"{name}.json"), environ=environ, root="/no-such-root")
    (problem,) = caught.value.problems
    assert (problem.field, problem.id) == ("device", "HW001")
    assert all(word in problem.message for word in words), problem.message
    assert "device=cpu" in problem.fix
    auto = machine(name, environ)
    assert (auto.device, auto.gpus) == ("cpu", ())


def test_cpu_does_not_look_at_gpus() -> None:
    hardware = detect("cpu", probe=RecordedProbe("/no-such-file"))
    assert (hardware.device, hardware.gpus) == ("cpu", ())


def test_this_machine_without_a_driver(tmp_path: Path) -> None:
    """The live probe in a process that finds no NVIDIA library that loads; torch stays out."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    code = (
        "import sys\n"
        "from soup_flows.hardware import detect\n"
        "h = detect(paths=['/no/such/folder'])\n"
        "assert h.device == 'cpu' and h.driver_error == 'NVML Shared Library Not Found', h\n"
        "assert h.cpu_cores >= 1 and h.host_memory.usable_bytes > 0 and h.disks[0].total_bytes > 0\n"
        "assert not {'torch', 'prefect', 'transformers'} & set(sys.modules)\n"
        "try:\n"
        "    detect('cuda')\n"
        "except ValueError as e:\n"
        "    print(e)\n"
    )
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "finds no NVIDIA driver" in done.stdout


def test_host_memory_is_bound_by_the_tightest_limit() -> None:
    memory = HostMemory(total_bytes=100, available_bytes=80, cgroup_limit_bytes=50, cgroup_used_bytes=20)
    assert memory.usable_bytes == 30
    assert memory.model_copy(update={"scheduler_limit_bytes": 10}).usable_bytes == 10
    assert memory.model_copy(update={"cgroup_used_bytes": 60}).usable_bytes == 0


def test_values_are_strict() -> None:
    with pytest.raises(ValueError, match="colour"):
        Gpu.model_validate(machine("t4").gpus[0].model_dump() | {"colour": "green"})
    with pytest.raises(ValueError, match="frozen"):
        machine("t4").device = "cpu"  # type: ignore[misc]
