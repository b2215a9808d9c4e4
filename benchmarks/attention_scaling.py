"""How time and memory of a mechanism grow with the length, on the CPU, beside `full`.

    python benchmarks/attention_scaling.py --plot scaling.png

For every mechanism and length: the fastest of several calls, and the most memory that one call held beyond its inputs.
The exponent is the slope of a straight line through log(cost) over log(length).
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch.profiler import ProfilerActivity, profile

import weft

DEFAULT_NAMES = (
    "full",
    "combiner-fixed",
    "combiner-axial",
    "combiner-axial-vertical",
    "combiner-axial-horizontal",
    "combiner-logsparse",
    "combiner-mixture",
    "combiner-routing",
)


def peak_memory(call) -> float:
    """Bytes that the tensors made by `call` hold at its worst moment, by PyTorch's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def fastest(call, repeats: int, clock, budget: float = 3.0) -> float:
    """Seconds of the fastest of `repeats` calls; fewer when they take longer than `budget` together."""
    best, spent = math.inf, 0.0
    for _ in range(repeats):
        start = clock()
        call()
        took = clock() - start
        best, spent = min(best, took), spent + took
        if spent > budget:
            break
    return best


def exponent(lengths: list[int], costs: list[float]) -> float:
    points = [(math.log(x), math.log(y)) for x, y in zip(lengths, costs, strict=True) if y > 0 and not math.isnan(y)]
    if len(points) < 2:
        return math.nan
    mx, my = sum(p[0] for p in points) / len(points), sum(p[1] for p in points) / len(points)
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)


def measure(name: str, L: int, args: argparse.Namespace) -> tuple[float, float]:
    torch.manual_seed(0)
    attn = weft.make_attention(name, heads=args.heads, head_dim=args.head_dim, causal=not args.bidirectional).eval()
    shape = (args.batch, args.heads, L, args.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=args.backward) for _ in range(3))

    def call() -> None:
        if args.backward:
            torch.autograd.grad(attn(q, k, v).sum(), (q, k, v))
        else:
            with torch.no_grad():
                attn(q, k, v)

    memory = peak_memory(call)  # also warms up
    return fastest(call, args.repeats, time.process_time if args.cpu_time else time.perf_counter), memory


def table(title: str, lengths: list[int], rows: dict[str, list[float]], unit: float, digits: int) -> None:
    print(f"\n{title}")
    print(f"{'':27}" + "".join(f"{L:>10,}" for L in lengths) + f"{'exponent':>10}")
    for name, costs in rows.items():
        cells = "".join(f"{c / unit:>10,.{digits}f}" for c in costs)
        print(f"{name:27}{cells}{exponent(lengths, costs):>10.2f}")


def plot(path: str, lengths: list[int], panels: dict[str, dict[str, list[float]]]) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("\nno plot: matplotlib is not installed (pip install 'weft[lab]')")
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 5), constrained_layout=True)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        for name, costs in rows.items():
            style = {"color": "black", "linestyle": "--"} if name == "full" else {}
            axis.loglog(lengths, costs, marker="o", label=f"{name} (L^{exponent(lengths, costs):.2f})", base=2, **style)
        axis.set_xlabel("length L")
        axis.set_title(title)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    print(f"\nplot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(DEFAULT_NAMES), help="mechanisms to measure")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2**p for p in range(10, 16)])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--bidirectional", action="store_true", help="causal otherwise")
    parser.add_argument("--backward", action="store_true", help="forward and backward; forward only otherwise")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's default")
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of CPU, all threads together: for a machine that others use"
    )
    parser.add_argument("--plot", default="", help="write a log-log plot to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    direction = "bidirectional" if args.bidirectional else "causal"
    work = "forward and backward" if args.backward else "forward"
    print(
        f"{direction}, {work}, batch {args.batch}, {args.heads} heads of {args.head_dim}, float32, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    seconds: dict[str, list[float]] = {name: [] for name in args.names}
    memory: dict[str, list[float]] = {name: [] for name in args.names}
    for L in args.lengths:
        for name in args.names:
            took, held = measure(name, L, args)
            seconds[name].append(took)
            memory[name].append(held)
    table("milliseconds of CPU time" if args.cpu_time else "milliseconds", args.lengths, seconds, 1e-3, 1)
    table("peak memory beyond the inputs, MiB", args.lengths, memory, 2**20, 1)
    if "full" in seconds:
        print("\nfaster than full from L =")
        for name, costs in seconds.items():
            if name != "full":
                slower = [L for L, mine, full in zip(args.lengths, costs, seconds["full"], strict=True) if mine >= full]
                later = [L for L in args.lengths if L > max(slower, default=0)]
                print(f"{name:27}{later[0] if later else 'never':>10}")
    if args.plot:
        plot(args.plot, args.lengths, {"seconds": seconds, "bytes": memory})


if __name__ == "__main__":
    main()
