"""The text that goes to Slurm and comes back, with what Slurm 22.05.8 really printed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soup_flows.cli import GOOD, main
from soup_flows.cli_plan import machine
from soup_flows.errors import Refused
from soup_flows.hardware import imagined
from soup_flows.launch.elastic import Rendezvous, elastic_argv
from soup_flows.launch.engines.slurm_text import (
    PASSED_BY_VALUE,
    Job,
    NodeGroup,
    batch_script,
    minutes,
    options,
    parse_sacct,
    parse_scontrol,
    parse_sinfo,
    parse_squeue,
)
from soup_flows.launch.plan import PASSED_SECRETS, LaunchPlan, build_launch_plan
from soup_flows.launch.receipt import collect_receipts
from soup_flows.paths import RunPaths, write_json
from soup_flows.slurm_settings import OPTIONS, SlurmSettings
from soup_flows.spec import parse_spec

HEAD = "JobId=7 JobName=run-x UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901754 Nice=0 "
TAIL = (
    "BatchFlag=1 Reboot=0 ExitCode=0:15 RunTime=00:00:19 TimeLimit=00:02:00 TimeMin=N/A Partition=debug "
    "NodeList=n2 NumNodes=1 NumCPUs=2 Command=/x/ JobState=RUNNING Restarts=9/a.sh WorkDir=/x StdOut=/dev/null "
)


@pytest.mark.parametrize(
    ("middle", "job", "here"),
    [
        ("JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 ", Job("RUNNING"), "RUNNING"),
        (
            "JobState=PENDING Reason=BeginTime Dependency=(null) Requeue=1 Restarts=1 ",
            Job("PENDING", "BeginTime", 1),
            "QUEUED",
        ),
        (
            "JobState=CANCELLED Reason=PartitionConfig Dependency=(null) Requeue=1 Restarts=0 ",
            Job("CANCELLED", "PartitionConfig"),
            "CANCELLED",
        ),
        (
            "JobState=FAILED Reason=NonZeroExitCode Requeue=1 Restarts=0 ",
            Job("FAILED", "NonZeroExitCode"),
            "FAILED",
        ),
        ("JobState=COMPLETED Reason=None Requeue=1 Restarts=2 ", Job("COMPLETED", "", 2), "FAILED"),
        ("JobState=COMPLETING Reason=None Requeue=1 Restarts=0 ", Job("COMPLETING"), "RUNNING"),
        ("JobState=SOMETHING_NEW Reason=None Requeue=1 Restarts=0 ", Job("SOMETHING_NEW"), None),
    ],
)
def test_scontrol(middle: str, job: Job, here: str | None) -> None:
    """`COMPLETED` alone is no success: that is what the run directory says."""
    assert parse_scontrol(HEAD + middle + TAIL) == job
    assert job.here == here


def test_what_is_no_job() -> None:
    assert parse_scontrol("") is None
    assert parse_scontrol("slurm_load_jobs error: Invalid job id specified") is None
    assert parse_squeue("") == {}
    assert parse_sacct("") is None
    assert parse_sinfo("sinfo: error: something\n") == []


def test_squeue() -> None:
    assert parse_squeue("2|PENDING\n1|RUNNING\n") == {"2": "PENDING", "1": "RUNNING"}


def test_sacct() -> None:
    """In the form that `man 1 sacct` describes: these daemons keep no accounts."""
    assert parse_sacct("CANCELLED by 1000|None\n") == Job("CANCELLED")
    assert parse_sacct("PREEMPTED|None\nTIMEOUT|None\n") == Job("TIMEOUT")
    assert parse_sacct("NODE_FAIL|NodeDown\n") == Job("NODE_FAIL", "NodeDown")


def test_sinfo() -> None:
    text = (
        "debug*|2|2|8000|gpu:2|infinite\nshort|1|64+|257000+|gpu:a100:4(S:0-1),gpu:h100:1|1-06:30:00\nbad|x\n"
    )
    assert parse_sinfo(text) == [
        NodeGroup("debug*", 2, 2, 8000, 2, None),
        NodeGroup("short", 1, 64, 257000, 5, 1830),
    ]
    assert [minutes(text) for text in ("30:00", "2:00:00", "1-00:00:00", "infinite")] == [30, 120, 1440, None]


def launch(folder: Path, device: Any = "cuda", nodes: int = 1, **slurm: Any) -> LaunchPlan:
    return build_launch_plan(
        paths=RunPaths.of(folder, "run-1"),
        run_id="run-1",
        attempt=1,
        nproc_per_node=4,
        device=device,
        config_path=None,
        omp_num_threads=8,
        stop_budget_s=20,
        timeout_s=None,
        nodes=nodes,
        cluster=SlurmSettings(**slurm),
    )


def test_every_setting_reaches_the_job() -> None:
    found = options(
        launch(
            Path("/shared"),
            nodes=2,
            partition="a,b",
            account="me",
            constraint="[rack1|rack2]",
            time_min=90,
            signal_s=300,
            memory_gib=64,
            options={"qos": "high", "exclusive": ""},
        )
    )
    assert {
        "--job-name=run-1", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--mem=64G", "--partition=a,b",
        "--account=me", "--constraint=[rack1|rack2]", "--time=90", "--signal=B:TERM@300", "--gpus-per-node=4",
        "--qos=high", "--exclusive", "--requeue", "--export=NONE",
    } <= set(found)  # fmt: skip
    assert "--cpus-per-task=3" in options(launch(Path("/shared"), cpus_per_node=3))
    assert not any("gpu" in text for text in options(launch(Path("/shared"), device="cpu")))
    typed = options(launch(Path("/shared"), options={"gpus-per-node": "a100:4"}))
    assert [text for text in typed if "gpu" in text] == ["--gpus-per-node=a100:4"]
    own = options(launch(Path("/shared"), options={"gres": "gpu:a100:4"}))
    assert [text for text in own if "gpu" in text] == ["--gres=gpu:a100:4"]


HOSTILE = 'it\'s a "bad" dir; echo $HOME `id` 100% \\ #SBATCH --uid=0'


def test_the_script_says_what_was_meant_and_no_secret(tmp_path: Path) -> None:
    """bash itself says what it would run; a folder's name is one word of it whatever it holds."""
    folder = tmp_path / HOSTILE
    folder.mkdir(parents=True)
    (folder / "runs" / "run-1").mkdir(parents=True)
    plan = launch(folder).model_copy(update={"env": {"PYTHONPATH": f"/a:{HOSTILE}"}})
    secrets = dict.fromkeys((*PASSED_SECRETS, "PREFECT_API_KEY", "ANYTHING_ELSE"), "s3cret")
    script = batch_script(plan, str(folder), {**secrets, "HF_HOME": HOSTILE, "PATH": os.environ["PATH"]})
    assert "s3cret" not in script
    assert not set(PASSED_BY_VALUE) & {*PASSED_SECRETS, "PREFECT_API_KEY"}
    headers = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert len(headers) == len(options(plan))
    said = tmp_path / "said"
    show = f'show() {{ printf "%s\\n" "$PWD" "$HF_HOME" "$PYTHONPATH" "$@" >{shlex.quote(str(said))}; exit 0; }}\n'
    lines = [line for line in script.splitlines() if not line.startswith("exec >>")]
    cut = next(n for n, line in enumerate(lines) if line.startswith("srun"))
    text = "\n".join([*lines[:cut], lines[cut].removesuffix(" &")]).replace(
        '"${job[@]}" begin "$run" || exit 1', ""
    )
    done = subprocess.run(
        ["bash", "-u", "-c", show + text.replace("srun", "show")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    got = said.read_text().splitlines()
    assert got[:3] == [str(folder), HOSTILE, f"/a:{HOSTILE}"]
    assert got[-5:] == [sys.executable, "-m", "soup_flows.slurm_job", "node", str(folder / "runs" / "run-1")]


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        ({"partition": "a\n#SBATCH --uid=0"}, "letters, digits"),
        ({"constraint": "a b"}, "letters, digits"),
        ({"options": {"uid": "0"}}, "not an option"),
        ({"options": {"quos": "high"}}, "did you mean 'qos'?"),
        ({"options": {"qos": "high;id"}}, "letters, digits"),
        ({"nodes": 0}, ">= 1"),
        ({"time_min": 1}, ">= 3"),
        ({"pratition": "a"}, "partition"),
    ],
)
def test_what_could_be_another_option_is_refused(slurm: dict[str, Any], words: str) -> None:
    values = {"model": "m", "dataset": "d", "launcher": {"engine": "slurm", "slurm": slurm}}
    with pytest.raises(Refused) as refused:
        parse_spec(values)
    (problem,) = refused.value.problems
    assert problem.field.startswith("launcher.slurm.")
    assert words in f"{problem.message} {problem.fix}"


