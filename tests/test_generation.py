"""Prefill, steps, reordered and cropped states equal the parallel form. Sweeps the registry."""

from __future__ import annotations

import pytest
import torch
from promises import DEVICE, HEAD_DIM, HEADS, Case, qkv, sweep
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import weft
from weft.core.decoding_state import Place, tree_map
from weft.core.softmax import attend_one, softmax_attention

EXACT = {"rtol": 1e-9, "atol": 1e-9}
LONGEST = 80


def made(case: Case, **changes) -> weft.Attention:
    return case.make(max_length=LONGEST, **changes)


def left_padding(L: int, *rows: int) -> Tensor:
    """Row b has rows[b] masked tokens in front."""
    return torch.arange(L) >= torch.tensor(rows)[:, None]


def steps(attn, tokens, state, first: int, last: int, mask=None, bias=None) -> tuple[Tensor, object]:
    outs = []
    for t in range(first, last):
        row = None if mask is None else mask[:, t]
        out, state = attn.step(*(x[:, :, t : t + 1] for x in tokens), state, row, bias)
        outs.append(out)
    return torch.cat(outs, 2), state


def assert_same(got: Tensor, wanted: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        got, wanted = (x.masked_fill(~mask[:, None, :, None], 0) for x in (got, wanted))
    torch.testing.assert_close(got, wanted, **EXACT)


@sweep(causal=True, steps=True)
@pytest.mark.parametrize("n", (1, 7, 32, 33, 64))
@torch.no_grad()
def test_prefill_then_steps_with_the_batch_reordered_in_the_middle(case, n):
    attn, L = made(case), n + 9
    tokens, rows = qkv(L, B=3), torch.tensor([2, 0, 0])
    given = [x.clone() for x in tokens]
    for mask in (None, left_padding(L, 0, min(3, n - 1), n // 2)):
        wanted = attn(*tokens, mask)
        out, state = attn.prefill(*(x[:, :, :n] for x in tokens), None if mask is None else mask[:, :n])
        assert_same(out, wanted[:, :, :n], None if mask is None else mask[:, :n])
        out, state = steps(attn, tokens, state, n, n + 4, mask)
        assert_same(out, wanted[:, :, n : n + 4])
        moved = [x[rows] for x in tokens]
        out, state = steps(attn, moved, attn.reorder(state, rows), n + 4, L, mask if mask is None else mask[rows])
        assert_same(out, wanted[rows, :, n + 4 :])
    assert all(map(torch.equal, tokens, given))  # the state has its own memory


@sweep(causal=True, steps=True)
@pytest.mark.parametrize("max_length", (None, 20))
@torch.no_grad()
def test_a_prompt_in_two_parts(case, max_length):
    attn, tokens, mask = made(case), qkv(20), left_padding(20, 5, 0)
    wanted = attn(*tokens, mask)
    _, state = attn.prefill(*(x[:, :, :7] for x in tokens), mask[:, :7], max_length=max_length)
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


@sweep(causal=True, steps=True)
@torch.no_grad()
def test_a_state_with_max_length_stays_where_it_is(case):
    attn, tokens, L = made(case), qkv(24), 24
    wanted, state = attn(*tokens), attn.start(2, max_length=L, history=4)
    out, state = attn.prefill(*(x[:, :, :5] for x in tokens), state=state)
    addresses = [x.data_ptr() for x in tensors(state.inner)]
    assert_same(out, wanted[:, :, :5])
    guess = [x.flip(0) for x in tokens]
    _, state = steps(attn, guess, state, 5, 9)
    state = attn.reorder(attn.crop(state, 4), torch.tensor([1, 0]))
    assert_same(steps(attn, [x.flip(0) for x in tokens], state, 5, L)[0], wanted.flip(0)[:, :, 5:])
    assert [x.data_ptr() for x in tensors(state.inner)] == addresses
    with pytest.raises(ValueError, match="max_length=24"):
        attn.step(*(x[:, :, :1] for x in tokens), state)
    again, state = attn.prefill(*tokens, state=attn.crop(state, L))
    assert_same(again, wanted)
    assert [x.data_ptr() for x in tensors(state.inner)] == addresses
    assert sum(x.numel() * x.element_size() for x in tensors(state.inner)) == attn.state_size(2, L, torch.float64)


def tensors(tree: object) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda x: found.append(x) or x, tree)
    return found


@sweep(causal=True, steps=True)
@torch.no_grad()
def test_a_step_where_the_position_is_a_tensor(case, monkeypatch):
    """As in a CUDA graph and in compiled code: nothing may depend on the value of the position."""
    attn, tokens, mask = made(case), qkv(26), left_padding(26, 3, 0)
    bias = weft.RelativeBias2d(HEADS, 5, 6).double() if case.info.bias else None  # has no position after 30
    _, state = attn.prefill(*(x[:, :, :2] for x in tokens), mask[:, :2], bias, max_length=26)
    monkeypatch.setattr(attn, "_place", lambda state, _: Place(state.place, 26, state.device, in_place=True))
    out, _ = steps(attn, tokens, state, 2, 26, mask, bias)
    assert_same(out, attn(*tokens, mask, bias)[:, :, 2:], mask[:, 2:])


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@sweep(causal=True, steps=True)
@torch.no_grad()
def test_a_cuda_graph_serves_every_position(case):
    attn, tokens, mask = made(case), qkv(26), left_padding(26, 3, 0)
    wanted = attn(*tokens, mask)
    _, state = attn.prefill(*(x[:, :, :2] for x in tokens), mask[:, :2], max_length=26)
    token, row = [x[:, :, 2:3].clone() for x in tokens], mask[:, 2].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first steps, outside the graph
        for t in (2, 3):
            attn.step(*(x[:, :, t : t + 1] for x in tokens), state, mask[:, t])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attn.step(*token, state, row)
    for t in range(4, 26):
        for buffer, x in zip(token, tokens, strict=True):
            buffer.copy_(x[:, :, t : t + 1])
        row.copy_(mask[:, t])
        graph.replay()
        assert_same(out, wanted[:, :, t : t + 1], mask[:, t : t + 1])
    assert state.position == 26


@pytest.mark.parametrize("name", ("full", "linear", "combiner-fixed"))
@torch.no_grad()
def test_a_compiled_step_serves_every_position(name):
    attn, tokens = weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, causal=True, max_length=200), qkv(70)
    torch._dynamo.reset()
    compiles = CompileCounter()
    step = torch.compile(attn.step, backend=compiles, fullgraph=True)
    _, state = attn.prefill(*(x[:, :, :60] for x in tokens), max_length=70)
    for t in range(60, 70):
        out, state = step(*(x[:, :, t : t + 1] for x in tokens), state)
    assert_same(out, attn(*tokens)[:, :, -1:])
    assert compiles.frame_count == 1
    assert state.position == 70


@sweep(causal=True, steps=True, first_setting=True)
def test_gradients_through_a_state(case):
    attn, tokens = made(case), qkv(15, grad=True)
    out, state = attn.prefill(*(x[:, :, :5] for x in tokens))
    second, state = attn.prefill(*(x[:, :, 5:9] for x in tokens), state=state)
    out, (more, _) = torch.cat([out, second], 2), steps(attn, tokens, state, 9, 15)
    wanted = attn(*tokens)
    probe = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view_as(wanted)
    got = torch.autograd.grad(torch.cat([out, more], 2), tokens, probe, allow_unused=True)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, tokens, probe, allow_unused=True), **EXACT)


