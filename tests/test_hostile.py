"""Unusual inputs, for every registered mechanism: memory layouts, NaN and infinity, biases of -inf, empty batches,
other dtypes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from promises import DEVICE, HEAD_DIM, HEADS, MAX_LENGTH, masks, noise, qkv, sweep

import weft
from weft.layers.encoder import EncoderBlock
from weft.models.crate import CRATELayer

EXACT = {"atol": 1e-10, "rtol": 1e-8}


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in other memory layouts, with NaN between them."""
    B, H, L, D = x.shape
    wide = torch.full((B, H, 2 * L + 1, 2 * D + 3), float("nan"), dtype=x.dtype)
    sliced = wide[:, :, 1::2, 2 : 2 * D + 2 : 2]
    sliced.copy_(x)
    return {
        "channels first": x.transpose(2, 3).contiguous().transpose(2, 3),
        "tokens first": x.transpose(0, 2).contiguous().transpose(0, 2),
        "heads inside": x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "sliced": sliced,
    }


@sweep()
@pytest.mark.parametrize("grad", (False, True))
def test_memory_layout_does_not_matter(case, grad):
    attn = case.make()
    q, k, v = qkv(13)
    mask = None if grad else masks(13)["inner"]
    with torch.set_grad_enabled(grad):
        expected = attn(q, k, v, mask)
        for kind in layouts(q):
            inputs = [layouts(x)[kind].requires_grad_(grad) for x in (q, k, v)]
            for changed in ((0,), (1,), (2,), (0, 1, 2)):
                given = [inputs[i] if i in changed else x for i, x in enumerate((q, k, v))]
                torch.testing.assert_close(attn(*given, mask), expected, msg=lambda s, k=kind: f"{k}: {s}", **EXACT)


@sweep()
def test_one_vector_for_all_tokens(case):
    """Expanded tensors with strides of 0, and the same tensor as q, k and v."""
    attn = case.make()
    x = noise(1, 1, 1, HEAD_DIM)
    wide = x.expand(2, HEADS, 9, HEAD_DIM)
    whole = wide.contiguous()
    torch.testing.assert_close(attn(wide, wide, wide), attn(whole, whole.clone(), whole.clone()), **EXACT)


@sweep(cross=True, causal=False)
def test_in_cross_attention_the_mask_is_for_keys_only(case):
    """Also if there are as many queries as keys."""
    attn = case.make()
    q, k, v = qkv(9)
    mask = masks(9)["inner"]
    together = attn(q, k, v, mask)
    if case.name == "synthesizer":  # its logits depend on query positions
        return
    for at in range(9):
        torch.testing.assert_close(attn(q[:, :, at : at + 1], k, v, mask), together[:, :, at : at + 1], **EXACT)


