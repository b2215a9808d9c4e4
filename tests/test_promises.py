"""The guarantees of weft, tested for every registered mechanism."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
from promises import DEVICE, HEAD_DIM, HEADS, MAX_LENGTH, cases, masks, noise, qkv, sweep

import weft

EXACT = {"atol": 1e-10, "rtol": 1e-8}
RUNS = "combiner-routing", "reformer", "routing"  # tokens in runs of one group


@sweep()
def test_attend_equals_naive(case):
    """The efficient version against the dense specification: outputs and all gradients, with masks and biases."""
    attn = case.make()
    for L in (1, 2, 5, 9, 17, 23):
        every = torch.stack([*(mask[0] for mask in masks(L).values()), torch.ones(L, dtype=torch.bool)])
        for mask in (None, every):
            compare_with_naive(case, attn.eval(), L, mask)
            compare_with_naive(case, attn.train(), L, mask, biased=True)  # with sampling, if the mechanism samples


@sweep(more=True)
def test_attend_equals_naive_with_other_options(case):
    attn = case.make(head_dim=2)
    for L in (7, 18, 33):
        compare_with_naive(case, attn.eval(), L, None, B=1)
        compare_with_naive(case, attn.train(), L, masks(L)["inner"], B=2, biased=True)


@sweep(first_setting=True)
def test_attend_equals_naive_over_many_blocks(case):
    """Longer than two chunks or blocks of any mechanism, with heads of width 1."""
    L = 150
    changes = {"max_length": L} if case.info.needs_max_length else {}
    attn = case.make(heads=1, head_dim=1, **changes).train()
    for mask in (None, torch.arange(L)[None] % 7 != 3):
        compare_with_naive(case, attn, L, mask, B=1)


@pytest.mark.parametrize("case", [c for c in cases() if c.name in RUNS], ids=str)
def test_shapes_that_do_not_depend_on_data(case, monkeypatch):
    """On a GPU and in compiled code, runs of tokens have room for any distribution over their groups."""
    for module in (weft.core.runs, weft.attention.combiner.routing):
        monkeypatch.setattr(module, "fixed_shapes", lambda x: True)
    attn = case.make().eval()
    for L in (1, 9, 23):
        every = torch.stack([*(mask[0] for mask in masks(L).values()), torch.ones(L, dtype=torch.bool)])
        for mask in (None, every):
            compare_with_naive(case, attn, L, mask)


def compare_with_naive(case, attn, L, mask, *, B=5, biased=False):
    bias = weft.RelativeBias(attn.heads, 6).double() if biased and case.info.bias else None
    q, k, v = qkv(L, B=B, H=attn.heads, D=attn.head_dim, grad=True)
    inputs = [q, k, v, *attn.parameters(), *(bias.parameters() if bias else ())]
    found = []
    for version in (attn, functools.partial(case.info.naive, attn)):
        torch.manual_seed(L)  # both draw the same sample
        out = version(q, k, v, mask, bias)
        if mask is not None:  # outputs of padded queries are unspecified, but zero in rows without tokens
            out = out.where((mask | ~mask.any(1, keepdim=True))[:, None, :, None], 0)
        found.append((out, *torch.autograd.grad(out, inputs, noise(*out.shape), materialize_grads=True)))
    if not attn.training:
        with torch.no_grad():  # may run other code
            real = slice(None) if mask is None else mask
            again = attn(q, k, v, mask, bias)
        torch.testing.assert_close(again.transpose(1, 2)[real], found[0][0].transpose(1, 2)[real], atol=1e-9, rtol=1e-9)
    for mine, specified in zip(*found, strict=True):
        torch.testing.assert_close(mine, specified, atol=1e-9, rtol=1e-9)


@sweep()
@pytest.mark.parametrize("L", (1, 4, 8, 13, 23))
def test_any_length_and_weights(case, L):
    """Linear in v, for every length: the effective matrix times v is the output, with and without masks."""
    attn = case.make()
    q, k, v = qkv(L)
    for mask in (None, *masks(L).values()):
        out = attn(q, k, v, mask)
        assert out.shape == q.shape and out.isfinite().all()
        torch.testing.assert_close(attn.weights(q, k, v, mask) @ v, out, **EXACT)


@sweep()
@pytest.mark.parametrize("L", (1, 17))
@pytest.mark.parametrize("bad", (float("nan"), float("inf")), ids=str)
def test_masked_tokens_have_no_effect(case, bad, L):
    """NaN and infinity in masked q, k and v change no output and no gradient of real tokens. All outputs stay finite,
    so that a loss may exclude the masked ones by multiplication."""
    attn = case.make()
    for kind, mask in masks(L).items():
        real, found = mask[:, None, :, None], []
        probe = noise(2, HEADS, L, HEAD_DIM, seed=1)
        for fill in (0.5, bad):
            inputs = [torch.where(real, x, fill).requires_grad_() for x in qkv(L)]
            attn.zero_grad()
            out = attn(*inputs, mask)
            assert out.isfinite().all(), f"{kind}: the output at a masked query is not finite"
            (out * real * probe).sum().backward()
            assert all(x.grad is None or (x.grad.where(~real, 0) == 0).all() for x in inputs), kind
            grads = [x.grad for x in (*inputs, *attn.parameters()) if x.grad is not None]
            found.append([out * real, *grads])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda s, k=kind: f"{k}: {s}", **EXACT)


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
@pytest.mark.parametrize("L", (3, 17))
@pytest.mark.parametrize("train", (False, True))
def test_the_future_has_no_effect(case, L, train):
    """The future has no gradient, and changing it does not change the past."""
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


@sweep(first_setting=True)
def test_can_be_pickled(case):
    attn, tensors = case.make(), qkv(9)
    assert torch.equal(pickle.loads(pickle.dumps(attn))(*tensors), attn(*tensors))


@sweep(first_setting=True)
def test_compiles_in_one_graph(case):
    """Compiled forward and backward equal eager mode: causal in training with a mask, bidirectional in evaluation under
    autocast."""
    cast = not case.causal
    dtype = torch.float32 if cast else torch.float64
    attn = case.make(dtype=dtype).train(not cast)
    inputs = [x.requires_grad_() for x in qkv(9, dtype=dtype)]
    mask = None if cast else masks(9)["inner"]
    twice = cast and weft.attention_info(case.name).causal and DEVICE == "cpu"
    backend = "eager" if twice else "aot_eager"  # AOTAutograd takes longest, and runs in the causal case
    torch._dynamo.reset()
    found = []
    for fn in (attn, torch.compile(attn, backend=backend, fullgraph=True)):
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
    if case.name != "synthesizer":  # its logits depend on query positions
        torch.testing.assert_close(attn(q.flip(2), k, v, mask).flip(2), out, **EXACT)


@sweep(cross=False)
def test_cross_attention_is_refused_if_not_supported(case):
    q, _, _ = qkv(5)
    _, k, v = qkv(11)
    with pytest.raises(ValueError, match="full"):
        case.make()(q, k, v)


@sweep(causal=True, steps=True)
@pytest.mark.parametrize("L", (1, 9, 26))
def test_steps_equal_the_parallel_form(case, L):
    attn = case.make(max_length=MAX_LENGTH)
    for mask in (None, *masks(L).values()):
        compare_steps(attn, L, mask)
        with torch.no_grad():  # the in-place buffers
            compare_steps(attn, L, mask)


@sweep(more=True, causal=True, steps=True)
@torch.no_grad()
def test_steps_equal_the_parallel_form_with_other_options(case):
    attn, mask = case.make(head_dim=2, max_length=MAX_LENGTH), masks(37)["inner"]
    mask[1, :5] = False
    compare_steps(attn, 37, mask, weft.ALiBi(HEADS) if case.info.bias else None)


def compare_steps(attn, L, mask, bias=None):
    q, k, v = qkv(L, D=attn.head_dim)
    expected, state, outs = attn(q, k, v, mask, bias), attn.start(2), []
    for t in range(L):
        token = (x[:, :, t : t + 1] for x in (q, k, v))
        out, state = attn.step(*token, state, None if mask is None else mask[:, t], bias)
        outs.append(out)
    seen = slice(None) if mask is None else mask
    torch.testing.assert_close(*(x.transpose(1, 2)[seen] for x in (torch.cat(outs, 2), expected)), **EXACT)


@sweep()
def test_dropout_acts_in_training_only(case):
    q, k, v = qkv(9, B=1)
    plain, dropping = case.make(), case.make(dropout=0.3)
    torch.testing.assert_close(dropping(q, k, v), plain(q, k, v), **EXACT)
    dropping.train()
    outs = torch.stack([dropping(q, k, v) for _ in range(2)])
    if case.name != "subsampled":
        assert not torch.equal(outs[0], outs[1])
    later = case.make().train()
    later.dropout = 0.3  # as layers of other libraries do
    outs = []
    for attn in (later, dropping):
        attn.load_state_dict(plain.state_dict())  # routing's clusters follow the keys
        torch.manual_seed(0)
        outs.append(attn(q, k, v))
    torch.testing.assert_close(*outs, **EXACT)


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
    """Records the largest tensor that any operator creates."""

    numel, what = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                size = t.untyped_storage().nbytes() // t.element_size()  # a broadcast view costs nothing
                if size > self.numel:
                    self.numel, self.what = size, str(func)
        return out


@pytest.mark.parametrize("name", [n for n in weft.attentions() if weft.attention_info(n).subquadratic])
@pytest.mark.parametrize("causal", (False, True))
def test_work_grows_with_the_stated_cost(name, causal):
    """The elements that all operators of a forward and a backward write, for four times as many tokens."""
    info = weft.attention_info(name)
    if not (info.causal if causal else info.bidirectional):
        pytest.skip(f"{name} has no such direction")
    fixed = dict.fromkeys(("block", "chunk", "rank", "window"), 1)
    work, stated = [], []
    for L in (4096, 16384):
        attn = weft.make_attention(name, heads=1, head_dim=4, causal=causal, max_length=L, backend="torch")
        with Written() as written:
            attn(*qkv(L, B=1, H=1, D=4, dtype=torch.float32, grad=True)).sum().backward()
        work.append(written.elements)
        stated.append(eval(info.cost.replace("^", "**"), {"L": L, "sqrt": math.sqrt, "log": math.log, **fixed}))
    assert work[1] / work[0] < 1.1 * stated[1] / stated[0]


class Written(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements that operators write."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


@pytest.mark.parametrize("name", [n for n in weft.attentions() if weft.attention_info(n).subquadratic])
def test_gradients_of_much_read_tokens_keep_their_bits(name):
    """Gradients of values in bfloat16, for tokens that hundreds of rows read. A sum in bfloat16 would stop growing."""
    info = weft.attention_info(name)
    L = 8192
    torch.manual_seed(0)
    attn = weft.make_attention(name, heads=1, head_dim=16, causal=info.causal, max_length=L, backend="torch").eval()
    q, k, v = (x.bfloat16() for x in qkv(L, B=1, H=1, D=16))
    found = []
    for dtype, module in ((torch.float64, copy.deepcopy(attn).double()), (torch.bfloat16, attn)):
        value = v.to(dtype).requires_grad_()
        out = module(q.to(dtype), k.to(dtype), value)
        found += torch.autograd.grad(out.sum(), value)
    exact, half = found
    error = (half - exact).norm() / exact.norm()
    assert error < 1e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", weft.attentions())
def test_single_precision_is_close_to_double_with_left_padding(name, causal):
    """Left padding leaves causal queries without keys, whose gradients must not dominate the others."""
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
def test_autocast_only_rounds(case):
    """Outputs and gradients under autocast equal those of the rounded input, up to rounding. Gradients are less exact,
    because a ReLU may switch."""
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
def test_long_sums_stay_in_float32_under_autocast(name, options, causal, dtype):
    """Sums over a thousand tokens overflow float16 and lose precision in bfloat16. In parallel and step by step."""
    torch.manual_seed(0)
    attn = weft.make_attention(name, heads=2, head_dim=16, causal=causal, max_length=1024, **options)
    assert attn.long_sums
    q, k, v = (torch.randn(1, 2, 1000, 16).to(dtype) for _ in range(3))
    if name in ("linear", "performer"):
        k, v = k + 1, v + 250
    else:  # this one sums keys
        q, k, v = q / 1000, k + 1500, v + 250
    expected = attn.double()(q.double(), k.double(), v.double())
    attn.float()
    ulp = torch.finfo(dtype).eps * 256  # relative to outputs near 250
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
