"""The commands `weft bench …`. Each measures all variants in one run and shows the paper's ratio for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import Group

if TYPE_CHECKING:
    from .timing import How

bench_app = typer.Typer(
    cls=Group, no_args_is_help=True, rich_markup_mode=None, help="Measure costs and compare the ratios with the papers."
)

Attentions = Annotated[str, typer.Option(help="comma-separated names, or all; default: the paper's")]
Heads = Annotated[int, typer.Option(help="heads")]
HeadDim = Annotated[int, typer.Option(help="width of a head")]
Device = Annotated[str, typer.Option("--device", "--accelerator", help="cpu or cuda; default: cuda if available")]
Precision = Annotated[str, typer.Option(help="32-true, tf32, bf16-mixed or bf16-true")]
Repeats = Annotated[int, typer.Option("--repeats", "--rounds", help="maximum number of rounds; 0: 10, with --full 30")]
Budget = Annotated[float, typer.Option(help="seconds per comparison; 0: automatic")]
Compile = Annotated[bool, typer.Option("--compile", help="use torch.compile")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: PyTorch's default")]
CpuTime = Annotated[bool, typer.Option("--cpu-time", help="measure CPU seconds, for shared machines")]
Full = Annotated[bool, typer.Option("--full", help="measure everything, not only a few minutes' worth")]
Out = Annotated[Path | None, typer.Option(help="also write all values to this JSON file, row by row")]
Markdown = Annotated[bool, typer.Option("--markdown", help="print the tables as Markdown")]


def _how(device: str, precision: str, repeats: int, budget: float, full: bool, threads: int, **more: Any) -> How:
    import torch

    from .timing import How

    if threads:
        torch.set_num_threads(threads)
    if device in ("", "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    repeats = repeats or (30 if full else 10)
    budget = budget or {"cpu": 8.0, "cuda": 1.5}.get(device, 8.0) * (4 if full else 1)
    return How(device=device, precision=precision, repeats=repeats, budget=budget, **more)


def _among(chosen: str, known: tuple[str, ...] | list[str], default: list[str], what: str) -> list[str]:
    names = [name.strip() for name in chosen.split(",") if name.strip()] or default
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; available: {', '.join(known)}")
    return names


def _lengths(given: str, end: int) -> list[int]:
    """The given lengths, or the powers of 2 from 2^10 up to 2^(end - 1)."""
    try:
        return sorted({int(part) for part in given.split(",")}) if given else [2**p for p in range(10, end)]
    except ValueError:
        raise ValueError(f"lengths must be comma-separated integers, got {given!r}") from None


@bench_app.command()
def latency(
    tasks: Annotated[str, typer.Option(help="imdb-token, imdb-byte, listops, matching; default: listops")] = "",
    attentions: Attentions = "",
    batch: Annotated[
        int, typer.Option("--batch-size", "--batch", min=0, help="documents; 0: 1 on the CPU, 32 on a GPU")
    ] = 0,
    length: Annotated[int, typer.Option(min=0, help="tokens per document; 0: the task's default")] = 0,
    device: Device = "",
    precision: Precision = "32-true",
    repeats: Repeats = 0,
    budget: Budget = 0.0,
    compile: Compile = False,
    threads: Threads = 0,
    cpu_time: CpuTime = False,
    full: Full = False,
    out: Out = None,
    markdown: Markdown = False,
) -> None:
    """One forward pass of the wide-attention study's deep and wide models (its Tables 9 and 10)."""
    from dataclasses import replace

    from ...models.presets import STUDY_ATTENTIONS, TASKS
    from . import latency as bench
    from .report import Report
    from .timing import names_of

    chosen = _among(tasks, list(TASKS), list(TASKS) if full else ["listops"], "task")
    names = names_of(attentions, STUDY_ATTENTIONS)
    how = _how(device, precision, repeats, budget, full, threads, compile=compile, cpu_time=cpu_time)
    how = replace(how, memory=how.device == "cuda")  # slow on the CPU, and not in the paper
    settings = {"batch": batch or bench.PAPER_BATCH[how.device], "length": length or "the task's"}
    report = Report("latency", how, settings, out)
    bench.measure(chosen, names, how, report, batch=batch, length=length)
    table = "10: batch 32 on an A100" if how.device == "cuda" else "9: one document on two EPYC 7763"
    notes = [
        f"batch {settings['batch']}, {how.precision}{', CPU seconds' if cpu_time else ''}; "
        "medians of rounds in which deep and wide alternate.",
        f"paper: Wide Attention Is The Way Forward For Transformers? (arXiv 2210.00640), Table {table}.",
    ]
    report.finish(bench.tables(report.records, how.device), notes, markdown)