class Table(torch.nn.Module):
    """A bias that is defined on 0 … L - 1 only."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.weight = length, torch.nn.Parameter(noise(HEADS, length, length, seed=3))

    def forward(self, i, j):
        for at in (i, j):
            assert 0 <= int(at.min()) and int(at.max()) < self.length, "a position outside the sequence"
        i, j = torch.broadcast_tensors(i, j)
        head = torch.arange(HEADS).view(1, -1, *[1] * (i.dim() - 2))
        return self.weight[head, i, j] + self.weight[head, i, j] * j.double().sqrt()


@sweep(bias=True)
@pytest.mark.parametrize("L", (1, 5, 17))
def test_biases_are_evaluated_inside_the_sequence(case, L):
    attn = case.make()
    for train in (False, True):
        table = Table(L)
        q, k, v = qkv(L, grad=True)
        attn.train(train)(q, k, v, masks(L)["right"], table).square().sum().backward()
        assert all(x.grad is None or x.grad.isfinite().all() for x in (table.weight, q, k, v))


class Forbidden:
    """-inf for all pairs of some queries ("rows"), and for some other pairs."""

    def __init__(self, rows: tuple[int, ...]):
        self.rows = rows

    def __call__(self, i, j):
        i, j = torch.broadcast_tensors(i, j)
        no = (i * 5 + j * 3) % 4 == 0
        for row in self.rows:
            no = no | (i == row)
        return torch.zeros(i.shape, dtype=torch.float64).masked_fill(no, float("-inf")).expand(-1, HEADS, *i.shape[2:])


@sweep(bias=True)
@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("L", (1, 9, 17))
def test_a_bias_of_minus_infinity_forbids_a_pair(case, L, grad):
    attn = case.make()
    i = torch.arange(L)
    rows = tuple({0, L // 2, L - 1})
    for mask in (None, masks(L)["inner"]):
        q, k, v = qkv(L, grad=grad)
        bias = Forbidden(rows)
        with torch.set_grad_enabled(grad):
            out = attn(q, k, v, mask, bias)
        assert out.isfinite().all() and (out[:, :, list(rows)] == 0).all()
        seen = attn.weights(q, k, v, mask, bias)
        no = bias(i.view(1, 1, L, 1), i.view(1, 1, 1, L)) == float("-inf")
        assert (seen.masked_fill(~no, 0) == 0).all()
        torch.testing.assert_close(seen @ v, out, **EXACT)
        if grad:
            out.square().sum().backward()
            assert all(x.grad is None or x.grad.isfinite().all() for x in (q, k, v))


@sweep()
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_padding_makes_no_nan_inside_the_backward(case):
    """PyTorch's anomaly mode would report it, even if no gradient has it in the end."""
    attn = case.make()
    for mask in masks(9).values():
        inputs = qkv(9, grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            attn(*inputs, mask).where(mask[:, None, :, None], 0).square().sum().backward()


@sweep()
@pytest.mark.parametrize("train", (False, True))
def test_empty_batches(case, train):
    attn = case.make().train(train)
    q, k, v = (x.requires_grad_() for x in qkv(9, B=0))
    for mask in (None, torch.ones(0, 9, dtype=torch.bool)):
        out = attn(q, k, v, mask)
        assert out.shape == (0, HEADS, 9, HEAD_DIM)
        out.sum().backward()
    assert all(b.isfinite().all() for b in attn.buffers())


@sweep()
@pytest.mark.parametrize(
    ("made", "fed"),
    [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_inputs_of_another_dtype_than_the_parameters(case, made, fed):
    attn = case.make(dtype=made)
    q, k, v = (x.to(fed) for x in qkv(13))
    out = attn(q, k, v, masks(13)["inner"])
    assert out.dtype == fed
    if case.name in ("reformer", "routing", "combiner-routing"):  # different rounding may choose another bucket
        return
    same = copy.deepcopy(attn).to(fed)(q, k, v, masks(13)["inner"])
    tolerance = 0.06 if fed == torch.bfloat16 else 1e-5
    assert (out - same).norm() <= tolerance * same.norm()


@sweep()
@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("train", (False, True))
def test_autocast_is_casting_the_input(case, grad, train):
    """Under autocast the output has its dtype, with and without gradients, and is that of the input in that dtype."""
    attn = case.make(dtype=torch.float32).train(train)
    for mask in (None, masks(13)["inner"]):
        q, k, v = qkv(13, dtype=torch.float32, grad=grad)
        with torch.set_grad_enabled(grad):
            torch.manual_seed(3)
            with torch.autocast(DEVICE, torch.bfloat16):
                out = copy.deepcopy(attn)(q, k, v, mask)
            torch.manual_seed(3)
            cast = copy.deepcopy(attn)(*(x.bfloat16() for x in (q, k, v)), mask)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, cast)
        if grad:
            out.sum().backward()
            assert q.grad is None or q.grad.dtype == torch.float32
    wide = qkv(13)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert copy.deepcopy(attn).double()(*wide).dtype == torch.float64


@sweep()
@pytest.mark.parametrize("wanted", ((0,), (1,), (2,), (0, 2)))
def test_gradients_do_not_depend_on_requires_grad_of_other_inputs(case, wanted):
    attn = case.make()
    inputs = qkv(9, grad=True)
    full = torch.autograd.grad(attn(*inputs).square().sum(), inputs, allow_unused=True)
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    out = attn(*some)
    for i in wanted:
        if full[i] is None:
            continue
        (found,) = torch.autograd.grad(out.square().sum(), some[i], retain_graph=True)
        torch.testing.assert_close(found, full[i], **EXACT)


@sweep(first_setting=True)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(case):
    """Calls and gradients of a stack of batches, as torch.func computes those of every sample."""
    if case.name in ("reformer", "routing", "combiner-routing"):
        pytest.skip("the sizes of its clusters are read, which vmap refuses")
    attn, mask = case.make(), masks(9)["inner"]
    stacks = [torch.stack([x, 0.5 * x]) for x in qkv(9)]
    with torch.no_grad():
        one_by_one = torch.stack([attn(*tokens, mask) for tokens in zip(*stacks, strict=True)])
        torch.testing.assert_close(torch.func.vmap(lambda *x: attn(*x, mask))(*stacks), one_by_one, **EXACT)

    def loss(q, k, v):
        return (attn(q, k, v, mask) * mask[:, None, :, None]).square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=2))(*stacks)
    leaf = stacks[2].clone().requires_grad_()
    sum(loss(*tokens) for tokens in zip(*stacks[:2], leaf, strict=True)).backward()
    torch.testing.assert_close(found, leaf.grad, **EXACT)


