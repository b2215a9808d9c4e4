"""Swin's sub-windows and graphs: recorded vectors, dense evaluation, and legal sources."""

import math

import golden
import pytest
import torch

import weft
from weft.layers import EdgeAttention, SubsampledWindowAttention

FILE = "ssa_swin.npz"


def swin_layer(case):
    height, width, window, sub, shift, heads = case["cfg_H_W_win_sub_shift_heads"].tolist()
    assert sub == window // 2
    dim = case["x_raster"].shape[-1]
    gate = case["w/relative_table"].shape[1] == 2 * heads
    layer = SubsampledWindowAttention(dim, heads, window=window, shift=shift, gate=gate).double()
    names = {"q": "q_lin", "kv": "kv_lin", "out": "proj"}
    weights = {f"{a}.{w}": case[f"w/{b}.{w}"] for a, b in names.items() for w in ("weight", "bias")}
    layer.load_state_dict({"table": case["w/relative_table"], **weights})
    return layer, case["x_raster"].unflatten(1, (height, width))


@pytest.mark.parametrize("name", golden.names(FILE))
def test_recorded_swin(name):
    case = {key: torch.as_tensor(value) for key, value in golden.case(FILE, name).items()}
    layer, x = swin_layer(case)
    targets, _ = layer._sample(*x.shape[1:3], x)
    assert torch.equal(targets.flatten(), case["slot_raster"])
    with layer.fixed(case["source_raster_of_slot"]):
        y = layer(x).flatten(1, 2)
    assert (y - case["y_train_raster"]).abs().max() < 1e-9


def by_definition(layer, x, legal):
    """Dense over all pairs of the map, illegal ones removed; offsets are target minus source."""
    B, height, width, dim = x.shape
    H, N = layer.heads, height * width
    flat = x.flatten(1, 2)
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (layer.q(flat), *layer.kv(flat).chunk(2, -1)))
    y, x_ = torch.arange(N) // width, torch.arange(N) % width
    last = layer.window - 1
    dy, dx = ((c[:, None] - c[None]).clamp(-last, last) + last for c in (y, x_))
    values = layer.table[dy * (2 * layer.window - 1) + dx].permute(2, 0, 1)
    logits = q @ k.transpose(-1, -2) / math.sqrt(dim // H) + values[:H]
    weights = logits.masked_fill(~legal, float("-inf")).softmax(-1)
    weights = weights * values[H:] if values.shape[0] > H else weights
    return layer.out((weights @ v).transpose(1, 2).flatten(2)).view(x.shape)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (3, 9)])
def test_eval_is_dense_window_attention(size, shift, gate):
    """Smaller windows at the borders equal a cyclic roll with a mask."""
    torch.manual_seed(0)
    layer = SubsampledWindowAttention(6, 2, window=4, shift=shift, gate=gate).double().eval()
    x = torch.randn(2, *size, 6, dtype=torch.float64)
    cell = torch.cartesian_prod(*(torch.arange(side) for side in size))
    window = (cell - shift).div(4, rounding_mode="floor")
    same = (window[:, None] == window[None]).all(-1)
    assert (layer(x) - by_definition(layer, x, same)).abs().max() < 1e-12
    layer.train().sampling = False
    assert (layer(x) - by_definition(layer, x, same)).abs().max() < 1e-12


