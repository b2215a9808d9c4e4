"""Summaries: pool the keys or queries of a span into one vector.

    name                            φ             pool
    max (default), mean, sum        identity      over the span, per channel
    relu-max                        ReLU          max
    deepsets-max, deepsets-mean     ReLU(x W)     max, mean; W (D, D) without bias, one for queries and one for keys

Pooling has three steps, so that pools can be joined. `lift` maps tokens to features; masked tokens are neutral (-inf
for max, 0 for sums). Features are then reduced over a set, over all earlier positions, or over all but one position.
`finish` turns the result into the pooled vector, zeros for an empty set.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.linear import through

SUMMARIES = ("max", "mean", "sum", "relu-max", "deepsets-max", "deepsets-mean")


class Summary(nn.Module):
    def __init__(self, kind: str, head_dim: int):
        super().__init__()
        if kind not in SUMMARIES:
            raise ValueError(f"unknown summary {kind!r}; choose from {', '.join(SUMMARIES)}")
        self.kind, self.pool = kind, kind.rpartition("-")[2]
        learned = kind.startswith("deepsets")
        self.query = nn.Linear(head_dim, head_dim, bias=False) if learned else None
        self.key = nn.Linear(head_dim, head_dim, bias=False) if learned else None

    def lift_queries(self, q: Tensor, real: Tensor | None) -> Tensor:
        """Map queries (.., L, D) to features; `real` (.., L) is False for masked tokens."""
        return self._lift(q, self.query, real)

    def lift_keys(self, k: Tensor, real: Tensor | None) -> Tensor:
        return self._lift(k, self.key, real)

    def _lift(self, x: Tensor, layer: nn.Linear | None, real: Tensor | None) -> Tensor:
        if layer is not None:
            x = through(layer, x)
        if self.kind not in ("max", "mean", "sum"):
            x = F.relu(x)
        x = x.to(self.dtype(x.dtype))
        return x if real is None else x.masked_fill(~real[..., None], self.neutral)

    @property
    def neutral(self) -> float:
        return float("-inf") if self.pool == "max" else 0.0

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the features of tokens in `dtype`."""
        return dtype if self.pool == "max" else torch.promote_types(dtype, torch.float32)

    def reduce(self, f: Tensor, dim: int) -> Tensor:
        return largest(f, dim).squeeze(dim) if self.pool == "max" else f.sum(dim)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """Features of the union of two disjoint sets."""
        return torch.maximum(a, b) if self.pool == "max" else a + b

    def up_to(self, f: Tensor) -> Tensor:
        """(.., T, D) -> (.., T, D): at each position, the pool of all positions up to it."""
        return running_max(f) if self.pool == "max" else f.cumsum(-2)

    def before(self, f: Tensor) -> Tensor:
        """(.., T, D) -> (.., T, D): at each position, the pool of all earlier positions."""
        return self.up_to(F.pad(f[..., :-1, :], (0, 0, 1, 0), value=self.neutral))

    def others(self, f: Tensor) -> Tensor:
        """(.., T, D) -> (.., T, D): at each position, the pool of all other positions."""
        return max_of_others(f) if self.pool == "max" else f.sum(-2, keepdim=True) - f

    def finish(self, f: Tensor, count: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Turn features into the pooled vector. `count` (..) is the number of pooled tokens; for max and sum it may be
        None if no set is empty."""
        if self.pool == "mean":
            assert count is not None
            f = f / count.clamp(min=1)[..., None]
        elif self.pool == "max" and count is not None:
            f = f.masked_fill((count == 0)[..., None], 0)
        return f.to(dtype)


def largest(x: Tensor, dim: int) -> Tensor:
    """`x.amax(dim, keepdim=True)`. On a CPU without gradients it works by halving, several times faster over rows.

    With gradients it uses amax, which splits the gradient of a tie equally.
    """
    if x.device.type != "cpu" or _differentiable(x) or x.shape[dim] == 1:  # amax of one row is a copy, as states need
        return x.amax(dim, keepdim=True)
    while (n := x.shape[dim]) > 1:
        half = (n + 1) // 2  # odd n: the halves overlap by one, which is harmless for max
        x = torch.maximum(x.narrow(dim, 0, half), x.narrow(dim, n - half, half))
    return x


def running_max(x: Tensor) -> Tensor:
    """Cumulative maximum over the last dimension but one.

    torch.cummax processes one element at a time, which is several times slower on a CPU. There, without gradients, each
    position is computed from the previous one as a whole row. Otherwise it takes about 2√T steps for T positions.
    """
    T = x.shape[-2]
    if _written_in_place(x):
        result = torch.empty_like(x)
        places, found = x.unbind(-2), result.unbind(-2)
        found[0].copy_(places[0])
        for t in range(1, T):
            torch.maximum(found[t - 1], places[t], out=found[t])
        return result
    size = max(1, round(T**0.5))
    short = -T % size
    x = torch.unflatten(F.pad(x, (0, 0, 0, short), value=float("-inf")), -2, (-1, size))
    inner = list(x.unbind(-2))
    for t in range(1, size):
        inner[t] = torch.maximum(inner[t], inner[t - 1])
    carried = list(inner[-1].unbind(-2))
    for g in range(1, len(carried)):
        carried[g] = torch.maximum(carried[g], carried[g - 1])
    start = torch.full_like(carried[0], float("-inf"))
    earlier = torch.stack([start, *carried[:-1]], -2)[..., None, :]
    return torch.maximum(torch.stack(inner, -2), earlier).flatten(-3, -2)[..., :T, :]


def max_of_others(x: Tensor) -> Tensor:
    """At each position, the maximum of all other positions along dimension -2; -inf if there are none.

    This is the largest value, or the second largest at the position of the largest. On a CPU without gradients it is
    computed by recursion over pairs.
    """
    if _written_in_place(x):
        return _max_of_others_to(torch.empty_like(x), x)
    top = x.amax(-2, keepdim=True)
    at_top = x == top
    second = x.masked_fill(at_top, float("-inf")).amax(-2, keepdim=True)
    second = torch.where(at_top.to(x.dtype).sum(-2, keepdim=True) > 1, top, second)
    return torch.where(at_top, second, top)


def _max_of_others_to(result: Tensor, x: Tensor) -> Tensor:
    """For each element: the other of its pair and the maximum of the other pairs. For odd T the last has no pair."""
    T, half = x.shape[-2], x.shape[-2] // 2
    if T == 1:
        return result.fill_(float("-inf"))
    first, second, alone = x.split([half, half, T % 2], -2)
    pairs = torch.maximum(first, second)
    if T % 2:
        pairs = torch.cat([pairs, alone], -2)
    seen = _max_of_others_to(torch.empty_like(pairs), pairs)
    torch.maximum(seen[..., :half, :], second, out=result[..., :half, :])
    torch.maximum(seen[..., :half, :], first, out=result[..., half : 2 * half, :])
    result[..., 2 * half :, :] = seen[..., half:, :]
    return result


def _written_in_place(x: Tensor) -> bool:
    """Return whether to write results in place, which is fastest on a CPU without gradients. torch.func cannot."""
    plain = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    return x.device.type == "cpu" and not _differentiable(x) and plain


def _differentiable(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
