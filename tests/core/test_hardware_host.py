"""Limits, ports and other makers' devices, replayed from files below a root folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soup_flows.hardware import RecordedProbe, detect, host, tools
from soup_flows.hardware.doctor import doctor

DATA = Path(__file__).parents[1] / "data/hardware"
MEMINFO = "MemTotal:       16384000 kB\nMemFree:  100 kB\nMemAvailable:   12288000 kB\n"
NONE_V1 = "9223372036854771712\n"
GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_without_limits(tmp_path: Path) -> None:
    memory, source = host.memory(tree(tmp_path, {}), {})
    assert (memory.total_bytes, memory.available_bytes) == (16384000 * 1024, 12288000 * 1024)
    assert memory.cgroup_limit_bytes is None
    assert memory.usable_bytes == memory.available_bytes
    assert source == "/proc/meminfo"


def test_cgroup_v2_takes_the_tightest_parent(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/kubepods/pod1"
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1/c1\n",
        f"{base}/c1/memory.max": "max\n",
        f"{base}/c1/cpu.max": "max 100000\n",
        f"{base}/memory.max": f"{4 * GIB}\n",
        f"{base}/memory.current": f"{3 * GIB}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n",
        f"{base}/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/kubepods/memory.max": f"{8 * GIB}\n",
        "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-3,8-11\n",
    }
    root = tree(tmp_path, files)
    memory, source = host.memory(root, {})
    assert (memory.cgroup_limit_bytes, memory.cgroup_used_bytes) == (4 * GIB, GIB)
    assert memory.usable_bytes == 3 * GIB
    assert "cgroup v2" in source
    assert host.cores(root, {})[0] == 2


def test_cgroup_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/docker/abc"
    files = {
        "proc/self/cgroup": "9:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        f"{base}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{base}/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NONE_V1,
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
        "proc/self/status": "Cpus_allowed_list:\t0-7\n",
    }
    root = tree(tmp_path, files)
    memory, source = host.memory(root, {})
    assert (memory.cgroup_limit_bytes, memory.cgroup_used_bytes) == (2 * GIB, GIB)
    assert "cgroup v1" in source
    assert host.cores(root, {})[0] == 1  # half a core is still one thread


def test_cgroup_v1_without_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/x\n1:cpu:/\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": NONE_V1,
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "proc/self/status": "Cpus_allowed_list:\t5\n",
    }
    root = tree(tmp_path, files)
    assert host.memory(root, {})[0].cgroup_limit_bytes is None
    assert host.cores(root, {}) == (1, "affinity (/proc/self/status)")


def test_a_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    """Without a cgroup namespace the path is the host's, and the limits lie in the mount itself."""
    files = {
        "proc/self/cgroup": "0::/system.slice/docker-abc.scope\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": "1048576\n",
    }
    assert host.memory(tree(tmp_path, files), {})[0].cgroup_limit_bytes == GIB
    files["proc/self/cgroup"] = "0::/../../other\n"
    assert host.memory(tree(tmp_path, files), {})[0].cgroup_limit_bytes == GIB


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({"SLURM_MEM_PER_NODE": "2048"}, 2 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}, 2 * GIB),
        ({}, None),
    ],
)
def test_slurm_memory(tmp_path: Path, environ: dict[str, str], limit: int | None) -> None:
    assert host.memory(tree(tmp_path, {}), environ)[0].scheduler_limit_bytes == limit


