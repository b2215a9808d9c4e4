"""Guarantees of the mechanisms. Each check draws a random call and compares two ways to compute it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from fuzz_draw import (
    DEVICE,
    LAYOUTS,
    Call,
    Found,
    Mechanism,
    assert_close,
    laid_out,
    leaf,
    noise,
    run,
    twin,
)
from torch import Tensor

import weft

EXACT = 1e-9
TOLERANCE = {torch.float64: EXACT, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}

Check = Callable[[Random, str], str]  # what was called, in words; AssertionError where a promise is broken
CHECKS: dict[str, Check] = {}


class Skip(Exception):
    """The check does not apply to the mechanism."""


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def no_change(attn: torch.nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in attn.state_dict().items()}


def compare_gradients(found: Found, expected: Found, tolerance: float, words: str, scale: Tensor | float) -> None:
    """Compare all gradients, relative to their common norm or `scale`, whichever is larger."""
    sizes = [g.norm() for g in expected.grads if g is not None]
    scale = max(float(scale), 0.3 * torch.stack(sizes).norm().item()) if sizes else scale
    for mine, theirs in zip(found.grads, expected.grads, strict=True):
        if mine is None or theirs is None:
            none = theirs if mine is None else mine
            assert none is None or not none.any(), f"one has a gradient, the other none: {words}"
        else:
            assert_close(mine, theirs, tolerance, f"gradient: {words}", scale)


@check
def precision(r: Random, name: str) -> str:
    """Any layout, dtype, autocast and gradient mode: the float64 result of a contiguous call, in the right dtype."""
    m = Mechanism.draw(r, name)
    call = Call.draw(r, m)
    dtype = r.choice((torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16))
    lower = r.choice((None, None, torch.bfloat16, torch.float16)) if dtype != torch.float64 else None
    grad, train = r.choice(("grad", "grad", "no_grad", "inference")), r.random() < 0.3
    layouts = [r.choice(LAYOUTS) for _ in range(3)]
    words = f"{call} {dtype} autocast {lower} {grad} train {train} {layouts}"
    # Numbers that every dtype in play can hold: what is compared is the arithmetic.
    inputs = [
        laid_out(x.to(lower or dtype).to(dtype), layout)
        for x, layout in zip((call.q, call.k, call.v), layouts, strict=True)
    ]
    if r.random() < 0.1 and call.q.shape == call.k.shape:
        inputs = [inputs[0]] * 3
    wanted = [r.random() < 0.8 for _ in inputs]
    module_dtype = torch.float32 if lower else dtype
    attn = m.make().to(module_dtype).train(train)
    bias, mask = twin(call.bias, module_dtype), call.mask
    exact, exact_bias = twin(attn, torch.float64), twin(bias, torch.float64)
    before = [x.clone() for x in inputs]
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    context = contextlib.ExitStack()
    context.enter_context(modes[grad]())
    if lower:
        context.enter_context(torch.autocast(DEVICE, lower))
    given = [leaf(x, w) for x, w in zip(inputs, wanted, strict=True)] if grad == "grad" else inputs
    with_grad = call.probe if grad == "grad" else None
    found = run(attn, given, mask, bias, with_grad, real=call.real, context=context)
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y), f"an input was changed: {words}"
    wide = [leaf(x.double().contiguous(), w) for x, w in zip(inputs, wanted, strict=True)]
    expected = run(exact, wide, mask, exact_bias, with_grad, real=call.real)
    assert found.out.dtype == (lower or dtype), f"out is {found.out.dtype}: {words}"
    assert found.out.isfinite().all(), f"out is not finite: {words}"
    narrow = min((lower or dtype, dtype), key=lambda t: -TOLERANCE[t])
    if m.sorts and (narrow != torch.float64 and dtype in (torch.bfloat16, torch.float16)):
        return words
    tolerance = TOLERANCE[narrow]
    size = expected.out.numel() ** 0.5 * call.v.std().nan_to_num() * 0.3 if call.v.numel() else 0.0
    assert_close(found.out.where(call.real, 0), expected.out.where(call.real, 0), tolerance, f"out: {words}", size)
    compare_gradients(found, expected, 5 * tolerance, words, 0.1 * call.probe.norm() * (size > 0))
    return words


@check
def modes(r: Random, name: str) -> str:
    """Neither recording a graph nor calling `weights` changes the output or the state."""
    m = Mechanism.draw(r, name, dropout=r.choice((0.0, 0.0, 0.3)))
    call = Call.draw(r, m)
    train = r.random() < 0.5
    words = f"{call} train {train}"
    attn = m.make().train(train)
    other, looked = copy.deepcopy(attn), copy.deepcopy(attn)
    inputs = [laid_out(x, r.choice(LAYOUTS)) for x in (call.q, call.k, call.v)]
    before = no_change(looked)
    looked.weights(*inputs, call.mask, call.bias)
    for key, x in looked.state_dict().items():
        assert torch.equal(x, before[key]), f"weights() changed {key}: {words}"
    out = run(attn, [leaf(x) for x in inputs], call.mask, call.bias).out.detach()
    with torch.no_grad():
        again = run(other, inputs, call.mask, call.bias).out
    if not (train and m.dropout):  # random numbers are drawn in another order
        assert_close(again, out, EXACT, f"without a graph: {words}")
        seen = run(looked, inputs, call.mask, call.bias).out
        assert_close(seen, out, EXACT, f"after weights(): {words}")
    for key, x in other.state_dict().items():
        torch.testing.assert_close(x, attn.state_dict()[key], msg=f"{key} without a graph: {words}")
    return words


@check
def weights(r: Random, name: str) -> str:
    """weights @ v is the output, and illegal pairs have no weight."""
    m = Mechanism.draw(r, name)
    call = Call.draw(r, m)
    inputs = [call.q, call.k, call.v]
    attn = m.make()
    w = attn.weights(*inputs, call.mask, call.bias)
    out = attn(*inputs, call.mask, call.bias)
    assert_close(w @ call.v, out, EXACT, f"weights @ v: {call}")
    if call.mask is not None:
        assert not w.masked_select(~call.mask[:, None, None]).any(), f"a masked key has weight: {call}"
    if m.causal:
        assert not w.triu(1).any(), f"the future has weight: {call}"
    return str(call)


@check
def rows(r: Random, name: str) -> str:
    """A row's output does not depend on the others of its batch."""
    m = Mechanism.draw(r, name)
    call = Call.draw(r, m, may_be_empty=False)
    attn = m.make()
    together = attn(call.q, call.k, call.v, call.mask, call.bias)
    for b in range(call.q.shape[0]):
        one = slice(b, b + 1)
        mask = None if call.mask is None else call.mask[one]
        alone = attn(call.q[one], call.k[one], call.v[one], mask, call.bias)
        assert_close(alone.where(call.real[one], 0), together[one].where(call.real[one], 0), EXACT, f"row {b}: {call}")
    return str(call)


