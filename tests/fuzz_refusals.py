"""Invalid calls must raise an error of weft with a message, not one of torch."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from fuzz_checks import Skip, check
from fuzz_draw import Call, Mechanism, noise
from fuzz_layers import must_refuse

import weft


def _other(r: Random, n: int) -> int:
    """A number that is not n, at least 1."""
    return r.choice([x for x in (1, 2, 3, 4, 5, 8) if x != n])


def _spoil(r: Random, x: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor with one wrong property, and the name of the property."""
    B, H, L, D = x.shape
    kind = r.choice(("heads", "head_dim", "batch", "length", "dimensions", "dtype", "kind"))
    if kind == "heads":
        return kind, noise(r, B, _other(r, H), L, D)
    if kind == "head_dim":
        return kind, noise(r, B, H, L, _other(r, D))
    if kind == "batch":
        return kind, noise(r, _other(r, B), H, L, D)
    if kind == "length":
        return kind, noise(r, B, H, _other(r, L) if r.random() < 0.5 else L + 1, D)
    if kind == "dimensions":
        return kind, r.choice((x[0], x[None], x.flatten(2)))
    if kind == "dtype":
        return kind, x.to(r.choice((torch.float32, torch.float16, torch.bfloat16)))
    return kind, x.to(r.choice((torch.long, torch.bool, torch.complex128)))


@check
def wrong_calls(r: Random, name: str) -> str:
    """One of q, k, v, mask and bias is invalid."""
    m = Mechanism.draw(r, name)
    call = Call.draw(r, m, may_be_empty=False, cross=False)
    attn = m.make().train(r.random() < 0.3)
    given: dict[str, Any] = {"q": call.q, "k": call.k, "v": call.v, "mask": call.mask, "bias": None}
    which = r.choice(("q", "k", "v", "v", "mask", "bias"))
    B, H, L, D = call.q.shape
    if which == "mask":
        mask = torch.ones(B, L, dtype=torch.bool)
        shapes = [(L,), (B, 1, L), (B, L, 1), (B, 1, 1, L), (L, L), (_other(r, B), L), (B, _other(r, L)), (1, 1)]
        wrong = [torch.ones(s, dtype=torch.bool) for s in shapes if s != (B, L)]
        given["mask"] = bad = r.choice([*wrong, mask.long(), mask.double(), mask.tolist(), "mask"])
        what = f"mask {bad.dtype, tuple(bad.shape)}" if isinstance(bad, torch.Tensor) else f"mask {bad!r}"
    elif which == "bias":
        if m.info.bias:
            n = _other(r, H)
            bad = r.choice((weft.ALiBi(n), weft.RelativeBias(n, 3).double(), lambda i, j: torch.zeros(7, 1, 1, 1), "b"))
            if callable(bad) and not isinstance(bad, torch.nn.Module) and B == 7:
                raise Skip
        else:
            bad = weft.ALiBi(H)
        given["bias"] = bad
        what = f"bias {bad} of {getattr(bad, 'heads', '?')} heads"
    else:
        kind, given[which] = _spoil(r, given[which])
        if kind in ("head_dim",) and which == "v":
            raise Skip  # values may be of another width
        if kind == "length" and m.info.cross and not m.causal and which == "q":
            raise Skip
        what = f"{which} {given[which].dtype} {tuple(given[which].shape)}, wrong {kind},"
    words = str(call)
    with torch.set_grad_enabled(r.random() < 0.5):
        must_refuse(what, lambda: attn(given["q"], given["k"], given["v"], given["mask"], given["bias"]), words)
    return f"{what} {words}"


@check
def wrong_steps(r: Random, name: str) -> str:
    """A step that does not match the mechanism, its state or start(batch)."""
    info = weft.attention_info(name)
    if not (info.causal and info.steps):
        raise Skip
    m = Mechanism.draw(r, name, causal=True, bounded=True)
    if m.options.get("layout", "1d") != "1d":
        raise Skip
    attn = m.make()
    B, H, D = r.choice((1, 2, 3)), m.heads, m.head_dim
    state = attn.start(B)
    token: dict[str, Any] = {x: noise(r, B, H, 1, D) for x in "qkv"}
    before = r.choice((0, 0, 1, 3))
    for _ in range(before):
        _, state = attn.step(token["q"], token["k"], token["v"], state)
    mask = bias = None
    which = r.choice(("q", "k", "v", "all", "mask", "bias", "dropout"))
    if which == "all":
        wrong = r.choice(("batch", "heads", "head_dim", "length"))
        size = {"batch": B, "heads": H, "length": 1, "head_dim": D}
        size[wrong] = _other(r, size[wrong])
        token = {x: noise(r, size["batch"], size["heads"], size["length"], size["head_dim"]) for x in "qkv"}
        what = f"q, k, v {tuple(token['q'].shape)} with start({B})"
    elif which == "dropout":
        attn.dropout = 0.2
        attn.train()
        what = "dropout in training"
    elif which == "mask":
        shapes = [(B, 1), (_other(r, B),), (), (B, 1, 1, 1)]
        mask = r.choice([*(torch.ones(s, dtype=torch.bool) for s in shapes), torch.ones(B), [True] * B])
        what = f"mask {mask}"
    elif which == "bias":
        bias = weft.ALiBi(_other(r, H) if info.bias else H)
        what = f"bias of {bias.heads} heads"
    else:
        kind, token[which] = _spoil(r, token[which])
        if kind == "head_dim" and which == "v":
            raise Skip
        what = f"{which} {token[which].dtype} {tuple(token[which].shape)}, wrong {kind},"
    words = f"{m} batch {B} after {before} steps"
    with torch.set_grad_enabled(r.random() < 0.5):
        must_refuse(what, lambda: attn.step(token["q"], token["k"], token["v"], state, mask, bias), words)
    return f"{what} {words}"


@check
def wrong_options(r: Random, name: str) -> str:
    """An option with an invalid value."""
    info = weft.attention_info(name)
    causal = not info.bidirectional or (info.causal and r.random() < 0.5)
    sizes: dict[str, Any] = {"heads": 2, "head_dim": 4, "causal": causal, "max_length": 16}
    numbers = [key for key, value in info.options.items() if isinstance(value, int) and not isinstance(value, bool)]
    numbers += [key for key, value in info.options.items() if value is None]
    numbers = [key for key in numbers if key != "seed"]
    names = [key for key, value in info.options.items() if isinstance(value, str)]
    where = r.choice(("heads", "head_dim", "max_length", "dropout", *numbers, *numbers, *names, *names))
    if where in names:
        value = r.choice(("speling", "", 3))
    elif where == "dropout":
        value = r.choice((1.0, -0.1, 7, float("nan")))
    else:
        value = r.choice((0, -1)) if where in sizes else r.choice((-1, -5))
    words = f"{name}({where}={value!r})"
    must_refuse(words, lambda: weft.make_attention(name, **{**sizes, where: value}), "")
    return words
