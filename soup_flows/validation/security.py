"""Rules about what a run may be made to do."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from soup_flows.user_file import expanded
from soup_flows.validation.table import TRANSFORMERS, Context, Found, rule, rules_in


@rule(
    "SE001",
    "warning",
    "trust_remote_code",
    "Python code from the model's repository runs with your rights on every rank",
    fix="drop it if the model loads without; else read the code, and use a local copy",
    source="transformers/dynamic_module_utils.py",
    versions=TRANSFORMERS,
)
def remote_code(run: Context) -> Iterator[Found]:
    """`trust_remote_code` switched on."""
    if run.spec.trust_remote_code:
        known = run.model.config is not None and not run.model.config.get("auto_map")
        yield Found("trust_remote_code is on" + (" and the model has no code of its own" if known else ""))


@rule(
    "SE002",
    "warning",
    "model",
    "pickles can run code when they are opened, and every rank reads them whole",
    fix="convert them: load and save_pretrained() once, on a machine you can lose",
    source="PyTorch documentation, torch.load; huggingface/safetensors",
)
def pickled_weights(run: Context) -> Iterator[Found]:
    """Weights as pickles (`*.bin`) only."""
    names = run.model.files
    bins = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
    if bins and not any(name.endswith(".safetensors") for name in names):
        yield Found(f"{bins[0]} and no safetensors file")


@rule(
    "SE004",
    "warning",
    "output_dir",
    "others on this machine can replace what the run writes and reads",
    fix="chmod go-w, or choose a folder of your own",
    source="POSIX permissions; inode(7)",
    local=True,
)
def open_folder(run: Context) -> Iterator[Found]:
    """An output folder that everybody may write, without the sticky bit."""
    folder = expanded(run.spec.output_dir)
    try:
        mode = folder.stat().st_mode
    except OSError:
        return
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield Found(f"{folder} has mode {stat.S_IMODE(mode):o}")


RULES = rules_in(globals())
