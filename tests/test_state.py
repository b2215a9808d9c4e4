"""State beyond decoding: models made on the meta device, swaps undone later, wrong sizes refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import weft
from weft import models
from weft.layers import MSSA, MixedAttention, TransformerXLAttention
from weft.models.crate_mae import CRATEMAE
from weft.models.image import Normalised

SMALL = {"dim": 16, "heads": 2, "head_dim": 8, "layers": 1, "mlp_dim": 16}


def ids() -> Tensor:
    return torch.randint(1, 20, (2, 9), generator=torch.Generator().manual_seed(0))


def pixels() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def vectors() -> Tensor:
    return torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))


def hidden() -> Tensor:
    return torch.arange(16).expand(2, 16) < 8


def mae() -> CRATEMAE:
    return CRATEMAE(dim=16, heads=2, layers=1, image_size=16, patch=4)


MADE: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple]]] = {
    "rotary": (lambda: weft.MultiheadAttention(16, 2, rope=True), lambda: (vectors(),)),
    "encoder": (lambda: models.TextEncoder(20, max_length=12, **SMALL), lambda: (ids(),)),
    "sinusoid": (lambda: models.LanguageModel(20, max_length=12, positions="sinusoid", **SMALL), lambda: (ids(),)),
    "rope": (lambda: models.LanguageModel(20, max_length=12, positions="rope", **SMALL), lambda: (ids(),)),
    "image": (lambda: models.ImageClassifier(16, 3, positions="sinusoid", **SMALL), lambda: (pixels(),)),
    "normalised": (lambda: Normalised(nn.Flatten(), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), lambda: (pixels(),)),
    "masked image": (mae, lambda: (pixels(), hidden())),
}


def first(y: object) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_from_the_meta_device(name, assign):
    make, inputs = MADE[name]
    model = make().eval()
    with torch.device("meta"):
        empty = make().eval()
    if not assign:
        empty.to_empty(device="cpu")
        for tensor in (*empty.parameters(), *empty.buffers()):  # what to_empty finds in memory is anything
            if any(tensor is kept for kept in (*empty.parameters(), *persistent(empty))):
                tensor.data.fill_(float("nan"))
    empty.load_state_dict(model.state_dict(), strict=True, assign=assign)
    assert torch.equal(first(empty(*inputs())), first(model(*inputs())))


def persistent(model: nn.Module) -> list[Tensor]:
    saved = model.state_dict(keep_vars=True)
    return [buffer for key, buffer in model.named_buffers() if key in saved]


@pytest.mark.parametrize("name", MADE)
def test_casts_do_not_round_positions_for_good(name):
    make, inputs = MADE[name]
    model = make().eval()
    twin = copy.deepcopy(model).half().double()
    twin.load_state_dict(model.double().state_dict())
    given = [x.double() if x.is_floating_point() else x for x in inputs()]
    torch.testing.assert_close(first(twin(*given)), first(model(*given)), rtol=0, atol=1e-12)
    assert torch.equal(first(pickle.loads(pickle.dumps(twin))(*given)), first(twin(*given)))


def test_rotary_angles_in_half_precision():
    exact, rounded = (weft.layers.Rotary(64).to(dtype) for dtype in (torch.float64, torch.bfloat16))
    x, at = torch.randn(1, 1, 1, 64, dtype=torch.float64), torch.tensor([4000])
    assert torch.equal(rounded(x, at), exact(x, at))


@pytest.mark.parametrize("old", ["full", "routing", "performer", "linformer"])
def test_undo_keeps_what_the_model_went_through(old):
    model = weft.MultiheadAttention(16, 2, attention=old, dropout=0.5, max_length=12).train()
    report = weft.swap(model, to="longformer", window=4)
    model.eval().double()
    report.undo()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    assert not any(m.training for m in model.modules())
    assert {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} == {torch.float64}
    assert torch.equal(model(x), model(x))
    report = weft.swap(model, to="longformer", window=4)
    model.train()
    report.undo()
    assert all(m.training for m in model.modules())


def test_undoing_a_cache_leaves_modes_set_inside_it():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1).train()
    report = weft.cache(model)
    model.layers[0].self_attn.inner.eval()
    report.undo()
    assert not model.layers[0].self_attn.training


def test_mixed_attention_shares_out_the_heads_of_a_bias():
    """Mixing a mechanism with itself equals that mechanism with all heads."""
    torch.manual_seed(0)
    mixed = MixedAttention(16, 4, ["full", "full"])
    whole = weft.MultiheadAttention(16, 4)
    for name in ("q", "k", "v"):
        rows = torch.stack([getattr(b, name).weight.unflatten(0, (2, 4)) for b in mixed.blocks], 1)  # head j of block m
        getattr(whole, name).weight.data = rows.flatten(0, 2)
    columns = torch.stack([b.out.weight.unflatten(1, (2, 4)) for b in mixed.blocks], 2)
    whole.out.weight.data = columns.flatten(1, 3) / 2
    bias = weft.ALiBi(4)
    torch.testing.assert_close(mixed(vectors(), bias=bias), whole(vectors(), bias=bias))
    with pytest.raises(ValueError, match="2 heads"):
        mixed(vectors(), bias=weft.ALiBi(2))


@pytest.mark.parametrize("name", [n for n in weft.attentions() if weft.attention_info(n).bidirectional])
def test_the_memory_attends_as_the_layer_does(name):
    inner = weft.MultiheadAttention(16, 2, attention=name, max_length=16)
    cached = weft.CachedAttention(inner, memory_attention="same", length=9)
    assert cached.memory.attention.name == name
    assert cached(vectors()).isfinite().all()


def test_the_memory_cannot_read_the_input_of_the_layer():
    options = {"attention": "combiner-axial", "key_summary": "proj", "block_size": 3, "input_dim": 16}
    inner = weft.MultiheadAttention(16, 2, **options)
    with pytest.raises(ValueError, match="memory_attention='full'"):
        weft.CachedAttention(inner, memory_attention="same")


def test_context_dim_needs_a_context():
    layer = weft.MultiheadAttention(16, 2, context_dim=24)
    with pytest.raises(ValueError, match="context="):
        layer(vectors())
    assert layer(vectors(), context=torch.randn(2, 5, 24)).shape == (2, 9, 16)


@pytest.mark.parametrize("heads", [0, -2])
@pytest.mark.parametrize(
    "make",
    [
        lambda heads: weft.MultiheadAttention(16, heads),
        lambda heads: weft.MultiheadAttention(16, heads, head_dim=8),
        lambda heads: MixedAttention(16, heads, ["full", "local"]),
        lambda heads: MSSA(16, heads),
        lambda heads: TransformerXLAttention(16, heads, memory=4),
        lambda heads: weft.CachedAttention(nn.Linear(16, 16), dim=16, heads=heads),
        lambda heads: models.LanguageModel(20, max_length=12, **{**SMALL, "heads": heads}),
        weft.ALiBi,
        lambda heads: weft.RelativeBias(heads, 4),
        lambda heads: weft.RelativeBias2d(heads, 3, 3),
    ],
)
def test_no_heads(make, heads):
    with pytest.raises(ValueError, match="heads"):
        make(heads)


def replica(model: nn.Module) -> nn.Module:
    """A copy as torch.nn.DataParallel makes it for each GPU and call."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, made in copies.items():
        for name, parameter in module._parameters.items():
            setattr(made, name, None if parameter is None else parameter * 1)
        made._modules = {name: copies[child] for name, child in module._modules.items()}
    return copies[model]


@pytest.mark.parametrize(
    "layer",
    [
        weft.CachedAttention(weft.MultiheadAttention(16, 2)),
        weft.CachedAttention(nn.MultiheadAttention(16, 2, batch_first=True), mix="projected"),
        weft.layers.AttentionCache(weft.MultiheadAttention(16, 2)),
        weft.MultiheadAttention(16, 2, attention="routing"),
    ],
)
def test_data_parallel_that_would_lose_the_state_is_refused(layer):
    x = vectors()
    given = (x, x, x) if isinstance(getattr(layer, "inner", None), nn.MultiheadAttention) else (x,)
    with pytest.raises(RuntimeError, match="DataParallel.* use torch.nn.parallel.DistributedDataParallel"):
        replica(layer)(*given)
    layer(*given)
    layer.eval()
    assert replica(layer)(*given)[0].isfinite().all()


def test_data_parallel_of_a_layer_whose_heads_are_mixed_inside_is_refused():
    layer = weft.CachedAttention(nn.MultiheadAttention(16, 2, batch_first=True))
    layer(vectors(), vectors(), vectors())
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        replica(layer.eval())(vectors(), vectors(), vectors())
