"""Triton kernels: forward pass of attention along the lines of a grid.

On a grid with rows of m tokens, a line is a row (consecutive tokens) or a column (every m-th token). Cell p of line l
is token l·line_step + p·cell_step. A query attends to keys on its own line by a rule on the cells, query i and key j:

    up_to  j ≤ i        before  j < i        after  j > i        others  j ≠ i        all
    well_before  j < i - 1                   apart  |j - i| > 1

`attend` continues the running softmax that earlier parts stored in OLD_OUT and OLD_LSE, often OUT and LSE themselves
(MORE). So all parts share one normaliser, and each part is a separate call. LSE is -inf for a query without keys so
far. Logarithms are to base 2. Dropout numbers the keys of all sources: key t of source SOURCE has the number
SOURCE · keys + t. Program ids run over heads first, so concurrent programs read whole rows of (B, L, H, D) memory, also
along a column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..random import kept, row_words
from ..rows import load_rows, store_rows, valid_rows
from ..softmax import log_normaliser, mean, no_keys, weigh


@triton.jit
def sees(i, j, RULE: tl.constexpr):
    if RULE == "up_to":
        return j <= i
    elif RULE == "before":
        return j < i
    elif RULE == "well_before":
        return j < i - 1
    elif RULE == "after":
        return j > i
    elif RULE == "others":
        return j != i
    elif RULE == "apart":
        return (j < i - 1) | (j > i + 1)
    else:
        return (j >= 0) & (i >= 0)


@triton.jit
def place(BH, H, cells, TILE: tl.constexpr):
    """Head, batch entry, line and first cell of this program."""
    tiles = (cells + TILE - 1) // TILE
    bh, tile = tl.program_id(0) % BH, tl.program_id(0) // BH
    return bh.to(tl.int64), (bh // H).to(tl.int64), (bh % H).to(tl.int64), tile // tiles, tile % tiles * TILE


@triton.jit
def cells_before(limit, first, cells, cell_step):
    """Number of cells of the line starting at token `first` whose token is below `limit`."""
    return tl.minimum(cells, (limit - first + cell_step - 1) // cell_step)


@triton.jit
def attend(
    Q, K, V, FLAGS, KEY, OUT, LSE, OLD_OUT, OLD_LSE,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l, f_b,
    BH, H, queries, keys, cells, line_step, cell_step, threshold, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    RULE: tl.constexpr, HAS_FLAGS: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    DROPOUT: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    bh, b, h, line, q_first = place(BH, H, cells, BQ)
    first = line * line_step
    Q += b * q_b + h * q_h + first.to(tl.int64) * q_l
    K += b * k_b + h // GROUP * k_h + first.to(tl.int64) * k_l
    V += b * v_b + h // GROUP * v_h + first.to(tl.int64) * v_l
    OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
    LSE += bh * queries + first
    FLAGS += b * f_b + first
    end = cells_before(keys, first, cells, cell_step)
    d = tl.arange(0, BLOCK_D)
    i = q_first + tl.arange(0, BQ)
    live = i < cells_before(queries, first, cells, cell_step)
    word = row_words(KEY, bh, first + i * cell_step, DROPOUT)
    q = load_rows(Q, i, d, cell_step * q_l, live, D, BLOCK_D)
    if MORE:
        OLD_OUT += b * o_b + h * o_h + first.to(tl.int64) * o_l
        top = tl.load(OLD_LSE + bh * queries + first + i * cell_step, mask=live, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = load_rows(OLD_OUT, i, d, cell_step * o_l, live, D, BLOCK_D).to(tl.float32)
    else:
        acc, top, total = no_keys(BQ, BLOCK_D)
    LOOKS_BACK: tl.constexpr = RULE == "up_to" or RULE == "before" or RULE == "well_before"
    start = q_first // BK * BK if RULE == "after" else 0
    if LOOKS_BACK:
        end = tl.minimum(end, q_first + BQ)
    for begin in range(start, end, BK):
        j = begin + tl.arange(0, BK)
        real = valid_rows(FLAGS, j * cell_step, j < end, HAS_FLAGS)
        k = load_rows(K, j, d, cell_step * k_l, real, D, BLOCK_D)
        v = load_rows(V, j, d, cell_step * v_l, real, D, BLOCK_D)
        allowed = sees(i[:, None], j[None, :], RULE) & real[None, :]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, old, top, total = weigh(s, allowed, top, total, scale)
        p *= kept(word[:, None], (SOURCE * keys + first + j * cell_step)[None, :], threshold, DROPOUT)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    store_rows(OUT, mean(acc, total), i, d, cell_step * o_l, live, D, BLOCK_D)
    tl.store(LSE + i * cell_step, log_normaliser(top, total), mask=live)
