"""Multi-head and mixed layers, and positions."""

from __future__ import annotations

import math

import pytest
import torch
from promises import cases, masks, noise
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import weft
from weft.core.positions import alibi_slopes, sinusoids
from weft.layers.dropout import HashedDropout, hashed_dropout

EXACT = {"atol": 1e-10, "rtol": 1e-8}


def layer(*args, **kwargs):
    torch.manual_seed(0)
    return weft.MultiheadAttention(*args, **kwargs).double().eval()


def inputs(L=9, dim=12, B=2):
    return noise(B, L, dim, seed=L)


def test_against_torchs_own_multihead_attention():
    ours = layer(12, 3, qkv_bias=True, out_bias=True)
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q.weight, ours.k.weight, ours.v.weight]))
        theirs.in_proj_bias.normal_()
        for part, linear in zip(theirs.in_proj_bias.chunk(3), (ours.q, ours.k, ours.v), strict=True):
            linear.bias.copy_(part)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias.normal_())
    x, mask = inputs(), masks(9)["inner"]
    expected, probabilities = theirs(x, x, x, key_padding_mask=~mask, average_attn_weights=False)
    torch.testing.assert_close(ours(x, mask), expected, **EXACT)
    torch.testing.assert_close(ours.weights(x, mask), probabilities, **EXACT)


def test_heads_may_be_wider_than_the_model():
    wide = layer(12, 6, head_dim=7)
    assert wide.q.weight.shape == (42, 12) and wide.out.weight.shape == (12, 42)
    assert wide(inputs()).shape == (2, 9, 12)


def test_grouped_queries():
    x = inputs()
    grouped = layer(12, 6, head_dim=4, kv_heads=2, causal=True)
    q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (grouped.q, grouped.k, grouped.v))
    assert k.shape[1] == 2
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(grouped(x), grouped.out(out.transpose(1, 2).flatten(2)), **EXACT)


def test_heads_stay_side_by_side_in_memory():
    """Otherwise the output projection and all gradients copy them."""
    rotary = layer(12, 2, head_dim=6, rope=True, qk_norm=True)
    assert all(heads.transpose(1, 2).is_contiguous() for heads in rotary.project(inputs()))


def test_compiled_rope_reads_a_table():
    """Inductor would compute its cosines again for every head, in float64. An exported program needs no operator."""
    rotary, x = layer(12, 2, head_dim=6, rope=True, causal=True), inputs()
    graphs = []
    compiled = torch.compile(rotary, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    torch.testing.assert_close(compiled(x), rotary(x))
    names = ["rotary_table" in str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum(names) == 1  # for q and k
    for strict in (False, True):
        exported = torch.export.export(rotary, (x,), strict=strict)
        assert not any("weft" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(exported.module()(x), rotary(x))


def test_rope_turns_only_with_distance():
    rotary = layer(12, 2, head_dim=6, rope=True)
    x = torch.nn.functional.pad(inputs(5), (0, 0, 3, 0))  # three masked tokens in front shift all positions
    mask = torch.tensor([[False] * 3 + [True] * 5] * 2)
    torch.testing.assert_close(rotary(x, mask)[:, 3:], rotary(inputs(5)), **EXACT)
    assert not torch.allclose(rotary(inputs(5)), layer(12, 2, head_dim=6)(inputs(5)))


def test_cross_attention():
    cross = layer(12, 3, context_dim=8)
    x, context, mask = inputs(5), inputs(11, 8), masks(11)["left"]
    garbage = torch.where(mask[..., None], context, torch.nan)
    torch.testing.assert_close(cross(x, mask, context=garbage), cross(x, mask, context=context), **EXACT)
    with pytest.raises(ValueError, match="context"):
        cross(x, context=inputs(11, 12))


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_mechanism_inside_the_layer(case):
    """Padded tokens change nothing through the whole layer, and every projection it has is used."""
    settings = dict(case.options)
    if case.info.needs_max_length:
        settings["max_length"] = 20
    mha = layer(10, 2, head_dim=6, attention=case.name, causal=case.causal, **settings)
    x, mask = inputs(13, 10), masks(13)["inner"]
    out = mha(x, mask)
    other = mha(torch.where(mask[..., None], x, 7.0), mask)
    torch.testing.assert_close(other[mask], out[mask], **EXACT)
    out[mask].square().sum().backward()
    for name, parameter in mha.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, f"{name} is not used"


def test_mixed_is_the_mean_of_its_blocks():
    torch.manual_seed(0)
    mixed = weft.MixedAttention(12, 4, ["full", ("local", {"block_size": 3})], head_dim=5).double().eval()
    x, mask = inputs(), masks(9)["right"]
    assert [b.heads for b in mixed.blocks] == [2, 2]
    torch.testing.assert_close(mixed(x, mask), (mixed.blocks[0](x, mask) + mixed.blocks[1](x, mask)) / 2, **EXACT)


def test_mixed_refuses():
    with pytest.raises(ValueError, match="must be divisible"):
        weft.MixedAttention(12, 4, ["full", "local", "linear"], head_dim=5)
    with pytest.raises(ValueError, match="did you mean"):
        weft.MixedAttention(12, 4, ["full", "lokal"], head_dim=5)
    with pytest.raises(ValueError, match="at least one"):
        weft.MixedAttention(12, 4, [])


@pytest.mark.parametrize(
    ("settings", "error"),
    (
        ({"dim": 10, "heads": 3}, "head_dim"),
        ({"dim": 12, "heads": 3, "kv_heads": 2}, "kv_heads"),
        ({"dim": 12, "heads": 4, "head_dim": 3, "rope": True}, "even"),
        ({"dim": 12, "heads": 4, "attention": "reformer", "head_dim": 4, "rope": True}, "rope=True has no effect"),
    ),
)
def test_the_layer_refuses(settings, error):
    with pytest.raises(ValueError, match=error):
        weft.MultiheadAttention(**settings)


def test_a_ready_mechanism():
    attn = weft.make_attention("local", heads=3, head_dim=4, block_size=3)
    mha = weft.MultiheadAttention(12, 3, attention=attn)
    assert mha.attention is attn
    with pytest.raises(TypeError, match="block_size"):
        weft.MultiheadAttention(12, 3, attention=attn, block_size=4)
    with pytest.raises(ValueError, match="causal"):
        weft.MultiheadAttention(12, 3, attention=attn, causal=True)


def test_alibi():
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-h for h in range(1, 9)], dtype=torch.float64))
    odd = alibi_slopes(6).tolist()  # the authors' rule: the slopes of 4 heads, then every other slope of 8
    assert odd == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    values = weft.ALiBi(2)(torch.tensor(5).view(1, 1, 1), torch.tensor([3, 5, 9]).view(1, 1, 3))
    torch.testing.assert_close(
        values[0], -torch.tensor([[2.0, 0, 4]]).double() * torch.tensor([[2**-4], [2**-8]]).double()
    )


