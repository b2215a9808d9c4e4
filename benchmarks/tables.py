"""Write the tables of the documentation from the measurements in benchmarks/results and experiments/convert.

    python -m benchmarks.tables

In README.md and docs/, a table stands between `<!-- table NAME -->` and `<!-- end -->`. In
weft/core/crossovers.py, which `attention_info` reads, it is between `# table NAME` and `# end`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import weft
from experiments.convert.table import conversions

from . import generation_tables, scale_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/kernels.md",
    "docs/kernel-development.md",
    "docs/generation.md",
    "docs/adapt.md",
    "docs/convert.md",
    "docs/packing.md",
    "docs/combiner.md",
    "docs/scale.md",
    "docs/bench.md",
    "experiments/convert/README.md",
    "weft/core/crossovers.py",
)
MARKED = re.compile(r"(<!-- table (\S+) -->\n|# table (\S+)\n)(.*?)(<!-- end -->|# end)", re.S)
SHORT = ("combiner-fixed", "linear", "local", "longformer")
FULL = {
    "cudnn": "cuDNN",
    "flash": "FlashAttention",
    "flex": "FlexAttention, causal",
    "fla linear": "fla, linear attention",
    "empty": "empty `autograd.Function`",
}
LONG = (16384, 65536)
GPUS = {
    "8.0": "A100",
    "8.6": "RTX 30, A10",
    "8.9": "RTX 40, L4, L40",
    "9.0": "H100, H200",
    "10.0": "B200",
    "12.0": "RTX 50",
}
SHARE = {True: 0.292, False: 0.25}  # of the dense pairs in `subsampled` with its defaults, causal and bidirectional


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def markdown(lines: list[list[str]]) -> str:
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def ms(value: float) -> str:
    return f"{value:.3f}" if value < 5 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


@functools.cache
def rows() -> dict[tuple[str, int, bool], dict[str, tuple[float, float]]]:
    """By name, length and direction: each time from the newest run that has it, and cuDNN's in the same run; if that
    run has none in this direction, in the newest run that has."""
    found: dict[tuple[str, int, bool], dict[str, tuple[float, float]]] = {}
    runs = results("gpu_attention")["runs"]  # newest first
    newest = {
        (row["L"], row["causal"]): row
        for run in reversed(runs)
        for row in run.get("rows", [])
        if row["name"] == "cudnn"
    }
    for run in runs:
        cudnn = newest | {(row["L"], row["causal"]): row for row in run.get("rows", []) if row["name"] == "cudnn"}
        for row in run.get("rows", []):
            kept = found.setdefault((row["name"], row["L"], row["causal"]), {})
            base = cudnn[row["L"], row["causal"]]
            for key, value in row.items():
                if key.endswith(("_ms", "_mib")):
                    kept.setdefault(key, (value, base.get(key, float("nan"))))
    return found


def mechanisms() -> list[str]:
    """With their variants."""
    return sorted({name for name, _, _ in rows() if name.split(",")[0] not in FULL})


def direction(name: str) -> bool:
    """Causal, if the row is."""
    return any(causal for other, _, causal in rows() if other == name)


def _time(name: str, L: int, causal: bool, key: str = "eager_both_ms", ratio: bool = False) -> str:
    if key not in rows().get((name, L, causal), {}):
        return "–"
    mine, cudnn = rows()[name, L, causal][key]
    return f"{ms(mine)} ({cudnn / mine:.1f} ×)" if ratio else ms(mine)


def _label(name: str) -> str:
    if name in FULL:
        return FULL[name]
    if name.startswith("flex, "):
        return f"FlexAttention, {name.removeprefix('flex, ')}"
    name, _, variant = name.partition(", ")
    return f"`{name}`" + (f", {variant}" if variant else "")


def eager(names: tuple[str, ...] = ()) -> str:
    """Milliseconds of an eager forward and backward by length, with the speedup over cuDNN in the same run."""
    lengths = sorted({L for (name, L, _), at in rows().items() if "eager_both_ms" in at and name not in FULL})
    if names:  # only complete columns
        lengths = [L for L in lengths if all(_time(name, L, True) != "–" for name in names)]
    lines = [["", *(f"{L:,}" for L in lengths)]]
    lines.append(["cuDNN", *(_time("cudnn", L, True) for L in lengths)])
    if not names:
        lines.append(["cuDNN, bidirectional", *(_time("cudnn", L, False) for L in lengths)])
    for name in names or mechanisms():
        causal = direction(name)
        cells = [_time(name, L, causal, ratio=True) for L in lengths]
        if any(cell != "–" for cell in cells):
            lines.append([_label(name) + ("" if causal else ", bidirectional"), *cells])
    return markdown(lines)


def ways() -> str:
    """At 16,384 tokens: eager forward; forward and backward eager, host and graph, and the memory. Then who misses
    1.5 times cuDNN's host time, or 1.3 times the own graph."""
    lines = [["", "eager forward", "eager", "host", "of cuDNN's", "graph", "MiB"]]
    slow, late = [], []
    for name in ["cudnn", "empty", *mechanisms()]:
        at = rows().get((name, 16384, direction(name)), {})
        if "host_ms" not in at:
            continue
        host, (eager, _) = at["host_ms"][0] / at["host_ms"][1], at["eager_both_ms"]
        keys = ("eager_forward_ms", "eager_both_ms", "host_ms", "both_ms", "peak_mib")
        cells = [ms(at[key][0]) if key in at else "–" for key in keys]
        cells.insert(3, f"{host:.2f}")
        lines.append([_label(name), *cells])
        slow += [_label(name)] if host > 1.5 else []
        if "both_ms" in at and eager > 1.3 * at["both_ms"][0]:
            late.append(f"{_label(name)} ({eager / at['both_ms'][0]:.1f} ×)")
    return (
        f"{markdown(lines)}Over 1.5 times cuDNN's host time: {', '.join(slow)}. "
        f"Over 1.3 times the graph: {', '.join(late)}.\n\n"
    )