def test_equal_keys_share_the_gradient_of_the_performers_scale_as_in_parallel():
    attn = weft.make_attention("performer", heads=HEADS, head_dim=HEAD_DIM, causal=True, features=5).double()
    q, k, v = qkv(8, grad=True)
    tokens = q, k.detach()[:, :, :4].repeat(1, 1, 2, 1).requires_grad_(), v
    out, state = attn.prefill(*(x[:, :, :5] for x in tokens))
    out = torch.cat([out, steps(attn, tokens, state, 5, 8)[0]], 2)
    wanted = attn(*tokens)
    probe = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view_as(wanted)
    got = torch.autograd.grad(out, tokens, probe)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, tokens, probe), **EXACT)


def test_a_state_of_summaries_is_a_hundredth_of_a_cache():
    L, sizes = 65_536, {"heads": 8, "head_dim": 64, "causal": True}
    cache = weft.make_attention("full", **sizes).state_size(1, L, torch.bfloat16)
    fixed = weft.make_attention("combiner-fixed", max_length=L, **sizes).state_size(1, L, torch.bfloat16)
    assert fixed <= 0.01 * cache


@torch.no_grad()
def test_a_state_grows_in_steps_of_an_eighth():
    attn, token = weft.make_attention("full", heads=1, head_dim=1, causal=True), torch.zeros(1, 1, 1, 1)
    state, rooms = attn.start(1), set()
    for _ in range(500):
        _, state = attn.step(token, token, token, state)
        rooms.add(state.inner.k.shape[2])
        assert state.inner.k.shape[2] <= 16 + 1.125 * state.position
    assert len(rooms) <= 20