def test_relative_biases():
    bias = weft.RelativeBias(2, 3)
    i, j = torch.arange(9).view(1, 1, 9, 1), torch.arange(9).view(1, 1, 1, 9)
    values = bias(i, j)
    assert (
        values.shape == (1, 2, 9, 9)
        and values[0, 1, 8, 0] == bias.table[1, 6]
        and values[0, 0, 2, 3] == bias.table[0, 2]
    )
    image = weft.RelativeBias2d(2, 3, 4, prefix=1)
    i, j = torch.arange(13).view(1, 1, 13, 1), torch.arange(13).view(1, 1, 1, 13)
    values = image(i, j)
    cell = lambda y, x: 1 + 4 * y + x  # noqa: E731
    assert (
        values[0, 0, cell(1, 2), cell(0, 3)]
        == values[0, 0, cell(2, 1), cell(1, 2)]
        != values[0, 0, cell(1, 2), cell(1, 1)]
    )
    assert (values[:, :, 0] == image.table[:, -1:]).all() and (values[..., 0] == image.table[:, -1:]).all()
    per_head = image(i.expand(1, 2, 13, 1), j)
    torch.testing.assert_close(per_head, values)


def test_sinusoids():
    table = sinusoids(7, 6, dtype=torch.float64)
    assert table[5, 2].item() == pytest.approx(math.sin(5 * 10000 ** (-2 / 6)))
    assert table[5, 3].item() == pytest.approx(math.cos(5 * 10000 ** (-2 / 6)))
    assert sinusoids(3, 5).shape == (3, 5)


@pytest.mark.parametrize("name", ["full", "linear", "reformer"])
def test_qk_norm_bounds_the_logits_and_keeps_the_contract(name):
    layer = weft.MultiheadAttention(12, 2, attention=name, causal=True, qk_norm=True, rope=name == "full").double()
    x = noise(2, 9, 12)
    q, k, _ = layer.project(1e6 * x)
    size = {"full": 1, "linear": 4, "reformer": 1}[name] * 6**0.5  # its gain times √D, whatever the scale of x
    torch.testing.assert_close(q.norm(dim=-1), q.new_full(q.shape[:3], size))
    if layer.k_norm is not None:
        torch.testing.assert_close(k.norm(dim=-1), k.new_full(k.shape[:3], size))
    if weft.attention_info(name).steps:
        out, state = layer.prefill(x[:, :5])
        rest = []
        for t in range(5, 9):
            y, state = layer.step(x[:, t : t + 1], state)
            rest.append(y)
        torch.testing.assert_close(torch.cat([out, *rest], 1), layer(x))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_hashed_dropout_drops_independently(p):
    torch.manual_seed(0)
    x = torch.full((1000, 1000), 2.0, requires_grad=True)
    outs = [hashed_dropout(x, p) for _ in range(2)]
    outs[0].sum().backward()
    torch.testing.assert_close(x.grad, outs[0].detach() / 2)
    torch.testing.assert_close(outs[0].unique(), torch.tensor([0, 2 / (1 - p)]))
    dropped, again = ((out == 0).double().flatten() - p for out in outs)
    pairs = [dropped[k:] * dropped[:-k] for k in (1, 2, 16, 1000, 4000)]  # along rows and columns
    for found in (dropped, dropped * again, *pairs):  # five standard deviations
        assert abs(found.mean()) < 5 * found.std() / 1000
    rates = dropped.view(1000, 1000).mean(0), dropped.view(1000, 1000).mean(1)
    assert all(0.8 < rate.std() / math.sqrt(p * (1 - p) / 1000) < 1.2 for rate in rates)


