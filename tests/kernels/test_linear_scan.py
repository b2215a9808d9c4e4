"""The kernels of causal linear and performer beyond test_agreement.py: many chunks, one token, large inputs, compiled
and checkpointed, and errors for unsupported calls.
"""

from __future__ import annotations

import pytest
import torch
from agree import TOLERANCE, relative_error
from torch.utils.checkpoint import checkpoint

import weft


def test_running_sums():
    torch.manual_seed(0)
    from weft.kernels.linear_scan.kernel import Plan, running

    n, F, D, chunk, L = 37, 3, 5, 4, 147
    document = [0] * 3 + [1] * 20 + [2] + [3] * 12 + [-1]  # packed: 16 chunks are summed at once
    table = torch.tensor([[0, 0, 0, number, 0, 0, 0, 0] for number in document], dtype=torch.int32)
    for scaled, packed in ((False, False), (True, False), (False, True)):
        p = Plan(1, 2, L, F, D, chunk, scaled, False, n if packed else 0)
        parts = torch.randn(1, 2, n, p.rows * (D + 1))
        top = torch.randn(1, 2, L).cumsum(-1).cummax(-1).values
        ends = top[..., [min((c + 1) * chunk, L) - 1 for c in range(n)]].double()
        for reverse in (False, True):
            sums, norms = torch.empty(1, 2, n, p.rows, D), torch.empty(1, 2, n, p.rows)
            running(p, parts, top, table, sums, norms, reverse=reverse)
            mine = torch.cat([sums.flatten(3), norms], -1)
            total, expected = torch.zeros_like(parts[:, :, 0]).double(), [None] * n
            last = torch.arange(p.rows * (D + 1)) // D == F
            last[p.rows * D :] = torch.arange(p.rows) == F
            before = -1
            for c in reversed(range(n)) if reverse else range(n):
                if packed and document[c] != before:
                    total, before = torch.zeros_like(total), document[c]
                expected[c] = total
                fade = (ends[..., max(c - 1, 0)] - ends[..., c]).exp()[..., None] if scaled else 1.0
                total = torch.where(last, total, total * fade) + parts[:, :, c]
            torch.testing.assert_close(mine.double(), torch.stack(expected, 2), rtol=1e-5, atol=1e-5)


def test_running_maximum():
    torch.manual_seed(0)
    from weft.attention.performer.forward import running_top

    largest = torch.randn(2, 147)
    largest[0, :40], largest[1, 60:] = float("-inf"), float("-inf")
    top = torch.empty_like(largest)
    running_top[(2,)](largest, top, 147, SPAN=16)
    expected = largest.cummax(-1).values
    assert torch.equal(top, expected.masked_fill(expected.isinf(), 0))


def test_gradient_of_the_running_maximum():
    torch.manual_seed(0)
    from weft.attention.performer.backward import top_gradients

    largest = torch.randn(2, 147).round()  # with ties
    largest[0, :40], largest[1, 60:] = float("-inf"), float("-inf")
    dtop, mine = torch.randn(2, 147), torch.empty(2, 147)
    top, index = largest.cummax(-1)
    top_gradients[(2,)](largest, top.masked_fill(top.isinf(), 0), dtop, mine, 147, SPAN=16)
    expected = torch.zeros(2, 147).scatter_add(-1, index, dtop)
    torch.testing.assert_close(mine, expected.masked_fill(largest.isinf(), 0), rtol=1e-5, atol=1e-5)


def test_one_token():
    torch.manual_seed(0)
    for name in ("linear", "performer"):
        attn = weft.make_attention(name, heads=1, head_dim=16, causal=True, backend="triton")
        q, k, v = (torch.randn(2, 1, 1, 16, requires_grad=True) for _ in range(3))
        mask = torch.tensor([[True], [False]])
        out = attn(q, k, v, mask)
        torch.testing.assert_close(out[0], v[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(out[1], torch.zeros(1, 1, 16))
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5
        assert torch.equal(dv[1], torch.zeros(1, 1, 16)) and (dv[0] - 1).abs().max() < 1e-5


def test_large_inputs():
    torch.manual_seed(0)
    for name, size in (("linear", 6.0), ("performer", 2.0)):
        attn = weft.make_attention(name, heads=1, head_dim=16, causal=True, backend="triton")
        inputs = [(size * torch.randn(1, 1, 140, 16)).half().requires_grad_() for _ in range(3)]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        out = attn(*inputs)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dout)
        attn.backend = "torch"
        expected = attn.double()(*exact)
        truth = (expected, *torch.autograd.grad(expected, exact, dout.double()))
        for mine, theirs in zip((out, *grads), truth, strict=True):
            error = relative_error(mine, theirs)
            assert error < 2 * TOLERANCE[torch.float16], (name, error)


def test_compiled_checkpointed_and_transposed():
    torch.manual_seed(0)
    for name in ("linear", "performer"):
        attn = weft.make_attention(name, heads=1, head_dim=16, causal=True, backend="triton")
        q, k, v = (torch.randn(1, 1, 40, 16, requires_grad=True) for _ in range(3))
        turned = torch.randn(1, 1, 16, 40).transpose(2, 3).requires_grad_()
        usual = torch.autograd.grad(attn(q, k, v).square().sum(), (q, k, v))
        compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
        for way in (compiled, lambda *x, attn=attn: checkpoint(attn, *x, use_reentrant=False)):
            for mine, theirs in zip(torch.autograd.grad(way(q, k, v).square().sum(), (q, k, v)), usual, strict=True):
                assert torch.equal(mine, theirs)
        (mine,) = torch.autograd.grad(attn(turned, k, v).square().sum(), turned)
        attn.backend = "torch"
        (theirs,) = torch.autograd.grad(attn(turned, k, v).square().sum(), turned)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_cross_attention_has_no_kernel(name):
    q, k, v = torch.randn(3, 1, 2, 300, 8).unbind()
    with pytest.raises(ValueError, match="same shape"):
        weft.make_attention(name, heads=2, head_dim=8, backend="triton")(q[:, :, :7], k, v)
    with pytest.raises(ValueError, match="backend must be"):
        weft.make_attention(name, heads=2, head_dim=8, backend="cuda")
    attn = weft.make_attention(name, heads=2, head_dim=8)
    assert attn.backend == "auto" and weft.attention_info(name).backends == ("torch", "triton")
    plain = weft.make_attention(name, heads=2, head_dim=8, backend="torch")
    plain.load_state_dict(attn.state_dict())
    assert torch.equal(attn(q[:, :, :7], k, v), plain(q[:, :, :7], k, v))
