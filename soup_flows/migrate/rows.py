"""Data sets as Axolotl and LLaMA-Factory name them: a list of blocks, and names in `dataset_info.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soup_flows.data.sources import hub_source, is_url
from soup_flows.migrate.reading import Reading, is_off
from soup_flows.migrate.values import NotTaken
from soup_flows.user_file import BadFile, expanded, read_json

COLUMNS = "rename the columns in the file to those of docs/data.md"
JOIN = "put their files into one folder, or their rows into one file, and give that with --dataset"
SILENT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ds_type", "type", "chat_template", "roles", "preprocess_shards", "text_column"), ()),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
}
"""Keys of a data set that need nothing here, and with which values (any, when empty): columns tell the format."""
COLUMN_NAMES: dict[str, tuple[Any, ...]] = {
    "field_messages": ("messages", "conversations", "conversation"),
    "field_instruction": ("instruction",),
    "field_input": ("input",),
    "field_output": ("output", "response"),
    "field_chosen": ("chosen",),
    "field_rejected": ("rejected",),
    "field_prompt": ("prompt",),
    "field_completion": ("completion",),
    "field_label": ("label",),
    "field_system": ("system",),
    "field": ("text",),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
}
"""Keys that name columns, and the names that are known here."""
READ = ("path", "split", "data_files", "revision", "name")
MAX_INFO_BYTES = 1 << 20
"""Largest `dataset_info.json` that is read, bytes; the one LLaMA-Factory ships has about 20 kilobytes."""


def axolotl_rows(reading: Reading) -> None:
    """Read `datasets`, `test_datasets` and `pretraining_dataset`."""
    _blocks(reading, "datasets", "dataset")
    _blocks(reading, "test_datasets", "data.eval_dataset")
    _blocks(reading, "pretraining_dataset", "dataset")
    if reading.asked("pretraining_dataset") and "training.task" not in reading.spec:
        reading.put("training.task", "pretrain", "pretraining_dataset")


def _blocks(reading: Reading, key: str, field: str) -> None:
    value = reading.values.get(key)
    if not reading.asked(key):
        return
    items = value if isinstance(value, list) else [value]
    if len(items) > 1:
        names = ", ".join(str(i.get("path")) if isinstance(i, Mapping) else str(i) for i in items)
        reading.wrong(key, NotTaken(f"one data set a run here, {len(items)} there: {names}", JOIN), field)
        return
    block = items[0]
    if isinstance(block, str):
        reading.put(field, block, key)
        return
    if not isinstance(block, Mapping) or not isinstance(block.get("path"), str):
        reading.wrong(key, NotTaken("there is no path in it", f"give {field} here"), field)
        return
    source = _source(reading, key, field, block)
    if source:
        reading.put(field, source, key, note="its format is told by its columns")
    kind = block.get("type")
    if isinstance(kind, str) and kind.split(":")[0] in ("completion", "pretrain") and field == "dataset":
        reading.put("training.task", "pretrain", f"{key}.type")
    for name, inner in block.items():
        if name not in READ:
            _rest(reading, key, str(name), inner)


def _rest(reading: Reading, key: str, name: str, value: Any) -> None:
    """Say what becomes of a key of a data set that does not name its source."""
    path = f"{key}.{name}"
    columns = name.startswith(("field", "message_")) or (name == "type" and isinstance(value, Mapping))
    usual = _usual(value) if name == "message_property_mappings" else value in COLUMN_NAMES.get(name, ())
    silent = not columns and name in SILENT and value in (SILENT[name] or (value,))
    if is_off(value) or silent or (columns and usual):
        reading.off.append(path)
    elif columns:
        reading.say(path, "MIG004", "error", f"{name}: columns have fixed names here", COLUMNS)
    else:
        message = f"{name} is not read: every row is trained, and the answers in it"
        reading.say(path, "MIG006", "warning", message, "change the rows themselves")


def _usual(mapping: object) -> bool:
    """Whether the names of role and content are names that are known here."""
    if not isinstance(mapping, Mapping):
        return False
    pair = (mapping.get("role", "role"), mapping.get("content", "content"))
    return pair in (("role", "content"), ("from", "value"))


def _source(reading: Reading, key: str, field: str, block: Mapping[str, Any]) -> str:
    """Return the name of a data set: a file, a folder, a URL, or `owner/name@revision/path:split`."""
    path, files = str(block["path"]), block.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if files is not None and not isinstance(files, str):
        reading.wrong(f"{key}.data_files", NotTaken("several files are not one data set here", JOIN), field)
        return ""
    if files and path in ("json", "csv", "parquet", "text", "arrow"):
        return files
    if is_url(path) or hub_source(path) is None:
        return str(Path(path, files)) if files else path
    if not is_off(block.get("name")):
        fix = f"name its folder: {path}/FOLDER, with --dataset"
        reading.wrong(f"{key}.name", NotTaken("a subset is named by its folder or file here", fix), field)
        return ""
    split = str(block.get("split") or "")
    if split and not split.isidentifier():
        message = f"{split!r} is a part of a split"
        reading.wrong(f"{key}.split", NotTaken(message, "name a whole split, or a file"), field)
        return ""
    revision = f"@{block['revision']}" if block.get("revision") else ""
    return path + revision + (f"/{files}" if files else "") + (f":{split}" if split else "")


def llama_factory_rows(reading: Reading) -> None:
    """Read `dataset` and `eval_dataset`, names whose files `dataset_info.json` in `dataset_dir` tells."""
    folder = str(reading.values.get("dataset_dir") or "data")
    for key, field in (("dataset", "dataset"), ("eval_dataset", "data.eval_dataset")):
        value = reading.values.get(key)
        if not reading.asked(key):
            continue
        names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
        if len(names) > 1:
            message = f"one data set a run here, {len(names)} there: {', '.join(map(str, names))}"
            reading.wrong(key, NotTaken(message, JOIN), field)
            continue
        try:
            reading.put(
                field, _looked_up(str(names[0]), folder), key, note="its format is told by its columns"
            )
        except NotTaken as wrong:
            reading.wrong(key, wrong, field)
    if "dataset_dir" in reading.values:
        reading.settle("dataset_dir")


def _looked_up(name: str, folder: str) -> str:
    """Return the file or Hub name that a data set's name stands for."""
    if folder.upper() == "ONLINE":
        return name
    give = "give the file with --dataset (held-out rows: --set data.eval_dataset=FILE)"
    if folder.startswith("REMOTE:"):
        raise NotTaken(f"{name!r} is listed on the Hub, in {folder.removeprefix('REMOTE:')}", give)
    info = expanded(folder) / "dataset_info.json"
    try:
        entries = read_json(info, MAX_INFO_BYTES, strict=False)
    except BadFile as bad:
        raise NotTaken(f"the file of {name!r} is not known: {bad}", give) from None
    entry = entries.get(name)
    if not isinstance(entry, Mapping):
        raise NotTaken(f"{name!r} is not in {info}", give)
    columns = [word for word in ("columns", "tags") if _renamed(entry.get(word))]
    if columns:
        raise NotTaken(f"{info} gives {name!r} {' and '.join(columns)} with names of their own", COLUMNS)
    if isinstance(entry.get("file_name"), str):
        return str(info.parent / entry["file_name"])
    if isinstance(entry.get("hf_hub_url"), str):
        split = entry.get("split")
        return str(entry["hf_hub_url"]) + (f":{split}" if isinstance(split, str) else "")
    raise NotTaken(f"{name!r} comes from neither a file nor the Hub", give)


USUAL = {
    **{name: (name,) for name in ("system", "tools", "history", "chosen", "rejected")},
    "messages": ("messages", "conversations", "conversation"), "query": ("input",), "kto_tag": ("label",),
    "prompt": ("instruction", "prompt", "question", "text"), "response": ("output", "response", "answer"),
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"), "user_tag": ("user", "human"), "assistant_tag": ("assistant", "gpt"),
    "system_tag": ("system",), "observation_tag": ("observation", "tool"), "function_tag": ("function_call",),
}  # fmt: skip
"""Names of `dataset_info.json` -> names of columns and roles that are known here."""


def _renamed(names: object) -> bool:
    """Whether a block names columns or roles that are not known here."""
    return isinstance(names, Mapping) and any(name not in USUAL.get(str(k), ()) for k, name in names.items())