@bench_app.command()
def scaling(
    attentions: Attentions = "",
    lengths: Annotated[str, typer.Option(help="comma-separated; default: 1024 to 16384, with --full to 65536")] = "",
    batch: Annotated[
        int,
        typer.Option("--batch-size", "--batch", min=0, help="sequences; 0: 1 on the CPU, 16 on a GPU, as in the paper"),
    ] = 0,
    heads: Heads = 4,
    head_dim: HeadDim = 64,
    causal: Annotated[bool, typer.Option("--causal/--bidirectional", help="BigBird is only bidirectional")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="measure forward and backward")] = False,
    limit: Annotated[float, typer.Option(help="seconds per call; stop a mechanism above it")] = 20.0,
    device: Device = "",
    precision: Precision = "32-true",
    repeats: Repeats = 0,
    budget: Budget = 0.0,
    compile: Compile = False,
    threads: Threads = 0,
    cpu_time: CpuTime = False,
    full: Full = False,
    plot: Annotated[Path | None, typer.Option(help="write a log-log plot to this file")] = None,
    out: Out = None,
    markdown: Markdown = False,
) -> None:
    """Time and memory of attention over length (Figure 3 of the Combiner paper)."""
    from ...attention import attention_info
    from . import scaling as bench
    from .report import Report
    from .timing import names_of

    fitting = [name for name in bench.FIGURE_3 if not causal or attention_info(name).causal]
    names = names_of(attentions, fitting, causal)
    numbers = _lengths(lengths, 17 if full else 15)
    if numbers[0] < 1 or min(heads, head_dim) < 1:
        raise ValueError("lengths, heads and head_dim must be at least 1")
    how = _how(device, precision, repeats, budget, full, threads, compile=compile, cpu_time=cpu_time)
    batch = batch or (16 if how.device == "cuda" else 1)
    settings: dict[str, Any] = {"batch": batch, "heads": heads, "head_dim": head_dim}
    settings |= {"causal": causal, "backward": backward, "limit_s": limit}
    report = Report("scaling", how, settings, out)
    bench.measure(
        names, numbers, how, report, batch=batch, heads=heads, head_dim=head_dim, causal=causal,
        backward=backward, limit=limit,
    )  # fmt: skip
    notes = [
        f"{'causal' if causal else 'bidirectional'}, {'forward and backward' if backward else 'forward'}, batch "
        f"{batch}, {heads} heads of {head_dim}, {how.precision}"
        + (", CPU seconds" if cpu_time else "")
        + "; medians of rounds in which all alternate.",
        "paper: Combiner (arXiv 2107.05768), Figure 3: batch 16 on TPU v3-16, 1,024 to 16,384 tokens.",
    ]
    notes += ["sparse: one column per block, as in the paper; weft's default has ten."] if "sparse" in names else []
    report.finish(bench.tables(report.records), notes, markdown)
    if plot is not None:
        bench.plot(plot, report.records)
        print(f"wrote {plot}")


@bench_app.command()
def cost(
    part: Annotated[str, typer.Option(help="attention, step or both")] = "both",
    schedules: Annotated[str, typer.Option(help="such as S0,S16-L4; default: S0 and the paper's schedules")] = "",
    length: Annotated[
        int, typer.Option(min=0, help="tokens; 0: 4,096 on a GPU or with --full, else 2,048 and 1,024")
    ] = 0,
    windows: Annotated[int, typer.Option(min=1, help="windows, in the part attention")] = 4,
    batch: Annotated[
        int,
        typer.Option(
            "--batch-size", "--batch", min=0, help="sequences, in the part step; 0: 2 on a GPU or with --full, else 1"
        ),
    ] = 0,
    device: Device = "",
    precision: Precision = "32-true",
    repeats: Repeats = 0,
    budget: Budget = 0.0,
    compile: Compile = False,
    threads: Threads = 0,
    cpu_time: CpuTime = False,
    full: Full = False,
    out: Out = None,
    markdown: Markdown = False,
) -> None:
    """Cost of subsampled and dense training (the cost columns of the subsampled-attention paper).

    On a GPU, or with --full, the training steps use the paper's Enwik8 model: 16 layers, width 1024, 4,096 bytes.
    """
    from dataclasses import asdict, replace

    from . import cost as bench
    from .report import Line, Report

    if part not in ("attention", "step", "both"):
        raise ValueError(f"--part must be attention, step or both, got {part!r}")
    how = _how(device, precision, repeats, budget, full, threads, compile=compile, cpu_time=cpu_time)
    large = full or how.device == "cuda"
    shape = bench.ENWIK8 if large else bench.SMALL
    shape = replace(shape, length=length or shape.length, batch=batch or shape.batch)
    plans = [name.strip() for name in schedules.split(",") if name.strip()] or bench.schedules_for(shape.layers)
    for plan in plans:
        bench.counted(shape, plan)  # invalid schedules raise an error before anything is measured
    report = Report("cost", how, {"part": part, "step": asdict(shape)}, out)
    with Line((4 if part != "step" else 0) + (part != "attention")) as line:
        if part != "step":
            tokens = length or (4096 if large else 2048)
            bench.measure_attention(how, report, line, length=tokens, windows=windows)
        if part != "attention":
            bench.measure_steps(how, report, line, shape=shape, schedules=plans)
    notes = [
        f"{how.precision}{', CPU seconds' if cpu_time else ''}; medians of rounds in which all alternate.",
        "paper: The Information Pathways Hypothesis (arXiv 2306.01705).",
    ]
    if part != "attention":
        gigabytes, milliseconds = bench.TABLE_7["Enwik8"]
        notes += [
            f"steps: {shape.layers} layers, {shape.heads} heads of {shape.head_dim}, "
            f"{shape.batch} x {shape.length:,} bytes. The paper's Table 7 has only the dense model "
            f"(Enwik8: {gigabytes} GB, {milliseconds} ms per step). Its relative costs are not available to us, so "
            "we show counted multiply-adds.",
        ]
    report.finish(bench.tables(report.records), notes, markdown)


