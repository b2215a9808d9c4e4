"""Triton kernel: attention of one token to the slots of its decoding state.

One program per head. It writes the token to a slot, attends to the slots of the state, and updates the summaries:

    "block"    local              slot i % m; attends to the slots up to its own
    "ring"     longformer         slot i for the first tokens, then a ring of m slots; attends to all filled slots
    "fixed"    combiner-fixed     "block", and the summary of every earlier block; a full block is summarised
    "axial"    combiner-axial     "block", and the spans of every earlier row for its column; a full row is summarised

The position is read from memory, so that one CUDA graph serves all positions. All heads of a row share the flags of its
slots: head 0 writes them, and no head reads the flag that is being written. The new token is never read back from
memory. Logarithms are to base 2: `scale` includes log2(e)/√D.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows import load_rows

NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def attend(query, top, total, acc, KEYS, VALUES, VALID, count, own, d, scale,
           D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Add the valid ones of the first `count` slots, except `own`, to a running softmax. Also return their number."""
    number = 0
    for first in range(0, count, SLOTS):
        s = first + tl.arange(0, SLOTS)
        filled = s < count
        k = load_rows(KEYS, s, d, D, filled, D, BLOCK_D).to(tl.float32)
        v = load_rows(VALUES, s, d, D, filled, D, BLOCK_D).to(tl.float32)
        live = filled & (s != own) & (tl.load(VALID + s, mask=filled, other=0) != 0)
        number += tl.sum(live.to(tl.int32), 0)
        logits = tl.where(live, tl.sum(query[None, :] * k, 1) * scale, NOTHING)
        new = tl.maximum(top, tl.max(logits, 0))
        base = tl.where(new == NOTHING, 0.0, new)
        p, kept = tl.exp2(logits - base), tl.exp2(top - base)
        acc = acc * kept + tl.sum(p[:, None] * v, 0)
        total = total * kept + tl.sum(p, 0)
        top = new
    return top, total, acc, number


@triton.jit
def begin(query, k, v, real, scale):
    """The running softmax over the token itself, if it is real."""
    top = tl.where(real, tl.sum(query * k, 0) * scale, NOTHING)
    return top, tl.where(real, 1.0, 0.0), tl.where(real, v, 0.0)


@triton.jit
def divided(acc, total):
    return acc / tl.where(total == 0, 1.0, total)


@triton.jit
def with_token(tile, row, own, token):
    """A tile of rows with the new token in its place."""
    return tl.where((row == own)[:, None], token[None, :], tile)


