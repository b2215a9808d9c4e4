"""Decoding states own their data and reject invalid inputs, for every registered mechanism."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from promises import HEAD_DIM, HEADS, MAX_LENGTH, Case, noise, qkv, sweep
from torch import Tensor

import weft
from weft.attention.routing import Clusters

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def decode(attn: weft.Attention, tokens: list[list[Tensor]], state=None) -> tuple[Tensor, object]:
    state, outs = attn.start(tokens[0][0].shape[0]) if state is None else state, []
    for token in tokens:
        out, state = attn.step(*token, state)
        outs.append(out)
    return torch.cat(outs, 2), state


def split(L: int, seed: int = 0, **options) -> list[list[Tensor]]:
    q, k, v = qkv(L, seed=seed, **options)
    return [[x[:, :, t : t + 1] for x in (q, k, v)] for t in range(L)]


def made(case: Case, **changes) -> weft.Attention:
    return case.make(max_length=MAX_LENGTH, **changes)


@sweep(causal=True, steps=True)
@pytest.mark.parametrize("grad", [False, True])
def test_a_reused_buffer_does_not_change_the_past(case, grad):
    attn, tokens = made(case), split(9)
    masks = [torch.tensor([t % 4 != 2, True]) for t in range(9)]
    with torch.set_grad_enabled(grad):
        state, expected = attn.start(2), []
        for token, mask in zip(tokens, masks, strict=True):
            out, state = attn.step(*token, state, mask)
            expected.append(out)
        state, buffers, flags = attn.start(2), [torch.empty_like(t) for t in tokens[0]], masks[0].clone()
        for token, mask, wanted in zip(tokens, masks, expected, strict=True):
            for buffer, t in zip(buffers, token, strict=True):
                buffer.copy_(t)
            flags.copy_(mask)
            out, state = attn.step(*buffers, state, flags)
            assert torch.equal(out, wanted)
            for buffer in buffers:
                buffer.fill_(float("nan"))
            flags.logical_not_()


@sweep(causal=True, steps=True)
def test_masked_tokens_may_be_nan(case):
    attn, tokens = made(case), split(9)
    state = clean = attn.start(2)
    for t, token in enumerate(tokens):
        mask = torch.tensor([t not in (0, 3, 4), True])
        out, state = attn.step(*(x.masked_fill(~mask[:, None, None, None], float("nan")) for x in token), state, mask)
        wanted, clean = attn.step(*token, clean, mask)
        assert out.isfinite().all()
        torch.testing.assert_close(out[mask], wanted[mask], **EXACT)


LAYERS = {
    "multihead": lambda: weft.MultiheadAttention(8, 2, causal=True),
    "mixed": lambda: weft.MixedAttention(8, 2, attentions=["full", "linear"], causal=True),
    "mssa": lambda: weft.MSSA(8, 2, causal=True),
    "cached": lambda: weft.CachedAttention(weft.MultiheadAttention(8, 2, causal=True), length=4, delayed=True),
    "block": lambda: weft.layers.EncoderBlock(8, weft.MultiheadAttention(8, 2, causal=True), mlp_dim=8),
}


@pytest.mark.filterwarnings("ignore:this cache was never written")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_masked_tokens_of_a_layer_may_be_nan(kind, grad):
    """They are zeroed on entry: otherwise they would reach the gradients of the weights."""
    layer = LAYERS[kind]().eval()
    state, mask = (layer.attention if kind == "block" else layer).start(2), torch.tensor([True, False])
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = torch.randn(2, 1, 8).masked_fill(~mask[:, None, None], float("nan"))
            out, state = layer.step(x, state, mask)
            assert out.isfinite().all()
    if grad:
        out.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@sweep(causal=True, steps=True)
def test_decoding_may_branch(case):
    """An earlier state stays valid or raises an error; deep copies and saved states are always valid."""
    attn, tokens = made(case), split(12)
    other = split(12, seed=7)
    with torch.no_grad():
        expected, _ = decode(attn, tokens)
        branched, _ = decode(attn, tokens[:6] + other[6:])
        _, state = decode(attn, tokens[:6])
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        kept, loaded = copy.deepcopy(state), torch.load(buffer, weights_only=False)
        torch.testing.assert_close(decode(attn, tokens[6:], state)[0], expected[:, :, 6:], **EXACT)
        for saved in (kept, loaded):
            torch.testing.assert_close(decode(attn, other[6:], saved)[0], branched[:, :, 6:], **EXACT)
        try:
            again, _ = decode(attn, other[6:], state)
        except ValueError as refusal:
            assert "deepcopy" in str(refusal)
        else:
            torch.testing.assert_close(again, branched[:, :, 6:], **EXACT)


@sweep(causal=True, steps=True)
@pytest.mark.parametrize("cast", [False, True])
def test_autocast_belongs_to_the_dtype_of_a_state(case, cast):
    """A state that started with or without it must go on in the same way."""
    attn, token = made(case).float(), [x.float() for x in split(1)[0]]
    with torch.autocast(token[0].device.type, torch.bfloat16, enabled=cast):
        _, state = attn.step(*token, attn.start(2))
        _, state = attn.step(*token, state)
    with (
        torch.autocast(token[0].device.type, torch.bfloat16, enabled=not cast),
        pytest.raises(TypeError, match="use the same dtype"),
    ):
        attn.step(*token, state)


@sweep(causal=True, steps=True)
def test_branches_after_a_differentiable_step_are_separate(case):
    """Without gradients both go on in place."""
    attn, tokens, other = made(case), split(20), split(20, seed=7)
    with torch.no_grad():
        expected, _ = decode(attn, tokens)
        branched, _ = decode(attn, tokens[:6] + other[6:])
        _, state = decode(attn, tokens[:6])
    _, branch = attn.step(*(x.clone().requires_grad_() for x in other[6]), state)
    _, state = attn.step(*(x.clone().requires_grad_() for x in tokens[6]), state)
    with torch.no_grad():
        for t in range(7, 20):
            out, state = attn.step(*tokens[t], state)
            torch.testing.assert_close(out, expected[:, :, t : t + 1], **EXACT)
            out, branch = attn.step(*other[t], branch)
            torch.testing.assert_close(out, branched[:, :, t : t + 1], **EXACT)


@sweep(causal=True, steps=True)
@pytest.mark.parametrize("first", [True, False])
def test_invalid_tokens_are_refused(case, first):
    attn = made(case)
    token = q, k, v = split(1, B=3)[0]
    state = attn.start(3) if first else attn.step(*token, attn.start(3))[1]
    D, H = HEAD_DIM, HEADS
    wrong = {
        "one row of three": [t[:1] for t in token],
        "v with one row": [q, k, v[:1]],
        "q with one row": [q[:1], k, v],
        "k with one head": [q, k[:, :1], v],
        "q with one head": [q[:, :1], k, v],
        "v with one head": [q, k, v[:, :1]],
        "all with one head": [t[:, :1] for t in token],
        "more heads": [noise(3, H + 1, 1, D)] * 3,
        "narrow heads": [t[..., :-1] for t in token],
        "a narrow v": [q, k, v[..., :1]],
        "two tokens": [torch.cat([t, t], 2) for t in token],
        "no heads": [t[:, 0] for t in token],
    }
    for what, bad in wrong.items():
        with pytest.raises(ValueError, match="one token"):
            attn.step(*bad, state)
            pytest.fail(what)
    with pytest.raises(TypeError, match="share a dtype"):
        attn.step(q, k.float(), v, state)
    with pytest.raises(TypeError, match="floating"):
        attn.step(q.long(), k.long(), v.long(), state)
    for mask in (torch.ones(1, dtype=torch.bool), torch.ones(3), [True] * 3):
        with pytest.raises(ValueError, match="must be boolean"):
            attn.step(*token, state, mask)
    with pytest.raises(TypeError, match=r"start\(\)"):
        attn.step(*token, None)
    attn.step(*token, state)


@sweep(causal=True, steps=True)
def test_a_state_keeps_its_dtype_and_its_mechanism(case):
    attn, tokens = made(case), split(2)
    _, state = attn.step(*tokens[0], attn.start(2))
    with pytest.raises(TypeError, match="float64"):
        attn.float().step(*(t.float() for t in tokens[1]), state)
    with pytest.raises(TypeError, match="float64"):
        attn.step(*(t.float() for t in tokens[0]), attn.start(2, dtype=torch.float64))
    name = "linear" if case.name == "full" else "full"
    other = weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, causal=True)
    with pytest.raises(ValueError, match=f"made for {case.name}"):
        other.step(*tokens[1], state)


@pytest.mark.parametrize(
    ("name", "option", "before", "after"),
    [("longformer", "window", 8, 4), ("local", "block_size", 8, 4), ("linear", "causal", True, False)],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_state_is_of_one_setting(name, option, before, after, grad):
    """Its buffers have the order of the earlier one."""
    attn = weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, **{"causal": True, option: before})
    tokens = split(11)
    with torch.set_grad_enabled(grad):
        _, state = decode(attn, tokens[:10])
        setattr(attn, option, after)
        with pytest.raises(ValueError, match=f"{option}={before}.*but this is .*{option}={after}"):
            attn.step(*tokens[10], state)


@pytest.mark.parametrize("mixture", ["average", "joint"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_state_is_of_one_setting_of_the_members(mixture, grad):
    attn = weft.make_attention(
        "combiner-mixture", heads=HEADS, head_dim=HEAD_DIM, causal=True, block_size=5, mixture=mixture
    )
    tokens = split(13)
    with torch.set_grad_enabled(grad):
        _, state = decode(attn, tokens[:12])
        attn.factorisations[0].block_size = 3
        with pytest.raises(ValueError, match="'block_size': 5.*but this is .*'block_size': 3"):
            attn.step(*tokens[12], state)


@pytest.mark.parametrize("name", ["combiner-routing", "combiner-mixture"])
@torch.no_grad()
def test_a_state_is_of_one_setting_of_the_clusters(name):
    options = {"clusters": 3, "capacity": 4}
    member = {"factorisations": [("combiner-routing", options)]}
    attn = weft.make_attention(
        name, heads=HEADS, head_dim=HEAD_DIM, causal=True, **(member if name == "combiner-mixture" else options)
    )
    tokens = split(13)
    _, state = decode(attn, tokens[:12])
    next(m for m in attn.modules() if isinstance(m, Clusters)).capacity = 3
    with pytest.raises(ValueError, match="capacity'?[=:] ?4.*but this is .*capacity'?[=:] ?3"):
        attn.step(*tokens[12], state)


@pytest.mark.parametrize("batch", [-1, 2.0, True, None])
def test_start_takes_a_number_of_rows(batch):
    with pytest.raises(ValueError, match="number of rows"):
        weft.make_attention("full", heads=2, head_dim=4, causal=True).start(batch)


@pytest.mark.parametrize("name", [n for n in weft.attentions() if "default" in weft.attention_info(n).length_dependent])
def test_sizes_that_follow_the_length_need_max_length(name):
    attn = weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, causal=True)
    if attn.info.steps:
        with pytest.raises(ValueError, match="(block_size|capacity) or max_length"):
            attn.start(1)


@sweep(causal=True, steps=True)
def test_dropout_while_stepping_is_refused(case):
    attn = made(case, dropout=0.5)
    token = split(1)[0]
    attn.step(*token, attn.start(2))
    with pytest.raises(ValueError, match=r"eval\(\)"):
        attn.train().step(*token, attn.start(2))


@sweep(causal=True, steps=True, bias=False)
def test_a_step_refuses_a_bias_that_it_cannot_use(case):
    attn = made(case)
    with pytest.raises(ValueError, match="position bias"):
        attn.step(*split(1)[0], attn.start(2), bias=weft.ALiBi(HEADS))


class Undeclared:
    """A custom bias without the attribute `heads`."""

    def __init__(self, heads: int):
        self.inner = weft.ALiBi(heads)

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        return self.inner(i, j)


@sweep(bias=True)
@pytest.mark.parametrize("heads, given", [(1, 4), (2, 1), (2, 4), (4, 2)])
def test_a_bias_needs_exactly_the_heads_of_the_mechanism(case, heads, given):
    attn = case.make(heads=heads, max_length=MAX_LENGTH)
    q, k, v = qkv(7, H=heads)
    token = [x[:, :, :1] for x in (q, k, v)]
    for kind in (weft.ALiBi, Undeclared):
        with pytest.raises(ValueError) as error:
            attn(q, k, v, bias=kind(given))
        assert f"{given}" in str(error.value) and f"{heads}" in str(error.value)
        attn(q, k, v, bias=kind(heads))
        if case.causal and case.info.steps:
            with pytest.raises(ValueError):
                attn.step(*token, attn.start(2), bias=kind(given))


@sweep(bias=True)
def test_a_bias_for_all_heads_must_have_one_head(case):
    attn, (q, k, v) = case.make(), qkv(7)

    class Shared:
        shared_heads = True

        def __call__(self, i: Tensor, j: Tensor) -> Tensor:
            return -(i - j).abs().double()

    def by_head(i: Tensor, j: Tensor) -> Tensor:
        values = Shared()(i, j)
        return values.expand(-1, HEADS, *values.shape[2:])

    torch.testing.assert_close(attn(q, k, v, bias=Shared()), attn(q, k, v, bias=by_head), **EXACT)


@sweep(bias=True)
def test_a_bias_on_a_grid_refuses_longer_sequences(case):
    attn, bias = case.make(), weft.RelativeBias2d(HEADS, 3, 3).double()
    attn(*qkv(9), bias=bias)
    with pytest.raises(ValueError, match="9 positions"):
        attn(*qkv(20), bias=bias)
