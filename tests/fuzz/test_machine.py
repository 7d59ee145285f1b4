"""What Slurm's commands, the kernel and drivers print: any text gives a value that says what is known."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from soup_flows.gpus import gpu_spec
from soup_flows.hardware import RecordedProbe, detect
from soup_flows.hardware.host import cores, disk, memlock, memory
from soup_flows.hardware.tools import infiniband, pci_devices
from soup_flows.launch.engines.slurm_text import (
    Wanted,
    first_line,
    minutes,
    parse_sacct,
    parse_scontrol,
    parse_sinfo,
    parse_squeue,
    why_infeasible,
)
from soup_flows.launch.kernel import memory_kill
from soup_flows.launch.leases import holder
from soup_flows.launch.receipt import first_failure
from soup_flows.launch.stacks import stuck_frame
from tests.fuzz.spoil import VALUES, WEIRD, damaged, documents, fuzz, little_memory, put, value_or_refusal

RECORDED = Path(__file__).parents[1] / "data" / "hardware"
SCONTROL = (
    b"JobId=7 JobName=x JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0 StdOut=/a b/JobState=FAILED"
)
SACCT = b"CANCELLED by 1000|None\nCOMPLETED|\nOUT_OF_MEMORY+|x|y\n"
SINFO = b"gpu*|4|8+|64000|gpu:a100:4(S:0-1),shard:8|1-00:00:00\ncpu|2|4|1000|(null)|infinite\n"
STACKS = (
    b'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n'
    b'Current thread 0x2:\n  File "b.py", line 4 in g\n'
)
LOG = b"failed (exitcode: -9) local_rank: 1 (pid: 77) of binary"
STATES = (None, "QUEUED", "RUNNING", "FAILED", "CANCELLED")
ODD = st.sampled_from(
    (*WEIRD, "9" * 5000, "-1", "0-", "3-1", "0-99999999999", "max", "max 100000", "0 0", "5 0")
)


def texts(good: bytes) -> st.SearchStrategy[str]:
    return damaged(good).map(lambda content: content.decode("utf-8", "replace"))


@fuzz(200)
@given(scontrol=texts(SCONTROL), sacct=texts(SACCT), sinfo=texts(SINFO), limit=ODD | st.text(max_size=8))
@example(scontrol="JobState=RUNNING Restarts=" + "9" * 5000, sacct="", sinfo="", limit="")
@example(scontrol="", sacct="|", sinfo="a|1|1|1|gpu:" + "9" * 5000 + "|1:00", limit="9" * 5000 + ":00")
@example(
    scontrol="",
    sacct="",
    sinfo="a|\N{SUPERSCRIPT TWO}|1|1|(null)|1:00",
    limit="\u0663:00",
)
def test_slurm(scontrol: str, sacct: str, sinfo: str, limit: str) -> None:
    with little_memory():
        for job in (
            parse_scontrol(scontrol),
            parse_sacct(sacct),
            parse_scontrol(sinfo),
            parse_sacct(scontrol),
        ):
            assert job is None or job.here in STATES
        parse_squeue(sacct)
        groups = parse_sinfo(sinfo)
        why_infeasible(groups, Wanted(nodes=2, gpus=1, cpus=1, memory_mib=1, time_min=5))
        minutes(limit)
        first_line(scontrol)


@fuzz(200)
@given(data=st.data())
def test_files_of_the_kernel(data: st.DataObject, tmp_path: Path) -> None:
    goods = {
        "proc/self/cgroup": b"0::/a/b\n4:memory:/c\n5:cpu,cpuacct:/c\n",
        "proc/meminfo": b"MemTotal: 100 kB\nMemAvailable: 50 kB\n",
        "proc/self/status": b"Cpus_allowed_list:\t0-3,7\n",
        "proc/self/limits": b"Max locked memory         unlimited            unlimited            bytes\n",
        "proc/self/mounts": b"/dev/sda1 / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nx /a\\040b nfs rw\n",
        "sys/fs/cgroup/memory.max": b"9223372036854771712\n",
        "sys/fs/cgroup/memory.current": b"12\n",
        "sys/fs/cgroup/memory.stat": b"inactive_file 5\n",
        "sys/fs/cgroup/cpu.max": b"200000 100000\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": b"4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": b"400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": b"InfiniBand\n",
        "sys/bus/pci/devices/0000:01:00.0/class": b"0x030200\n",
        "sys/bus/pci/devices/0000:01:00.0/vendor": b"0x1002\n",
        "sys/bus/pci/devices/0000:01:00.0/device": b"0x74a1\n",
    }
    for name, good in goods.items():
        content = data.draw(st.just(good) | damaged(good) | ODD.map(lambda t: t.encode("utf-8", "replace")))
        put(tmp_path / name, content)
    environ = {
        name: data.draw(ODD) for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    }
    with little_memory():
        found, _ = memory(tmp_path, environ)
        found.model_dump_json()
        assert cores(tmp_path, environ)[0] >= 1
        memlock(tmp_path)
        disk(tmp_path, tmp_path)
        infiniband(tmp_path)
        pci_devices(tmp_path)


@fuzz(100)
@given(
    recorded=st.sampled_from(sorted(RECORDED.glob("*.json"))),
    data=st.data(),
    name=st.sampled_from(
        ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
    ),
    value=ODD | st.from_regex(r"[0-9,\-]{0,8}", fullmatch=True) | st.text(max_size=8),
)
def test_drivers_and_variables(
    recorded: Path, data: st.DataObject, name: str, value: str, tmp_path: Path
) -> None:
    file = put(
        tmp_path / "reading.json",
        data.draw(documents(json.loads(recorded.read_text())) | st.just(recorded.read_bytes())),
    )
    if "\0" in value:
        return
    probe = RecordedProbe(file)
    value_or_refusal(lambda: detect("auto", probe=probe, environ={name: value}), ValidationError)


@fuzz(100)
@given(
    stacks=damaged(STACKS),
    log=damaged(LOG),
    lines=st.lists(st.text(max_size=60)),
)
def test_what_dying_ranks_leave(stacks: bytes, log: bytes, lines: list[str], tmp_path: Path) -> None:
    with little_memory():
        stuck_frame(put(tmp_path / "stacks", stacks))
        first_failure(put(tmp_path / "log", log), {0: 3})
        memory_kill([*lines, "Memory cgroup out of memory: Killed process 7 (a)"], [7, None])


@fuzz(100)
@given(content=documents({"run_id": "r", "pid": 3, "since": 1.0}))
@example(content=b"[" * 4000)
def test_locks(content: bytes, tmp_path: Path) -> None:
    put(tmp_path / "GPU-1.lock", content)
    with little_memory():
        assert holder(tmp_path, "GPU-1") is None


@fuzz(100)
@given(name=st.sampled_from(WEIRD) | st.text(max_size=12) | VALUES.map(str))
def test_names_of_gpus(name: str) -> None:
    value_or_refusal(lambda: gpu_spec(name))
