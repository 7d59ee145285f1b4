"""Completion as a real bash does it, from the script that the command prints."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import shtab

from soup_flows import cli
from soup_flows.cli_completion import _FILES, _FOLDERS, SHELLS, _actions

BASH = shutil.which("bash")
# What bash does at Tab: the registered function is called with the words so far, and leaves its answers in COMPREPLY.
PRESS_TAB = """
source ./script
registered=$(complete -p soup-flows)
function=$(sed 's/.*-F \\([^ ]*\\).*/\\1/' <<<"$registered")
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"$function" soup-flows "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "runs").mkdir()
    return tmp_path


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("pl", {"plan"}),
        ("plan --deepspeed zero2", {"zero2", "zero2_offload"}),
        ("plan --deepspeed zero+", {"zero++"}),
        ("train --fsdp full_s", {"full_shard"}),
        ("demo d", {"ddp"}),
        ("presets zero3 --diff hybrid", {"hybrid_shard"}),
        ("plan --gpu h100-80gb-p", {"h100-80gb-pcie"}),
        ("explain DS014", {"DS014"}),
        ("plan --rehe", {"--rehearse"}),
        ("deploy --type k", {"kubernetes"}),
        ("data --policy r", {"refuse"}),
        ("train --dataset r", {"rows.jsonl", "runs"}),
        ("data r", {"rows.jsonl", "runs"}),
        ("stop r", {"runs"}),
        ("plan --gpus r", {""}),
    ],
)
def test_bash_completes(folder: Path, typed: str, offered: set[str]) -> None:
    done = subprocess.run(
        [str(BASH), "--norc", "-c", PRESS_TAB, "bash", "soup-flows", *typed.split()],
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    assert set(done.stdout.rstrip("\n").split("\n")) == offered, done.stderr


def test_files_and_folders_are_completed_as_such() -> None:
    named = {
        action.dest
        for action in _actions(cli._parser())
        if {str(action.metavar)} & {"FILE", "DIR", "RUN_DIR", "OUT"}
    }
    assert named - {"file"} <= _FILES | _FOLDERS
    assert {action.dest for action in _actions(cli._parser())} >= _FILES | _FOLDERS


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell in shtab.SUPPORTED_SHELLS
    assert cli.main(["completion", shell, "--json"]) == 0
    script = json.loads(capsys.readouterr().out)["script"]
    assert "zero3_offload" in script
    assert "consolidate" in script


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "ksh"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
