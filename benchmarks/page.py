"""The page of all kept results: `python -m benchmarks page` writes docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import (
    decisions,
    exits,
    gpu,
    harness,
    launch,
    prediction,
    prepare,
    scale,
    supervision,
    throughput,
)
from benchmarks.harness import ROOT, Result, load

PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Made from the files in `benchmarks/results/` by `python -m benchmarks page`; every single run is in them.
`make bench` measures everything anew on your machine, `python -m benchmarks NAME` one part (`--help` lists them).
Other trainers are installed into environments of their own, by name and version, below the folder of `--peers`.
Runs that are compared are made in turn, so that other load on the machine hits all of them.

Where figures stand as `a / b / c`, they are the smallest, the median and the largest of the runs.
"""


def span(values: dict[str, float], digits: int = 1) -> str:
    """Return smallest / median / largest as text."""
    return " / ".join(f"{values[key]:,.{digits}f}" for key in ("min", "median", "max"))


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def throughput_table(result: Result) -> str:
    """Return the comparison of trainers, and the ratios beside the goals."""
    rows = []
    for line in throughput.summary(result):
        if "why" in line:
            rows.append([line["label"], 0, f"not run: {line['why']}", *[""] * 6])
            continue
        rows.append(
            [
                line["label"], line["runs"], span(line["tokens_per_cpu_s"], 0), span(line["tokens_per_s"], 0),
                span(line["first_step_s"]), span(line["wall_s"]), f"{line['padding_share']:.0%}",
                line["loss"] or "", f"{line['max_rss_mb']['median']:,.0f}",
            ]
        )  # fmt: skip
    head = ["trainer", "runs", "real tokens per CPU second", "real tokens per second", "first step, s",
            "whole run, s", "padding", "last loss", "MB a rank"]  # fmt: skip
    cpu, wall = (throughput.ratios(result, figure) for figure in ("tokens_per_cpu_s", "tokens_per_s"))
    first = throughput.ratios(result, "first_step_s")
    ratios = [
        [
            throughput.PEERS[name].label,
            throughput.GOALS[name],
            *(f"{r[name]:.2f}" for r in (cpu, wall, first)),
        ]
        for name in cpu
    ]
    more = table(["soup-flows against", "goal", "per CPU second", "per second", "first step"], ratios)
    size = f"{harness.largest(result)[0]['rows']:,} rows."
    noted = [f"{row['run']}, round {row['round']}: {row['note']}." for row in result.rows if "note" in row]
    size = " ".join([size, *noted])
    return f"{size}\n\n{table(head, rows)}\n\nMedians of the rounds that have both, ours divided by theirs:\n\n{more}"


def launch_table(result: Result) -> str:
    """Return the start-up of each launcher, and where ours spends its time."""
    lines = launch.summary(result)
    rows = [
        [line["label"], line["runs"], f"not run: {line['why']}", "", ""]
        if "why" in line
        else [
            line["label"],
            line["runs"],
            span(line["first_step_s"]),
            span(line["start_cpu_s"]),
            span(line["cpu_s"]),
        ]
        for line in lines
    ]
    head = [
        "launcher",
        "runs",
        "first step is done, s",
        "CPU s of the ranks before training",
        "CPU s of everything",
    ]
    parts = [f"{harness.largest(result)[0]['rows']:,} rows.", table(head, rows)]
    for line in lines:
        if "phases" in line:
            taken = [[name, f"{seconds:.2f}"] for name, seconds in line["phases"].items()]
            flow = f"{line['label']}: {span(line['from_flow_start_s'])} s from the start of the flow"
            parts.append(f"{flow}. Medians:\n\n" + table(["from", "s to the next"], taken))
    return "\n\n".join(parts)


def supervision_table(result: Result) -> str:
    """Return what supervision adds to torchrun."""
    rows = [
        [
            line["lines_per_minute"], line["pairs"], span(line["added_start_s"], 2),
            f"{line['added_start_best_s']:+.2f}",
            " / ".join(f"{line['added_step_share'][k]:+.1%}" for k in ("min", "median", "max")),
            f"{line['supervisor_mb']:.1f}", f"{line['supervisor_cpu_share']['median']:.2%}",
        ]
        for line in supervision.summary(result)
    ]  # fmt: skip
    head = ["lines a minute", "pairs", "added to the first line, s", "best of each, s", "added to a step (mean)",
            "supervisor, MB", "of a core"]  # fmt: skip
    return table(head, rows)


def decisions_table(result: Result) -> str:
    """Return processes, calls, and the supervisor."""
    lines = decisions.summary(result)
    rows = [[f"`{x['process']}`", x["rounds"], x["wall_s"], x["cpu_s"], x["peak_mb"]] for x in lines]
    parts = [table(["process", "rounds", "wall, s", "CPU, s", "peak, MB"], rows), "The least of the rounds."]
    made = [row for row in result.rows if "call" in row]
    rows = [[row["call"], span({k: 1000 * v for k, v in row["seconds"].items()}, 2)] for row in made]
    parts.append(table(["call in one process", "ms"], rows))
    for row in result.rows:
        if "supervisor_mb" in row:
            parts.append(f"The supervisor of two ranks: {row['supervisor_mb']} MB at its peak, "
                         f"{row['supervisor_cpu_s']} s of processor in {row['seconds']} s.")  # fmt: skip
    return "\n\n".join(parts)