@bench_app.command()
def throughput(
    models: Annotated[str, typer.Option(help="pvt-tiny, …; vit-small, swin-tiny, pvtv2-b2 … from timm")] = "",
    batch: Annotated[
        int, typer.Option("--batch-size", "--batch", min=0, help="images; 0: 4 on the CPU, 256 on a GPU")
    ] = 0,
    device: Device = "",
    precision: Precision = "32-true",
    repeats: Repeats = 0,
    budget: Budget = 0.0,
    compile: Compile = False,
    threads: Threads = 0,
    cpu_time: CpuTime = False,
    full: Full = False,
    out: Out = None,
    markdown: Markdown = False,
) -> None:
    """Images per second with and without a cache, in training and inference (Table 9 of the cache paper)."""
    from . import throughput as bench
    from .report import Report

    how = _how(device, precision, repeats, budget, full, threads, compile=compile, cpu_time=cpu_time)
    quick = list(bench.TABLE_9) if how.device == "cuda" else ["pvt-tiny"]
    chosen = _among(models, bench.MODELS, list(bench.MODELS) if full else quick, "model")
    batch = batch or (256 if how.device == "cuda" else 4)
    report = Report("throughput", how, {"batch": batch}, out)
    bench.measure(chosen, how, report, batch=batch)
    notes = [
        f"batch {batch}, {how.precision}{', CPU seconds' if cpu_time else ''}, half of the channels cached; "
        "medians of rounds in which both alternate.",
        "paper: Cached Transformers (arXiv 2312.12742), Table 9: one V100.",
    ]
    report.finish(bench.tables(report.records), notes, markdown)


@bench_app.command()
def generation(
    attentions: Annotated[str, typer.Option(help="comma-separated names; default: all that decode")] = "",
    lengths: Annotated[str, typer.Option(help="comma-separated; default: 1024 to 16384, with --full to 262144")] = "",
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="sequences decoded at once")] = 1,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    limit: Annotated[float, typer.Option(help="seconds; skip prompts that take longer")] = 20.0,
    device: Device = "",
    precision: Precision = "32-true",
    repeats: Repeats = 0,
    budget: Budget = 0.0,
    threads: Threads = 0,
    cpu_time: CpuTime = False,
    full: Full = False,
    plot: Annotated[Path | None, typer.Option(help="write a log-log plot to this file")] = None,
    out: Out = None,
    markdown: Markdown = False,
) -> None:
    """Prefill, steps and state memory over the context, compared with a key-value cache."""
    from . import generation as bench
    from .report import Report

    known = bench.decoding()
    names = known if attentions == "all" else _among(attentions, known, known, "mechanism that decodes")
    numbers = _lengths(lengths, 19 if full else 15)
    shortest = 2 * bench.STEPS * bench.STARTS
    if numbers[0] < shortest or min(heads, head_dim, batch) < 1:
        raise ValueError(f"lengths must be at least {shortest}, and heads, head_dim and batch at least 1")
    how = _how(device, precision, repeats, budget, full, threads, cpu_time=cpu_time)
    settings: dict[str, Any] = {"batch": batch, "heads": heads, "head_dim": head_dim, "limit_s": limit}
    report = Report("generation", how, settings, out)
    bench.measure(
        names, numbers, how, report, batch=batch, heads=heads, head_dim=head_dim, limit=limit
    )  # fmt: skip
    notes = [
        f"batch {batch}, {heads} heads of {head_dim}, {how.precision}{', CPU seconds' if cpu_time else ''}; "
        "medians of rounds in which each mechanism alternates with the cache, prompts only the first one"
        + ("; steps are CUDA graphs with max_length." if how.device == "cuda" else "."),
    ]
    report.finish(bench.tables(report.records), notes, markdown)
    if plot is not None:
        bench.plot(plot, report.records)
        print(f"wrote {plot}")
