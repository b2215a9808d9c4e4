"""Compare compiled and eager mode: a ListOps classifier with every mechanism, compiled for training and then for
evaluation.

    python3 -m benchmarks.gpu_compiled [--only NAME ...] [--workers N] [--heads 48] [--batch 8] [--no-padding]

One layer, 2,000 tokens and a CLS token, padding at the end, bfloat16 autocast, no dropout. Prints the
error of logits (relative to the differences between examples) and of gradients (relative to their norm), next to the
error of bfloat16 against float32. A much larger error means that the model was miscompiled. The exit code is the number
of models that were miscompiled or could not be compiled. --no-padding disables Inductor's padding of strides, to test
whether it is the cause.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import weft
from weft.models.presets import lra

LENGTH = 2000
WORSE = 3.0  # times the error of bfloat16

Examples = tuple[Tensor, Tensor, Tensor]


def made_up(batch: int) -> Examples:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 15, (batch, LENGTH), generator=generator)
    lengths = torch.randint(500, LENGTH, (batch, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    return ids.cuda(), mask.cuda(), torch.randint(10, (batch,), generator=generator).cuda()


def gradients(model: nn.Module, run: nn.Module, examples: Examples, half: bool) -> Tensor:
    ids, mask, labels = examples
    model.train()
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        loss = F.cross_entropy(run(ids, mask).float(), labels)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def logits(model: nn.Module, run: nn.Module, examples: Examples, half: bool) -> Tensor:
    ids, mask, _ = examples
    model.eval()
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        out = run(ids, mask).float()
    return out - out.mean(0)


def off(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


def check(name: str, heads: int, batch: int, padding: bool) -> tuple[str, list[float], str]:
    """Errors of logits and gradients: compiled against eager, and bfloat16 against float32."""
    import torch._inductor.config as inductor

    torch.set_num_threads(1)
    inductor.comprehensive_padding = padding
    try:
        torch.manual_seed(0)
        model = lra("listops", name, 1, heads, attention_dropout=0.0, dropout=0.0).cuda()
        with torch.no_grad():  # as after some training, so that attention affects the output
            for p in model.parameters():
                if p.dim() > 1:
                    p.mul_(2.0)
        compiled, examples = torch.compile(model), made_up(batch)
        found = []
        for measure in (gradients, logits):
            mine = measure(model, compiled, examples, True)
            plain, exact = (measure(model, model, examples, half) for half in (True, False))
            found += [off(mine, plain), off(plain, exact)]
        return name, found, ""
    except Exception as error:
        return name, [], f"{type(error).__name__}: {str(error)[:300]}\n{traceback.format_exc()[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="these mechanisms only")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--heads", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--no-padding", action="store_true")
    args = parser.parse_args()
    names = args.only or weft.attentions()
    wrong = failed = 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':<28}{'gradients off':>14}{'bfloat16':>10}{'logits off':>12}{'bfloat16':>10}")
    with ProcessPoolExecutor(args.workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = [pool.submit(check, name, args.heads, args.batch, not args.no_padding) for name in names]
        for job in as_completed(jobs):
            name, found, problem = job.result()
            if problem:
                failed += 1
                print(f"{name:<28} {problem}", flush=True)
                continue
            bad = any(not x <= WORSE * own + 1e-3 for x, own in (found[:2], found[2:]))
            wrong += bad
            figures = f"{found[0]:>14.2e}{found[1]:>10.1e}{found[2]:>12.2e}{found[3]:>10.1e}"
            print(f"{name:<28}{figures}{'  WRONG' if bad else ''}", flush=True)
    print(f"of {len(names)}, {wrong} compiled wrongly, {failed} not at all")
    return min(wrong + failed, 100)


if __name__ == "__main__":
    raise SystemExit(main())