def test_hashed_dropout_runs_in_compiled_graphs():
    torch.manual_seed(0)
    layer, x = HashedDropout(0.3), torch.ones(100, 100)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.manual_seed(1)
    expected = hashed_dropout(x, 0.3)
    torch.manual_seed(1)
    assert torch.equal(compiled(x), expected)
    torch.manual_seed(1)
    expected = torch.dropout(x, 0.3, True)
    torch.manual_seed(1)
    assert torch.equal(layer(x), expected) and torch.equal(torch.compile(layer.eval(), backend="aot_eager")(x), x)


class Int8(nn.Module):
    """A linear layer without floating point parameters, whose `weight` is a method, as in torch.ao."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.step = linear.in_features, linear.out_features, 0.01
        self.codes = nn.Parameter((linear.weight / self.step).round().to(torch.int8), requires_grad=False)

    def weight(self) -> torch.Tensor:
        return self.codes * self.step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight())


def quantized(model: nn.Module) -> nn.Module:
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(path, Int8(module))
    return model


def test_quantized_projections_decode():
    sizes = {"dim": 16, "heads": 2, "head_dim": 8, "layers": 2, "mlp_dim": 24}
    model = quantized(weft.models.LanguageModel(20, max_length=12, **sizes).eval())
    ids = torch.arange(9)[None]
    torch.testing.assert_close(model.prefill(ids)[0], model(ids))


@pytest.mark.parametrize("to", ["linear", "routing", "synthesizer"])
def test_quantized_projections_can_be_swapped(to):
    layer = quantized(weft.MultiheadAttention(16, 2)).eval()
    x, before = torch.randn(2, 9, 16), weft.MultiheadAttention(16, 2).eval()
    for name in ("q", "k", "v", "out"):
        getattr(before, name).weight.data = getattr(layer, name).weight()
    for model in (layer, before):
        assert weft.swap(model, to=to, max_length=12).replaced
    torch.testing.assert_close(layer(x), before(x))


@pytest.mark.parametrize(
    "settings", [{}, {"kv_heads": 2, "head_dim": 5}, {"qkv_bias": True}, {"qk_norm": True}], ids=str
)
@pytest.mark.parametrize(
    "name, options", [("full", {}), ("bigbird", {"block_size": 3}), ("sparse", {"block_size": 3, "cls": True})]
)
def test_the_first_token_alone(name, options, settings):
    """`first=True` equals the first of all tokens, with every gradient."""
    attn = layer(12, 4, attention=name, **settings, **options)
    real = torch.arange(20)[None] < torch.tensor([[20], [13], [1], [0]])
    unread = torch.cat([~real[:, :1], real[:, 1:]], 1)  # rows whose first token is masked, if others are not
    for mask in (None, real, unread):
        found = []
        for call in (lambda x: attn(x, mask)[:, 0], lambda x: attn(x, mask, first=True)):  # noqa: B023
            x = inputs(20, B=4).requires_grad_()
            y = call(x)
            found.append((y, *torch.autograd.grad(y, [x, *attn.parameters()], noise(*y.shape, seed=3))))
        torch.testing.assert_close(found[1], found[0], **EXACT)
    x = inputs(20, B=4)
    poisoned = x.masked_fill(~real[..., None], float("nan"))
    torch.testing.assert_close(attn(poisoned, real, first=True), attn(x, real, first=True))


@pytest.mark.parametrize("hooked", [False, True])
def test_the_first_token_alone_needs_no_keys_of_the_others(hooked, monkeypatch):
    attn, linear, counts = layer(12, 4), torch.nn.functional.linear, []
    if hooked:
        attn.k.register_forward_hook(lambda *_: None)  # could change the keys
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: counts.append(x[0].numel()) or linear(x, *rest))
    attn(inputs(20), first=True)
    assert max(counts) == (240 if hooked else 12)


def test_the_first_token_alone_needs_the_whole_sequence_within_the_limit():
    attn = layer(12, 4, max_length=20)
    with pytest.raises(ValueError, match="length 21 is over max_length=20"):
        attn(inputs(21), first=True)
    with weft.core.sharding.use(object()), pytest.raises(ValueError, match="needs the whole sequence on one rank"):
        attn(inputs(20), first=True)
