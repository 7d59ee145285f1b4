"""`docs/migration.md`: what maps and what does not, made from the tables that the reader uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from soup_flows import accelerate_keys as accelerate
from soup_flows.migrate.read import TOOLS
from soup_flows.migrate.values import NOTHING, UNKNOWN, Part, To, Tool, Without

HEAD = """\
# Coming from another tool

`soup-flows plan` reads the config you have, says in its own words what it says, names what it cannot say, and plans:

```sh
soup-flows plan --from-soup soup.yaml --deepspeed zero3 --gpus 4
soup-flows plan --from-axolotl config.yml --gpus 8 --gpu h100-80gb
soup-flows plan --from-llama-factory sft.yaml --gpus 4 --save spec.yaml
soup-flows plan --accelerate-config accelerate.yaml --model ./llama --dataset rows.jsonl
soup-flows train --spec spec.yaml
```

Nothing is dropped in silence. Every key of the file is taken over, or listed as empty or off, or named with the
reason and what to do instead: as an error where the run would be of another kind (the exit code is 2 then), as a
warning where its numbers may differ, as a note where nothing that is learned depends on it. A key that is in no
table is an error with the nearest one. What a tool takes where the file is silent is taken over too, if it is not
what is taken here, and shown in brackets. Flags and `--set` win over the file.

The same settings are printed as a spec; `--save FILE` writes it (a new file, with the flags in it), and `soup-flows
train --spec FILE` runs it. `--json` has all of it under `migration`: `mapped`, `off`, `not_mapped`, `spec`.

## What is different whatever the tool

- **Batch.** Other tools count rows per GPU, so that a step grows with the GPUs. Here `training.global_batch_size`
  is the rows of a step over all GPUs, and is kept for any number of them. Rows per GPU x passes x GPUs are
  multiplied for the `--gpus` you give.
- **Packing.** Other tools pack rows first and count packs; here a step holds rows, packed or not. With packing the
  batch is therefore smaller in tokens: raise it by the rows of a pack.
- **Lengths in epochs.** Warm-up is a share of the steps. "Twice an epoch" and shares of a run are not known before
  the data is read: give `training.eval_steps` and `recovery.save_steps` in optimizer steps.
- **Data.** One data set a run, its format told by its columns ([data.md](data.md)), the chat template by the
  tokenizer.
- **FSDP** is FSDP2. **DeepSpeed** files are used byte for byte; a file that the tool ships and that is not on this
  machine becomes the preset of its name ([presets.md](presets.md)).
"""


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows), ""]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _grouped(entries: Mapping[str, Part] | Mapping[str, Without]) -> dict[Part | Without, list[str]]:
    """Return entries that several keys share, with those keys."""
    groups: dict[Part | Without, list[str]] = {}
    for key, entry in entries.items():
        groups.setdefault(entry, []).append(key)
    return groups


def _default(entry: To) -> str:
    if entry.default is UNKNOWN:
        return "not known to this reader; a warning says so"
    return "" if entry.default is NOTHING else f"`{entry.default}`"


def _tool(tool: Tool) -> list[str]:
    """Return the section of a tool."""
    plain = {key: entry for key, entry in tool.keys.items() if isinstance(entry, To)}
    parts = _grouped({key: entry for key, entry in tool.keys.items() if isinstance(entry, Part)})
    rest = _grouped({key: entry for key, entry in tool.keys.items() if isinstance(entry, Without)})
    lines = [
        f"## From {tool.name}",
        "",
        f"`{tool.option} FILE`; read against {tool.source}. {tool.about}",
        "",
    ]
    if tool.flags:
        lines += ["The options of its command:", ""]
        lines += _rows(("there", "here"), ((f"`{flag}`", here) for flag, here in tool.flags.items()))
    lines += ["Keys that are settings here:", ""]
    lines += _rows(
        ("key", "setting", "where it is not written", "note"),
        ((f"`{key}`", f"`{e.field}`", _default(e), e.note) for key, e in plain.items()),
    )
    lines += ["Keys that are read together:", ""]
    lines += _rows(
        ("keys", "settings", "how"),
        ((_code(keys), _code(e.fields), e.how) for e, keys in parts.items() if isinstance(e, Part)),
    )
    lines += ["Keys without a setting:", ""]
    lines += _rows(
        ("keys", "why", "instead", "said as"),
        ((_code(keys), e.why, e.instead, e.severity) for e, keys in rest.items() if isinstance(e, Without)),
    )
    return lines


def _accelerate() -> list[str]:
    """Return the section of accelerate."""
    lines = [
        "## From accelerate",
        "",
        "`--accelerate-config FILE`; read against accelerate 1.15. The file says how a",
    ]
    lines += [
        "model is wrapped, so that `--model` and `--dataset`, or one of the files above, stand beside it.",
        "",
    ]
    lines += _rows(("key", "here"), ((f"`{key}`", here) for key, here in accelerate.MAPPED.items()))
    lines += ["Keys that need no setting:", ""]
    lines += _rows(("key", "why"), ((f"`{key}`", why) for key, why in accelerate.SETTLED.items()))
    lines += ["Keys that are named and not used:", ""]
    used = {**accelerate.IGNORED, **accelerate.UNSUPPORTED}
    lines += _rows(
        ("key", "why", "said as"),
        ((f"`{k}`", why, "error" if k in accelerate.UNSUPPORTED else "note") for k, why in used.items()),
    )
    return lines


def migration_page() -> str:
    """Return the whole page, as Markdown."""
    lines = [HEAD]
    for tool in TOOLS:
        lines += _tool(tool)
    lines += _accelerate()
    lines += ["<!-- Made by: python -m soup_flows.migrate > docs/migration.md -->", ""]
    return "\n".join(lines)