@pytest.mark.parametrize(("biased", "shift"), [(False, 0), (False, 1), (False, 2), (True, 0), (True, 2)])
def test_training_samples_within_windows(biased, shift):
    torch.manual_seed(0)
    layer = SubsampledWindowAttention(6, 2, window=4, shift=shift, biased=biased).double()
    height, width = 7, 6
    x = torch.randn(1, height, width, 6, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    targets, _ = layer._sample(height, width, torch.empty(0))
    N = height * width
    legal = torch.zeros(N, N, dtype=torch.bool)
    with layer.fixed(layer.last_indices):
        y = layer(x)
    for window, sample in zip(targets.tolist(), layer.last_indices.tolist(), strict=True):
        sample = [s for s in sample if s < N]
        for t in (t for t in window if t < N):
            legal[t, sample or [t]] = True  # itself, where a border window kept no cell
    cell = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    window = (cell - shift).div(4, rounding_mode="floor")
    assert not (legal & ~(window[:, None] == window[None]).all(-1)).any()
    assert (y - by_definition(layer, x, legal)).abs().max() < 1e-12
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    if biased:
        assert legal.any(0).all()  # a permutation: every source serves


def test_swin_refusals():
    for options, says in (
        ({"window": 7}, "even"),
        ({"window": 4, "shift": 4}, "shift"),
        ({"window": 8, "shift": 3}, "shift must be 0 or half the window, 4"),
        ({"sigma": 0.0}, "sigma"),
    ):
        with pytest.raises(ValueError, match=says):
            SubsampledWindowAttention(8, 2, **options)
    with pytest.raises(ValueError, match="height"):
        SubsampledWindowAttention(8, 2)(torch.randn(2, 16, 8))


def graph(B=3, N=5, dim=8, edge_dim=4):
    torch.manual_seed(0)
    layer = EdgeAttention(dim, 2, edge_dim, source_dropout=0.5).double()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    return layer, torch.randn(B, N, dim).double(), torch.randn(B, N, N, edge_dim).double(), mask


def test_edge_attention_by_definition():
    layer, x, edges, mask = graph()
    out = layer.eval()(x, edges, mask)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
    e = layer.edge(edges)
    for b, i, h in ((0, 3, 1), (1, 0, 0)):
        real = mask[b].nonzero().flatten()
        logits = (q[b, i, h] * k[b, real, h]).sum(-1) / 2 + e[b, i, real, h]
        head = (logits.softmax(0) * e[b, i, real, 2 + h].sigmoid()) @ v[b, real, h]
        others = torch.zeros(2, 4).double()
        others[h] = head
        probe = torch.nn.functional.linear(others.flatten(), layer.out.weight)
        other = 1 - h
        logits = (q[b, i, other] * k[b, real, other]).sum(-1) / 2 + e[b, i, real, other]
        others.zero_()[other] = (logits.softmax(0) * e[b, i, real, 2 + other].sigmoid()) @ v[b, real, other]
        probe = probe + torch.nn.functional.linear(others.flatten(), layer.out.weight, layer.out.bias)
        assert (out[b, i] - probe).abs().max() < 1e-12
    assert (out[2] - layer.out.bias).abs().max() < 1e-12  # a graph without nodes: zeros into the projection


def test_source_dropout_on_graphs():
    layer, x, edges, mask = graph()
    layer.train()
    x[1, 3] = edges[1, 3] = edges[1, :, 3] = float("nan")  # padding may hold anything
    x.requires_grad_(), edges.requires_grad_()
    for _ in range(20):
        out = layer(x, edges, mask)
        grads = torch.autograd.grad(out.square().sum(), (x, edges, *layer.parameters()))
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
        assert (grads[0][~mask] == 0).all() and (grads[1][1, :, 2:] == 0).all()
    torch.manual_seed(1)
    seen = {tuple(round(n, 6) for n in layer(x, edges, mask)[1, 0].tolist()) for _ in range(60)}
    assert len(seen) == 3  # two nodes: either, or both; never neither


def test_layers_compile():
    torch._dynamo.reset()
    layer = SubsampledWindowAttention(6, 2, window=4, shift=2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 7, 6, 6)
    torch.manual_seed(1)
    once = compiled(x)
    torch.manual_seed(1)
    assert (once - layer(x)).abs().max() < 1e-5 and not torch.equal(once, compiled(x))


def test_swin_layer_is_sampled_by_the_ensemble_switches():
    layer = SubsampledWindowAttention(6, 2, window=4)
    x = torch.randn(1, 8, 8, 6)
    dense = layer.eval()(x)
    assert weft.subsampling(layer.train(), False) == 1 and torch.equal(layer(x), dense)
    weft.subsampling(layer, True)
    assert not torch.equal(layer(x), dense)
