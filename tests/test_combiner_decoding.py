"""Decoding equals the parallel form, for every causal Combiner."""

import pytest
import torch

import weft

H, D = 2, 4

CASES = [
    *[("combiner-fixed", {"block_size": m}) for m in (1, 4, 5, 64)],
    *[("combiner-fixed", {"block_size": 3, "summary": s}) for s in ("mean", "sum", "relu-max", "deepsets-mean")],
    *[("combiner-fixed", {"block_size": m, "levels": n}) for m, n in ((2, 3), (3, 3), (2, 4))],
    ("combiner-fixed", {"block_size": 3, "levels": 3, "summary": "mean"}),
    ("combiner-fixed", {"max_length": 100}),
    ("combiner-logsparse", {}),
    ("combiner-logsparse", {"summary": "deepsets-max"}),
    *[("combiner-axial-vertical", {"block_size": m, "summary": s}) for m, s in ((1, "max"), (4, "max"), (5, "mean"))],
    *[("combiner-axial-horizontal", {"block_size": m, "summary": s}) for m, s in ((1, "max"), (4, "sum"))],
    ("combiner-axial-horizontal", {"block_size": 4, "split": True}),
    *[("combiner-axial", {"block_size": m, "key_summary": s}) for m, s in ((4, "wsum"), (5, "none"), (1, "wsum"))],
    ("combiner-routing", {"clusters": 3, "capacity": 4}),
    ("combiner-routing", {"clusters": 2, "capacity": 3, "summary": "mean"}),
    ("combiner-routing", {"max_length": 100}),
    ("combiner-mixture", {"block_size": 4}),
    ("combiner-mixture", {"block_size": 4, "mixture": "joint", "summary": "deepsets-mean"}),
    ("combiner-mixture", {"block_size": 3, "factorisations": ("combiner-fixed", "combiner-logsparse")}),
]


def inputs(L, B=3):
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(B, L, generator=g) < 0.8
    mask[0], mask[1, :5], mask[2, L // 2 :] = True, False, False  # whole; left padding; a shorter sequence
    return *torch.randn(3, B, H, L, D, generator=g).unbind(0), mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_steps_equal_the_whole(name, options, masked):
    torch.manual_seed(1)
    attn = weft.make_attention(name, heads=H, head_dim=D, causal=True, **options).eval()
    L = 37
    q, k, v, mask = inputs(L)
    with torch.no_grad():
        whole = attn(q, k, v, mask if masked else None)
        state = attn.start(3)
        for t in range(L):
            token = (x[:, :, t : t + 1] for x in (q, k, v))
            out, state = attn.step(*token, state, mask[:, t] if masked else None)
            real = mask[:, t] if masked else torch.ones(3, dtype=torch.bool)
            torch.testing.assert_close(out[real, :, 0], whole[real, :, t], atol=1e-5, rtol=0)


def test_row_major_projections():
    torch.manual_seed(1)
    layer = weft.MultiheadAttention(
        6, H, head_dim=D, attention="combiner-axial", key_summary="proj", input_dim=6, block_size=4, causal=True
    )
    x, mask = torch.randn(3, 21, 6), inputs(21)[3]
    whole, state = layer(x, mask), layer.start(3)
    for t in range(21):
        out, state = layer.step(x[:, t : t + 1], state, mask[:, t])
        torch.testing.assert_close(out[mask[:, t], 0], whole[mask[:, t], t], atol=1e-5, rtol=0)


def test_steps_can_be_differentiated():
    for name in ("combiner-fixed", "combiner-axial", "combiner-axial-vertical", "combiner-axial-horizontal"):
        attn = weft.make_attention(name, heads=H, head_dim=D, causal=True, block_size=3)
        q, k, v, _ = inputs(10)
        q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        want = torch.autograd.grad(attn(q, k, v).square().sum(), (q, k, v))
        outs, state = [], attn.start(3)
        for t in range(10):
            out, state = attn.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
            outs.append(out)
        got = torch.autograd.grad(torch.cat(outs, 2).square().sum(), (q, k, v))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_fixed_drops_summarised_tokens():
    """The state has m tokens and L / m summaries, instead of the L tokens of a full cache."""
    L, m = 256, 16
    q, k, v = (x[:1] for x in inputs(L)[:3])
    attn = weft.make_attention("combiner-fixed", heads=H, head_dim=D, causal=True, block_size=m)
    state, largest = attn.start(1), 0
    with torch.no_grad():
        for t in range(L):
            _, state = attn.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
            largest = max(largest, weft.state_size(state))
    keys_and_values = 2 * H * D
    assert largest <= (m + L // m + 2) * keys_and_values < L * keys_and_values / 7


def test_decoding_needs_max_length():
    for name, wanted in (
        ("combiner-fixed", "block_size"),
        ("combiner-axial", "block_size"),
        ("combiner-routing", "capacity"),
    ):
        with pytest.raises(ValueError, match=f"{wanted} or max_length"):
            weft.make_attention(name, heads=H, head_dim=D, causal=True).start(1)
    attn = weft.make_attention("combiner-fixed", heads=H, head_dim=D, causal=True, max_length=3)
    q, k, v, _ = inputs(4)
    state = attn.start(3)
    for t in range(3):
        _, state = attn.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
    with pytest.raises(ValueError, match="past max_length"):
        attn.step(*(x[:, :, 3:] for x in (q, k, v)), state)