@pytest.mark.parametrize("options", [{}, {"keep": 0.5}, {"layout": (3, 4)}], ids=str)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_samples_under_torch_func(options):
    """In training, torch.func draws the same sample as autograd, and with randomness="different" one per batch."""
    attn = weft.make_attention("subsampled", heads=HEADS, head_dim=HEAD_DIM, windows=2, **options).double()
    x, probe = noise(2, HEADS, 12, HEAD_DIM), noise(2, HEADS, 12, HEAD_DIM, seed=1)

    def loss(x):
        return (attn(x, x, x) * probe).sum()

    leaf = x.clone().requires_grad_()
    torch.manual_seed(0)
    loss(leaf).backward()
    torch.manual_seed(0)
    torch.testing.assert_close(torch.func.grad(loss)(x), leaf.grad, **EXACT)
    torch.manual_seed(0)
    one, other = torch.func.vmap(torch.func.grad(loss), randomness="different")(torch.stack([x, x]))
    assert not torch.equal(one, other)
    pickle.dumps(attn)


@sweep(first_setting=True)
def test_second_derivatives_and_forward_mode(case):
    """With PyTorch's unfused attention: against differences of first derivatives and of outputs."""
    attn, mask = case.make(), masks(9)["inner"]
    real, probe = mask[:, None, :, None], noise(2, HEADS, 9, HEAD_DIM, seed=1)
    inputs, along = qkv(9), tuple(noise(2, HEADS, 9, HEAD_DIM, seed=2 + i) for i in range(3))

    def out(*tokens):
        return attn(*tokens, mask) * real

    def size(*tokens, create_graph=False):
        leaves = [x.detach().requires_grad_() for x in tokens]
        square = (out(*leaves) * probe).sum().square()
        grads = torch.autograd.grad(square, leaves, create_graph=create_graph, allow_unused=True)
        return sum(g.square().sum() for g in grads if g is not None), leaves

    def difference(function):
        near = [function(*(x + step * a for x, a in zip(inputs, along, strict=True))) for step in (1e-6, -1e-6)]
        return (near[0] - near[1]) / 2e-6

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        total, leaves = size(*inputs, create_graph=True)
        second = torch.autograd.grad(total, leaves, allow_unused=True)
        found = sum((g * a).sum() for g, a in zip(second, along, strict=True) if g is not None)
        torch.testing.assert_close(found, difference(lambda *x: size(*x)[0]), rtol=1e-5, atol=1e-5)
        tangent = torch.func.jvp(out, inputs, along)[1]
        torch.testing.assert_close(tangent, difference(out), rtol=1e-5, atol=1e-6)


