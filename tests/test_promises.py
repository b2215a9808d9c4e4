"""What weft promises of every mechanism, proven over the whole registry."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from promises import DEVICE, HEADS, LENGTHS, MAX_LENGTH, masks, noise, qkv, sweep

import weft

EXACT = {"atol": 1e-10, "rtol": 1e-8}


@sweep()
def test_attend_equals_naive(case):
    """The efficient version against the dense specification: outputs and all gradients, with masks and biases."""
    attn = case.make()
    for L in (1, 2, 5, 9, 17, 23):
        every = torch.stack([*(mask[0] for mask in masks(L).values()), torch.ones(L, dtype=torch.bool)])
        for mask in (None, every):
            compare_with_naive(case, attn.eval(), L, mask)
            compare_with_naive(case, attn.train(), L, mask, biased=True)  # those that sample do so


@sweep(more=True)
def test_attend_equals_naive_with_other_options(case):
    attn = case.make(head_dim=2)
    for L in (7, 18, 33):
        compare_with_naive(case, attn.eval(), L, None, B=1)
        compare_with_naive(case, attn.train(), L, masks(L)["inner"], B=2, biased=True)


@sweep(first_setting=True)
def test_attend_equals_naive_over_many_blocks(case):
    """Longer than any chunk or block that tokens are worked on in, and than two of them."""
    L = 150
    changes = {"max_length": L} if case.info.needs_max_length else {}
    attn = case.make(heads=1, head_dim=2, **changes).train()
    for mask in (None, torch.arange(L)[None] % 7 != 3):
        compare_with_naive(case, attn, L, mask, B=1)


def compare_with_naive(case, attn, L, mask, *, B=5, biased=False):
    bias = weft.RelativeBias(attn.heads, 6).double() if biased and case.info.bias else None
    q, k, v = qkv(L, B=B, H=attn.heads, D=attn.head_dim, grad=True)
    inputs = [q, k, v, *attn.parameters(), *(bias.parameters() if bias else ())]
    found = []
    for version in (attn, functools.partial(case.info.naive, attn)):
        torch.manual_seed(L)  # both draw the same sample
        out = version(q, k, v, mask, bias)
        if mask is not None:  # padded queries may give anything, but zeros where there is no token at all
            out = out.where((mask | ~mask.any(1, keepdim=True))[:, None, :, None], 0)
        found.append((out, *torch.autograd.grad(out, inputs, noise(*out.shape), materialize_grads=True)))
    for mine, specified in zip(*found, strict=True):
        torch.testing.assert_close(mine, specified, atol=1e-9, rtol=1e-9)


@sweep()
@pytest.mark.parametrize("L", LENGTHS)
def test_any_length_and_weights(case, L):
    """Linear in v, for every length: the effective matrix times v is the output, with and without masks."""
    attn = case.make()
    q, k, v = qkv(L)
    for mask in (None, *masks(L).values()):
        out = attn(q, k, v, mask)
        assert out.shape == q.shape and out.isfinite().all()
        torch.testing.assert_close(attn.weights(q, k, v, mask) @ v, out, **EXACT)


@sweep()
@pytest.mark.parametrize("L", (1, 5, 8, 13, 17))
def test_masked_tokens_do_not_exist(case, L):
    """Whatever stands in a masked token, NaN included, no real position's output or gradient can tell."""
    attn = case.make()
    for kind, mask in masks(L).items():
        q, k, v = qkv(L, grad=True)
        probe = noise(*q.shape, seed=1)
        real = mask[:, None, :, None]
        (attn(q, k, v, mask) * probe * real).sum().backward()
        q2, k2, v2 = (
            torch.where(real, x, torch.full_like(x, 1e4 if x is q else float("nan"))).detach().requires_grad_()
            for x in (q, k, v)
        )
        out = attn(q2, k2, v2, mask)
        (out.where(real, 0) * probe).sum().backward()
        torch.testing.assert_close(
            out.where(real, 0), attn(q, k, v, mask).where(real, 0), msg=lambda m, kind=kind: f"{kind}: {m}", **EXACT
        )
        for x, y in ((q, q2), (k, k2), (v, v2)):
            if x.grad is None:  # a mechanism that does not read it
                assert y.grad is None
                continue
            assert y.grad.isfinite().all(), kind
            assert (y.grad.where(~real, 0) == 0).all(), f"{kind}: a masked token got a gradient"
            torch.testing.assert_close(x.grad, y.grad, **EXACT)


