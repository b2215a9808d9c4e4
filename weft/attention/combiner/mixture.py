"""Combiner-Mixture: several factorisations of one sequence.

Combiner, https://arxiv.org/abs/2107.05768, section 4.4

    average    out_i = (1/M) Σ_μ out_i(ω_μ)          one normaliser per factorisation, as in the paper
    joint      one softmax over the direct set and the spans of all, as in the authors' code; axial only

In the joint form, i attends once to its own row and column. Every other token is in two spans: the part of its column
above (or, if bidirectional, below) the row of i, and the part of its row left or right of the column of i.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.blocks import ceil_div
from ...core.contract import Attention, PositionBias
from ...core.decoding_state import Place
from ...core.dense import positions
from ...core.dispatch import Kernel, without_dropout
from ...core.joint import Part, Rows, mean_attention
from ...core.partitions import default_block
from ...core.registry import attention_info, attentions, make_attention, register
from ...core.segments import Segments
from ...kernels.line_pool.combiner import GridPlan, grid_attention
from ..axial import Grid, column_part, row_part
from .axial_horizontal import CombinerAxialHorizontal, row_spans
from .axial_vertical import CombinerAxialVertical, column_spans
from .base import combiner_naive
from .grid import KERNEL, GridCombiner

AXIAL = ("combiner-axial-vertical", "combiner-axial-horizontal")
MixtureState = list


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """The paper uses the average, the authors' code the joint form."""
    attns = list(attn.factorisations)
    if not isinstance(attns[0], JointAxial):
        return torch.stack([a.info.naive(a, q, k, v, mask) for a in attns]).mean(0)
    i, j = positions(q, k)
    m = attns[0].block_size or default_block(k.shape[2], attn.max_length)
    direct = (i // m == j // m) | (i % m == j % m)
    i, x = i[:, None], torch.arange(max(m, ceil_div(k.shape[2], m)), device=q.device)[:, None]  # a column, or a row
    row, column = (j // m == x) & (x != i // m), (j % m == x) & (x != i % m)
    left, right, above, below = j % m < i % m, j % m > i % m, j // m < i // m, j // m > i // m
    spans = torch.cat([row & left, row & right, column & above, column & below], 1)
    return combiner_naive(attns[0], q, k, v, mask, direct, spans)


class CombinerMixture(Attention):
    """`factorisations`: names or (name, {options}). `block_size` and `summary` are passed to all that support them.

    Factorisations on one grid run as one kernel. With dropout each has its own kernel, because each drops its own
    probabilities. `backend="triton"` requires a kernel for each; "auto" uses those available.
    """

    _plan: GridPlan | None = None

    def __init__(
        self,
        *,
        factorisations: Sequence[str | tuple[str, dict[str, Any]]] = AXIAL,
        mixture: str = "average",
        block_size: int | None = None,
        summary: str = "max",
        **contract: Any,
    ):
        super().__init__(**contract)
        if mixture not in ("average", "joint"):
            raise ValueError(f"mixture must be 'average' or 'joint', got {mixture!r}")
        entries = _entries(factorisations)
        if mixture == "joint":
            if sorted(name for name, _ in entries) != sorted(AXIAL) or any(options for _, options in entries):
                raise ValueError(
                    f"mixture='joint' supports only {AXIAL[0]} and {AXIAL[1]}, both without options; "
                    "for other factorisations use mixture='average'"
                )
            joint = JointAxial(block_size=block_size, summary=summary, **contract)
            joint.options = {"block_size": block_size, "summary": summary}
            self.factorisations = nn.ModuleList([joint])
            self.long_sums = joint.long_sums
            return
        shared = {"block_size": block_size, "summary": summary}
        made = []
        for name, options in entries:
            info = attention_info(name)
            given = {key: value for key, value in shared.items() if key in info.options}
            made.append(make_attention(name, **contract, **{**given, **options}))
            if getattr(made[-1], "needs_input", False):
                raise ValueError(f"{name} with {options} reads the layer's input, which a mixture does not support")
        self.factorisations = nn.ModuleList(made)
        self.long_sums = any(attn.long_sums for attn in made)
        self._plan = self._plan_together()

    def __setattr__(self, name: str, value: Any) -> None:
        """Members follow changes of the options that they share."""
        if name in ("mixture", "block_size", "summary"):
            raise AttributeError(f"{name} of a mixture cannot change: change its factorisations, or create a new one")
        super().__setattr__(name, value)
        if name in ("backend", "causal", "dropout", "max_length"):
            for attn in self._each():
                setattr(attn, name, value)
        if name == "causal":
            self._plan = self._plan_together()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        attns = self._each()
        if q.device.type != "cpu" or not self._on_one_grid():  # on a GPU, each factorisation chooses its kernel
            return mean([attn(q, k, v, mask) for attn in attns])
        dtype = q.dtype
        q, k, v = (attns[0]._widen(t) for t in (q, k, v))
        m = attns[0].block_size or default_block(k.shape[2], self.max_length)
        grid, queries = Grid.of(k, v, mask, m, self.causal), Rows(m).arrange(q)
        row, column = row_part(grid), column_part(grid)
        mixture = [[row, column, *attn.spans(grid, queries, row, column)] for attn in attns]
        return mean_attention(q, mixture, dropout=self.dropout_now, may_be_empty=mask is not None).to(dtype)

    def run_kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        plan = self._plan
        if plan is not None and self._on_one_grid() and not self.dropout_now:
            attn: Any = self.factorisations[0]
            m, pool = attn.block_size or default_block(q.shape[2], self.max_length), attn.summary.kind
            if plan.has_kernel(pool, q.shape[2], m):
                dtype = q.dtype
                q, k, v = (attn._widen(t) for t in (q, k, v))
                return grid_attention(q, k, v, mask, plan, pool=pool, width=m).to(dtype)
        return mean([attn(q, k, v, mask) for attn in self._each()])

    @torch.no_grad()
    def weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        segments: Tensor | Segments | None = None,
    ) -> Tensor:
        if segments is not None:
            return super().weights(q, k, v, mask, bias, segments)
        self.check(q, k, v, mask, bias)
        return mean([attn.weights(q, k, v, mask) for attn in self._each()])

    def _plan_together(self) -> GridPlan | None:
        """How one kernel computes all factorisations: only on one grid and with one kind of summary."""
        attns = self._each()
        if len(attns) < 2 or not self._on_one_grid() or len({attn.summary.kind for attn in attns}) > 1:
            return None
        parts: list[Any] = attns[0].direct_parts()
        spans: list[Any] = []
        members: list[int] = []
        for attn in attns:
            more, reading = attn.line_parts(len(spans))
            parts, spans = parts + reading, spans + more
            members.append(len(reading))
        return GridPlan.of(parts, spans, members)

    def _on_one_grid(self) -> bool:
        """Return whether all factorisations share their direct sets (own row and own column), so that these can be
        computed once."""
        attns = self._each()
        if not all(isinstance(attn, CombinerAxialVertical | CombinerAxialHorizontal) for attn in attns):
            return False
        return len({(attn.block_size, attn.long_sums) for attn in attns}) == 1

    def pattern_for(self, length: int) -> Hashable:
        return tuple(attn.pattern_for(length) for attn in self._each())

    def empty_state(self, k: Tensor, capacity: int) -> MixtureState:
        return [attn.empty_state(k, capacity) for attn in self._each()]

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> MixtureState:
        return [attn.state_after(q, k, v, mask, capacity) for attn in self._each()]

    def attend_next(self, q, k, v, state: MixtureState, mask, bias, at: Place):
        pairs = zip(self._each(), state, strict=True)
        results = [attn.attend_next(q, k, v, inner, mask, bias, at) for attn, inner in pairs]
        return mean([out for out, _ in results]), [inner for _, inner in results]

    def _each(self) -> list[Any]:
        return list(getattr(self, "factorisations", ()))

    def _settings(self) -> dict[str, Any]:
        members = {f"factorisations[{i}]": attn._settings() for i, attn in enumerate(self._each())}
        return {**super()._settings(), **members}


def _entries(factorisations: Any) -> list[tuple[str, dict[str, Any]]]:
    """Parse to a list of (name, options); raise an error for anything else."""
    known = [name for name in attentions() if name.startswith("combiner-") and name != "combiner-mixture"]
    wanted = f"factorisations must be a list of names or (name, {{options}}) from {', '.join(known)}"
    if isinstance(factorisations, str) or not isinstance(factorisations, Sequence) or not factorisations:
        raise ValueError(f"{wanted}; got {factorisations!r}")
    entries = []
    for entry in factorisations:
        name, options = (entry, {}) if isinstance(entry, str) else entry if _is_pair(entry) else (None, {})
        if name not in known:
            raise ValueError(f"{wanted}; got {entry!r}")
        entries.append((name, options))
    return entries


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[1], dict)


