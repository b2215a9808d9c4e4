"""Write the tables of the documentation from the measurements in benchmarks/results and experiments/convert.

    python -m benchmarks.tables

In README.md and docs/, a table stands between `<!-- table NAME -->` and `<!-- end -->`. In
weft/core/crossovers.py, which `attention_info` reads, it is between `# table NAME` and `# end`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from experiments.convert.table import conversions

from . import generation_tables

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/kernels.md",
    "docs/generation.md",
    "docs/adapt.md",
    "docs/convert.md",
    "docs/packing.md",
    "experiments/convert/README.md",
    "weft/core/crossovers.py",
)
MARKED = re.compile(r"(<!-- table (\S+) -->\n|# table (\S+)\n)(.*?)(<!-- end -->|# end)", re.S)
SINCE = ("reformer", "routing")  # "auto" uses their kernels since the measurement, which has them as "NAME, triton"
SHORT = ("combiner-fixed", "linear", "local", "longformer")
GRAPH = {
    "cudnn": "cuDNN",
    "combiner-fixed": "`combiner-fixed`",
    "combiner-axial": "`combiner-axial`",
    "linear": "`linear`",
    "local": "`local`",
    "longformer": "`longformer`",
    "sparse": "`sparse`",
    "subsampled": "`subsampled`, W = 4",
}
MORE_GRAPH = {
    "sparse, strided": "`sparse`, strided",
    "performer": "`performer`",
    "combiner-axial-vertical": "`combiner-axial-vertical`",
    "combiner-axial-horizontal": "`-horizontal`",
    "combiner-mixture": "`combiner-mixture`",
}

Row = dict[str, Any]


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def markdown(lines: list[list[str]]) -> str:
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def ms(value: float) -> str:
    return f"{value:.3f}" if value < 5 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def eager_rows() -> tuple[list[int], list[str], dict[tuple[str, int, bool], Row]]:
    rows = results("gpu_eager")["rows"]
    for row in rows:
        name, _, backend = row["name"].partition(", ")
        if name in SINCE:
            row["name"] = name if backend else f"{name}, torch"
    names = [name for name in dict.fromkeys(row["name"] for row in rows) if name != "cudnn"]
    return sorted({row["L"] for row in rows}), names, {(row["name"], row["L"], row["causal"]): row for row in rows}


def eager(names: tuple[str, ...] = ()) -> str:
    """Milliseconds of an eager forward and backward by length, with the speedup over cuDNN in the same direction."""
    lengths, measured, rows = eager_rows()
    if names:  # only complete columns
        lengths = [L for L in lengths if all((name, L, True) in rows for name in names)]
    lines = [["", *(f"{L:,}" for L in lengths)]]
    for causal, label in ((True, "cuDNN"), (False, "cuDNN, bidirectional")):
        if any(("cudnn", L, causal) in rows for L in lengths) and (causal or not names):
            lines.append([label, *(_time(rows.get(("cudnn", L, causal))) for L in lengths)])
    for name in names or measured:
        causal = any((name, L, True) in rows for L in lengths)
        cells = [_time(rows.get((name, L, causal)), rows.get(("cudnn", L, causal))) for L in lengths]
        lines.append([_label(name) + ("" if causal else ", bidirectional"), *cells])
    return markdown(lines)


def _label(name: str) -> str:
    name, _, backend = name.partition(", ")
    return f"`{name}`" + (f", backend={backend!r}" if backend else "")


def _time(row: Row | None, base: Row | None = None) -> str:
    if row is None:
        return "–"
    text = ms(row["eager_both_ms"])
    return text if base is None else f"{text} ({base['eager_both_ms'] / row['eager_both_ms']:.1f} ×)"


def host() -> str:
    """At 16,384 tokens: eager, host and graph time of a forward and backward, and the seconds of the first call."""
    lengths, names, rows = eager_rows()
    report, L = results("gpu_eager"), 16384
    lines = [["", "eager", "host", "graph", "MiB", "first call, s"]]
    for name in ["cudnn", *names]:
        row = rows.get((name, L, True)) or rows.get((name, L, False))
        if row is not None:
            graph, mib = row.get("both_ms"), row.get("peak_mib")
            first = report.get("first_call_s", {}).get(name)
            numbers = [ms(row["eager_both_ms"]), ms(row["host_ms"]), "–" if graph is None else ms(graph)]
            numbers += ["–" if mib is None else f"{mib:.0f}", "–" if first is None else f"{first:.1f}"]
            lines.append(["cuDNN" if name == "cudnn" else _label(name), *numbers])
    return markdown(lines)


def crossovers() -> dict[str, int]:
    """By mechanism, the shortest measured length from which its eager forward and backward is faster than cuDNN at
    every longer measured length too; 0 if it is slower at the longest one."""
    lengths, names, rows = eager_rows()
    found = {}
    for name in names:
        if ", " in name:
            continue
        causal = any((name, L, True) in rows for L in lengths)
        measured = [L for L in lengths if (name, L, causal) in rows and ("cudnn", L, causal) in rows]
        found[name] = 0
        for L in reversed(measured):
            if rows[name, L, causal]["eager_both_ms"] >= rows["cudnn", L, causal]["eager_both_ms"]:
                break
            found[name] = L
    return found


def crossover_code() -> str:
    lines = [f'    "{name}": {length or None},\n' for name, length in sorted(crossovers().items())]
    return "FASTER_FROM: dict[str, int | None] = {\n" + "".join(lines) + "}\n"


def graph_rows() -> tuple[list[int], dict[tuple[str, int], Row]]:
    """Causal rows; `combiner-fixed` with blocks of 128 up to 16,384 tokens, 256 beyond."""
    rows = {}
    for row in results("gpu_attention")["rows"]:
        name = row["name"].removesuffix(" (default)")
        if name == f"combiner-fixed m={128 if row['L'] <= 16384 else 256}":
            name = "combiner-fixed"
        if row["causal"]:
            rows[name, row["L"]] = row
    return sorted({L for _, L in rows}), rows


def graph(columns: dict[str, str]) -> str:
    lengths, rows = graph_rows()
    lines = [["L", *columns.values()]]
    for L in lengths:
        both = [rows[name, L] for name in columns]
        lines.append([f"{L:,}", *(" / ".join(_graph_ms(r[key]) for key in ("forward_ms", "both_ms")) for r in both)])
    return markdown(lines)


def _graph_ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def speedups() -> str:
    """Speedup of the kernels over cuDNN, forward / forward and backward."""
    _, rows = graph_rows()
    lengths = 16384, 65536
    lines = [["speedup over cuDNN", *(f"{L:,}" for L in lengths)]]
    for name, label in {**GRAPH, **MORE_GRAPH}.items():
        if name != "cudnn":
            cells = [
                " / ".join(f"{rows['cudnn', L][key] / rows[name, L][key]:.1f}" for key in ("forward_ms", "both_ms"))
                for L in lengths
            ]
            lines.append([f"`{name}`" if label.startswith("`-") else label, *cells])
    return markdown(lines)


def packing() -> str:
    """Milliseconds of a forward and backward of packed documents, and the ratio to one sequence of as many tokens."""
    lines = [["", "one sequence", "packed", "ratio", "one sequence, graph", "packed, graph", "ratio"]]
    for row in results("gpu_packing")["rows"]:
        cells = [f"`{row['name']}`"]
        for kind in ("eager_ms", "graph_ms"):
            whole, packed = row.get(kind), row.get(f"lengths_{kind}")
            cells += [ms(whole), ms(packed), f"{packed / whole:.2f}"] if whole else ["–"] * 3
        lines.append(cells)
    return markdown(lines)


def source(name: str) -> str:
    """Where the numbers of one file come from."""
    report = results(name)
    return f"\n{report['gpu']}, torch {report['torch'].split('+')[0]}, commit {report['commit']}\n\n"


TABLES = {
    "eager": eager,
    "eager-short": lambda: eager(SHORT),
    "eager-source": lambda: source("gpu_eager"),
    "eager-host": host,
    "crossovers": crossover_code,
    "graph": lambda: graph(GRAPH),
    "graph-more": lambda: graph(MORE_GRAPH),
    "graph-speedups": speedups,
    "packing": packing,
    "packing-source": lambda: source("gpu_packing"),
    "generation-cpu": lambda: markdown(generation_tables.steps("generation_cpu")),
    "generation-gpu": lambda: markdown(generation_tables.steps("generation_gpu")),
    "hf-generation-gpu": lambda: markdown(generation_tables.transformers("hf_generation_gpu")),
    "convert": lambda: f"\n{conversions()}\n\n",
    "hf-generation": lambda: markdown(generation_tables.transformers("hf_generation")),
}


def written(text: str) -> str:
    """The text of a page with its tables made again."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2] or found[3]]() + found[5], text)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
