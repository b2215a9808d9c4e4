"""Pooling along lines by itself: ties, and what no mechanism shows."""

from __future__ import annotations

import torch
from agree import poisoned_memory


def test_matches_the_summaries_including_ties():
    torch.manual_seed(0)
    from weft.attention.combiner.base import line_summaries
    from weft.attention.combiner.summaries import Summary
    from weft.core.joint import Columns, Rows
    from weft.kernels.line_pool.kernel import line_pool_gradients, pool_lines

    B, L, D = 1, 11, 4
    mask = torch.rand(B, L) > 0.2
    lines = (("row", "up_to", "max", 6), ("column", "up_to", "mean", 3), ("column", "after", "max", 1))
    for axis, which, pool, m in lines:
        q, k = torch.randn(2, B, 1, L, D).round().unbind()  # whole numbers: most maxima are shared
        layout = Rows(m) if axis == "row" else Columns(m)
        real = layout.arrange(mask[:, None, :, None])[..., 0]
        exact = k.double().masked_fill(~mask[:, None, :, None], 0).requires_grad_()
        lines = layout.arrange(exact)
        expected, _, some = line_summaries(Summary(pool, D), lines, lines, lines, real, which)
        cells = lines.shape[2] * lines.shape[3]
        expected, some = layout.restore(expected, cells), layout.restore(some[..., None], cells)[:, 0, :, 0]
        dout = torch.randn(expected.shape)
        (gradient,) = torch.autograd.grad(expected, exact, dout.double())
        k.masked_fill_(~mask[:, None, :, None], float("nan"))
        with poisoned_memory():
            kbar, found, mine = (
                q.new_empty(B, 1, cells, D),
                torch.empty(B, cells, dtype=torch.bool),
                torch.empty_like(k),
            )
            pooled = torch.empty_like(kbar), kbar, found
            pool_lines(q, k, mask, *pooled, axis, which, pool, m)
            given = dout, dout, q, k, mask, *pooled, torch.empty_like(q), mine
            line_pool_gradients(*given, axis, which, pool, m, more=False)
        assert torch.equal(found, some), (axis, which, pool)
        torch.testing.assert_close(kbar.double(), expected, msg=f"{axis} {which} {pool}")
        torch.testing.assert_close(mine.double(), gradient, rtol=1e-5, atol=1e-5, msg=f"{axis} {which} {pool}")


def test_the_operator_passes_opcheck():
    q, k, v = (torch.randn(1, 3, 1, 4).transpose(1, 2).requires_grad_() for _ in range(3))
    mask = torch.tensor([[True, False, True]])
    parts, spans = (0, 0, 0, 1, 1, 1), (1, 1)  # own row up to the token; one member: spans of the columns above
    with poisoned_memory():  # bytes that nothing writes are the same in every run
        torch.library.opcheck(torch.ops.weft.grid_attention, (q, k, v, mask, None, parts, spans, (1,), "max", 2, 0))