def mean(outs: list[Tensor]) -> Tensor:
    """Add one by one: stacking would copy every output."""
    if len(outs) == 1:
        return outs[0]
    return functools.reduce(torch.add, outs) / len(outs)


class JointAxial(GridCombiner):
    """Vertical and horizontal spans with one normaliser."""

    name, fused = "combiner-mixture", KERNEL
    columns_as_spans = columns_split = True
    rows_as_spans = ("before", "after")

    def spans(self, grid: Grid, q: Tensor, row: Part, column: Part) -> list[Part]:
        columns = self.column_spans if grid.n > 1 else ()
        return [
            *(column_spans(row.layout, grid, q, self.summary, which) for which in columns),
            *(row_spans(column.layout, grid, q, self.summary, which) for which in self.rows_as_spans),
        ]


def lacks(attn: CombinerMixture, *qkv: Tensor) -> str:
    for member in attn._each():
        reason = f"{member.name} has no kernel" if member.fused is None else member.fused.lacks(member, *qkv)
        if reason:
            return reason
    return ""


register(
    "combiner-mixture",
    CombinerMixture,
    naive=naive,
    paper="Ren et al. 2021, Combiner: Full Attention Transformer with Sparse Computation Cost (2107.05768)",
    cost="L*sqrt(L)",
    length_dependent="without max_length the default block size (combiner-routing: capacity) depends on the length; "
    "set block_size (capacity) to fix it; bidirectional spans of combiner-logsparse are counted from the end",
    kernel=Kernel(CombinerMixture.run_kernel, lacks, dropout=True, grouped=lambda attn: True, auto=without_dropout),
)