POISON = (float("nan"), float("inf"), float("-inf"), 1e30, 1e4)


@check
def masked(r: Random, name: str) -> str:
    """The values of masked tokens, including NaN, do not affect outputs and gradients of real ones."""
    m = Mechanism.draw(r, name, dropout=r.choice((0.0, 0.0, 0.2)))
    call = Call.draw(r, m, masked=True)
    poison, train = [r.choice(POISON) for _ in range(3)], r.random() < 0.4
    words = f"{call} {poison} train {train}"
    assert call.mask is not None
    hidden = ~call.mask[:, None, :, None]
    own = ~call.real  # queries that are masked as well
    attn = m.make().train(train)
    other = copy.deepcopy(attn)
    clean = [leaf(x) for x in (call.q, call.k, call.v)]
    dirty = [
        leaf(x.masked_fill(hide, p))
        for x, hide, p in zip((call.q, call.k, call.v), (own, hidden, hidden), poison, strict=True)
    ]
    # What random numbers a masked token draws, and what a sampler makes of them, must be the same as well.
    expected = run(attn, clean, call.mask, call.bias, call.probe, real=call.real)
    found = run(other, dirty, call.mask, call.bias, call.probe, real=call.real)
    assert found.out.isfinite().all(), f"out is not finite: {words}"
    assert_close(found.out.where(call.real, 0), expected.out.where(call.real, 0), EXACT, f"out: {words}")
    empty = ~call.mask.any(1)
    assert not found.out[empty].any(), f"a row without tokens is not zero: {words}"
    compare_gradients(found, expected, EXACT, words, call.probe.norm())
    for gradient, hide in zip(found.grads[:3], (own, hidden, hidden), strict=False):
        if gradient is not None:
            assert not gradient.masked_select(hide).any(), f"a masked token has a gradient: {words}"
    for key, x in other.state_dict().items():
        torch.testing.assert_close(x, attn.state_dict()[key], msg=f"{key} after masked tokens: {words}")
    return words


