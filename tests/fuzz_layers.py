"""Guarantees of layers and models: padding, checkpointing, surgery, meta devices, compositions."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from fuzz_checks import EXACT, Skip, check
from fuzz_draw import DEVICE, Mechanism, assert_close, draw_mask, leaf, noise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

import weft
from weft.layers.memory_tokens import RecurrentMemory
from weft.models import LanguageModel, TextClassifier


def layer(r: Random, m: Mechanism, **changes: Any) -> weft.MultiheadAttention:
    """A multi-head layer around the mechanism, in float64."""
    torch.manual_seed(m.seed)
    options = dict(m.options)
    dim = m.heads * m.head_dim
    if m.name == "combiner-axial" and r.random() < 0.3:
        options.update(key_summary=r.choice(("proj", "wsum_proj")), input_dim=dim)
    groups = [n for n in range(1, m.heads + 1) if m.heads % n == 0]
    settings: dict[str, Any] = {
        "head_dim": m.head_dim,
        "attention": m.name,
        "causal": m.causal,
        "max_length": m.max_length,
        "dropout": m.dropout,
        "kv_heads": r.choice(groups),
        "qkv_bias": r.random() < 0.5,
        **options,
        **changes,
    }
    return weft.MultiheadAttention(dim, m.heads, **settings).to(DEVICE, torch.float64)


def cached(r: Random, m: Mechanism, inner: weft.MultiheadAttention) -> nn.Module:
    """Cached attention around the layer with random options; invalid options are drawn again."""
    for _ in range(10):
        options: dict[str, Any] = {"ratio": r.choice((0.5, 1.0)), "length": r.choice((None, 3, 8))}
        options["preset"] = r.choice(("paper", "paper", "authors"))
        if r.random() < 0.3:
            options["memory_attention"] = "same"
        if r.random() < 0.3 or options["preset"] == "authors":
            options["position"] = "none"
        if m.causal:
            options.update(delayed=True, eval_gate=False, memory="mean")
        if r.random() < 0.3:
            options["scope"] = "stream"
        try:
            return weft.CachedAttention(inner, **options).double()
        except ValueError:
            continue
    return weft.CachedAttention(inner, delayed=m.causal).double()


def length(r: Random, m: Mechanism, longest: int = 20) -> int:
    return m.length(r, longest)


@check
def padded_layers(r: Random, name: str) -> str:
    """NaN in padded x does not affect outputs, gradients of weights or state."""
    m = Mechanism.draw(r, name)
    attn: nn.Module = layer(r, m)
    wrapped = r.random() < 0.3
    if wrapped:
        attn = cached(r, m, attn)  # type: ignore[arg-type]
    attn.train(r.random() < 0.5)
    B, L = r.choice((1, 2, 3)), length(r, m)
    mask = draw_mask(r, B, L, must=True)
    assert mask is not None
    poison = r.choice((float("nan"), float("inf"), 1e30))
    words = f"{m} {'cached ' if wrapped else ''}{attn} x {(B, L)} mask {mask.int().tolist()} {poison}"
    x = noise(r, B, L, m.heads * m.head_dim)
    probe = noise(r, *x.shape).masked_fill(~mask[..., None], 0)
    results = []
    for given in (x, x.masked_fill(~mask[..., None], poison)):
        twin, z = copy.deepcopy(attn), leaf(given)
        torch.manual_seed(3)
        try:
            out = twin(z, mask).where(mask[..., None], 0)
        except ValueError as refusal:
            if not wrapped:
                raise
            return refused(refusal, words)
        grads = torch.autograd.grad(out, [z, *twin.parameters()], probe, allow_unused=True)
        results.append((out.detach(), grads, twin.state_dict()))
    (expected, theirs, after), (found, mine, after_too) = results
    assert_close(found, expected, EXACT, f"out: {words}")
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None), words
        if a is not None and b is not None:
            assert_close(a, b, EXACT, f"gradient: {words}", 1.0)
    for key, value in after.items():
        torch.testing.assert_close(after_too[key], value, msg=f"{key}: {words}")
    return words


@check
def layer_decoding(r: Random, name: str) -> str:
    """Layers with projections, rotary positions and caches decode like the parallel form."""
    info = weft.attention_info(name)
    if not (info.causal and info.steps):
        raise Skip
    m = Mechanism.draw(r, name, causal=True, bounded=True)
    if m.options.get("layout", "1d") != "1d":
        raise Skip
    attn: nn.Module = layer(r, m, rope=r.random() < 0.5 and m.head_dim % 2 == 0)
    B, L, dim = r.choice((0, 1, 2)), length(r, m), m.heads * m.head_dim
    words = f"{m} {attn} x {(B, L)}"
    x, buffer = noise(r, B, L, dim), noise(r, B, 1, dim)
    if r.random() < 0.3:
        attn = weft.CachedAttention(attn, delayed=True, length=r.choice((None, 5))).double().train()
        attn(noise(r, 2, L, dim))
    attn.eval()
    mask, outs = draw_mask(r, B, L), []
    with torch.no_grad():
        expected = attn(x, mask)
        state = attn.start(B)
        for t in range(L):
            out, state = attn.step(buffer.copy_(x[:, t : t + 1]), state, None if mask is None else mask[:, t])
            buffer.fill_(float("nan"))
            outs.append(out)
    real = torch.ones(B, L, 1, dtype=torch.bool) if mask is None else mask[..., None]
    assert_close(torch.cat(outs, 1).where(real, 0), expected.where(real, 0), EXACT, f"steps: {words}")
    return words


@check
def checkpointing(r: Random, name: str) -> str:
    """Activation checkpointing changes no gradient and no state, with several forwards before the backward."""
    m = Mechanism.draw(r, name, dropout=r.choice((0.0, 0.0, 0.2)))
    torch.manual_seed(m.seed)
    attn: nn.Module = layer(r, m)
    wrapped = r.random() < 0.5
    if wrapped:
        attn = cached(r, m, attn)  # type: ignore[arg-type]
    dim = m.heads * m.head_dim
    if r.random() < 0.6:
        attn = nn.Sequential(nn.LayerNorm(dim, dtype=torch.float64), attn)
    attn.train()
    B, L, flights = r.choice((1, 2, 3)), length(r, m), r.randint(1, 6)
    try:
        for _ in range(r.choice((0, 2))):  # steps that were made before
            attn(noise(r, B, L, dim))
    except ValueError as refusal:
        return refused(refusal, f"{m} {attn} x {(B, L)}")
    xs = [noise(r, B, L, dim) for _ in range(flights)]
    if r.random() < 0.4:  # the same batch again
        xs = [xs[0]] * flights
    probes = [noise(r, B, L, dim) for _ in range(flights)]
    order = r.choice(("together", "first first", "last first", "shuffled"))
    at = list(range(flights))
    if order == "last first":
        at.reverse()
    elif order == "shuffled":
        r.shuffle(at)
    reentrant, rounds = r.random() < 0.5, r.choice((1, 2))
    words = f"{m} {attn} x {(B, L)} {flights} in flight {order} reentrant {reentrant} rounds {rounds}"
    results = []
    for checkpointed in (False, True):
        module = copy.deepcopy(attn)
        torch.manual_seed(3)
        gradients: list[Tensor] = []
        for _ in range(rounds):
            leaves = [leaf(x) for x in xs]
            try:
                if checkpointed:
                    outs = [recompute(module, x, use_reentrant=reentrant) for x in leaves]
                else:
                    outs = [module(x) for x in leaves]
            except ValueError as refusal:  # a mechanism that cannot read a memory of another length
                return refused(refusal, words)
            try:
                if order == "together":
                    sum((out * probe).sum() for out, probe in zip(outs, probes, strict=True)).backward()
                else:
                    for i in at:
                        (outs[i] * probes[i]).sum().backward()
            except RuntimeError as refusal:
                if checkpointed and "activation checkpointing" in str(refusal):
                    return f"refused: {words}"
                raise
            gradients += [x.grad for x in leaves if x.grad is not None]
        gradients += [p.grad for p in module.parameters() if p.grad is not None]
        results.append((gradients, copy.deepcopy(module.state_dict())))
    (theirs, after), (mine, after_too) = results
    assert len(theirs) == len(mine), words
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b, EXACT, f"gradient: {words}", 1e-3)
    for key, value in after.items():
        torch.testing.assert_close(after_too[key], value, msg=f"{key}: {words}")
    return words


@check
def surgery(r: Random, name: str) -> str:
    """After swap and undo, a model equals one that was never swapped, with the same changes in between."""
    torch.manual_seed(0)
    heads, dim, dropout = r.choice((1, 2, 4)), 8, r.choice((0.0, 0.3))
    model: Any
    if r.random() < 0.5:
        block = nn.TransformerEncoderLayer(dim, heads, 16, dropout=dropout, batch_first=True)
        model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    else:
        before = r.choice([n for n in weft.attentions() if weft.attention_info(n).bidirectional])
        settings: dict[str, Any] = {"attention": before, "dropout": dropout, "max_length": 16}
        model = nn.Sequential(*(weft.MultiheadAttention(dim, heads, **settings) for _ in range(2)))
    model.train(r.random() < 0.5)
    twin = copy.deepcopy(model)
    if r.random() < 0.2:
        report = weft.cache(model)
    else:
        report = weft.swap(model, to=name, **({"max_length": 16} if weft.attention_info(name).needs_max_length else {}))
    done = []
    for _ in range(r.randint(0, 4)):
        what = r.choice(("train", "eval", "double", "float", "half"))
        done.append(what)
        for each in (model, twin):
            getattr(each, what)()
    words = f"{name} in {type(model).__name__} heads {heads} {done}"
    report.undo()
    for (key, a), (_, b) in zip(model.named_modules(), twin.named_modules(), strict=True):
        assert a.training == b.training, f"{key}.training is {a.training}: {words}"
    for key, b in twin.state_dict().items():
        a = model.state_dict()[key]
        assert a.dtype == b.dtype, f"{key} is {a.dtype} instead of {b.dtype}: {words}"
        # What was out of the model when it was rounded may have kept its digits.
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-2, msg=f"{key}: {words}")
    return words


@check
def meta(r: Random, name: str) -> str:
    """A model created on the meta device and loaded with weights gives the same outputs."""
    m = Mechanism.draw(r, name)
    if isinstance(m.options.get("layout"), tuple):
        raise Skip
    kind = r.choice(("layer", "cached", "language", "classifier"))
    choice = {
        "attention": m.name,
        "attention_options": m.options,
        "dim": 8,
        "heads": m.heads,
        "head_dim": m.head_dim,
        "layers": 1,
        "mlp_dim": 8,
    }
    positions = r.choice(("rope", "sinusoid", "learned", "none"))
    seed = r.randrange(1 << 30)

    def make() -> nn.Module:
        choices = Random(seed)
        torch.manual_seed(seed)
        if kind in ("layer", "cached"):
            inner = layer(choices, m)
            return inner if kind == "layer" else cached(choices, m, inner)
        if kind == "language":
            return LanguageModel(20, max_length=24, causal=m.causal, positions=positions, **choice)  # type: ignore[arg-type]
        return TextClassifier(20, 3, max_length=24, causal=m.causal, pooling="mean", positions="sinusoid", **choice)

    words = f"{m} {kind} {positions}"
    try:
        model = make().double().eval()
    except ValueError:  # rotary positions in odd heads, say
        raise Skip from None
    x: Tensor = torch.randint(1, 20, (2, 12))
    if kind in ("layer", "cached"):
        x = noise(r, 2, 12, m.heads * m.head_dim)
    with torch.device("meta"):
        other = _made_on_meta(make)
    other = other.double()
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        other = other.to_empty(device=DEVICE).eval()
    finally:
        torch.use_deterministic_algorithms(False)
    other.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        try:
            expected = model(x)
        except ValueError as refusal:
            return refused(refusal, words)
        assert_close(other(x), expected, EXACT, f"out: {words}")
    return words


def _made_on_meta(make: Any) -> nn.Module:
    """`layer` moves its result to DEVICE, which meta tensors do not support: skip the move."""
    to = nn.Module.to

    def stay(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        args = tuple(a for a in args if a != DEVICE)
        return to(self, *args, **kwargs)

    nn.Module.to = stay  # type: ignore[method-assign]
    try:
        return make()
    finally:
        nn.Module.to = to  # type: ignore[method-assign]


@check
def compositions(r: Random, name: str) -> str:
    """Models, mixed and cached layers and memories run with any mechanism, or raise an error at construction."""
    m = Mechanism.draw(r, name)
    if isinstance(m.options.get("layout"), tuple):
        m.options = {}
    kind = r.choice(("language", "language", "classifier", "mixed", "cached", "memory", "ensemble"))
    B, L = r.choice((0, 1, 2)), r.randint(1, 12)
    dim = m.heads * m.head_dim
    other = r.choice(weft.attentions())
    words = f"{m} {kind} with {other} x {(B, L)}"
    torch.manual_seed(m.seed)
    ids = torch.randint(1, 20, (B, L))
    attention: Any = r.choice((name, [name, other], [other, name]))
    settings: dict[str, Any] = {"dim": 8, "heads": 2, "head_dim": 4, "layers": 1, "mlp_dim": 8, "dropout": 0.0}
    settings.update(attention=attention, max_length=24)
    try:
        if kind == "language":
            positions = r.choice(("alibi", "alibi", "rope", "learned", "sinusoid", "none"))
            words += f" {attention} {positions}"
            model: Any = LanguageModel(20, causal=m.causal, positions=positions, **settings)
            names = [attention] if isinstance(attention, str) else attention
            able = all(weft.attention_info(n).bias for n in names)
            assert able or positions != "alibi", f"alibi was accepted: {words}"
            x: Any = (ids,)
        elif kind in ("classifier", "ensemble"):
            model = TextClassifier(20, 3, causal=m.causal, pooling="mean", **settings)
            if kind == "ensemble":
                if name != "subsampled":
                    raise Skip
                model = weft.ensemble(model, samples=2, progress=False)
            x = (ids,)
        elif kind == "mixed":
            model = weft.MixedAttention(8, 2, [name, other], causal=m.causal, max_length=24)
            x = (noise(r, B, L, 8).float(),)
        elif kind == "cached":
            model = cached(r, m, layer(r, m))
            x = (noise(r, B, L, dim),)
        else:
            if m.causal or not m.info.bias:
                raise Skip
            model = RecurrentMemory(layer(r, m), dim, 2, causal=r.random() < 0.5).double()
            x = (noise(r, B, L, dim),)
    except (ValueError, TypeError) as refusal:
        return refused(refusal, words)
    if isinstance(model, nn.Module):
        model.train(r.random() < 0.5)
    try:
        out = model(*x)
    except ValueError as refusal:
        if kind != "cached":
            raise
        return refused(refusal, words)
    out = out[0] if isinstance(out, tuple) else getattr(out, "mean", None) if kind == "ensemble" else out
    assert out.isfinite().all(), f"not finite: {words}"
    if out.requires_grad:
        out.square().sum().backward()
        for key, p in model.named_parameters():
            assert p.grad is None or p.grad.isfinite().all(), f"gradient of {key}: {words}"
    return words


def raised_by_weft(error: BaseException) -> bool:
    """Whether weft raised it explicitly, with a message."""
    tb = error.__traceback__
    assert tb is not None
    while tb.tb_next is not None:
        tb = tb.tb_next
    file = tb.tb_frame.f_code.co_filename
    line = linecache.getline(file, tb.tb_lineno).strip()
    return "/weft/" in file.replace("\\", "/") and line.startswith("raise") and len(str(error)) > 10


def refused(error: Exception, words: str) -> str:
    """Return a note if weft raised the error; otherwise raise it again."""
    if not raised_by_weft(error):
        raise error
    return f"refused: {words}"


def must_refuse(what: str, call: Callable[[], Any], words: str) -> str:
    try:
        call()
    except (ValueError, TypeError) as refusal:
        assert raised_by_weft(refusal), f"{what}: {type(refusal).__name__}, but not from weft: {refusal}: {words}"
        return f"refused: {what} {words}"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}: {words}") from error
    raise AssertionError(f"{what} was accepted: {words}")