HALF = {torch.float16: 1500.0, torch.bfloat16: 1e4}


@sweep()
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_large_keys_and_values_in_half_precision(case, dtype):
    """Values near 1,500 in every token: no partial sum may overflow float16."""
    if case.name in ("linformer", "sinkhorn") or (case.name == "performer" and case.options[0][1] == "relu"):
        size = 100.0  # these sum keys or values without normalising
    else:
        size = HALF[dtype]
    attn = case.make().to(dtype)
    q, k, v = (x.to(dtype) for x in qkv(39))
    for mask in (None, masks(39)["inner"]):
        assert attn(q / size, k + size, v + size, mask).isfinite().all()


@pytest.mark.parametrize("wrong", ["combiner-fixed", [], ["full"], ["no such"], [("combiner-fixed",)], [3], 7, [None],
                                   ["combiner-mixture"], [("combiner-fixed", None)]], ids=str)  # fmt: skip
def test_wrong_factorisations_are_refused(wrong):
    with pytest.raises(ValueError, match="factorisations must be a list of names"):
        weft.make_attention("combiner-mixture", heads=2, head_dim=4, factorisations=wrong)


def test_mixtures_report_their_dependence_on_the_length():
    assert "combiner-logsparse" in weft.attention_info("combiner-mixture").length_dependent
    causal = weft.make_attention(
        "combiner-mixture", heads=HEADS, head_dim=HEAD_DIM, causal=True, factorisations=["combiner-logsparse"]
    ).double()
    q, k, v = qkv(9)
    longer = [torch.cat([x, x], 2) for x in (q, k, v)]
    mask = (torch.arange(18) < 9).expand(2, -1)
    torch.testing.assert_close(causal(*longer, mask)[:, :, :9], causal(q, k, v), **EXACT)


@sweep(first_setting=True)
@pytest.mark.parametrize(("D", "std"), [(64, 1.0), (64, 1.5), (64, 2.0)])
def test_gradients_of_wide_heads_and_large_inputs(case, D, std):
    """Directional derivatives in float64, where small terms matter."""
    attn = case.make(head_dim=D)
    mask = masks(9)["left"]
    inputs = [(std * x.detach()).requires_grad_() for x in qkv(9, D=D)]
    probe = noise(2, HEADS, 9, D, seed=1)

    def loss(*x):
        return (attn(*x, mask) * probe).sum()

    grads = torch.autograd.grad(loss(*inputs), inputs, allow_unused=True)
    for at, grad in enumerate(grads):
        direction = noise(2, HEADS, 9, D, seed=7 + at)
        moved = [[x + (i == at) * sign * 1e-6 * direction for i, x in enumerate(inputs)] for sign in (1, -1)]
        with torch.no_grad():
            slope = (loss(*moved[0]) - loss(*moved[1])).item() / 2e-6
        found = 0.0 if grad is None else (grad * direction).sum().item()
        assert found == pytest.approx(slope, rel=1e-4, abs=1e-6)


@sweep(first_setting=True)
def test_dropout_keeps_the_mean(case):
    """Over 2,000 draws, also for the first tokens, which may lose all keys."""
    rows, L = 2000, 5
    attn = case.make(dropout=0.3).train()
    attn.sampling = False  # sampling of subsampled attention is not dropout
    q, k, v = (x.expand(rows, -1, -1, -1) for x in qkv(L, B=1))
    outs = attn(q, k, v)
    error = (outs.mean(0) - attn.eval()(q[:1], k[:1], v[:1])[0]).abs()
    assert (error <= 5 * outs.std(0) / rows**0.5 + 1e-9).all()