def test_one_query_with_matrix_products():
    (q, _, _), (_, k, v) = qkv(1, B=3), qkv(50, B=3)
    allowed = torch.rand(3, 1, 1, 50) > 0.4
    allowed[2] = False
    bias = torch.randn(1, HEADS, 1, 50, dtype=q.dtype)
    bias[:, 0, :, :3] = float("-inf")
    for given in (None, bias):
        assert_same(attend_one(q, k, v, allowed, given), softmax_attention(q, k, v, allowed=allowed, bias=given))


def test_dropping_more_than_the_history_names_the_limit():
    attn, tokens = weft.make_attention("linear", heads=HEADS, head_dim=HEAD_DIM, causal=True), qkv(9)
    with torch.no_grad():
        _, state = attn.prefill(*tokens)
        with pytest.raises(ValueError, match="last 0, got n=2; .*history=2"):
            attn.crop(state, 2)
        assert attn.crop(state, 9).position == 0
        _, state = attn.prefill(*tokens, state=attn.start(2, history=3))
        with pytest.raises(ValueError, match="last 3, got n=4; .*history=4"):
            attn.crop(state, 4)
        state = attn.crop(state, 2)
        with pytest.raises(ValueError, match="last 1, got n=2; tokens dropped before .* more than history=3"):
            attn.crop(state, 2)


@sweep(causal=True, steps=True, first_setting=True)
@torch.no_grad()
def test_states_that_were_overwritten_are_refused(case):
    """Whatever happened since: also if the newest state has as many tokens again."""
    attn, tokens = made(case), qkv(9)
    _, early = steps(attn, tokens, attn.start(2, history=3), 0, 5)
    _, late = steps(attn, tokens, early, 5, 6)
    cropped = attn.crop(late, 1)
    _, newest = steps(attn, tokens, cropped, 7, 8)
    for state in (early, late, cropped):
        for call in (
            lambda: steps(attn, tokens, state, 8, 9),  # noqa: B023
            lambda: attn.reorder(state, torch.tensor([1, 0])),  # noqa: B023
            lambda: attn.crop(state, 1),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="overwritten by later steps"):
                call()
    steps(attn, tokens, newest, 8, 9)


@sweep(causal=True, steps=True, first_setting=True)
def test_states_that_do_not_fit_are_refused(case):
    attn, tokens = made(case), qkv(5)
    _, state = attn.prefill(*tokens)
    name = "linear" if case.name == "full" else "full"
    other = weft.make_attention(name, heads=HEADS, head_dim=HEAD_DIM, causal=True)
    for call in (lambda: other.prefill(*tokens, state=state), lambda: other.crop(state, 1)):
        with pytest.raises(ValueError, match=f"made for {case.name}"):
            call()
    longer = case.make(max_length=LONGEST + 1)
    with pytest.raises(ValueError, match=f"max_length={LONGEST}.* this is .*max_length={LONGEST + 1}"):
        longer.step(*qkv(1), state)
    with pytest.raises(ValueError, match="2 rows"):
        attn.prefill(*qkv(5, B=3), state=state)
    with pytest.raises(TypeError, match="float64"):
        attn.prefill(*(x.float() for x in tokens), state=state)
    with pytest.raises(ValueError, match="max_length=4"):
        attn.prefill(*tokens, max_length=4)
    with pytest.raises(ValueError, match="0 … 1"):
        attn.reorder(state, torch.tensor([0, 2], device="cpu"))
    with pytest.raises(ValueError, match="0 … 5"):
        attn.crop(state, 6)


@sweep(causal=True, steps=True, first_setting=True)
@torch.no_grad()
def test_no_rows(case):
    attn, tokens, mask = made(case), qkv(9, B=0), torch.ones(0, 9, dtype=torch.bool)
    for given in (None, mask):
        out, state = attn.prefill(*(x[:, :, :6] for x in tokens), None if given is None else given[:, :6])
        assert out.shape == (0, HEADS, 6, HEAD_DIM)
        assert steps(attn, tokens, state, 6, 9, given)[0].shape == (0, HEADS, 3, HEAD_DIM)