def compiled() -> str:
    """At 16,384 tokens, forward and backward: eager, compiled and as a CUDA graph, with host times."""
    keys = ("eager_both_ms", "host_ms", "compiled_both_ms", "compiled_host_ms", "reduced_both_ms", "reduced_host_ms")
    lines = [["", "eager", "host", "compiled", "host", "reduce-overhead", "host", "graph"]]
    for name in mechanisms():
        at = rows().get((name, 16384, direction(name)), {})
        if "compiled_both_ms" in at:
            lines.append([_label(name), *(ms(at[key][0]) if key in at else "–" for key in (*keys, "both_ms"))])
    return markdown(lines)


def share() -> str:
    """The time of `subsampled` over its share of cuDNN's, forward / forward and backward."""
    lines = [["", *(f"{L:,}" for L in LONG)]]
    for causal in (True, False):
        cells = []
        for at in (rows().get(("subsampled", L, causal), {}) for L in LONG):
            pairs = [at.get(key) for key in ("forward_ms", "both_ms")]
            cells.append(" / ".join("–" if x is None else f"{x[0] / x[1] / SHARE[causal]:.2f}" for x in pairs))
        lines.append(["causal" if causal else "bidirectional, by the kernels", *cells])
    whole = {row["L"]: row for row in results("gpu_floor")["runs"][0]["windows"]}
    cells = []
    for L in LONG:
        keys = {"whole_forward_ms": "eager_forward_ms", "whole_both_ms": "eager_both_ms"}
        cudnn = rows()["cudnn", L, False]
        found = [whole[L][mine] / cudnn[key][0] / SHARE[False] if key in cudnn else None for mine, key in keys.items()]
        cells.append(" / ".join("–" if x is None else f"{x:.2f}" for x in found))
    lines.append(["bidirectional, PyTorch's attention on gathered keys (eager, cuDNN from another run)", *cells])
    return markdown(lines)


def others() -> str:
    """Other libraries, and ours beside them: eager forward / forward and backward, at 16,384 tokens."""
    lines = [["", "forward", "forward and backward"]]
    found = dict.fromkeys(name for name, _, causal in rows() if causal and name.split(",")[0] in FULL)
    found.pop("empty", None)
    for name in [*found, "longformer", "linear", "combiner-fixed"]:
        lines.append([_label(name), *(_time(name, 16384, True, key) for key in ("eager_forward_ms", "eager_both_ms"))])
    return markdown(lines)


def first_calls() -> str:
    """Seconds of the first call of a process, and of the first call at each other length."""
    newest = next(run["first_calls"] for run in results("gpu_attention")["runs"] if "first_calls" in run)
    lengths = list(dict.fromkeys(L for row in newest for L in row["seconds"]))
    lines = [["", *(f"{int(L):,}" for L in lengths)]]
    for row in sorted(newest, key=lambda row: row["name"]):
        seconds = [f"{row['seconds'][L]:.1f}" if L in row["seconds"] else "–" for L in lengths]
        lines.append([_label(row["name"]) + ("" if row["causal"] else ", bidirectional"), *seconds])
    return markdown(lines)


