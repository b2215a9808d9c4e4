"""The kernels of a decoding step equal the plain step: outputs and every tensor of the state. Sweeps the registry."""

from __future__ import annotations

import copy

import pytest
import torch
from promises import DEVICE, Case, cases, sweep
from torch import Tensor

import weft
from weft.core.decoding_state import Place, tree_map

LONGEST, TOLERANCE = 40, {"rtol": 2e-5, "atol": 2e-5}
ALL = cases(causal=True, steps=True) + (cases(causal=True, steps=True, more=True) if DEVICE == "cuda" else [])
STEPPED = [
    case
    for case in ALL
    if case.causal and case.info.kernel and case.info.kernel.step and not case.info.kernel.lacks(case.make())
]


@pytest.fixture
def calls(monkeypatch):
    """One entry for every step that a kernel has computed."""
    found: list[str] = []
    from weft.kernels.steps import kernel

    class Counted(kernel.Bound):
        def __call__(self, *given):
            found.append("")
            return super().__call__(*given)

    monkeypatch.setattr(kernel, "Bound", Counted)
    return found


def tokens_of(L: int, B: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(B, L, 2, 6).transpose(1, 2).to(dtype) for _ in range(3)]


def pair(case: Case) -> tuple[weft.Attention, weft.Attention]:
    fused = case.make(dtype=torch.float32, max_length=LONGEST, backend="triton")
    plain = copy.deepcopy(fused)
    plain.backend = "torch"
    # With a tensor as position, plain steps also write summaries of open blocks, to slots that nobody reads yet.
    plain._place = lambda state, _: Place(state.position, state.capacity, state.device, True, state.whole)
    return fused, plain


@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("case", STEPPED, ids=str)
@torch.no_grad()
def test_steps_equal_the_plain_steps(case, static, calls):
    """A state that grows, without padding; one with max_length, with padding."""
    first, L = 2, 11
    both, tokens = pair(case), tokens_of(L)
    mask = torch.arange(L) >= torch.tensor([[0], [5]]) if static else torch.ones(2, L, dtype=torch.bool)
    states = [
        attn.prefill(*(x[:, :, :first] for x in tokens), mask[:, :first], max_length=L if static else None)[1]
        for attn in both
    ]
    calls.clear()
    repeated = 0
    for t in range(first, L):
        token = [x[:, :, t : t + 1].masked_fill(~mask[:, t, None, None, None], float("nan")) for x in tokens]
        row = mask[:, t] if static else None
        wanted, states[1] = both[1].step(*token, states[1], row)
        mine = both[0].repeat(*token, states[0], row) if t % 2 else None
        repeated += mine is not None
        if mine is None:
            mine, states[0] = both[0].step(*token, states[0], row)
        torch.testing.assert_close(mine[mask[:, t]], wanted[mask[:, t]], **TOLERANCE)
        if t == 5:
            rows = torch.tensor([1, 0])
            states = [attn.reorder(state, rows) for attn, state in zip(both, states, strict=True)]
            tokens, mask = [x[rows] for x in tokens], mask[rows]
    assert len(calls) == L - first and repeated >= 3
    tree_map(lambda x, y: torch.testing.assert_close(x, y, **TOLERANCE), *(state.inner for state in states))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("case", STEPPED, ids=str)
@torch.no_grad()
def test_a_cuda_graph_serves_every_position(case, calls):
    (fused, plain), tokens, L = pair(case), tokens_of(26), 26
    states = [attn.prefill(*(x[:, :, :1] for x in tokens), max_length=L)[1] for attn in (fused, plain)]
    token = [x[:, :, :1].clone() for x in tokens]

    def step(t):
        for buffer, x in zip(token, tokens, strict=True):
            buffer.copy_(x[:, :, t : t + 1])
        return fused.step(*token, states[0])[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for t in (1, 2, 3):
            torch.testing.assert_close(step(t), plain.step(*token, states[1])[0], **TOLERANCE)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = fused.step(*token, states[0])
    for t in range(4, L):
        for buffer, x in zip(token, tokens, strict=True):
            buffer.copy_(x[:, :, t : t + 1])
        graph.replay()
        torch.testing.assert_close(out, plain.step(*token, states[1])[0], **TOLERANCE)
    assert len(calls) == 4


@torch.no_grad()
def test_a_compiled_step_runs_the_kernel():
    case = next(case for case in STEPPED if case.name == "combiner-fixed")
    (fused, plain), tokens = pair(case), tokens_of(9)
    states = [attn.prefill(*(x[:, :, :5] for x in tokens), max_length=9)[1] for attn in (fused, plain)]
    called: list[str] = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    step = torch.compile(fused.step, backend=backend, fullgraph=True)
    for t in range(5, 9):
        token = [x[:, :, t : t + 1] for x in tokens]
        torch.testing.assert_close(step(*token, states[0])[0], plain.step(*token, states[1])[0], **TOLERANCE)
    assert called.count("weft.slots_step.default") == 1
    tree_map(lambda x, y: torch.testing.assert_close(x, y, **TOLERANCE), *(state.inner for state in states))


@sweep(causal=True, steps=True, first_setting=True)
def test_what_the_kernels_do_not_support_runs_the_plain_step(case, calls):
    fused = case.make(max_length=LONGEST)
    tokens = [x.double() for x in tokens_of(3)]
    state = fused.start(2)
    for t in range(3):
        _, state = fused.step(*(x[:, :, t : t + 1] for x in tokens), state)
    assert not calls