@triton.jit
def summarise_row(QUERIES, KEYS, VALUES, VALID, SPAN_KEYS, SPAN_VALUES, q, k, v, real, own, span, spans, m, d, scale,
                  D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Every query of a full row attends to the row: weighted sums of its keys and of its values. `own`: the last."""
    kind = KEYS.dtype.element_ty
    for first in range(0, m, TILE):
        row = first + tl.arange(0, TILE)
        queries = load_rows(QUERIES, row, d, D, row < own, D, BLOCK_D).to(tl.float32)
        queries = with_token(queries, row, own, q).to(kind)
        top = tl.full([TILE], NOTHING, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mixed_keys = tl.zeros([TILE, BLOCK_D], tl.float32)
        mixed_values = tl.zeros([TILE, BLOCK_D], tl.float32)
        for begins in range(0, m, TILE):
            s = begins + tl.arange(0, TILE)
            keys = load_rows(KEYS, s, d, D, s < own, D, BLOCK_D).to(tl.float32)
            values = load_rows(VALUES, s, d, D, s < own, D, BLOCK_D).to(tl.float32)
            keys, values = with_token(keys, s, own, k).to(kind), with_token(values, s, own, v).to(kind)
            live = ((s < own) & (tl.load(VALID + s, mask=s < own, other=0) != 0)) | (s == tl.where(real, own, -1))
            logits = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            logits = tl.where(live[None, :], logits, NOTHING)
            new = tl.maximum(top, tl.max(logits, 1))
            base = tl.where(new == NOTHING, 0.0, new)
            p, kept = tl.exp2(logits - base[:, None]), tl.exp2(top - base)
            total = total * kept + tl.sum(p, 1)
            mixed_keys = mixed_keys * kept[:, None] + tl.dot(p.to(kind), keys, input_precision=PRECISION)
            mixed_values = mixed_values * kept[:, None] + tl.dot(p.to(kind), values, input_precision=PRECISION)
            top = new
        at = (row.to(tl.int64) * spans + span)[:, None] * D + d[None, :]
        inside = (row < m)[:, None] & (d < D)[None, :]
        total = total[:, None]
        tl.store(SPAN_KEYS + at, divided(mixed_keys, total).to(kind), mask=inside)
        tl.store(SPAN_VALUES + at, divided(mixed_values, total).to(kind), mask=inside)


@triton.jit
def token_to_slots(
    Q, K, V, MASK, PLACE,
    KEYS, VALUES, VALID, FAR_KEYS, FAR_VALUES, FAR_VALID, QUERIES, KEY_FEATURES, COUNT, OUT,
    q_b, q_h, k_b, k_h, v_b, v_h,
    H, slots, far, m, ahead, scale,
    FORM: tl.constexpr, POOL: tl.constexpr, HAS_MASK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """KEYS, VALUES (B, H, slots, D), VALID (B, slots): tokens. FAR_...: summaries, (B, H, far, D) and (B, far); with
    "axial" (B, H, m, far, D). QUERIES: with "axial" (B, H, slots, D); with "fixed" the features (B, H, D) of the open
    block's queries, like KEY_FEATURES. COUNT (B): its real tokens. The first `ahead` tokens are before the ring."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    i = tl.load(PLACE).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    real = i >= 0
    if HAS_MASK:
        real = tl.load(MASK + b) != 0
    here = d < tl.where(real, D, 0)
    q = tl.load(Q + b * q_b + h * q_h + d, mask=here, other=0.0).to(tl.float32)
    k = tl.load(K + b * k_b + h * k_h + d, mask=here, other=0.0).to(tl.float32)
    v = tl.load(V + b * v_b + h * v_h + d, mask=here, other=0.0).to(tl.float32)
    KEYS += bh * slots * D
    VALUES += bh * slots * D
    VALID += b * slots
    if FORM == "ring":
        slot = tl.where(i < ahead, i, ahead + (i - ahead) % m)
        count = tl.minimum(i + 1, slots)
    else:
        slot = i % m
        count = slot + 1
    top, total, acc = begin(q, k, v, real, scale)
    top, total, acc, number = attend(
        q, top, total, acc, KEYS, VALUES, VALID, count, slot, d, scale, D, BLOCK_D, SLOTS
    )  # fmt: skip
    span = i // m
    if FORM == "fixed" or FORM == "axial":
        group = bh
        if FORM == "axial":
            group = bh * m + slot
        FAR_VALID += b * far
        top, total, acc, _ = attend(
            q, top, total, acc, FAR_KEYS + group * far * D, FAR_VALUES + group * far * D, FAR_VALID,
            tl.minimum(span, far), -1, d, scale, D, BLOCK_D, SLOTS,
        )  # fmt: skip
    tl.store(OUT + bh * D + d, divided(acc, total).to(OUT.dtype.element_ty), mask=d < D)

    within = slot < slots  # a CUDA graph may be replayed past the end of the state
    kind = KEYS.dtype.element_ty
    width = tl.where(within, D, 0)
    tl.store(KEYS + slot * D + d, k.to(kind), mask=d < width)
    tl.store(VALUES + slot * D + d, v.to(kind), mask=d < width)
    tl.store(VALID + slot, tl.where(real, 1, 0).to(tl.int8), mask=within & (h == 0))
    if FORM == "fixed":
        number += tl.where(real, 1, 0)  # of the open block
        tl.store(COUNT + b, number.to(tl.int64), mask=h == 0)
        pooled_query = pool(QUERIES + bh * D + d, q, real, slot, d < D, POOL)
        pooled_key = pool(KEY_FEATURES + bh * D + d, k, real, slot, d < D, POOL)
        if slot == m - 1:
            query = finish(pooled_query, number, POOL).to(kind).to(tl.float32)
            key = finish(pooled_key, number, POOL)
            top, total, acc = begin(query, k, v, real, scale)
            top, total, acc, _ = attend(
                query, top, total, acc, KEYS, VALUES, VALID, m, slot, d, scale, D, BLOCK_D, SLOTS
            )  # fmt: skip
            inside = d < tl.where(span < far, D, 0)
            tl.store(FAR_KEYS + (bh * far + span) * D + d, key.to(kind), mask=inside)
            tl.store(FAR_VALUES + (bh * far + span) * D + d, divided(acc, total).to(kind), mask=inside)
            tl.store(FAR_VALID + span, tl.where(number > 0, 1, 0).to(tl.int8), mask=(span < far) & (h == 0))
    if FORM == "axial":
        QUERIES += bh * slots * D
        tl.store(QUERIES + slot * D + d, q.to(kind), mask=d < width)
        if (slot == m - 1) & (span < far):
            summarise_row(
                QUERIES, KEYS, VALUES, VALID, FAR_KEYS + bh * m * far * D, FAR_VALUES + bh * m * far * D,
                q, k, v, real, slot, span, far, m, d, scale,
                D, BLOCK_D, TILE, PRECISION,
            )  # fmt: skip
            some = number + tl.where(real, 1, 0) > 0
            tl.store(FAR_VALID + span, tl.where(some, 1, 0).to(tl.int8), mask=h == 0)


@triton.jit
def pool(FEATURES, x, real, slot, inside, POOL: tl.constexpr):
    """Add a token to the features of the open block, or begin with it. See `Summary`."""
    old = tl.load(FEATURES, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # several warps read the same numbers: none may write before all have read
    if POOL == "max":
        x = tl.where(real, x, NOTHING)
        new = tl.where(slot == 0, x, tl.maximum(old, x))
    else:
        new = tl.where(slot == 0, x, old + x)
    tl.store(FEATURES, new.to(FEATURES.dtype.element_ty), mask=inside)
    return new


@triton.jit
def finish(features, number, POOL: tl.constexpr):
    """The pooled vector; zeros for an empty block."""
    if POOL == "mean":
        features = features / tl.maximum(number, 1)
    if POOL == "max":
        features = tl.where(number == 0, 0.0, features)
    return features
