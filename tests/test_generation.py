"""Prefill, steps, reordered and cropped states equal the parallel form. Sweeps the registry."""

from __future__ import annotations

import pytest
import torch
from promises import HEAD_DIM, HEADS, Case, qkv, sweep
from torch import Tensor

import weft

EXACT = {"rtol": 1e-9, "atol": 1e-9}
LONGEST = 80


def made(case: Case, **changes) -> weft.Attention:
    return case.make(max_length=LONGEST, **changes)


def left_padding(L: int, *rows: int) -> Tensor:
    """Row b has rows[b] masked tokens in front."""
    return torch.arange(L) >= torch.tensor(rows)[:, None]


def steps(attn, tokens, state, first: int, last: int, mask=None) -> tuple[Tensor, object]:
    outs = []
    for t in range(first, last):
        row = None if mask is None else mask[:, t]
        out, state = attn.step(*(x[:, :, t : t + 1] for x in tokens), state, row)
        outs.append(out)
    return torch.cat(outs, 2), state


def assert_same(got: Tensor, wanted: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        got, wanted = (x.masked_fill(~mask[:, None, :, None], 0) for x in (got, wanted))
    torch.testing.assert_close(got, wanted, **EXACT)


@sweep(causal=True, steps=True)
@pytest.mark.parametrize("n", (1, 7, 31, 32, 33, 64))
@torch.no_grad()
def test_prefill_then_steps_with_the_batch_reordered_in_the_middle(case, n):
    attn, L = made(case), n + 9
    tokens, rows = qkv(L, B=3), torch.tensor([2, 0, 0])
    for mask in (None, left_padding(L, 0, min(3, n - 1), n // 2)):
        wanted = attn(*tokens, mask)
        out, state = attn.prefill(*(x[:, :, :n] for x in tokens), None if mask is None else mask[:, :n])
        assert_same(out, wanted[:, :, :n], None if mask is None else mask[:, :n])
        out, state = steps(attn, tokens, state, n, n + 4, mask)
        assert_same(out, wanted[:, :, n : n + 4])
        moved = [x[rows] for x in tokens]
        out, state = steps(attn, moved, attn.reorder(state, rows), n + 4, L, mask if mask is None else mask[rows])
        assert_same(out, wanted[rows, :, n + 4 :])


@sweep(causal=True, steps=True)
@torch.no_grad()
def test_a_prompt_in_two_parts(case):
    attn, tokens, mask = made(case), qkv(20), left_padding(20, 5, 0)
    wanted = attn(*tokens, mask)
    _, state = attn.prefill(*(x[:, :, :7] for x in tokens), mask[:, :7])
    out, state = attn.prefill(*(x[:, :, 7:15] for x in tokens), mask[:, 7:15], state=state)
    assert_same(out, wanted[:, :, 7:15])
    assert state.position == 15
    assert_same(steps(attn, tokens, state, 15, 20, mask)[0], wanted[:, :, 15:])


@sweep(causal=True, steps=True)
@torch.no_grad()
def test_crop_forgets_the_last_tokens(case):
    attn, tokens, other = made(case), qkv(20), qkv(20, seed=7)
    state = attn.start(2, history=6)
    _, state = attn.prefill(
        *(torch.cat([x[:, :, :5], y[:, :, 5:9]], 2) for x, y in zip(tokens, other, strict=True)), state=state
    )
    state = attn.crop(state, 4)
    assert state.position == 5
    for _ in range(3):  # guess four tokens, keep one of them, as in speculative decoding
        t = state.position
        _, guessed = steps(
            attn,
            [torch.cat([x[:, :, : t + 1], y[:, :, t + 1 :]], 2) for x, y in zip(tokens, other, strict=True)],
            state,
            t,
            t + 4,
        )
        state = attn.crop(guessed, 3)
    out, _ = steps(attn, tokens, state, state.position, 20)
    assert_same(out, attn(*tokens)[:, :, -out.shape[2] :])


@sweep(causal=True, steps=True, first_setting=True)
def test_states_that_do_not_fit_are_refused(case):
    attn, tokens = made(case), qkv(5)
    _, state = attn.prefill(*tokens)
    name = "linear" if case.name == "full" else "full"
    other = weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, causal=True)
    for call in (lambda: other.prefill(*tokens, state=state), lambda: other.crop(state, 1)):
        with pytest.raises(ValueError, match=f"made for {case.name}"):
            call()
    with pytest.raises(ValueError, match="2 rows"):
        attn.prefill(*qkv(5, B=3), state=state)
    with pytest.raises(TypeError, match="float64"):
        attn.prefill(*(x.float() for x in tokens), state=state)
    with pytest.raises(ValueError, match="max_length=4"):
        attn.prefill(*tokens, max_length=4)
    with pytest.raises(ValueError, match="0 … 1"):
        attn.reorder(state, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="0 … 5"):
        attn.crop(state, 6)


@sweep(causal=True, steps=False)
def test_mechanisms_without_an_exact_state_refuse(case):
    with pytest.raises(ValueError, match="does not support step-by-step"):
        case.make().prefill(*qkv(5))
