"""How a Combiner pools a span's keys and queries into one vector.

    name                            φ             pool
    max (default), mean, sum        identity      over the span, per channel
    relu-max                        ReLU          max
    deepsets-max, deepsets-mean     ReLU(x W)     max, mean; W (D, D) without bias, one for queries and one for keys

Pools are built in two strokes, so that they can be made of other pools: tokens are lifted to features, in which a
token that does not count is neutral (-inf for max, 0 for sums); features are reduced over a set, over everything
before a place, or over all but one place; `finish` turns the result into the vector, zeros for an empty set.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SUMMARIES = ("max", "mean", "sum", "relu-max", "deepsets-max", "deepsets-mean")


class Summary(nn.Module):
    def __init__(self, kind: str, head_dim: int):
        super().__init__()
        if kind not in SUMMARIES:
            raise ValueError(f"there is no summary {kind!r}; choose from {', '.join(SUMMARIES)}")
        self.kind, self.pool = kind, kind.rpartition("-")[2]
        learned = kind.startswith("deepsets")
        self.query = nn.Linear(head_dim, head_dim, bias=False) if learned else None
        self.key = nn.Linear(head_dim, head_dim, bias=False) if learned else None

    def lift_queries(self, q: Tensor, real: Tensor | None) -> Tensor:
        """Queries (.., L, D) to features; `real` (.., L) is False at tokens that do not count."""
        return self._lift(q, self.query, real)

    def lift_keys(self, k: Tensor, real: Tensor | None) -> Tensor:
        return self._lift(k, self.key, real)

    def _lift(self, x: Tensor, linear: nn.Linear | None, real: Tensor | None) -> Tensor:
        if linear is not None:
            x = F.linear(x, linear.weight.to(x.dtype))
        if self.kind not in ("max", "mean", "sum"):
            x = F.relu(x)
        if self.pool != "max":
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x if real is None else x.masked_fill(~real[..., None], self.neutral)

    @property
    def neutral(self) -> float:
        return float("-inf") if self.pool == "max" else 0.0

    def reduce(self, f: Tensor, dim: int) -> Tensor:
        return largest(f, dim).squeeze(dim) if self.pool == "max" else f.sum(dim)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """The features of two disjoint sets together."""
        return torch.maximum(a, b) if self.pool == "max" else a + b

    def up_to(self, f: Tensor) -> Tensor:
        """(.., T, D) -> (.., T, D): at each place the pool of all up to it."""
        return running_max(f) if self.pool == "max" else f.cumsum(-2)

    def before(self, f: Tensor) -> Tensor:
        """(.., T, D) -> (.., T, D): at each place the pool of all strictly earlier ones."""
        return self.up_to(F.pad(f[..., :-1, :], (0, 0, 1, 0), value=self.neutral))

    def others(self, f: Tensor) -> Tensor:
        """(.., T, D) -> (.., T, D): at each place the pool of all others."""
        return max_of_others(f) if self.pool == "max" else f.sum(-2, keepdim=True) - f

    def finish(self, f: Tensor, count: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Features to the pooled vector; `count` (..), how many tokens were pooled, may be left out for max and sum
        where no set is empty."""
        if self.pool == "mean":
            assert count is not None
            f = f / count.clamp(min=1)[..., None]
        elif self.pool == "max" and count is not None:
            f = f.masked_fill((count == 0)[..., None], 0)
        return f.to(dtype)


def largest(x: Tensor, dim: int) -> Tensor:
    """`x.amax(dim, keepdim=True)`; on a CPU without gradients by halves, several times as fast over rows.

    With gradients it is amax, which shares the gradient of a tie equally.
    """
    if x.device.type != "cpu" or _differentiable(x):
        return x.amax(dim, keepdim=True)
    while (n := x.shape[dim]) > 1:
        half = (n + 1) // 2  # where n is odd the halves share one, which no maximum minds
        x = torch.maximum(x.narrow(dim, 0, half), x.narrow(dim, n - half, half))
    return x


def running_max(x: Tensor) -> Tensor:
    """Cumulative maximum over the last dimension but one.

    torch.cummax walks along the dimension one element at a time, which costs several times as much on a CPU: there
    each place is made of the one before, whole; with gradients, and on a GPU, in about 2√T steps over T places.
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
    """At each place the maximum of all others over the last dimension but one, -inf where there are none.

    It is the largest, or at the largest the next; on a CPU without gradients, place by place in pairs.
    """
    if _written_in_place(x):
        return _max_of_others_to(torch.empty_like(x), x)
    top = x.amax(-2, keepdim=True)
    at_top = x == top
    second = x.masked_fill(at_top, float("-inf")).amax(-2, keepdim=True)
    second = torch.where(at_top.to(x.dtype).sum(-2, keepdim=True) > 1, top, second)
    return torch.where(at_top, second, top)


def _max_of_others_to(result: Tensor, x: Tensor) -> Tensor:
    """Each of a pair sees the other, and what the pair sees; the last of an odd number is alone."""
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
    """Whether results are best written where they belong."""
    return x.device.type == "cpu" and not _differentiable(x) and not torch.compiler.is_compiling()


def _differentiable(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