def draw_segments(r: Random, B: int, L: int) -> Tensor:
    """Documents of random lengths, many of one token, and padding between some of them."""
    rows = []
    for _ in range(B):
        row: list[int] = []
        while len(row) < L:
            number = 0 if r.random() < 0.3 else len(row) + 1
            row += [number] * r.choice((1, 2, r.randint(1, 20), L))
        rows.append(row[:L])
    return torch.tensor(rows, dtype=r.choice((torch.int64, torch.int32))).view(B, L)


@check
def packed(r: Random, name: str) -> str:
    """Outputs and gradients of a packed document are those of the document alone, whatever is in the padding."""
    m = Mechanism.draw(r, name)
    if isinstance(m.options.get("layout"), tuple):  # a single length
        raise Skip
    call = Call.draw(r, m, cross=False)
    segments, train, poison = draw_segments(r, *call.q.shape[::2]), r.random() < 0.3, r.choice((0.0, *POISON))
    train = train and m.options.get("layout") != "graph"  # it drops other sources in each document
    words = f"{call} train {train} {poison} segments {segments.tolist()}"
    attn = m.make().train(train)
    before = no_change(attn)
    real = call.real & (segments > 0)[:, None, :, None]
    inputs = [leaf(x.masked_fill(~real, poison)) for x in (call.q, call.k, call.v)]
    found = run(attn, inputs, call.mask, call.bias, call.probe, real=real, segments=segments)
    assert found.out.isfinite().all(), f"out is not finite: {words}"
    assert not found.out.masked_select((segments == 0)[:, None, :, None]).any(), f"padding is not zero: {words}"
    out, sums = torch.zeros_like(found.out), [None if g is None else torch.zeros_like(g) for g in found.grads]
    for b, numbers in enumerate(segments.tolist()):
        for number in {n for n in numbers if n}:
            first = numbers.index(number)
            at = slice(b, b + 1), slice(None), slice(first, first + numbers.count(number))
            attn.load_state_dict(before)  # training moves clusters
            mask = None if call.mask is None else call.mask[at[::2]]
            alone = run(attn, [leaf(x[at]) for x in inputs], mask, call.bias, call.probe[at], real=real[at])
            out[at] = alone.out
            for i, (total, part) in enumerate(zip(sums, alone.grads, strict=True)):
                if total is not None and part is not None:
                    (total[at] if i < 3 else total).add_(part)
    assert_close(found.out.where(real, 0), out.where(real, 0), EXACT, f"out: {words}")
    if not call.ties:
        compare_gradients(found, Found(out, sums), 1e-7, words, call.probe.norm())
    return words


@check
def causal(r: Random, name: str) -> str:
    """The future has no effect and no gradient."""
    if not weft.attention_info(name).causal:
        raise Skip
    m = Mechanism.draw(r, name, causal=True, dropout=r.choice((0.0, 0.0, 0.2)))
    if m.sorts:  # the future changes how many random numbers are drawn, and with them which probabilities are dropped
        m.dropout = 0.0
    call = Call.draw(r, m)
    L, train = call.q.shape[2], r.random() < 0.5
    at = r.randrange(L)
    words = f"{call} train {train} at {at}"
    attn = m.make().train(train)
    other = copy.deepcopy(attn)
    probe = call.probe.clone()
    probe[:, :, at + 1 :] = 0
    found = run(attn, [leaf(x) for x in (call.q, call.k, call.v)], call.mask, call.bias, probe, real=call.real)
    filling = r.choice((50.0, 1e4, 0.0, float("nan"), float("inf")))
    changed = [
        torch.cat([x[:, :, : at + 1], filling * noise(r, *x[:, :, at + 1 :].shape)], 2)
        for x in (call.q, call.k, call.v)
    ]
    again = run(other, changed, call.mask, call.bias)
    past = call.real[:, :, : at + 1]
    mine, theirs = (x.out[:, :, : at + 1].where(past, 0) for x in (again, found))
    if filling * 0 != 0:  # NaN and inf may make an earlier output NaN, and nothing else
        mine = mine.where(mine.isfinite(), theirs)
    assert_close(mine, theirs, EXACT, f"past before {filling}: {words}")
    for gradient in found.grads[:3]:
        if gradient is not None:
            assert not gradient[:, :, at + 1 :].any(), f"the future has a gradient: {words}"
    return words


