"""The plateau at the start of ListOps, in small: how soon does a class token find one token of L?

    python -m experiments.plateau --attention linear --length 200 400 --gain 1 4

The label is the class (one of 4) of the first of L random tokens. One layer with two heads, the study's rate and
warm-up, clipping at 1. Prints the step at which the mean loss of the last 30 steps is below 0.7 (1.39 at the start),
and the spread of the class token's attention before: the standard deviation of its weights over their mean, 0 if
attention is uniform. `--gain` adds QK-norm and sets its gains at the start.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from weft import MultiheadAttention
from weft.models import TextClassifier

KINDS = 16  # of tokens, in 4 classes
RATE, WARMUP = 0.05, 1000


def leaves_at(attention: str, length: int, gain: float | None, seed: int, steps: int) -> tuple[int | None, float]:
    """The step at which the plateau is left, None if it is not, and the spread of the attention before."""
    torch.manual_seed(seed)
    model = TextClassifier(
        KINDS + 1, 4, max_length=length + 1, dim=64, heads=2, head_dim=32, layers=1, mlp_dim=128, dropout=0.0,
        attention=attention, qk_norm=gain is not None,
    )  # fmt: skip
    layer = next(module for module in model.modules() if isinstance(module, MultiheadAttention))
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None and gain is not None:
            nn.init.constant_(norm.weight, gain)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    losses: list[float] = []
    spread = 0.0
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(step / WARMUP**1.5, step**-0.5)
        tokens = torch.randint(KINDS, (16, length))
        if step == 1:
            spread = _spread(model, layer, tokens + 1)
        loss = F.cross_entropy(model(tokens + 1), tokens[:, 0] // 4)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses = [*losses[-29:], loss.item()]
        if len(losses) == 30 and sum(losses) / 30 < 0.7:
            return step, spread
    return None, spread


@torch.no_grad()
def _spread(model: nn.Module, layer: MultiheadAttention, tokens: torch.Tensor) -> float:
    inputs: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda layer, args: inputs.append(args[0]))
    model(tokens)
    hook.remove()
    weights = layer.attention.weights(*layer.project(inputs[0]))[:, :, 0]
    return (weights.std(-1) / weights.mean(-1)).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=["full", "linear"])
    parser.add_argument("--length", nargs="+", type=int, default=[200])
    parser.add_argument("--gain", nargs="+", type=float, default=[None], help="0: without QK-norm")
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=3000)
    given = parser.parse_args()
    for attention, length, gain, seed in itertools.product(given.attention, given.length, given.gain, given.seed):
        step, spread = leaves_at(attention, length, gain or None, seed, given.steps)
        what = f"{attention} length {length} gain {gain or 'none'} seed {seed}"
        print(f"{what}: spread {spread:.3f}, step {step}", flush=True)


if __name__ == "__main__":
    main()