def prediction_table(result: Result) -> str:
    """Return the errors by group."""
    keys = ("n", "mape", "bias", "within_10", "within_20", "worst_under", "worst_over", "required_covers")
    groups = [row for row in result.rows if row.get("n") and row["group"] != "oom"]
    rows = [[row["group"], *("" if row.get(key) is None else row[key] for key in keys)] for row in groups]
    oom = next(row for row in result.rows if row["group"] == "oom")
    return table(["group", "runs", "mean error %", "bias %", "within 10 %", "within 20 %", "worst under %",
                  "worst over %", "requirement covers %"], rows) + (
        f"\n\nRuns that ran out of memory: {oom['accepted']} of {oom['failed']} would have been let through; of the "
        f"good runs of the same sources {oom['refused_good']} of {oom['good']} would have been refused."
    )  # fmt: skip


def prepare_table(result: Result) -> str:
    """Return time and memory by size, and their exponents."""
    keys = ("rows", "tokens", "data_mib", "seconds", "rows_per_s", "peak_mib", "second_call_s")
    head = ["rows", "tokens", "data, MiB", "s", "rows/s", "peak of all processes, MiB", "second call, s"]
    text = table(head, [[f"{row[key]:,}" for key in keys] for row in result.rows])
    found = ", ".join(f"{name} {value}" for name, value in prepare.summary(result).items())
    return (
        f"{text}\n\nGoal: under {prepare.GOAL_MIB} MiB at a million rows. Exponents over the rows: {found}."
    )


def scale_table(result: Result) -> str:
    """Return cost by size for each kind of work."""
    rows = []
    for line in scale.summary(result):
        by_size = ", ".join(f"{size:,}: {cost:,}" for size, cost in line["by_size"].items())
        rows.append([line["kind"], f"`{line['figure']}`", by_size, line.get("exponent", "")])
    return table(["what grows", "figure", "size: cost", "exponent"], rows)


def exits_table(result: Result) -> str:
    """Return how many runs exited 0."""
    found = exits.summary(result)
    return f"{found['exit_0']} of {found['finished']} finished runs exited 0 ({found['runs']} were started)."


def gpu_table(result: Result) -> str:
    """Return the grid."""
    rows = []
    for row in result.rows:
        what = " ".join(str(row[k]) for k in ("model", "method", "deepspeed", "fsdp", "drill") if k in row)
        what += ", checkpointing" if row.get("gradient_checkpointing") else ""
        memory = [f"{row[k] / 2**30:.2f}" if k in row else "" for k in ("predicted_bytes", "measured_bytes")]
        end = row.get("why") or row["failure_class"] or row["state"]
        error = f"{row['error']:+.1%}" if "error" in row else ""
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        rows.append([what, *memory, error, row.get("tokens_per_s", ""), mfu, row.get("proof", ""), end])
    head = ["run", "predicted, GiB", "measured, GiB", "error", "tokens/s", "MFU", "proof", "ended"]
    return table(head, rows)


PARTS = {
    "throughput": ("Throughput", throughput, throughput_table),
    "launch": ("Launch", launch, launch_table),
    "supervision": ("Supervision", supervision, supervision_table),
    "decisions": ("Decisions", decisions, decisions_table),
    "prediction": ("Prediction of memory", prediction, prediction_table),
    "prepare": ("Preparing data", prepare, prepare_table),
    "scale": ("Scale", scale, scale_table),
    "exits": ("Clean exits", exits, exits_table),
    "gpu": ("One GPU", gpu, gpu_table),
}


def section(name: str) -> str:
    """Return the part of the page about one benchmark."""
    title, module, render = PARTS[name]
    about = (module.__doc__ or "").strip().replace("\n\n", "\n")
    result = load(name)
    if result is None:
        return f"## {title}\n\n{about}\n\nNot measured yet: `python -m benchmarks {name}`."
    where = ", ".join(f"{key} {value}" for key, value in result.machine.items())
    what = ", ".join(f"{key} {value}" for key, value in result.versions.items())
    commands = "\n".join(dict.fromkeys(result.commands))
    loads = [row["load"] for row in result.rows if "load" in row]
    busy = f" Load average before the runs: {min(loads)} to {max(loads)}." if loads else ""
    facts = f"{result.date}, commit {result.commit}. {where}. {what}.{busy}"
    return f"## {title}\n\n{about}\n\n{render(result)}\n\n{facts}\n\n```text\n{commands}\n```"


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(section(name) + "\n" for name in PARTS)])


def write() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