@check
def gradient(r: Random, name: str) -> str:
    """Gradients equal finite differences in a random direction, with heads of realistic size."""
    m = Mechanism.draw(r, name, wide=True)
    call = Call.draw(r, m, longest=20, may_be_empty=False, scale=r.choice((0.5, 1.0, 1.5, 2.0)))
    train = r.random() < 0.3
    words = f"{call} train {train}"
    attn = m.make().train(train)
    inputs = [leaf(x + 1e-3 * noise(r, *x.shape)) for x in (call.q, call.k, call.v)]  # where a maximum has no tie
    state = copy.deepcopy(attn.state_dict())
    found = run(attn, inputs, call.mask, call.bias, call.probe, real=call.real)
    parameters = [*attn.parameters(), *(call.bias.parameters() if call.bias is not None else ())]
    probe = call.probe.where(call.real, 0)
    for n, (x, g) in enumerate(zip([*inputs, *parameters], found.grads, strict=True)):
        assert g is None or g.isfinite().all(), f"gradient {n} is not finite: {words}"
        step = noise(r, *x.shape).where(x.detach().isfinite(), 0)
        step = step / step.norm().clamp(min=1e-30)

        def slope(h: float, x: Tensor = x, step: Tensor = step) -> float:
            ends, kept = [], x.detach().clone()
            for sign in (1, -1):
                attn.load_state_dict(state)
                with torch.no_grad():
                    x.add_(step, alpha=sign * h)
                    ends.append((run(attn, inputs, call.mask, call.bias).out * probe).sum().item())
                    x.copy_(kept)
            return (ends[0] - ends[1]) / (2 * h)

        mine, size = (0.0, 0.0) if g is None else ((g * step).sum().item(), g.norm().item())
        wrong = True
        for h in (1e-5, 1e-6, 1e-7):  # a step across an edge (another bucket, another maximum) is no derivative
            if wrong:
                measured = slope(h)
                wrong = abs(measured - mine) > 1e-3 * size + 1e-5
        assert not wrong, f"gradient {n} is {mine:.6g}, by differences {measured:.6g}: {words}"
    return words


@check
def padding(r: Random, name: str) -> str:
    """Masked tokens on the right change nothing."""
    m = Mechanism.draw(r, name, fixed=True)
    why = m.info.length_dependent
    if why and "default" not in why and not (m.causal and "bidirectional" in why):
        raise Skip
    if m.name == "combiner-mixture" and not m.causal and "combiner-logsparse" in m.options.get("factorisations", ()):
        raise Skip
    if isinstance(m.options.get("layout"), tuple):
        raise Skip
    call = Call.draw(r, m, bias=r.choice(("none", "alibi", "relative")), cross=False)
    B, _, L, _ = call.q.shape
    extra = r.randint(1, 20)
    attn = m.make()
    longer = [torch.cat([x, noise(r, *x.shape[:2], extra, x.shape[3])], 2) for x in (call.q, call.k, call.v)]
    mask = torch.ones(B, L, dtype=torch.bool) if call.mask is None else call.mask
    found = attn(*longer, torch.nn.functional.pad(mask, (0, extra)), call.bias)[:, :, :L]
    expected = attn(call.q, call.k, call.v, call.mask, call.bias)
    assert_close(found.where(call.real, 0), expected.where(call.real, 0), EXACT, f"{extra} more: {call}")
    return f"{call} {extra} more"


