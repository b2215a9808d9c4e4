"""Every kernel on the GPU against its definition in float64: outputs, all gradients, and how PyTorch may call it.

    python3 -m benchmarks.gpu_correctness [--quick] [--seed N]

Goes on after a failure; the last lines say what failed, and the exit code is the number of failures (at most 100).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weft.kernels.checks import REAL, Case, compare, compare_mechanism, failures, relative_error  # noqa: E402
from weft.kernels.combiner_fixed import combiner_fixed  # noqa: E402

OPTIONS = {"block_size": 128, "pool": "max", "causal": True}
CASE = Case(1000, 128, D=64, B=2, H=4, dtype=torch.bfloat16)


def leaves(seed: int | None = None) -> tuple[list[Tensor], Tensor]:
    if seed is not None:
        torch.manual_seed(seed)
    q, k, v, dout, _ = CASE.tensors("cuda")
    return [x.requires_grad_() for x in (q, k, v)], dout


def run(fn: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    out = fn(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return combiner_fixed(q, k, v, None, **OPTIONS)


def same(mine: list[Tensor], theirs: list[Tensor], within: float = 0.0) -> str:
    for name, a, b in zip(("out", "dq", "dk", "dv"), mine, theirs, strict=True):
        if within == 0.0 and not torch.equal(a, b):
            return f"{name} differs by {relative_error(a, b.double()):.1e}"
        if within and not relative_error(a, b.double()) < within:
            return f"{name} differs by {relative_error(a, b.double()):.1e}, over {within:.0e}"
    return ""


def deterministic() -> str:
    inputs, dout = leaves()
    return same(run(attention, inputs, dout), run(attention, inputs, dout))


def compiled() -> str:
    inputs, dout = leaves()
    fn = torch.compile(lambda q, k, v: attention(q * 1, k, v) * 1, fullgraph=True)
    return same(run(fn, inputs, dout), run(attention, inputs, dout))


def checkpointed() -> str:
    inputs, dout = leaves()
    return same(
        run(lambda *x: checkpoint(attention, *x, use_reentrant=False), inputs, dout), run(attention, inputs, dout)
    )


def autocast() -> str:
    inputs, dout = leaves()
    wide = [x.detach().float().requires_grad_() for x in inputs]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(*wide)
    if out.dtype != torch.bfloat16:
        return f"under autocast the output is {out.dtype}"
    grads = torch.autograd.grad(out, wide, dout)
    return same([out, *(g.bfloat16() for g in grads)], run(attention, inputs, dout))


def cuda_graph() -> str:
    inputs, dout = leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(attention, inputs, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(attention, inputs, dout)
    fresh, fresh_dout = leaves()
    with torch.no_grad():
        for old, new in zip((*inputs, dout), (*fresh, fresh_dout), strict=True):
            old.copy_(new)
    graph.replay()
    return same(captured, run(attention, fresh, fresh_dout))


def batch_mates() -> str:
    inputs, dout = leaves()
    alone = [x.detach()[:1].clone().requires_grad_() for x in inputs]
    return same(run(attention, alone, dout[:1].contiguous()), [x[:1] for x in run(attention, inputs, dout)])


def opcheck() -> str:
    inputs, _ = leaves()
    torch.library.opcheck(torch.ops.weft.combiner_fixed.default, (*inputs, None, 128, "max", True, True))
    return ""


def expanded_gradient() -> str:
    """out.sum().backward() sends a gradient whose strides are all 0."""
    inputs, dout = leaves()
    return same(
        run(attention, inputs, torch.ones_like(dout)), run(attention, inputs, dout.new_ones(()).expand_as(dout))
    )


def mechanism() -> str:
    """The registered mechanism: both backends agree, "auto" takes the kernel, compiled too, and shows its weights."""
    import weft

    for case in (replace(CASE, pool="sum", mask="random"), replace(CASE, causal=False, mask="blocks")):
        wrong = failures(compare_mechanism("combiner-fixed", case, "cuda"), case.dtype)
        if wrong:
            return f"{case}: {wrong}"
    inputs, dout = leaves()
    made = {
        backend: weft.make_attention(
            "combiner-fixed", heads=CASE.H, head_dim=CASE.D, causal=True, block_size=128, backend=backend
        )
        for backend in ("auto", "triton")
    }
    fused = run(made["triton"], inputs, dout)
    text = same(run(made["auto"], inputs, dout), fused)
    text = text or same(run(torch.compile(made["auto"], fullgraph=True), inputs, dout), fused)
    q, k, v = inputs
    error = relative_error(made["triton"].weights(q, k, v) @ v, fused[0].double())
    return text or ("" if error < 1e-2 else f"weights @ v is {error:.1e} away")


MANNERS = (
    deterministic,
    compiled,
    checkpointed,
    autocast,
    cuda_graph,
    batch_mates,
    opcheck,
    expanded_gradient,
    mechanism,
)


def check_case(case: Case, seed: int) -> tuple[Case, bool, float, str]:
    """In a process of its own: most of the time goes into compiling, and there are many cores."""
    torch.manual_seed(seed)
    try:
        errors = compare(combiner_fixed, case, "cuda")
    except Exception as error:  # one broken case must not hide the others
        return case, False, float("nan"), f"{type(error).__name__}: {str(error)[:300]}"
    text = "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return case, not failures(errors, case.dtype), max(errors.values()), text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="bfloat16 cases only")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    failed = []
    began = time.time()
    worst: dict[str, float] = {}
    cases = [c for c in REAL if not args.quick or c.dtype == torch.bfloat16]
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        jobs = [pool.submit(check_case, case, args.seed + i) for i, case in enumerate(cases)]
        for job in as_completed(jobs):
            case, fine, error, text = job.result()
            kind = str(case.dtype)[6:]
            worst[kind] = max(worst.get(kind, 0.0), error)
            print(f"{'ok  ' if fine else 'FAIL'} {time.time() - began:5.0f}s {case}  {text}", flush=True)
            if not fine:
                failed.append(f"{case}: {text}")
    torch.manual_seed(args.seed)
    for check in MANNERS:
        try:
            text = check()
        except Exception:
            text = traceback.format_exc()[-600:]
        print(f"{'FAIL' if text else 'ok  '} {time.time() - began:5.0f}s {check.__name__}  {text}", flush=True)
        if text:
            failed.append(f"{check.__name__}: {text}")
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {args.seed}, {time.time() - began:.0f} s")
    print("worst relative error: " + ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items()))
    for line in failed:
        print("FAILED", line)
    print(f"{len(failed)} failed")
    return min(len(failed), 100)


if __name__ == "__main__":
    raise SystemExit(main())
