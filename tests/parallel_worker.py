"""One rank of tests/test_parallel.py: every case sharded over the ranks, against the same call on the whole sequence.

Rank 0 writes {case: largest difference, or the error}.
"""

from __future__ import annotations

import json
import random
import sys
import traceback

import torch
import torch.distributed as dist
from promises import HEAD_DIM, HEADS, Case, cases
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.parallel import SHARDED

LENGTHS = (9, 17, 64, 130)


def whole_and_parts(case: Case, mesh, length: int, masked: bool, biased: bool) -> float:
    """The largest difference of outputs and gradients, over all ranks; they see the same random numbers."""
    attn = case.make(max_length=200)
    torch.manual_seed(length)
    q, k, v, dout = (torch.randn(2, HEADS, length, HEAD_DIM, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(2, length) > 0.3 if masked else None
    bias = weft.ALiBi(HEADS).double() if biased else None
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    weights = list(attn.parameters())
    out = attn(*inputs, mask, bias)
    expected = [out.detach(), *torch.autograd.grad(out, [*inputs, *weights], dout, allow_unused=True)]
    sizes = random.Random(length).sample(range(1, length), mesh.size() - 1)
    bounds = [0, *sorted(sizes), length]  # uneven parts
    here = slice(*bounds[mesh.get_local_rank() :][:2])
    parts = [x[:, :, here].clone().requires_grad_() for x in (q, k, v)]
    with weft.parallel.context(mesh):
        out = attn(*parts, None if mask is None else mask[:, here], bias)
    found = [out.detach(), *torch.autograd.grad(out, [*parts, *weights], dout[:, :, here], allow_unused=True)]
    worst = 0.0
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a is None:
            continue
        if number < 4:
            a = a[:, :, here]
        else:
            dist.all_reduce(b)
        worst = max(worst, (a - b).abs().max().item())
    differences = torch.tensor([worst], dtype=torch.float64)
    dist.all_reduce(differences, dist.ReduceOp.MAX)
    return differences.item()


def supported(case: Case) -> bool:
    options = dict(case.options)
    return options.get("pattern") != "strided" and options.get("levels", 2) == 2


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    results: dict[str, float | str] = {}
    for case in cases():
        if case.name not in SHARDED or not supported(case):
            continue
        for length in LENGTHS:
            for masked in (False, True):
                biased = masked and case.info.bias
                name = f"{case} {length}{' masked' if masked else ''}{' biased' if biased else ''}"
                try:
                    results[name] = whole_and_parts(case, mesh, length, masked, biased)
                except Exception:
                    results[name] = traceback.format_exc()
                    if "--all" not in sys.argv:
                        raise
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