def crossovers() -> dict[str, int]:
    """By mechanism, the shortest measured length from which its eager forward and backward is faster than cuDNN at
    every longer measured length too; if it is slower at the longest one, that length with a minus sign."""
    found = {}
    for name in mechanisms():
        causal = direction(name)
        mine = {L: times for (n, L, c), times in rows().items() if (n, c) == (name, causal)}
        at = {L: times["eager_both_ms"] for L, times in mine.items() if "eager_both_ms" in times}
        if ", " in name or not at:
            continue
        found[name] = -max(at)
        for L in sorted(at, reverse=True):
            if at[L][0] >= at[L][1]:
                break
            found[name] = L
    return found


def crossover_code() -> str:
    def code(name: str, sign: int) -> str:
        lines = [f'    "{key}": {abs(L)},\n' for key, L in sorted(crossovers().items()) if L * sign > 0]
        return f"{name}: dict[str, int] = {{\n{''.join(lines)}}}\n"

    return code("FASTER_FROM", 1) + code("SLOWER_UP_TO", -1)


def speedups() -> str:
    """Speedup of the kernels over cuDNN, forward / forward and backward."""
    lines = [["", *(f"{L:,}" for L in LONG)]]
    for name, causal in sorted({(name, causal) for name, _, causal in rows()}, key=lambda row: (row[0], not row[1])):
        cells = []
        for at in (rows().get((name, L, causal), {}) for L in LONG):
            pairs = [at.get(key) for key in ("forward_ms", "both_ms")]
            cells.append(" / ".join("–" if pair is None else f"{pair[1] / pair[0]:.1f}" for pair in pairs))
        if name in mechanisms() and cells != ["– / –"] * len(LONG):
            lines.append([_label(name) + ("" if causal else ", bidirectional"), *cells])
    return markdown(lines)


def kernels() -> str:
    """What each kernel supports, from the registry."""
    lines = [["", "from", "dropout", "grouped keys and values", "packed documents in place", "decoding steps"]]
    for name in weft.attentions():
        info = weft.attention_info(name)
        if info.kernel is not None:
            attn = weft.make_attention(name, heads=4, head_dim=64, causal=info.causal, max_length=1024)
            has = (info.kernel.grouped(attn), info.kernel.packed, info.kernel.step)
            least = f"{info.kernel.least_length:,}" if info.kernel.auto(attn) else "not in `auto`"
            attn.dropout = 0.1
            drops = ("yes" if info.kernel.auto(attn) else "not in `auto`") if info.kernel.dropout else "–"
            lines.append([f"`{name}`", least, drops, *("yes" if x else "–" for x in has)])
    return markdown(lines)


def compiled_for() -> str:
    """The GPUs for which all kernels were compiled without one."""
    report = results("compiled_kernels")
    lines = [["compute capability", "GPUs", "kernels", "spill registers", "fewer pipeline stages", "failed"]]
    for capability, gpus in GPUS.items():
        rows = [row for row in report["rows"] if row["capability"] == capability]
        if rows:
            sets = [{kernel for row in rows for kernel in row[key]} for key in ("spills", "fewer_stages", "failed")]
            lines.append([capability, gpus, str(sum(row["kernels"] for row in rows)), *(str(len(x)) for x in sets)])
    about = f"torch {report['torch'].split('+')[0]}, Triton {report['triton']}, {_commit(report)}"
    return f"{markdown(lines)}{about}: `{report['command']}`\n\n"


def tests() -> str:
    """By mechanism and kind, how many tests of the kernels passed on a GPU."""
    report = results("gpu_tests")
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in report["rows"]:
        at = found.setdefault((row["name"], row["kind"]), {})
        at[row["outcome"]] = at.get(row["outcome"], 0) + row["tests"]
    kinds = ["bfloat16", "float16", "float32", "heads of 256", "grouped", "dropout", "packed", "call modes", "steps"]

    def cell(at: dict[str, int] | None) -> str:
        if at is None:
            return ""
        passed, total = at.get("passed", 0), sum(at.values())
        return f"{passed}" if passed == total else f"{passed} of {total}"

    names = sorted({name for name, _ in found} - {"others"})
    lines = [["", *kinds], *([f"`{name}`", *(cell(found.get((name, kind))) for kind in kinds)] for name in names)]
    outcomes = {kind: sum(at.get(kind, 0) for at in found.values()) for kind in ("passed", "failed", "not run")}
    said = ", ".join(f"{n:,} {outcome}" for outcome, n in outcomes.items())
    counts = {x: sum(row["tests"] for row in report["rows"] if row["commit"] == x) for x in report["commits"]}
    by = ", ".join(f"{n:,} on {commit}" for commit, n in counts.items() if n)
    return (
        f"{markdown(lines)}Other tests (launches, draws, refusals): {cell(found['others', 'other'])}. All: {said} "
        f"({by}; {report['gpu']}, torch {report['torch']}).\n\n"
    )