@sweep()
@pytest.mark.parametrize("B", (1, 2))
def test_fully_masked_rows_are_zero(case, B):
    attn = case.make()
    q, k, v = qkv(7, B=B, grad=True)
    mask = torch.zeros(B, 7, dtype=torch.bool)
    out = attn(q, k, v, mask)
    assert (out == 0).all()
    out.sum().backward()
    for x in (*(x.grad for x in (q, k, v)), *(p.grad for p in attn.parameters())):
        assert x is None or (x == 0).all()


@sweep(causal=True)
@pytest.mark.parametrize("L", (2, 5, 9, 16, 17))
@pytest.mark.parametrize("train", (False, True))
def test_causal_means_causal(case, L, train):
    """The future has no gradient and, being changed out of recognition, changes not one bit of the past."""
    for i in {0, L // 2, L - 2}:
        attn = case.make(seed=i).train(train)
        q, k, v = qkv(L, grad=True)
        torch.manual_seed(5)  # stochastic mechanisms draw the same sample in both calls
        out = attn(q, k, v)
        out[:, :, : i + 1].square().sum().backward()
        for x in (q, k, v):
            if x.grad is not None:
                assert (x.grad[:, :, i + 1 :] == 0).all()
        changed = [
            torch.cat([x[:, :, : i + 1], 50 * torch.randn_like(x[:, :, i + 1 :])], 2).detach() for x in (q, k, v)
        ]
        attn = case.make(seed=i).train(train)
        torch.manual_seed(5)
        again = attn(*changed)
        torch.testing.assert_close(again[:, :, : i + 1], out[:, :, : i + 1], atol=1e-12, rtol=1e-12)


@sweep()
@pytest.mark.parametrize("L", (5, 9, 14))
def test_padding_on_the_right_changes_nothing(case, L):
    why = case.info.length_dependent  # defaults that follow the length are fixed here; spans from the end are not
    if why and "default" not in why and not (case.causal and "bidirectional" in why):
        pytest.skip(why)
    attn = case.make()
    q, k, v = qkv(L)
    longer = [torch.cat([x, torch.randn_like(x[:, :, :1]).expand(-1, -1, 6, -1)], 2) for x in (q, k, v)]
    mask = torch.arange(L + 6).expand(2, -1) < L
    torch.testing.assert_close(attn(*longer, mask)[:, :, :L], attn(q, k, v), **EXACT)


@sweep()
def test_gradients_agree_with_finite_differences(case):
    attn = case.make()
    q, k, v = qkv(9, B=1, grad=True)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 3] = False
    for m in (None, mask):
        assert torch.autograd.gradcheck(lambda *x, m=m: attn(*x, m), (q, k, v), fast_mode=True, atol=1e-6)
    for p in attn.parameters():
        out = attn(q, k, v, mask).square().sum()
        (grad,) = torch.autograd.grad(out, p, allow_unused=True)
        direction = torch.randn_like(p)
        with torch.no_grad():
            p.add_(direction, alpha=1e-6)
            up = attn(q, k, v, mask).square().sum()
            p.add_(direction, alpha=-2e-6)
            down = attn(q, k, v, mask).square().sum()
            p.add_(direction, alpha=1e-6)
        slope = 0.0 if grad is None else (grad * direction).sum().item()
        assert slope == pytest.approx((up - down).item() / 2e-6, rel=1e-4, abs=1e-6)


@sweep()
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_dtype_in_is_dtype_out(case, dtype):
    exact = case.make()
    q, k, v = (x.to(dtype) for x in qkv(13))
    mask = masks(13)["inner"]
    out = case.make().to(dtype)(q, k, v, mask)
    assert out.dtype == dtype and out.isfinite().all()
    reference = exact(q.double(), k.double(), v.double(), mask)
    if case.name in ("reformer", "routing", "combiner-routing"):  # hashing in half precision may choose another bucket
        return
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}[dtype]
    assert (out.double() - reference).norm() / reference.norm() < tolerance


@sweep()
def test_results_do_not_depend_on_batch_mates(case):
    attn = case.make()
    q, k, v = qkv(13, B=3)
    mask = torch.ones(3, 13, dtype=torch.bool)
    mask[0, 8:], mask[1, :5] = False, False
    together = attn(q, k, v, mask)
    for b in range(3):
        alone = attn(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask[b : b + 1])
        torch.testing.assert_close(alone[0], together[b], **EXACT)


@sweep(first_setting=True)
def test_can_be_pickled(case):
    attn, tensors = case.make(), qkv(9)
    assert torch.equal(pickle.loads(pickle.dumps(attn))(*tensors), attn(*tensors))