def test_no_option_may_change_what_runs() -> None:
    assert not {
        "wrap",
        "export",
        "chdir",
        "output",
        "uid",
        "gid",
        "get-user-env",
        "job-name",
        "signal",
    } & set(OPTIONS)


def test_the_hosts_of_several_meet_on_the_first() -> None:
    meet = Rendezvous(id="7.1", host="n1", port=1234, nodes=2, node=1)
    text = " ".join(elastic_argv("run-1", 4, 20, "-m", "x", meet=meet))
    assert "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint n1:1234" in text
    assert "--rdzv-conf is_host=0 --rdzv-id 7.1" in text
    assert "is_host=1" in " ".join(
        elastic_argv("r", 4, 20, "-m", "x", meet=meet.model_copy(update={"node": 0}))
    )
    assert "localhost:0" not in text
    assert launch(Path("/x"), device="cpu").env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in launch(Path("/x"), device="cpu", nodes=2).env


def test_the_receipts_of_several_hosts_become_one(tmp_path: Path) -> None:
    attempt = RunPaths.of(tmp_path, "run-1").create().attempt(1)
    attempt.root.mkdir()
    assert collect_receipts(attempt) == {}
    first = {"rank": 3, "pid": 7, "exit_code": 1}
    dead = {"rank": 3, "pid": 7, "time": 10.0}
    base: dict[str, Any] = {"signalled": [], "survivors": [], "kernel": [], "first_failure": None}
    follower = {**base, "reason": "signal", "stop_time": 12.0, "exit_code": 0, "dead_ranks": []}
    culprit = {**base, "reason": "exited", "stop_time": 11.0, "exit_code": 1, "dead_ranks": [dead]}
    write_json(attempt.receipt_of(0), follower)
    write_json(attempt.receipt_of(1), culprit | {"first_failure": first})
    whole = collect_receipts(attempt)
    assert (whole["reason"], whole["exit_code"]) == ("exited", 1)
    assert (whole["first_failure"], whole["dead_ranks"]) == (first, [dead])
    write_json(attempt.receipt, whole)
    assert collect_receipts(attempt) == whole