def windows() -> str:
    """Eager bidirectional `subsampled` in both ways, forward / forward and backward."""
    lines = [["targets per window", "kernels", "PyTorch's attention on gathered keys"]]
    for row in sorted(results("gpu_floor")["runs"][0]["windows"], key=lambda row: row["L"]):
        cells = [f"{ms(row[f'{way}_forward_ms'])} / {ms(row[f'{way}_both_ms'])}" for way in ("kernels", "whole")]
        lines.append([f"{row['window']:,}", *cells])
    return markdown(lines)


def floor() -> str:
    """Bytes and times of `combiner-fixed` beside those of copies."""
    run = results("gpu_floor")["runs"][0]
    lines = [["16,384 tokens, CUDA graph replays", "MB", "ms", "TB/s", "forward and backward, ms"]]
    for row in run["memory"]:
        lines.append([row["name"], f"{row['megabytes']:.0f}", ms(row["ms"]), f"{row['tb_per_s']:.2f}", ""])
    best = [min(run["summarise"], key=lambda row: row[key]) for key in ("forward_ms", "both_ms")]
    for row in run["combiner-fixed"] + best:
        name = "`combiner-fixed`, forward"
        if "rows" in row:
            name += f", `summarise` in tiles of {row['rows']}, {row['warps']} warps, {row['stages']} stages"
        elif "both_ms" not in row:
            name += f", {row['heads']} heads at a time"
        both = ms(row["both_ms"]) if "both_ms" in row else ""
        lines.append([name, "235", ms(row["forward_ms"]), f"{235 / row['forward_ms'] / 1e3:.2f}", both])
    return f"{markdown(lines)}{_run(run)}: `{run['command']}`\n\n"


def counters() -> str:
    """What the profiler counted in the kernels of `combiner-fixed`."""
    lines = [["kernel", "µs", "issue slots busy", "DRAM busy", "active warps", "registers", "programs"]]
    report = results("gpu_counters")
    for row in report["rows"]:
        shares = (f"{row[key]:.0f} %" for key in ("issue_percent", "dram_percent", "warps_percent"))
        numbers = f"{row['registers']:.0f}", f"{row['programs']:,}"
        lines.append([f"`{row['kernel']}`", f"{row['us']:.1f}", *shares, *numbers])
    return markdown(lines) + f"{_run(report)}: `{report['command']}`\n\n"


