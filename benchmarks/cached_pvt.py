"""Images per second of PVT, plain and cached: training steps and evaluation, bfloat16, one GPU.

python benchmarks/cached_pvt.py [--size tiny] [--batch 1024] [--compile]
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from weft.models import pvt


def rate(model: nn.Module, batch: int, train: bool, steps: int = 8) -> float:
    model.train(train)
    images = torch.randn(batch, 3, 224, 224, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(train):
            y = model(images)
        if train:
            y.float().square().mean().backward()
            model.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return batch * steps / (time.perf_counter() - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for cached in (False, True):
        net = pvt(given.size, cached=cached).cuda()
        model = torch.compile(net) if given.compile else net
        found = [rate(model, given.batch, train) for train in (True, False)]
        print(f"cached={cached}: {found[0]:.0f} train, {found[1]:.0f} test", flush=True)
