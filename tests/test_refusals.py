"""Invalid input raises an error that says what to do."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from promises import MAX_LENGTH, qkv, sweep

import weft
from weft.tasks.config import make_config


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="longformer"):
        weft.make_attention("longfomer", heads=2, head_dim=4)
    with pytest.raises(ValueError, match=r"weft\.attentions\(\)"):
        weft.attention_info("zzzzzz")


@pytest.mark.parametrize("name", weft.attentions())
def test_an_option_nothing_reads_is_refused(name):
    with pytest.raises(TypeError, match="no option 'speling'"):
        weft.make_attention(name, heads=2, head_dim=4, max_length=8, speling=1)


WRONG = {int: "8", float: "0.5", bool: "yes", str: 8, type(None): "8"}  # for a default of this type


@pytest.mark.parametrize("value", ["wrong type", 8.0])
@pytest.mark.parametrize("name", weft.attentions())
def test_an_option_of_another_type_is_refused_by_name(name, value):
    """Before it is compared with a number, or reaches a function of PyTorch in the first call."""
    for option, default in weft.attention_info(name).options.items():
        given = WRONG.get(type(default)) if value == "wrong type" else value
        if given is None or (type(default) is float and given == 8.0):
            continue
        with pytest.raises((TypeError, ValueError), match=rf"{option}\b.* must be .*got .*{given!r}"):
            weft.make_attention(name, heads=2, head_dim=4, max_length=8, **{option: given})


def test_numbers_of_numpy_are_options():
    attn = weft.make_attention("performer", heads=2, head_dim=4, features=np.int64(8), epsilon=np.float32(0.5))
    assert attn(*qkv(5, H=2, D=4)).shape == (2, 2, 5, 4)


def test_a_type_that_is_wrong_is_found_before_anything_is_built():
    model = torch.nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(TypeError, match="local: block_size must be an integer, got 8.0"):
        weft.swap(model, "local", block_size=8.0)
    with pytest.raises(ValueError, match="attention_options: local: block_size must be an integer, got 50.5"):
        make_config("digits", attention="local", attention_options='{"block_size": 50.5}')
    with pytest.raises(ValueError, match="max_length must be an integer of at least 1, or None, got '64'"):
        weft.make_attention("local", heads=2, head_dim=4, max_length="64")


CHANGES = [partial(weft.swap, to="local"), weft.cache, partial(weft.subsample, schedule="Sall-L2")]


@pytest.mark.parametrize("change", CHANGES)
def test_a_list_of_paths_does_not_choose_layers(change):
    """`subsample` read it as all layers."""
    model = torch.nn.Sequential(weft.MultiheadAttention(8, 2), weft.MultiheadAttention(8, 2))
    with pytest.raises(TypeError, match=r"where must be a pattern .*got \['0'\]; for a list of paths, use"):
        change(model, where=["0"])


@pytest.mark.parametrize("name", [n for n in weft.attentions() if not weft.attention_info(n).causal])
def test_what_cannot_be_causal_says_why_and_what_can(name):
    with pytest.raises(ValueError) as error:
        weft.make_attention(name, heads=2, head_dim=4, causal=True, max_length=8)
    named = [other for other in weft.attentions() if f"'{other}'" in str(error.value)]
    assert named and all(weft.attention_info(other).causal for other in named)


@pytest.mark.parametrize("name", [n for n in weft.attentions() if weft.attention_info(n).needs_max_length])
def test_parameters_per_position_need_max_length(name):
    with pytest.raises(ValueError, match="max_length"):
        weft.make_attention(name, heads=2, head_dim=4)


@sweep()
def test_a_length_over_max_length_is_refused(case):
    attn = case.make(max_length=MAX_LENGTH)
    with pytest.raises(ValueError, match="max_length=40"):
        attn(*qkv(MAX_LENGTH + 1))


@sweep()
def test_wrong_shapes_and_kinds(case):
    attn = case.make()
    q, k, v = qkv(5)
    mask = torch.ones(2, 5, dtype=torch.bool)
    for bad in ((q[0], k, v), (q[:, :1], k, v), (q[..., :3], k, v), (q, k[..., :3], v), (q, k, v[:, :, :4])):
        with pytest.raises(ValueError):
            attn(*bad)
    with pytest.raises(TypeError, match="floating"):
        attn(q.long(), k, v)
    with pytest.raises(TypeError, match="dtype"):
        attn(q, k.float(), v)
    for bad_mask in (mask.float(), mask.long(), [[True] * 5] * 2):
        with pytest.raises(TypeError, match="boolean"):
            attn(q, k, v, bad_mask)
    for bad_mask in (mask[:, :4], mask[:1], mask[:, None], torch.ones(5, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match="mask must be"):
            attn(q, k, v, bad_mask)
    with pytest.raises((TypeError, ValueError)):
        attn(q, k, v, bias=torch.zeros(5, 5))


@sweep(bias=False)
def test_a_bias_that_cannot_be_used_is_refused(case):
    with pytest.raises(ValueError, match="position bias"):
        case.make()(*qkv(5), bias=weft.ALiBi(2))


@sweep(steps=False, causal=True)
def test_no_steps_says_what_has_them(case):
    with pytest.raises(ValueError, match="full"):
        case.make().start(2)


def test_steps_refuse_misuse():
    q, k, v = qkv(1)
    attn = weft.make_attention("full", heads=2, head_dim=6)
    with pytest.raises(ValueError, match="causal=True"):
        attn.step(q, k, v, attn.start(2))
    attn = weft.make_attention("full", heads=2, head_dim=6, causal=True, max_length=1)
    _, state = attn.step(q, k, v, attn.start(2))
    with pytest.raises(ValueError, match="max_length"):
        attn.step(q, k, v, state)
    with pytest.raises(ValueError, match="one token"):
        attn.step(*qkv(2), attn.start(2))


def test_causal_needs_equal_lengths():
    attn = weft.make_attention("full", heads=2, head_dim=6, causal=True)
    with pytest.raises(ValueError, match="attn.step"):
        attn(qkv(3)[0], *qkv(5)[1:])


@pytest.mark.parametrize("bad", ({"heads": 0}, {"head_dim": 0}, {"dropout": 1.0}, {"dropout": -0.1}, {"max_length": 0}))
def test_bad_sizes(bad):
    with pytest.raises(ValueError):
        weft.make_attention("full", **{"heads": 2, "head_dim": 4, **bad})


def test_registering_twice_or_without_a_reason():
    with pytest.raises(ValueError, match="already"):
        weft.register("full", weft.Attention, naive=torch.add, paper="", cost="L")
    with pytest.raises(ValueError, match="not_causal"):
        weft.register("new", weft.Attention, naive=torch.add, paper="", cost="L", causal=False)
    assert "new" not in weft.attentions()


@pytest.mark.parametrize(("heads", "head_dim"), [("8", 4), (8.0, 4), (0, 4), (2, None)])
def test_sizes_that_are_no_positive_integers(heads, head_dim):
    with pytest.raises(ValueError, match="heads and head_dim must be integers of at least 1, got"):
        weft.make_attention("linear", heads=heads, head_dim=head_dim)


def test_swap_of_something_that_is_no_module():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
        weft.swap("gpt2", to="linear")


@pytest.mark.parametrize("name", weft.attentions())
def test_a_mechanism_shows_its_options(name):
    causal = weft.attention_info(name).causal
    shown = repr(weft.make_attention(name, heads=3, head_dim=5, causal=causal, max_length=70))
    assert f"heads=3, head_dim=5, causal={causal}, max_length=70" in shown


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@sweep()
def test_a_trace_is_refused_or_right_at_every_length(case):
    attn, x = case.make(dtype=torch.float32, max_length=40).eval(), qkv(20, dtype=torch.float32)
    if not attn.exports_any_length:
        with pytest.raises(RuntimeError, match="use torch.export"):
            torch.jit.trace(attn, x)
        return
    traced = torch.jit.trace(attn, [*x, torch.ones(2, 20, dtype=torch.bool)])
    for length in (1, 13, 40):
        x, mask = qkv(length, dtype=torch.float32), torch.rand(2, length) > 0.3
        torch.testing.assert_close(traced(*x, mask), attn(*x, mask))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_in_training_of_state_or_samples_is_refused():
    inner = weft.MultiheadAttention(12, 2)
    sampling = weft.MultiheadAttention(12, 2, attention="subsampled", layout="graph")
    for layer in (weft.CachedAttention(inner), weft.layers.AttentionCache(inner), sampling):
        with pytest.raises(RuntimeError, match="call eval.*use torch.export"):
            torch.jit.trace(layer, torch.randn(2, 9, 12))


def test_a_trace_of_decoding_is_refused():
    attn = weft.make_attention("full", heads=2, head_dim=6, causal=True)
    state = attn.start(2)
    with pytest.raises(RuntimeError, match="decoding with full.*use torch.export"):
        torch.jit.trace(lambda q, k, v: attn.step(q, k, v, state)[0], qkv(1))


def test_the_options_of_a_cache_are_all_named():
    with pytest.raises(TypeError, match="no option 'ratios'; its options: ratio, length, preset, update_from"):
        weft.CachedAttention(weft.MultiheadAttention(8, 2), ratios=0.5)