def test_plan_shows_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "one", "completion": "two"}\n' * 40)
    model = Path(__file__).parents[1] / "data" / "models" / "llama-8b"
    recorded = tmp_path / "node.json"
    recorded.write_text(imagined("h100-80gb", 8).model_dump_json())
    asked = ["plan", "--model", str(model), "--dataset", str(data), "--output-dir", str(tmp_path / "out"),
             "--hardware", str(recorded), "--gpus", "8", "--set", "launcher.engine=slurm",
             "--set", "launcher.slurm.nodes=2", "--set", "launcher.slurm.partition=h100"]  # fmt: skip
    assert main([*asked, "--json"]) == GOOD
    value = json.loads(capsys.readouterr().out)
    assert (value["plan"]["nodes"], value["plan"]["world_size"]) == (2, 16)
    assert (value["launch"]["nodes"], value["launch"]["slurm"]["partition"]) == (2, "h100")
    assert "CUDA_VISIBLE_DEVICES" not in value["launch"]["env"]  # Slurm hands out its machines' own
    assert "#SBATCH --partition=h100\n" in value["batch_script"]
    assert "#SBATCH --gpus-per-node=8\n" in value["batch_script"]
    assert main(asked) == GOOD
    assert "#SBATCH --nodes=2\n" in capsys.readouterr().out
    slurm = {"engine": "slurm", "slurm": {"hardware": str(recorded)}}
    here = machine(parse_spec({"model": "m", "dataset": "d", "launcher": slurm}), None)
    assert [gpu.name for gpu in here.gpus] == [gpu.name for gpu in imagined("h100-80gb", 8).gpus]
    recorded.write_text("{}")
    with pytest.raises(Refused, match=r"launcher\.slurm\.hardware"):
        machine(parse_spec({"model": "m", "dataset": "d", "launcher": slurm}), None)