@sweep(first_setting=True)
def test_compiles_in_one_graph(case):
    """Forward and backward give what they give without the compiler: causal in training with a mask, bidirectional in
    evaluation under autocast."""
    cast = not case.causal
    dtype = torch.float32 if cast else torch.float64
    attn = case.make(dtype=dtype).train(not cast)
    inputs = [x.requires_grad_() for x in qkv(9, dtype=dtype)]
    mask = None if cast else masks(9)["inner"]
    torch._dynamo.reset()
    found = []
    for fn in (attn, torch.compile(attn, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=cast):
            out = fn(*inputs, mask)
        leaves = [*inputs, *attn.parameters()]
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
        found.append([out, *(g for g in grads if g is not None)])
    for compiled, eager in zip(*reversed(found), strict=True):
        assert (compiled - eager).norm() <= (1e-2 if cast else 1e-9) * eager.norm() + 1e-9


@sweep(cross=True, causal=False)
def test_cross_attention(case):
    attn = case.make()
    q, _, _ = qkv(5)
    _, k, v = qkv(11)
    mask = masks(11)["inner"]
    out = attn(q, k, v, mask)
    torch.testing.assert_close(attn.weights(q, k, v, mask) @ v, out, **EXACT)
    if case.name != "synthesizer":  # its logits belong to query positions
        torch.testing.assert_close(attn(q.flip(2), k, v, mask).flip(2), out, **EXACT)


@sweep(cross=False)
def test_self_attention_only_is_said(case):
    q, _, _ = qkv(5)
    _, k, v = qkv(11)
    with pytest.raises(ValueError, match="full"):
        case.make()(q, k, v)


@sweep(bias=True)
@pytest.mark.parametrize("L", (1, 9, 17))
def test_position_biases_are_exact(case, L):
    """Adding -|i - j| · slope to the logits of each legal pair, wherever the mechanism has put the pair."""
    attn = case.make()
    q, k, v = qkv(L)
    mask = masks(L)["inner"]
    bias = weft.RelativeBias(HEADS, 6).double()
    plain, biased = attn.weights(q, k, v, mask), attn.weights(q, k, v, mask, bias)
    i = torch.arange(L)
    shift = bias(i.view(1, 1, L, 1), i.view(1, 1, 1, L)).detach()
    if case.name == "reformer":  # several rounds, each normalised for itself: check one
        attn = case.make(hashes=1)
        plain, biased = attn.weights(q, k, v, mask), attn.weights(q, k, v, mask, bias)
    expected = plain * shift.exp()
    expected = expected / expected.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(biased, expected, atol=1e-9, rtol=1e-7)


@sweep(causal=True, steps=True)
@pytest.mark.parametrize("L", (1, 9, 17, 26))
def test_steps_equal_the_parallel_form(case, L):
    attn = case.make(max_length=MAX_LENGTH)
    q, k, v = qkv(L)
    for mask in (None, *masks(L).values()):
        expected = attn(q, k, v, mask)
        state = attn.start(2)
        for t in range(L):
            at = slice(t, t + 1)
            out, state = attn.step(q[:, :, at], k[:, :, at], v[:, :, at], state, None if mask is None else mask[:, t])
            seen = slice(None) if mask is None else mask[:, t]
            torch.testing.assert_close(out[seen], expected[:, :, at][seen], **EXACT)
        with torch.no_grad():  # the in-place buffers
            state = attn.start(2)
            for t in range(L):
                at = slice(t, t + 1)
                out, state = attn.step(
                    q[:, :, at], k[:, :, at], v[:, :, at], state, None if mask is None else mask[:, t]
                )
            seen = slice(None) if mask is None else mask[:, -1]
            torch.testing.assert_close(out[seen], expected[:, :, -1:][seen], **EXACT)


@sweep()
def test_dropout_is_for_training_only_and_keeps_the_mean(case):
    q, k, v = qkv(9, B=1)
    plain, dropping = case.make(), case.make(dropout=0.3)
    torch.testing.assert_close(dropping(q, k, v), plain(q, k, v), **EXACT)
    dropping.train()
    outs = torch.stack([dropping(q, k, v) for _ in range(2)])
    if case.name != "subsampled":
        assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("name", [n for n in weft.attentions() if weft.attention_info(n).subquadratic])
@pytest.mark.parametrize("causal", (False, True))
def test_subquadratic_never_builds_a_square(name, causal):
    """No tensor with L × L elements in forward or backward, by watching every operator's outputs."""
    info = weft.attention_info(name)
    if not (info.causal if causal else info.bidirectional):
        pytest.skip(f"{name} has no such direction")
    L = 2048 if name != "sinkhorn" else 1024
    attn = weft.make_attention(
        name, heads=1, head_dim=4, causal=causal, max_length=L if info.needs_max_length else None
    )
    q, k, v = qkv(L, B=1, H=1, D=4, dtype=torch.float32, grad=True)
    with Largest() as largest:
        attn(q, k, v, torch.ones(1, L, dtype=torch.bool)).sum().backward()
    assert largest.numel < L * L / 2, f"{largest.what} made {largest.numel:,} elements at L = {L}"


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor any operator made."""

    numel, what = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                size = t.untyped_storage().nbytes() // t.element_size()  # a broadcast view costs nothing
                if size > self.numel:
                    self.numel, self.what = size, str(func)
        return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", weft.attentions())
def test_single_precision_is_close_to_double_where_the_first_tokens_are_masked(name, causal):
    """Padding on the left leaves causal queries without keys; what these send back must not drown the others."""
    if causal and not weft.attention_info(name).causal:
        pytest.skip("not causal")
    L = 150  # longer than any chunk or block
    torch.manual_seed(0)
    tensors, mask = torch.randn(4, 2, 2, L, 16), torch.rand(2, L) > 0.2
    mask[0, :70], mask[1, :2] = False, False
    attn = weft.make_attention(name, heads=2, head_dim=16, causal=causal, max_length=L)
    found = []
    for dtype in (torch.float64, torch.float32):
        *inputs, grad = tensors.to(dtype).unbind()
        inputs = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(1)  # the same sample
        out = copy.deepcopy(attn).to(dtype)(*inputs, mask)
        grads = torch.autograd.grad(out, inputs, grad, allow_unused=True)
        found.append([out, *(g for g in grads if g is not None)])
    for double, single in zip(*found, strict=True):
        assert (double - single).norm() < 1e-5 * double.norm()


@sweep()
def test_autocast_rounds_and_does_no_more(case):
    """Under autocast the answer, and the gradients, are those of the rounded input, but for rounding (gradients more:
    a ReLU may fall to the other side)."""
    attn = case.make().float()
    exact = copy.deepcopy(attn).double()
    mask = torch.arange(40) < torch.tensor([[40], [31]])
    rounded = [x.bfloat16().float().requires_grad_() for x in qkv(40)]
    wide = [x.detach().double().requires_grad_() for x in rounded]
    torch.manual_seed(5)
    expected = exact(*wide, mask)
    torch.manual_seed(5)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = attn(*rounded, mask)
    assert (out.double() - expected).norm() < 2e-2 * expected.norm()
    probe = noise(*expected.shape, seed=1)
    grads = torch.autograd.grad(out, rounded, probe.to(out.dtype), allow_unused=True)
    truth = torch.autograd.grad(expected, wide, probe, allow_unused=True)
    for mine, theirs in zip(grads, truth, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (mine.double() - theirs).norm() < 0.1 * theirs.norm() + 1e-6


LONG_SUMS = {"linear": [{}], "performer": [{}, {"kernel": "relu"}], "combiner-fixed": [{"summary": "sum"}]}


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(("name", "options"), [(name, o) for name, each in LONG_SUMS.items() for o in each])
def test_long_sums_outgrow_no_autocast(name, options, causal, dtype):
    """Sums over a thousand tokens leave float16's range, and all but eight bits of bfloat16: they stay in float32. Step
    by step as well."""
    torch.manual_seed(0)
    attn = weft.make_attention(name, heads=2, head_dim=16, causal=causal, max_length=1024, **options)
    assert attn.long_sums
    q, k, v = (torch.randn(1, 2, 1000, 16).to(dtype) for _ in range(3))
    if name in ("linear", "performer"):
        k, v = k + 1, v + 250
    else:  # here it is the keys that are added up
        q, k, v = q / 1000, k + 1500, v + 250
    expected = attn.double()(q.double(), k.double(), v.double())
    attn.float()
    ulp = torch.finfo(dtype).eps * 256  # of the output: what differs between tokens is small beside 250
    with torch.autocast(DEVICE, dtype):
        out = attn(q, k, v)
        if causal:
            state, steps = attn.start(batch=1), []
            for i in range(40):
                step, state = attn.step(*(x[:, :, i : i + 1] for x in (q, k, v)), state)
                steps.append(step)
            torch.testing.assert_close(torch.cat(steps, 2), out[:, :, :40], atol=ulp, rtol=0)
    assert out.dtype == dtype and out.isfinite().all()
    assert (out.double() - expected).abs().max() <= 2 * ulp  # kernels also round their operands