@sweep(causal=True)
@pytest.mark.parametrize("bad", (float("nan"), float("inf")), ids=str)
@pytest.mark.parametrize("which", range(3))
def test_nan_in_the_future_does_not_change_the_past(case, bad, which):
    """Values computed together with NaN may become NaN, but no other number. Decoding step by step is exact."""
    L, at = 17, 11
    attn = case.make(max_length=MAX_LENGTH)
    q, k, v = qkv(L)
    inputs = [x.clone() for x in (q, k, v)]
    inputs[which][:, :, at:] = bad
    past = attn(q, k, v)[:, :, :at]
    found = attn(*inputs)[:, :, :at]
    torch.testing.assert_close(torch.where(found.isnan(), past, found), past, **EXACT)
    if case.info.steps:
        state = attn.start(2)
        for t in range(at):
            out, state = attn.step(*(x[:, :, t : t + 1] for x in inputs), state)
            torch.testing.assert_close(out, past[:, :, t : t + 1], **EXACT)


LAYERS = {
    "multihead": lambda name, **o: weft.MultiheadAttention(12, HEADS, attention=name, **o),
    "mixed": lambda name, **o: weft.MixedAttention(12, HEADS, [name, "full"], **o),
    "cached": lambda name, **o: weft.CachedAttention(weft.MultiheadAttention(12, HEADS, attention=name, **o), length=4),
    "block": lambda name, **o: EncoderBlock(12, weft.MultiheadAttention(12, HEADS, attention=name, **o), mlp_dim=8),
    "mssa": lambda name, **o: weft.MSSA(12, HEADS, attention=name, **o),
    "crate": lambda name, **o: CRATELayer(12, HEADS, attention=name, **o),
}


@pytest.mark.parametrize("name", weft.attentions())
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bad", (float("nan"), float("inf")), ids=str)
def test_padding_does_not_affect_the_gradients_of_a_layer(kind, name, bad):
    length = {"max_length": 9} if weft.attention_info(name).needs_max_length else {}
    torch.manual_seed(0)
    layer = LAYERS[kind](name, **length).double().train()
    mask = masks(9)["inner"]
    found = []
    for fill in (0.5, bad):
        copied = copy.deepcopy(layer)
        x = torch.where(mask[..., None], noise(2, 9, 12), fill).requires_grad_()
        torch.manual_seed(1)
        y = copied(x, mask)
        (y * mask[..., None]).square().sum().backward()
        grads = [p.grad for p in (x, *copied.parameters()) if p.grad is not None]
        assert y.isfinite().all() and all(g.isfinite().all() for g in grads)
        found.append([y * mask[..., None], *grads])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_refuse_masks_that_are_not_boolean(kind):
    layer, mask = LAYERS[kind]("full"), masks(9)["inner"]
    for wrong in (mask.long(), mask.float(), mask.tolist()):
        with pytest.raises(TypeError, match="mask must be boolean"):
            layer(torch.randn(2, 9, 12), wrong)


def test_padding_of_a_context_does_not_affect_gradients():
    layer = weft.MultiheadAttention(12, HEADS, context_dim=10).double()
    mask = masks(9)["inner"]
    context = torch.where(mask[..., None], noise(2, 9, 10), float("nan"))
    x = noise(2, 9, 12, seed=1)
    y = layer(x, mask, context=context)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    alone = layer(x[:, 4:5], mask, context=context)  # as many queries as keys: the mask is for keys only
    torch.testing.assert_close(alone, y[:, 4:5], **EXACT)


def test_an_ensemble_of_an_empty_batch():
    model = weft.MultiheadAttention(12, HEADS, attention="subsampled")
    found = weft.ensemble(model, samples=3, progress=False)(torch.randn(0, 7, 12))
    assert found.probabilities.shape == (0, 7, 12) and found.information.shape == (0, 7)
