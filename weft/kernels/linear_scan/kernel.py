"""Fused kernels for causal attention with feature maps: forward and backward as one PyTorch operator.

    out_i = Σ_{j ≤ i} p_ij v_j / (Σ_{j ≤ i} p_ij + ε)          p_ij = φ(q_i)·φ(k_j)                           plain
                                                               p_ij = φ(q_i)·φ(k_j) e^{m_j - G_i} + rest_i    scaled

over the unmasked keys; zeros if there are none. φ is elu(t) + 1 or ReLU(t) + 1e-3, computed in the kernel, or the
features are given. The scaled form is for exponential features: e^{m_j} was divided out of the features of key j, G is
non-decreasing, and m_j ≤ G_i for j ≤ i. There ε is 0, so out does not depend on the scale of a query's p, and the
gradient of G is rest · drest. m gets no gradient, because its effect on the features cancels.

The plain versions of `linear` and `performer` in `weft/attention` are the reference, and these kernels must equal them.
The scaled form with WIDE features or more has separate kernels, `wide.py`, with the inner loop over features.
Triton is imported only when a kernel runs, so this module can be imported anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.dispatch import DTYPES, LARGEST_HEAD
from ...core.precision import autocast
from ...core.tiles import (
    Block,
    Tiles,
    block_width,
    empty_rows,
    flags_or,
    for_operator,
    precision,
    rows_contiguous,
    strides,
    tile_table,
    tiles_for,
)
from ..grouped import empty_by_head, fits, sum_to_groups
from ..launch import launch
from ..operator import Operator

FEATURES = ("elu", "relu", "given")
LEAST_LENGTH = 256  # the shortest length measured; the kernels are faster from here on: docs/kernels.md

# Bytes are those of a multiplied element (float16 is multiplied as tf32: 4).
TILES = tile_table(
    {
        "states": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1)),
        "outputs": ((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (64, 32, 4, 1)),
        "query gradients": ((64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1)),
        "key gradients": ((16, 64, 4, 3), (32, 64, 8, 2), (16, 64, 4, 1), (32, 32, 4, 1)),
        # For many features (`wide.py`): rows and features per tile. Tuned for half precision and head_dim 64.
        "wide states": ((128, 128, 4, 1), (64, 64, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1)),
        "wide outputs": ((64, 32, 4, 3, 128), (64, 32, 8, 2), (32, 32, 4, 1), (32, 32, 8, 1)),
        "wide query gradients": ((64, 32, 4, 3), (64, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
        "wide key gradients": ((64, 32, 4, 3, 168), (64, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
        "wide value gradients": ((64, 32, 4, 3, 168), (64, 32, 8, 2), (32, 32, 4, 1), (32, 32, 8, 1)),
    }
)
WIDE = 129  # from this many features on, the scaled form uses the kernels of `wide.py`
COLUMNS, SCALED_COLUMNS = 128, 512  # of the states, per program of `running_sums` and of `scaled_running_sums`
CHUNK, LONG, LONG_CHUNK = 128, 16384, 256  # tokens per state, and past LONG tokens


def linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    features: str,
    epsilon: float = 0.0,
    key_scale: Tensor | None = None,
    top: Tensor | None = None,
    rest: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """q and k (B, H, L, F), v (B, H, L, D), mask (B, L) -> (B, H, L, D). The scaled form needs `key_scale` (m), `top`
    (G) and `rest`, all (B, H, L). k, v, `key_scale` and `top` may have fewer heads, each shared by a group of heads of
    q. Packed documents need the plain form and the `table` of their chunks of CHUNK tokens."""
    q, k, v = autocast(q, k, v)
    return operator(q, k, v, for_operator(mask), key_scale, top, rest, table, features, epsilon)


@dataclass(frozen=True)
class Plan:
    """Sizes of one call, shared by all its kernels."""

    B: int
    H: int
    L: int
    F: int
    D: int
    chunk: int
    scaled: bool
    half: bool  # bfloat16 operands
    packed: int = 0  # chunks of packed documents, of all rows together
    group: int = 1  # heads of q for each head of k and v

    @property
    def keys(self) -> Plan:
        """For kernels that run once for each head of k and v."""
        return replace(self, H=self.H // self.group, group=1)

    @property
    def n(self) -> int:
        return self.packed or ceil_div(self.L, self.chunk)

    @property
    def sequences(self) -> tuple[int, int]:
        """Of n chunks: one for each row and head, or one for each head if documents are packed."""
        return 1 if self.packed else self.B, self.H

    @property
    def heads(self) -> int:
        return self.sequences[0] * self.H

    def programs(self, rows: int) -> tuple[int]:
        """One for each tile of `rows` tokens."""
        tiles = self.packed * self.chunk // rows if self.packed else ceil_div(self.L, rows)
        return (tiles * self.heads,)

    @property
    def rows(self) -> int:
        """Rows of a state: one per feature, and one for the plain sums of v."""
        return self.F + int(self.scaled)

    @property
    def wide(self) -> bool:
        return is_wide(self.F, self.scaled)

    def tiles(self, kernel: str) -> Tiles:
        return tiles_for(TILES, kernel, self.D, 2 if self.half else 4)

    def state_tiles(self) -> Tiles:
        return self.tiles("wide states" if self.wide else "states")

    def shape(self, kernel: str) -> dict[str, int]:
        width = block_width(self.D)
        widest = 128 if self.half and width == 128 and kernel != "states" else 64
        return {"F": self.F, "D": self.D, "BLOCK_D": width, "BF": min(block_width(self.F), widest), "CHUNK": self.chunk}

    def wide_launch(self, kernel: str) -> tuple[tuple[int], dict[str, Any]]:
        """Programs and tiles of a kernel of `wide.py`."""
        t = self.tiles(f"wide {kernel}")
        cut = {"F": self.F, "D": self.D, "BLOCK_D": block_width(self.D), "BF": t.keys, "ROWS": t.queries}
        programs = (ceil_div(self.L, t.queries) * self.B * self.H,)
        return programs, {**cut, "CHUNK": self.chunk, "CARRIED": self.n > 1, **t.launch()}

    def state_programs(self, chunks: int) -> tuple[int]:
        return (chunks * ceil_div(self.F, self.shape("states")["BF"]) * self.heads,)


def plan(q: Tensor, v: Tensor, scaled: bool, table: Tensor | None) -> Plan:
    """Chunks depend only on the length, so the result of a sequence does not depend on the rest of the batch."""
    B, H, L, F = q.shape
    chunk = CHUNK if L <= LONG or is_wide(F, scaled) or table is not None else LONG_CHUNK
    packed = 0 if table is None else table.shape[0]
    return Plan(B, H, L, F, v.shape[3], chunk, scaled, q.dtype == torch.bfloat16, packed, H // v.shape[1])


def is_wide(F: int, scaled: bool) -> bool:
    return scaled and F >= WIDE


def running(p: Plan, parts: Tensor, top: Tensor, table: Tensor, sums: Tensor, norms: Tensor, *, reverse: bool) -> None:
    """Write the sums of the parts before each chunk, or after it."""
    from .forward import running_sums, scaled_running_sums

    heads, width = p.heads, parts.shape[-1]
    options = {"F": p.F, "D": p.D, "PART": width, "REVERSE": reverse}
    if p.scaled:
        launch(
            scaled_running_sums, (ceil_div(width, SCALED_COLUMNS) * heads,),
            parts, top, sums, norms, heads, p.L, p.n, COLUMNS=SCALED_COLUMNS, CHUNK=p.chunk, STAGES=4, **options,
            GROUP=p.group, num_warps=4,
        )  # fmt: skip
    else:
        launch(
            running_sums, (ceil_div(width, COLUMNS) * heads,),
            parts, table, sums, norms, heads, p.n, COLUMNS=COLUMNS, **options, PACKED=bool(p.packed),
            num_warps=4, num_stages=3,
        )  # fmt: skip


def _forward(q, k, v, mask, key_scale, top, rest, table, features, epsilon):
    from . import wide
    from .forward import chunk_states, outputs

    check(q, k, v, key_scale, top, rest, features)
    p = plan(q, v, rest is not None, table)
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    out, block = found = _outputs(q, v, p)
    weight, before, before_norm = _kept(p).split(block)
    has_mask = mask is not None
    flags = flags_or(mask, q)
    key_scale, top, rest = (numbers(x, weight) for x in (key_scale, top, rest))
    table = q if table is None else table
    common = {"HAS_MASK": has_mask, "BF16": p.half, "PRECISION": precision(q)}
    group = {"GROUP": p.group}
    options = common | {"FEATURES": features, "SCALED": p.scaled, "PACKED": bool(p.packed)}
    if p.n > 1:
        parts = _parts(p.keys, q)
        t = p.state_tiles()
        launch(
            chunk_states, p.keys.state_programs(p.n - 1),
            k, v, flags, table, key_scale, top, parts, *strides(k), *strides(v), p.keys.heads, p.keys.H, p.L, p.n,
            ROWS=t.keys, PART=parts.shape[-1], **p.shape("states"), **options, **t.launch(),
        )  # fmt: skip
        running(p.keys, parts, top, table, before, before_norm, reverse=False)
    given = (key_scale, top, rest, before, before_norm, out, weight)
    sizes = (*strides(q), *strides(k), *strides(v), *strides(out), p.heads, p.H, p.L, p.n, epsilon)
    if p.wide:
        programs, cut = p.wide_launch("outputs")
        launch(wide.outputs, programs, q, k, v, flags, *given, *sizes, **cut, **common, **group)
        return found
    t = p.tiles("outputs")
    launch(
        outputs, p.programs(t.queries),
        q, k, v, flags, table, *given, *sizes,
        BQ=t.queries, BK=t.keys, CARRIED=p.n > 1, **p.shape("outputs"), **options, **group, **t.launch(),
    )  # fmt: skip
    return found


def _outputs(q: Tensor, v: Tensor, p: Plan) -> tuple[Tensor, Tensor]:
    return empty_by_head(v, q), _kept(p).empty(v)


def _kept(p: Plan) -> Block:
    """1 / denominators, and the sums before each chunk: of φ(k) vᵀ, and of φ(k)."""
    return Block((((p.B, p.H, p.L), torch.float32), *_sums(p.keys)))


def _sums(p: Plan) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    n = p.n if p.n > 1 else 0
    sums = (*p.sequences, n, p.rows, p.D), torch.bfloat16 if p.half else torch.float32
    return sums, ((*p.sequences, n, p.rows), torch.float32)


def _backward(dout, q, k, v, mask, key_scale, top, rest, table, out, block, features, epsilon):
    from .backward import gradient_states, key_gradients, query_gradients

    p = plan(q, v, rest is not None, table)
    weight, before, before_norm = _kept(p).split(block)
    dout, q, k, v = (rows_contiguous(x) for x in (dout, q, k, v))
    dq, dk, dv, dtop, drest = found = _gradients(q, k, v, p)
    if p.group > 1:
        dk, dv, dtop = empty_by_head(k, q), empty_by_head(v, q), torch.empty_like(drest)
    has_mask = mask is not None
    flags = flags_or(mask, q)
    key_scale, top, rest = (numbers(x, weight) for x in (key_scale, top, rest))
    table = q if table is None else table
    options: dict[str, Any] = {"FEATURES": features, "SCALED": p.scaled, "BF16": p.half, "PRECISION": precision(q)}
    options |= {"PACKED": bool(p.packed), "GROUP": p.group}
    counts = p.heads, p.H, p.L, p.n
    delta, parts = torch.empty_like(weight), _parts(p, q)
    t = p.state_tiles()
    launch(
        gradient_states, p.state_programs(p.n),
        q, out, dout, table, top, rest, weight, delta, parts, *strides(q), *strides(out), *strides(dout), *counts,
        ROWS=t.queries, PART=parts.shape[-1], **p.shape("states"), **options, **t.launch(),
    )  # fmt: skip
    after, after_norm = (q.new_empty(shape, dtype=dtype) for shape, dtype in _sums(p))
    if p.n > 1:
        running(p, parts, top, table, after, after_norm, reverse=True)
    if p.wide:
        _wide_gradients(
            p, q, k, v, flags, key_scale, top, rest, before, before_norm, after, after_norm, dout, weight, delta,
            dq, dk, dv, dtop, drest, {"HAS_MASK": has_mask, "BF16": p.half, "PRECISION": precision(q),
            "GROUP": p.group},
        )  # fmt: skip
        return _summed(p, found, dk, dv, dtop)
    options |= {"HAS_MASK": has_mask, "CARRIED": p.n > 1}
    t = p.tiles("query gradients")
    launch(
        query_gradients, p.programs(t.queries),
        q, k, v, flags, table, key_scale, top, rest, before, before_norm, dout, weight, delta, dq, dtop, drest,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *counts,
        BQ=t.queries, BK=t.keys, **p.shape("query gradients"), **options, **t.launch(),
    )  # fmt: skip
    t = p.tiles("key gradients")
    launch(
        key_gradients, p.programs(t.keys),
        q, k, v, flags, table, key_scale, top, rest, after, after_norm, dout, weight, delta, dk, dv,
        *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk), *strides(dv), *counts,
        BQ=t.queries, BK=t.keys, **p.shape("key gradients"), **options, **t.launch(),
    )  # fmt: skip
    return _summed(p, found, dk, dv, dtop)


def _wide_gradients(
    p, q, k, v, flags, key_scale, top, rest, before, before_norm, after, after_norm, dout, weight, delta,
    dq, dk, dv, dtop, drest, common,
):  # fmt: skip
    from .wide import key_gradients, query_gradients, value_gradients

    counts = p.B * p.H, p.H, p.L, p.n
    programs, cut = p.wide_launch("query gradients")
    launch(
        query_gradients, programs,
        k, v, flags, key_scale, top, rest, before, before_norm, dout, weight, delta, dq, dtop, drest,
        *strides(k), *strides(v), *strides(dout), *strides(dq), *counts, **cut, **common,
    )  # fmt: skip
    programs, cut = p.wide_launch("key gradients")
    launch(
        key_gradients, programs,
        q, v, flags, key_scale, top, after, after_norm, dout, weight, delta, dk,
        *strides(q), *strides(v), *strides(dout), *strides(dk), *counts, **cut, **common,
    )  # fmt: skip
    programs, cut = p.wide_launch("value gradients")
    launch(
        value_gradients, programs,
        q, k, flags, key_scale, top, rest, after, dout, weight, dv,
        *strides(q), *strides(k), *strides(dout), *strides(dv), *counts, **cut, **common,
    )  # fmt: skip


def _gradients(q: Tensor, k: Tensor, v: Tensor, p: Plan) -> tuple[Tensor, ...]:
    """Of q, k, v, top and rest; the last two are empty in the plain form."""
    L = p.L if p.scaled else 0
    rows = (q.new_empty(p.B, heads, L, dtype=torch.float32) for heads in (k.shape[1], p.H))
    return *(empty_rows(x) for x in (q, k, v)), *rows


def _summed(p: Plan, found: tuple[Tensor, ...], dk: Tensor, dv: Tensor, dtop: Tensor) -> tuple[Tensor, ...]:
    """All gradients, with those of shared heads summed over each group."""
    sum_to_groups(dk, found[1])
    sum_to_groups(dv, found[2])
    if p.scaled:
        sum_to_groups(dtop[..., None], found[3][..., None])
    return found


def _parts(p: Plan, q: Tensor) -> Tensor:
    """Contribution of each chunk: the rows of its state, then their norms. A multiple of 16 elements, for alignment."""
    return q.new_empty(*p.sequences, p.n, ceil_div(p.rows * (p.D + 1), 16) * 16, dtype=torch.float32)


def numbers(x: Tensor | None, stand_in: Tensor) -> Tensor:
    """One number per token; a tensor that is never read if there is none."""
    return stand_in if x is None else x.float().contiguous()


operator = Operator(
    "linear_scan",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_scale, Tensor? top, Tensor? rest, Tensor? table,"
    " str features, float epsilon",
    _forward,
    lambda q, k, v, mask, key_scale, top, rest, table, *options: _outputs(q, v, plan(q, v, rest is not None, table)),
    _backward,
    outputs=2,
    gradients=(0, 1, 2, 5, 6),
    fake_backward=lambda q, k, v, mask, key_scale, top, rest, table, *options: _gradients(
        q, k, v, plan(q, v, rest is not None, table)
    ),
)


def check(
    q: Tensor, k: Tensor, v: Tensor, key_scale: Tensor | None, top: Tensor | None, rest: Tensor | None, features: str
) -> None:
    if q.dim() != 4 or v.dim() != 4 or not fits(k, q) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"the kernel needs q and k of the same shape (B, H, L, F) and v (B, H, L, D), got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}; use backend='torch'"
        )
    if features not in FEATURES:
        raise ValueError(f"features must be one of {', '.join(FEATURES)}, got {features!r}")
    if v.shape[3] > LARGEST_HEAD:
        raise ValueError(f"the kernel supports head_dim up to {LARGEST_HEAD}, got {v.shape[3]}; use backend='torch'")
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"the kernel needs q, k and v all float32, float16 or bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}; "
            "use backend='torch'"
        )
    if not (key_scale is None) == (top is None) == (rest is None):
        raise ValueError("the scaled form needs all of key_scale, top and rest; the plain form needs none of them")
    if rest is not None and features != "given":
        raise ValueError(f"the scaled form needs features='given', got {features!r}")