def test_slurm_cores(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t0-63\n"})
    assert host.cores(root, {"SLURM_CPUS_ON_NODE": "12"}) == (12, "SLURM_CPUS_ON_NODE")
    assert host.cores(root, {"SLURM_CPUS_ON_NODE": "128"})[0] == 64


def test_live_cores_are_the_kernels() -> None:
    assert 1 <= host.cores(Path("/"), {})[0] <= len(os.sched_getaffinity(0))


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    mounts = f"rootfs / ext4 rw 0 0\nserver:/x {tmp_path.resolve()} nfs4 rw 0 0\n"
    root = tree(tmp_path, {"proc/self/mounts": mounts})
    asked = tmp_path / "runs/of/tomorrow"
    disk = host.disk(asked, root)
    assert disk is not None
    assert (disk.path, disk.filesystem) == (str(asked), "nfs4")
    stat = os.statvfs(tmp_path)
    assert disk.total_bytes == stat.f_blocks * stat.f_frsize
    assert not asked.exists()


def test_memlock(tmp_path: Path) -> None:
    line = "Max locked memory         {0}              {0}              bytes\n"
    assert host.memlock(tree(tmp_path, {"proc/self/limits": line.format("65536")})) == 65536
    assert host.memlock(tree(tmp_path, {"proc/self/limits": line.format("unlimited")})) == "unlimited"
    assert host.memlock(tmp_path / "nothing") is None


def port(name: str, state: str) -> dict[str, str]:
    base = f"sys/class/infiniband/{name}/ports/1"
    rate = "400 Gb/sec (4X NDR)\n"
    return {f"{base}/state": state, f"{base}/link_layer": "InfiniBand\n", f"{base}/rate": rate}


def test_infiniband(tmp_path: Path) -> None:
    files = port("mlx5_0", "4: ACTIVE\n") | port("mlx5_1", "1: DOWN\n")
    usable, down = tools.infiniband(tree(tmp_path, files))
    assert (usable, len(down)) == ([], 2)
    assert any("/dev/infiniband is not here" in text for text in down)
    usable, down = tools.infiniband(tree(tmp_path, files | {"dev/infiniband/uverbs0": ""}))
    assert usable == ["mlx5_0 port 1: ACTIVE, InfiniBand, 400 Gb/sec (4X NDR)"]
    assert down == ["mlx5_1 port 1: DOWN, InfiniBand, 400 Gb/sec (4X NDR)"]


def pci(address: str, vendor: str, device: str, kind: str = "0x030000") -> dict[str, str]:
    base = f"sys/bus/pci/devices/{address}"
    return {f"{base}/vendor": vendor + "\n", f"{base}/device": device + "\n", f"{base}/class": kind + "\n"}


def test_other_makers_are_named(tmp_path: Path) -> None:
    ids = "# list\n1002  AMD\n\t74a1  Aqua Vanjaram [Instinct MI300X]\n8086  Intel\n\t56a0  Arc A770\n"
    files = {
        **pci("0000:c1:00.0", "0x1002", "0x74a1", "0x120000"),
        **pci("0000:03:00.0", "0x8086", "0x56a0"),
        **pci("0000:04:00.0", "0x8086", "0x1533", "0x020000"),  # a network card
        "usr/share/hwdata/pci.ids": ids,
    }
    found = {gpu.vendor: gpu for gpu in tools.pci_devices(tree(tmp_path, files))}
    assert set(found) == {"amd", "intel"}
    assert "Instinct MI300X" in found["amd"].name
    assert "Arc A770" in found["intel"].name
    hardware = detect(probe=RecordedProbe(DATA / "broken-driver.json"), environ={}, root=tmp_path)
    assert {gpu.vendor for gpu in hardware.unused} == {"amd", "intel"}
    assert hardware.device == "cpu"
    assert "HW008" in {problem.id for problem in doctor(hardware)}


def test_an_nvidia_card_without_a_driver(tmp_path: Path) -> None:
    root = tree(tmp_path, pci("0000:17:00.0", "0x10de", "0x2330", "0x030200"))

    class NoDriver:
        def read(self):
            reading = RecordedProbe(DATA / "broken-driver.json").read()
            return reading.model_copy(update={"error": "NVML Shared Library Not Found"})

    hardware = detect(probe=NoDriver(), environ={}, root=root)
    assert [gpu.why for gpu in hardware.unused] == ["no_driver"]
    assert "HW003" in {problem.id for problem in doctor(hardware)}
    with pytest.raises(ValueError, match=r"0x2330 at 0000:17:00.0"):
        detect("cuda", probe=NoDriver(), environ={}, root=root)


def test_toolkit_and_compiler_come_from_the_given_environment(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    assert tools.cuda_toolkit({"CUDA_HOME": str(tmp_path)}) == ("12.4", str(nvcc))
    nvcc.write_text("#!/bin/sh\nexit 3\n")
    assert tools.cuda_toolkit({"CUDA_HOME": str(tmp_path)})[0] is None
    assert tools.cuda_toolkit({"CUDA_HOME": str(tmp_path / "none")})[0] is None
    assert tools.compiler({"PATH": str(tmp_path)}) is None
    assert not tools.has_ninja({"PATH": str(tmp_path)})
