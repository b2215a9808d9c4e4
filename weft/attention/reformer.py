"""Reformer: shared queries and keys, and attention within hash buckets.

Kitaev et al., Reformer: The Efficient Transformer, https://arxiv.org/abs/2001.04451

    k_j = q_j / |q_j|                                   shared QK: the argument k is not used
    bucket(x) = argmax([x R; -x R])                     R random, (D, buckets/2): angular locality-sensitive hashing
    P_i = {j : bucket(q_j) = bucket(q_i), j in the same or the previous run of `chunk` members of that bucket}
    out_i = Σ_rounds w_i^round Σ_{j in P_i} softmax_j(q_i · k_j / √D) v_j,   w_i^round ∝ the round's normaliser

A token attends to itself only if it has no other key. Runs are counted within each bucket, not across the sorted
sequence, so a later token never moves an earlier one into another run: the causal form is exactly causal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.contract import Attention, PositionBias
from ..core.dense import dense_logits, dense_softmax, legal, positions, runs_of, same
from ..core.dispatch import Kernel
from ..core.dropout import dropout_key
from ..core.precision import precise, without_autocast
from ..core.registry import register
from ..core.runs import gather_runs, take_mask, take_tokens
from ..kernels.intervals.kernel import MOST_GROUPS, Orders, hashed_attention, interval_attention, nearest


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The paper chunks the sorted sequence; here chunks do not cross buckets. Rounds weighted by their normalisers
    equal one softmax in which j counts once per round in which i attends to it."""
    (i, j), times = positions(q, q), torch.zeros_like(q @ q.mT)
    logits = dense_logits(q, F.normalize(q, dim=-1), bias)
    for rotation in attn.rotations:
        turned = q @ rotation
        bucket, run = runs_of(torch.cat([turned, -turned], -1).argmax(-1), mask, attn.chunk)
        back = run[..., :, None] - run[..., None, :]
        met = same(bucket) & ((back == 0) | (back == 1)) & legal(attn, q, q, mask) & (logits > float("-inf"))
        others = met & (i != j)
        times = times + torch.where(others.any(-1, keepdim=True), others, met)
    return dense_softmax(logits + times.clamp(min=1).log(), times > 0) @ v


class ReformerAttention(Attention):
    rotations: Tensor
    reads_k = False

    def __init__(self, *, chunk: int = 64, buckets: int = 32, hashes: int = 2, **contract):
        super().__init__(**contract)
        if chunk < 1 or hashes < 1 or buckets < 2 or buckets % 2:
            raise ValueError(
                "chunk and hashes must be at least 1, and buckets even and at least 2, "
                f"got chunk={chunk}, hashes={hashes}, buckets={buckets}"
            )
        self.chunk, self.buckets, self.hashes = chunk, buckets, hashes
        # A seed draws other numbers in other dtypes.
        drawn = torch.randn(hashes, self.heads, self.head_dim, buckets // 2, dtype=torch.float32)
        self.register_buffer("rotations", drawn.to(torch.promote_types(torch.get_default_dtype(), torch.float32)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        rounds = [self._round(q, v, mask, bias, rotation) for rotation in self.rotations]
        outs, normalisers = (torch.stack(x) for x in zip(*rounds, strict=True))
        empty = normalisers.isneginf().all(0)  # tokens without keys; their outs are zero
        share = normalisers.masked_fill(empty, 0).softmax(0)
        return (share[..., None] * outs).sum(0).to(q.dtype)

    def _round(self, q, v, mask, bias, rotation) -> tuple[Tensor, Tensor]:
        """One round of hashing: outputs (B, H, L, D) and log-normalisers (B, H, L)."""
        L, D = q.shape[2:]
        with without_autocast(q):  # rounding would change buckets
            turned = precise(q.detach()) @ rotation.to(precise(q).dtype)
        bucket = torch.cat([turned, -turned], -1).argmax(-1)
        if mask is not None:  # padding gets its own bucket, so it moves no other token
            bucket = bucket.masked_fill(~mask[:, None], self.buckets)
        runs = gather_runs(bucket, self.buckets + 1, min(self.chunk, L))
        at, real = runs.token, take_mask(mask, runs.token, L)

        def with_previous(x: Tensor, empty) -> Tensor:  # (B, H, R, m, ...) -> (B, H, R, 2m, ...)
            before = torch.cat([torch.full_like(x[:, :, :1], empty), x[:, :, :-1]], 2)
            return torch.cat([before, x], 3)

        query = precise(take_tokens(q, at))
        key = with_previous(F.normalize(query, dim=-1), 0)
        value = with_previous(precise(take_tokens(v, at)), 0)
        j, real_key = with_previous(at, L), with_previous(real, False)
        same_bucket = with_previous(runs.group[..., None].expand_as(at), -1) == runs.group[..., None]
        i, j = at[..., None], j[..., None, :]
        allowed = (real_key & same_bucket)[..., None, :]
        if self.causal:
            allowed = allowed & (j <= i)
        values = None
        if bias is not None:  # a bias of -inf forbids a pair, so it does not count as another key
            values = bias(i.clamp(max=L - 1), j.clamp(max=L - 1))
            allowed = allowed & (values != float("-inf"))
        others = allowed & (j != i)
        allowed = torch.where(others.any(-1, keepdim=True), others, allowed)
        logits = query @ key.transpose(-1, -2) * D**-0.5
        if values is not None:
            logits = logits + values.to(logits.dtype).masked_fill(~allowed, 0)
        alive = allowed.any(-1, keepdim=True)
        logits = logits.masked_fill(~(allowed | ~alive), float("-inf"))
        normaliser = logits.logsumexp(-1, keepdim=True)
        p = F.dropout((logits - normaliser).exp(), self.dropout, self.training)
        out = (p @ value).masked_fill(~alive, 0)
        normaliser = normaliser.masked_fill(~alive, float("-inf"))
        slot = runs.slot[..., None]
        out = out.flatten(2, 3).gather(2, slot.expand(*slot.shape[:3], out.shape[-1]))
        return out, normaliser.flatten(2).gather(2, runs.slot)


def run_kernel(attn: ReformerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: None) -> Tensor:
    key, threshold = dropout_key(attn, q)
    if attn.buckets <= MOST_GROUPS:
        return hashed_attention(
            q, v, attn.rotations, mask, buckets=attn.buckets, size=attn.chunk, causal=attn.causal, key=key,
            threshold=threshold,
        )  # fmt: skip
    bucket, inv = nearest(q, attn.rotations.mT, mask, groups=attn.buckets, signed=True)
    orders = Orders.of(bucket, attn.buckets)
    return interval_attention(
        q, None, v, orders, size=attn.chunk, causal=attn.causal, back=True, others=True, inv=inv, key=key,
        threshold=threshold,
    )  # fmt: skip


register(
    "reformer",
    ReformerAttention,
    naive=naive,
    paper="Kitaev et al. 2020, Reformer (2001.04451)",
    cost="L*chunk",
    bias=True,
    kernel=Kernel(run_kernel, dropout=True, grouped=lambda attn: True),
)