@check
def biases(r: Random, name: str) -> str:
    """A bias is added to the logit of each pair, -inf included: weights are the plain ones times its exponential."""
    if not weft.attention_info(name).bias:
        raise Skip
    m = Mechanism.draw(r, name)
    if "hashes" in m.options or name == "reformer":
        m.options["hashes"] = 1  # each round is normalised for itself
    call = Call.draw(r, m, bias=r.choice(("alibi", "relative", "table", "root", "holes", "closed rows")), cross=False)
    assert call.bias is not None
    attn = m.make()
    L = call.q.shape[2]
    i = torch.arange(L)
    plain = attn.weights(call.q, call.k, call.v, call.mask)
    found = attn.weights(call.q, call.k, call.v, call.mask, call.bias)
    shift = call.bias(i.view(1, 1, L, 1), i.view(1, 1, 1, L)).detach()
    if name == "reformer" and shift.isinf().any():
        raise Skip  # a token sees itself where it sees nothing else
    expected = plain * (shift - shift.amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
    expected = expected / expected.sum(-1, keepdim=True).clamp(min=1e-300)
    assert_close(found.where(call.real, 0), expected.where(call.real, 0), 1e-7, f"weights: {call}")
    return str(call)


@check
def decoding(r: Random, name: str) -> str:
    """Decoding equals the parallel form, with input buffers that are reused for every token, in any mode."""
    info = weft.attention_info(name)
    if not info.steps:
        raise Skip
    m = Mechanism.draw(r, name, causal=True, bounded=True)
    if m.options.get("layout", "1d") != "1d":
        m.options["layout"] = "1d"
        m.options["windows"] = 2
    call = Call.draw(r, m, longest=24)
    dtype = r.choice((torch.float64, torch.float64, torch.float32, torch.float16))
    lower = r.choice((None, None, torch.bfloat16)) if dtype == torch.float32 else None
    mode = r.choice(("no_grad", "no_grad", "inference", "grad", "backward"))
    layout, branch = r.choice(LAYOUTS), r.choice((None, None, r.randrange(24)))
    prompt, room = r.choice((0, 0, r.randrange(24))), r.choice((None, None, 24))
    words = f"{call} {dtype} autocast {lower} {mode} {layout} branch at {branch} prompt {prompt} max_length {room}"
    attn = m.make().to(torch.float32 if lower else dtype)
    inputs = [laid_out(x.to(lower or dtype).to(dtype), layout) for x in (call.q, call.k, call.v)]
    bias = twin(call.bias, torch.float32 if lower else dtype)
    B, _, L, _ = inputs[0].shape
    backward = mode == "backward"
    if backward:
        inputs = [leaf(x) for x in inputs]
    context = contextlib.ExitStack()
    context.enter_context({"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)())
    if lower:
        context.enter_context(torch.autocast(DEVICE, lower))
    outs = []
    with context:
        expected = attn(*inputs, call.mask, bias)
        buffers = [laid_out(torch.empty_like(x[:, :, :1]), layout) for x in inputs]
        if "one" in layout:
            buffers = [x.contiguous() for x in buffers]
        row = torch.ones(B, dtype=torch.bool)
        prompt = min(prompt, L)
        if room is not None:  # all steps return the same state
            room, branch = min(room, attn.max_length or room), None
        state = attn.start(B, max_length=room)
        if prompt:
            given = None if call.mask is None else call.mask[:, :prompt]
            out, state = attn.prefill(*(x[:, :, :prompt] for x in inputs), given, bias, state=state)
            outs.append(out)
        for t in range(prompt, L):
            tokens = [x[:, :, t : t + 1] for x in inputs]
            if not backward:
                for buffer, token in zip(buffers, tokens, strict=True):
                    buffer.copy_(token)
                tokens = buffers
            if call.mask is not None:
                row = call.mask[:, t] if backward else row.copy_(call.mask[:, t])
            if t == branch:  # another continuation, thrown away
                attn.step(*(torch.zeros_like(x) for x in tokens), state, None, bias)
            try:
                out, state = attn.step(*tokens, state, None if call.mask is None else row, bias)
            except ValueError as refusal:
                if t == branch and "deepcopy" in str(refusal):
                    return f"refused: {words}"
                raise
            outs.append(out)
            assert out.dtype == expected.dtype, f"step {t} is {out.dtype}, in parallel {expected.dtype}: {words}"
            if not backward:
                for buffer in buffers:
                    buffer.fill_(float("nan"))
        together = torch.cat(outs, 2)
    tolerance = TOLERANCE[lower or dtype]
    if m.sorts and (lower or dtype) != torch.float64:
        return words
    size = together.numel() ** 0.5 * 0.3
    assert_close(together.where(call.real, 0), expected.where(call.real, 0), tolerance, f"steps: {words}", size)
    if backward and together.requires_grad and not call.ties:
        probe = call.probe.to(expected.dtype).where(call.real, 0)
        mine = torch.autograd.grad(together, inputs, probe, allow_unused=True)
        theirs = torch.autograd.grad(expected, inputs, probe, allow_unused=True)
        scale = torch.stack([g.double().norm() for g in theirs if g is not None]).norm()
        for a, b in zip(mine, theirs, strict=True):
            if a is not None and b is not None:
                assert_close(a, b, 10 * tolerance, f"gradient of steps: {words}", scale)
    return words


class Specification(torch.nn.Module):
    """A mechanism that computes its naive function."""

    def __init__(self, attn: weft.Attention):
        super().__init__()
        self.attn = attn

    def forward(self, *args: Any) -> Tensor:
        return self.attn.info.naive(self.attn, *args)


@check
def reference(r: Random, name: str) -> str:
    """The dense specification, output and gradients, in eval and in training."""
    m = Mechanism.draw(r, name)
    call = Call.draw(r, m)
    train = r.random() < 0.3
    words = f"{call} train {train}"
    attn = m.make().train(train)
    inputs = [leaf(x) for x in (call.q, call.k, call.v)]
    found = run(attn, inputs, call.mask, call.bias, call.probe, real=call.real)
    expected = run(Specification(attn), inputs, call.mask, call.bias, call.probe, real=call.real)
    assert_close(found.out.where(call.real, 0), expected.out.where(call.real, 0), EXACT, f"naive: {words}")
    if not call.ties:
        compare_gradients(found, expected, 1e-7, words, call.probe.norm())
    return words


@check
def large(r: Random, name: str) -> str:
    """Inputs near the end of float16's range give finite outputs."""
    m = Mechanism.draw(r, name)
    call = Call.draw(r, m, bias="none", longest=150)
    keys = r.choice((100.0, 1500.0, 10000.0))
    q = (call.q / keys * r.choice((0.1, 1.0))).half()  # logits stay small: only sums and products could overflow
    k = ((call.k.sign() if r.random() < 0.5 else torch.ones_like(call.k)) * keys).half()
    v = (call.v * 100).half()
    dtype = r.choice((torch.float16, torch.float32))
    attn = m.make().to(dtype)
    words = f"{call} keys {keys} {dtype}"
    context = torch.autocast(DEVICE, torch.float16) if dtype == torch.float32 else contextlib.nullcontext()
    with context, torch.set_grad_enabled(r.random() < 0.5):
        out = attn(q.to(dtype), k.to(dtype), v.to(dtype), call.mask)
    exact = twin(attn, torch.float64)(q.double(), k.double(), v.double(), call.mask)
    if exact.isfinite().all() and (exact.abs().max() if exact.numel() else 0) < 6e4:
        assert out.isfinite().all(), f"out is not finite: {words}"
    return words


@check
def backends(r: Random, name: str) -> str:
    """Kernels agree with the plain version, in outputs and gradients. On a GPU only."""
    if DEVICE != "cuda" or "triton" not in weft.attention_info(name).backends:
        raise Skip
    m = Mechanism.draw(r, name, wide=r.random() < 0.7)
    backend = r.choice(("auto", "triton"))
    try:
        attn = m.make(backend=backend)
    except ValueError:
        raise Skip from None
    call = Call.draw(r, m, longest=400, bias=r.choice(("none", "alibi")), may_be_empty=False)
    dtype = r.choice((torch.float32, torch.bfloat16, torch.float16))
    train, grad = r.random() < 0.6, r.random() < 0.7
    layouts = [r.choice(LAYOUTS) for _ in range(3)]
    words = f"{call} {backend} {dtype} train {train} grad {grad} {layouts}"
    attn = attn.to(dtype).train(train)
    plain = twin(attn, torch.float64)
    plain.backend = "torch"
    inputs = [laid_out(x.to(dtype), layout) for x, layout in zip((call.q, call.k, call.v), layouts, strict=True)]
    probe = call.probe if grad else None
    expected = run(plain, [leaf(x.double()) for x in inputs], call.mask, call.bias, probe, real=call.real)
    try:
        found = run(attn, [leaf(x, grad) for x in inputs], call.mask, call.bias, probe, real=call.real)
    except ValueError as refusal:
        assert "backend='triton'" in str(refusal), words
        raise Skip from None
    size = expected.out.numel() ** 0.5 * 0.3
    assert_close(
        found.out.where(call.real, 0), expected.out.where(call.real, 0), TOLERANCE[dtype], f"out: {words}", size
    )
    compare_gradients(found, expected, 5 * TOLERANCE[dtype], words, 0.1 * call.probe.norm())
    return words
