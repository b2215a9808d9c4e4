"""The memories that the cache is compared with, each against its formula."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft import CachedAttention, MultiheadAttention
from weft.layers import AttentionCache, MemoryTokens, RecurrentMemory, SegmentMemory, TransformerXLAttention, sinusoids


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def xl(memory: int = 5) -> TransformerXLAttention:
    torch.manual_seed(0)
    layer = TransformerXLAttention(12, 3, memory).double()
    nn.init.normal_(layer.content_bias)
    nn.init.normal_(layer.position_bias)
    return layer


def xl_by_hand(layer: TransformerXLAttention, x: Tensor, memory: Tensor) -> Tensor:
    """One sample, one head, one pair at a time."""
    seen, M, d = torch.cat([memory, x]), len(memory), layer.head_dim
    table = sinusoids(len(seen), layer.dim, dtype=torch.float64)
    rows = []
    for i in range(len(x)):
        heads = []
        for h in range(layer.heads):
            part = slice(h * d, (h + 1) * d)
            q = layer.q.weight[part] @ x[i]
            logits = []
            for j in range(M + i + 1):
                k, r = layer.k.weight[part] @ seen[j], layer.r.weight[part] @ table[M + i - j]
                content = (q + layer.content_bias[h]) @ k
                logits.append((content + (q + layer.position_bias[h]) @ r) / math.sqrt(d))
            p = torch.softmax(torch.stack(logits), 0)
            heads.append(sum(p[j] * (layer.v.weight[part] @ seen[j]) for j in range(len(p))))
        rows.append(layer.out.weight @ torch.cat(heads))
    return torch.stack(rows)


def test_transformer_xl_is_its_formula_over_segments() -> None:
    layer, x = xl(memory=5), tokens(2, 10, 12)
    memory, kept = None, x[:, :0]
    for segment in x.split((4, 1, 3, 2), 1):
        y, memory = layer(segment, memory)
        for b in range(2):
            torch.testing.assert_close(y[b], xl_by_hand(layer, segment[b], kept[b]))
        kept = torch.cat([kept, segment], 1)[:, -5:]
        assert torch.equal(memory.tokens, kept)


def test_transformer_xl_memory_has_no_gradient_and_padding_no_effect() -> None:
    layer = xl()
    first, second = tokens(2, 4, 12).requires_grad_(), tokens(2, 3, 12, seed=2)
    _, memory = layer(first)
    y, _ = layer(second, SegmentMemory(memory.tokens.requires_grad_(), memory.valid))
    y.sum().backward()
    assert first.grad is None
    mask = torch.tensor([[True, True, True, True], [False, False, True, True]])
    padded = first.detach().masked_fill(~mask[..., None], torch.nan)
    _, memory = layer(padded, mask=mask)
    y, _ = layer(second, memory)
    # Row 1 had two real tokens; their distances to the next segment do not change by the padding before them.
    torch.testing.assert_close(y[1], xl_by_hand(layer, second[1], first[1, 2:].detach()))


def test_transformer_xl_is_causal() -> None:
    layer, x = xl(), tokens(1, 6, 12)
    _, memory = layer(tokens(1, 4, 12, seed=3))
    y, _ = layer(x, memory)
    for j in range(6):
        changed = x.clone()
        changed[:, j] += 1
        assert torch.equal(layer(changed, memory)[0][:, :j], y[:, :j])


class Stack(nn.Module):
    """Two layers that pass mask and bias to full attention."""

    def __init__(self, dim: int = 8, heads: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(MultiheadAttention(dim, heads) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: object = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask, bias)
        return x


def test_memory_tokens_are_read_and_learned() -> None:
    torch.manual_seed(0)
    layer = MemoryTokens(Stack(), 8, 3).double()
    x = tokens(2, 5, 8)
    joined = torch.cat([layer.memory.expand(2, -1, -1), x], 1)
    torch.testing.assert_close(layer(x), layer.stack(joined)[:, 3:])
    assert not torch.allclose(layer(x), layer.stack(x))
    mask = torch.arange(5) < torch.tensor([5, 2])[:, None]
    torch.testing.assert_close(layer(x, mask)[1, :2], layer(x[1:, :2])[0])
    layer(x).square().sum().backward()
    assert layer.memory.grad.abs().max() > 0


def recurrent(causal: bool = True) -> RecurrentMemory:
    torch.manual_seed(0)
    return RecurrentMemory(Stack(), 8, 2, causal=causal).double()


def reach(layer: RecurrentMemory, x: Tensor) -> Tensor:
    """Which inputs of [read; x; write] each output depends on, by gradient."""
    joined = torch.cat([tokens(1, 2, 8, seed=4), x, tokens(1, 2, 8, seed=5)], 1)
    from weft.layers.memory_tokens import ReadWriteOrder

    order = ReadWriteOrder(2, x.shape[1], layer.causal)
    jacobian = torch.autograd.functional.jacobian(lambda t: layer.stack(t, None, order), joined)
    return jacobian.abs().sum((0, 2, 3, 5)) > 0


@pytest.mark.parametrize("causal", [True, False])
def test_recurrent_memory_reads_first_and_writes_last(causal: bool) -> None:
    L, m = 4, 2
    found = reach(recurrent(causal), tokens(1, L, 8))
    expected = torch.zeros(m + L + m, m + L + m, dtype=torch.bool)
    expected[:, :m] = True  # everyone reads
    expected[m : m + L, m : m + L] = torch.ones(L, L).tril().bool() if causal else True
    expected[m + L :] = True  # the writers see all
    assert torch.equal(found, expected)


def test_recurrent_memory_carries_through_a_few_segments() -> None:
    layer, x = recurrent(), tokens(2, 12, 8).requires_grad_()
    y, memory = layer.segments(x, 3, bptt=2)
    by_hand, carried = [], None
    for part in x.split(3, 1):
        out, carried = layer(part, carried)
        by_hand.append(out)
    torch.testing.assert_close(y, torch.cat(by_hand, 1))
    torch.testing.assert_close(memory, carried)
    (g,) = torch.autograd.grad(y[:, 9:].square().sum(), x, retain_graph=True)
    assert g[:, 6:9].abs().max() > 0  # one segment back, within the pair
    assert (g[:, :6] == 0).all()
    for j in range(12):  # nothing of the future, in any segment
        changed = x.detach().clone()
        changed[:, j] += 1
        assert torch.equal(layer.segments(changed, 3)[0][:, :j], y[:, :j].detach())


def test_the_attention_cache_sees_the_step_before() -> None:
    torch.manual_seed(0)
    inner = MultiheadAttention(8, 2).double()
    layer = AttentionCache(inner)
    first, second = tokens(3, 4, 8).requires_grad_(), tokens(3, 4, 8, seed=2)
    torch.testing.assert_close(layer(first), inner(first))
    y = layer(second)
    torch.testing.assert_close(y, inner(second, context=torch.cat([first, second], 1)))
    y.sum().backward()
    assert first.grad is None
    torch.testing.assert_close(layer(second[:2]), inner(second[:2]))  # another shape: afresh
    layer.eval()
    torch.testing.assert_close(layer(second[:2]), inner(second[:2]))
    layer.train().reset()
    torch.testing.assert_close(layer(second), inner(second))


def test_the_attention_cache_under_checkpointing() -> None:
    torch.manual_seed(0)
    plain, saved = (AttentionCache(MultiheadAttention(8, 2).double()) for _ in range(2))
    saved.load_state_dict(plain.state_dict())
    for step in range(3):
        x, y = (tokens(2, 4, 8, seed=step).requires_grad_() for _ in range(2))
        plain(x).square().sum().backward()
        checkpoint(saved, y, use_reentrant=False).square().sum().backward()
        torch.testing.assert_close(y.grad, x.grad)


def test_padding_of_the_attention_cache_may_be_nan() -> None:
    layer, mask = AttentionCache(MultiheadAttention(8, 2)).double(), torch.arange(6) < torch.tensor([[6], [4]])
    for step in range(2):
        y = layer(tokens(2, 6, 8, seed=step).masked_fill(~mask[..., None], torch.nan), mask)
    y[mask].sum().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("kind", ["attention cache", "delayed cache"])
def test_the_memory_of_a_step_may_be_used_for_the_next(kind: str) -> None:
    """What is kept is a copy; otherwise a delayed cache would read the current segment."""
    layer: nn.Module = AttentionCache(MultiheadAttention(8, 2))
    if kind == "delayed cache":
        layer = CachedAttention(MultiheadAttention(8, 2, causal=True), length=6, delayed=True)
    again, (first, second) = copy.deepcopy(layer.double()), tokens(2, 2, 6, 8)
    layer(first)
    expected, buffer = layer(second), first.clone()
    again(buffer)
    torch.testing.assert_close(again(buffer.copy_(second)), expected)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="has 2 rows"):
        layer = xl()
        layer(tokens(3, 4, 12), layer(tokens(2, 4, 12))[1])
    with pytest.raises(ValueError, match="supports cross attention"):
        AttentionCache(MultiheadAttention(8, 2, causal=True))
    with pytest.raises(ValueError, match="memory must be"):
        recurrent()(tokens(2, 3, 8), tokens(2, 3, 8))