def trained(kind: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of gpu_training by name, length and mode, each value from the newest run that has it."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in results("gpu_training")["runs"]:
        for row in run.get(kind, []):
            key = row["name"], row["L"], row.get("mode")
            found[key] = row | found.get(key, {})
    return found


def layers() -> str:
    """Milliseconds of a forward and backward of one layer, and the time to queue it."""
    lines = [["L", "attention", "eager", "host", "compiled", "host", "graph", "reduce-overhead", "MiB"]]
    keys = ("eager_ms", "eager_host_ms", "compiled_ms", "compiled_host_ms", "graph_ms", "reduced_ms", "eager_mib")
    for row in sorted(trained("layers").values(), key=lambda row: row["L"]):
        lines.append([f"{row['L']:,}", row["name"], *(ms(row[key]) if key in row else "–" for key in keys)])
    return markdown(lines)


def steps() -> str:
    """Thousands of tokens per second in training, with the speedup over `full` and the memory."""
    found = trained("steps")
    names, lengths, modes = (list(dict.fromkeys(key[i] for key in found)) for i in range(3))
    lines = [["", *(f"{L:,}" for L in sorted(lengths))]]
    for name, mode in itertools.product(names, modes):
        cells = []
        for L in sorted(lengths):
            row, base = found.get((name, L, mode)), found.get(("full", L, mode))
            share = f" ({row['tokens_per_s'] / base['tokens_per_s']:.2f} ×)" if row and base and name != "full" else ""
            cells.append(f"{row['tokens_per_s'] / 1e3:.0f}{share}, {row['peak_gib']:.1f} GiB" if row else "–")
        lines.append([f"`{name}`, {mode}", *cells])
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


def listops() -> str:
    """Training steps on ListOps: milliseconds of the GPU and in total, tokens per second with and without padding."""
    lines, where = [["", "GPU, ms", "step, ms", "M tokens/s", "of them real", "commit"]], {}
    for report in map(results, ("train_listops", "train_listops_deep")):
        where = report["machine"]
        for row in report["rows"]:
            if "error" not in row:
                name, shape, *flags = row["model"].split(":")
                cells = [f"{row[key] / 1e6:.2f}" for key in ("tokens_per_s", "real_tokens_per_s")]
                cells = [ms(row["gpu_ms"]), ms(row["step_ms"]), *cells, where["commit"][:8]]
                lines.append([", ".join([f"`{name}` {shape}", *flags]), *cells])
    return f"{markdown(lines)}{where['device']}, torch {where['torch'].split('+')[0]}\n\n"


def combiner_cpu() -> str:
    """CPU milliseconds and MiB beyond the inputs, and the length from which a Combiner is faster than `full`."""
    found = {(row["attention"], row["length"]): row for row in results("combiner_cpu")["rows"]}
    names, lengths = (list(dict.fromkeys(key[i] for key in found)) for i in range(2))
    lines = [["", *(f"{L:,}" for L in lengths), "faster than `full` from"]]
    for name in names:
        cells = [(row["ms"], row["peak_mib"]) for row in (found[name, L] for L in lengths)]
        behind = [i for i, L in enumerate(lengths) if found[name, L]["of_full"] >= 1]
        start = 1 + max(behind, default=-1)
        faster = f"{lengths[start]:,}" if start < len(lengths) else "–"
        shown = (f"{time:.0f} ({mib:.0f})" if time >= 100 else f"{time:.1f} ({mib:.0f})" for time, mib in cells)
        lines.append([f"`{name}`", *shown, faster])
    return markdown(lines)


def long_sequence() -> str:
    """Tokens per second of a training step on one GPU; seconds and memory of the longest sequence."""
    found = {(row["attention"], row["length"]): row for row in results("long_sequence")["rows"]}
    names, lengths = (list(dict.fromkeys(key[i] for key in found)) for i in range(2))
    lines = [["tokens/s", *(f"{L:,} tokens" for L in lengths), "seconds per step", "peak memory"]]
    for name in names:
        last = found[name, lengths[-1]]
        cells = [f"{found[name, L]['tokens_per_s']:,}" for L in lengths]
        lines.append([f"`{name}`", *cells, f"{last['seconds']:.2f}", f"{last['peak_gib']:.1f} GiB"])
    return markdown(lines)


def source(name: str) -> str:
    """Where the numbers of one file come from."""
    report = results(name)
    if "runs" not in report:
        return f"\n{_run(report)}\n\n"
    return "\n" + "".join(f"{i}. {_run(run)}: `{run['command']}`\n" for i, run in enumerate(report["runs"], 1)) + "\n"


def _run(report: dict[str, Any]) -> str:
    return f"{report['gpu']}, torch {report['torch'].split('+')[0]}, {_commit(report)}"


def _commit(report: dict[str, Any]) -> str:
    commit, changes, _ = report["commit"].partition("+")
    return f"commit {commit[:8]}" + (" with changes" if changes else "")


TABLES = {
    "eager": eager,
    "eager-short": lambda: eager(SHORT),
    "attention-source": lambda: source("gpu_attention"),
    "training-source": lambda: source("gpu_training"),
    "ways": ways,
    "others": others,
    "first-calls": first_calls,
    "crossovers": crossover_code,
    "compiled": compiled,
    "share": share,
    "graph-speedups": speedups,
    "kernels": kernels,
    "compiled-for": compiled_for,
    "tests": tests,
    "floor": floor,
    "counters": counters,
    "windows": windows,
    "layers": layers,
    "steps": steps,
    "listops": listops,
    "combiner-cpu": combiner_cpu,
    "long-sequence": long_sequence,
    "packing": packing,
    "packing-source": lambda: source("gpu_packing"),
    "generation-cpu": lambda: markdown(generation_tables.steps("generation_cpu")),
    "generation-gpu": lambda: markdown(generation_tables.steps("generation_gpu")),
    "hf-generation-gpu": lambda: markdown(generation_tables.transformers("hf_generation_gpu")),
    "scale-bytes": lambda: markdown(scale_model.sent()),
    "scale-times": lambda: markdown(scale_model.times(rows())),
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
