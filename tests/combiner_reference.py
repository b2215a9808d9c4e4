"""Combiner by its definition: for every query a direct set and spans, one at a time, in O(L²).

The index sets are those of the paper, written out; nothing here knows about blocks of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

Sets = tuple[list[int], list[list[int]]]  # the direct set and the spans of one query


def fixed(i: int, L: int, m: int, causal: bool, own_span: bool = False) -> Sets:
    r, end = i // m, i + 1 if causal else L
    direct = [j for j in range(end) if j // m == r]
    spans = [
        [j for j in range(L) if j // m == s] for s in range(-(-L // m)) if (s < r if causal else s != r or own_span)
    ]
    return direct, spans


def levels(i: int, L: int, m: int, depth: int, causal: bool) -> Sets:
    """Own block; at each level the other nodes under the same parent; at the top all other nodes."""
    direct, spans = fixed(i, L, m, causal)[0], []
    for level in range(1, depth):
        size = m**level
        mine = i // size
        nodes = range(-(-L // size)) if level == depth - 1 else range(mine // m * m, mine // m * m + m)
        spans += [
            list(range(x * size, min(x * size + size, L)))
            for x in nodes
            if (x < mine if causal else x != mine) and x * size < L
        ]
    return direct, spans


def logsparse(i: int, L: int, causal: bool) -> Sets:
    def before(i: int) -> list[list[int]]:
        starts = [(b, (i >> (b + 1)) << (b + 1)) for b in range(i.bit_length()) if i >> b & 1]
        return [list(range(a, a + 2**b)) for b, a in starts]

    spans = before(i)
    if not causal:
        spans += [[L - 1 - j for j in span] for span in before(L - 1 - i)]
    return [i] + [j for span in spans if len(span) == 1 for j in span], [span for span in spans if len(span) > 1]


def axial_direct(i: int, L: int, m: int, causal: bool) -> list[int]:
    return [j for j in range(i + 1 if causal else L) if j // m == i // m or j % m == i % m]


def vertical(i: int, L: int, m: int, causal: bool) -> Sets:
    r, c = divmod(i, m)
    rows = [j for j in range(L) if (j // m < r if causal else j // m != r)]
    return axial_direct(i, L, m, causal), [[j for j in rows if j % m == x] for x in range(m) if x != c]


def horizontal(i: int, L: int, m: int, causal: bool, split: bool = False) -> Sets:
    r, c = divmod(i, m)
    rows = [s for s in range(-(-L // m)) if (s < r if causal else s != r)]
    if split:
        spans = [[j for j in range(L) if j // m == s and (j % m < c if left else j % m > c)]
                 for left in (True, False) for s in rows]  # fmt: skip
    else:
        spans = [[j for j in range(L) if j // m == s and j % m != c] for s in rows]
    return axial_direct(i, L, m, causal), spans


def joint(i: int, L: int, m: int, causal: bool) -> Sets:
    r, c = divmod(i, m)
    direct, rows = horizontal(i, L, m, causal, split=True)
    above = [[j for j in range(L) if j % m == x and j // m < r] for x in range(m) if x != c]
    below = [[j for j in range(L) if j % m == x and j // m > r] for x in range(m) if x != c]
    return direct, rows + above + ([] if causal else below)


def clusters(i: int, run: list[int], causal: bool) -> Sets:
    """`run` names the run of every token."""
    seen = range(i + 1 if causal else len(run))
    direct = [j for j in seen if run[j] == run[i]]
    return direct, [[j for j in seen if run[j] == g] for g in sorted(set(run)) if g != run[i]]


def pool(summary: str, x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is not None:
        x = x @ weight.T
    if summary not in ("max", "mean", "sum"):
        x = x.relu()
    kind = summary.split("-")[-1]
    return x.amax(0) if kind == "max" else x.mean(0) if kind == "mean" else x.sum(0)


def weights(
    q: Tensor, k: Tensor, sets: list[Sets], real: Tensor, summary: str = "max", pooling=None, tree=None
) -> Tensor:
    """The effective attention (L, L) of one head, q and k (L, D). `real` (L,) is False at masked tokens.

    `tree` gives the children of a span whose value is drawn from them (levels)."""
    L, D = q.shape
    wq, wk = (pooling.query.weight, pooling.key.weight) if summary.startswith("deepsets") else (None, None)
    rows = torch.zeros(L, L, dtype=q.dtype)
    memory: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def summarise(span: list[int]) -> tuple[Tensor, Tensor]:
        """Key of the span, and its distribution over all L tokens."""
        key = tuple(span)
        if key not in memory:
            inside = [j for j in span if real[j]]
            qbar = pool(summary, q[inside], wq)
            children = tree(span) if tree else None
            if children:
                parts = [summarise(child) for child in children if any(real[j] for j in child)]
                ks, ps = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
            else:
                ks, ps = k[inside], torch.eye(L, dtype=q.dtype)[inside]
            memory[key] = pool(summary, k[inside], wk), (ks @ qbar / D**0.5).softmax(0) @ ps
        return memory[key]

    for i, (direct, spans) in enumerate(sets):
        direct = [j for j in direct if real[j]]
        parts = [summarise(span) for span in spans if any(real[j] for j in span)]
        keys = torch.cat([k[direct], *(p[0][None] for p in parts)])
        if len(keys):
            p = (keys @ q[i] / D**0.5).softmax(0)
            over = torch.cat([torch.eye(L, dtype=q.dtype)[direct], *(p[1][None] for p in parts)])
            rows[i] = p @ over
    return rows


def row_major(q: Tensor, k: Tensor, m: int, causal: bool, real: Tensor, key_summary: str, own_span: bool) -> Tensor:
    """The effective attention of the row-major form with `none` or `wsum` keys, one head."""
    L, D = q.shape
    rows = torch.zeros(L, L, dtype=q.dtype)
    for i in range(L):
        if not real[i]:
            continue
        direct, spans = fixed(i, L, m, causal, own_span)
        direct = [j for j in direct if real[j]]
        keys, over = [*k[direct]], [*torch.eye(L, dtype=q.dtype)[direct]]
        for span in spans:
            cell = span[0] + i % m  # the token of the span's row in the query's column; none, or masked, counts as zero
            there = cell < L and bool(real[cell])
            inside = [j for j in span if real[j]]
            if not inside:
                continue
            p = (k[inside] @ (q[cell] if there else torch.zeros_like(q[0])) / D**0.5).softmax(0)
            keys.append(k[cell] if key_summary == "none" and there else p @ k[inside])
            over.append(p @ torch.eye(L, dtype=q.dtype)[inside])
        rows[i] = (torch.stack(keys) @ q[i] / D**0.5).softmax(0) @ torch.stack(over)
    return rows
