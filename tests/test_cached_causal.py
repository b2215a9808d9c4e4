"""Causal layers and language models: a token never reads the future of its own segment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from weft import CachedAttention, MixedAttention, MultiheadAttention, make_attention
from weft.layers import TransformerXLAttention

SEGMENT, VOCABULARY = 6, 11


class LanguageModel(nn.Module):
    """Two cached causal layers; a cache that is carried from segment to segment."""

    def __init__(self, relative: bool = False, **options: object):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        inner = (
            [TransformerXLAttention(16, 4, memory=0) for _ in range(2)]
            if relative
            else [MultiheadAttention(16, 4, causal=True) for _ in range(2)]
        )
        self.layers = nn.ModuleList(CachedAttention(i, length=4, delayed=True, **options) for i in inner)
        self.out = nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def text(seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (3, 4 * SEGMENT), generator=torch.Generator().manual_seed(seed))


def read(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.cat([model(segment) for segment in ids.split(SEGMENT, 1)], 1)


KINDS = [
    {},
    {"scope": "stream"},
    {"update_from": "output"},
    {"relative": True},
    {"candidate": "ln_gelu"},
    {"memory_attention": "same"},
]


@pytest.mark.parametrize("options", KINDS)
def test_a_changed_token_does_not_change_the_past(options: dict) -> None:
    """Bit-identical in every row, for every changed token, because the rows of a batch share a cache."""
    ids = text()
    reference = read(LanguageModel(**options), ids)
    carried = False
    for j in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, j] = (changed[0, j] + 1) % VOCABULARY
        got = read(LanguageModel(**options), changed)
        assert torch.equal(got[:, :j], reference[:, :j]), j
        segment_end = (j // SEGMENT + 1) * SEGMENT
        assert torch.equal(got[1:, :segment_end], reference[1:, :segment_end]), j
        if options.get("scope") == "stream":
            assert torch.equal(got[1:], reference[1:]), j  # other streams do not change
        carried |= not torch.equal(got[0, segment_end:], reference[0, segment_end:])
    assert carried  # and yet later segments do remember


@pytest.mark.parametrize("options", KINDS)
def test_the_gates_learn(options: dict) -> None:
    model, ids = LanguageModel(**options), text()
    for step, segment in enumerate(ids.split(SEGMENT, 1)):
        model.zero_grad()
        model(segment).square().sum().backward()
        for layer in model.layers:
            for name, p in layer.cache.named_parameters():
                assert p.grad is not None, name  # from the first step on, as data-parallel training expects
                if step == 0:
                    assert (p.grad == 0).all(), name  # there is nothing to gate in yet
                if step >= 2:
                    assert p.grad.abs().max() > 0, (step, name)


def test_the_update_is_delayed_and_otherwise_the_same() -> None:
    """Step t in delayed mode reads what step t - 1 wrote in plain mode."""
    torch.manual_seed(0)
    plain = CachedAttention(MultiheadAttention(16, 4).double(), length=4)
    delayed = CachedAttention(MultiheadAttention(16, 4).double(), length=4, delayed=True)
    delayed.load_state_dict(plain.state_dict(), strict=False)
    written = torch.zeros(1, 4, 8, dtype=torch.float64)
    for step in range(4):
        x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        delayed(x)
        torch.testing.assert_close(delayed.cache.cache, written)
        plain(x)
        written = plain.cache.cache


def test_streams_continue_in_evaluation_and_can_be_reset() -> None:
    model, ids = LanguageModel(scope="stream", eval_update=True).eval(), text()
    with torch.no_grad():
        together = read(model, ids)
        for layer in model.layers:
            layer.reset()
        assert torch.equal(read(model, ids), together)
        with pytest.raises(ValueError, match="call reset"):
            model(ids[:2, :SEGMENT])
        for row in range(3):  # a stream is the same alone
            for layer in model.layers:
                layer.reset()
            torch.testing.assert_close(read(model, ids[row : row + 1]), together[row : row + 1])
        # a new document in row 1 starts from nothing, the others go on
        for layer in model.layers:
            layer.reset()
        read(model, ids)
        other = text(5)
        for layer in model.layers:
            layer.reset(rows=torch.tensor([False, True, False]))
        after = read(model, other)
        for layer in model.layers:
            layer.reset()
        fresh = read(model, other)
        torch.testing.assert_close(after[1], fresh[1])
        assert not torch.allclose(after[0], fresh[0])
    frozen = LanguageModel(scope="stream")
    read(frozen, ids)
    frozen.eval()
    before = frozen.layers[0].cache.cache.clone()
    frozen(ids[:, :SEGMENT])
    assert torch.equal(frozen.layers[0].cache.cache, before)


@pytest.mark.parametrize("options", [{"length": 5}, {"length": 9, "pool": 2}])
def test_decoding_equals_the_parallel_form(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    layer = CachedAttention(MultiheadAttention(16, 4, causal=True, rope=True).double(), delayed=True, **options)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    layer(x), layer(x)
    with pytest.raises(ValueError, match="eval"):
        layer.start(2)
    layer.eval()
    state, steps = layer.start(2), []
    for i in range(9):
        y, state = layer.step(x[:, i : i + 1], state)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), layer(x))


def test_a_memory_that_reads_positions_neither_decodes_nor_splits() -> None:
    """A step would be at the first position, and every rank would start there."""
    from weft.core import sharding
    from weft.parallel.traffic import _Counting

    memory = make_attention("synthesizer", heads=2, head_dim=2, max_length=16)
    layer = CachedAttention(MultiheadAttention(8, 2, causal=True), length=4, delayed=True, memory_attention=memory)
    x = torch.randn(1, 6, 8)
    layer(x)
    layer.eval()
    with pytest.raises(ValueError, match="step-by-step decoding does not support synthesizer as memory_attention"):
        layer.prefill(x)
    with sharding.use(_Counting(0, 2, 12)), pytest.raises(ValueError, match="context parallelism does not support syn"):
        layer(x)


def test_leaks_are_refused() -> None:
    causal = MultiheadAttention(16, 4, causal=True)
    with pytest.raises(ValueError, match="delayed=True"):
        CachedAttention(causal)
    with pytest.raises(ValueError, match="delayed=True"):
        CachedAttention(nn.Identity(), dim=16, heads=4, causal=True)
    mixed = MixedAttention(16, 4, ["full", "linear"], causal=True)  # does not say so itself: its blocks do
    with pytest.raises(ValueError, match="delayed=True"):
        CachedAttention(mixed, dim=16, heads=4)
    with pytest.raises(ValueError, match="choose one"):
        CachedAttention(causal, delayed=True, eval_gate=True)
    with pytest.raises(ValueError, match="reads later tokens"):
        CachedAttention(causal, delayed=True, position="conv")
    with pytest.raises(ValueError, match="scope='stream'"):
        CachedAttention(causal, delayed=True, memory="per_sample")
    pooled = MultiheadAttention(16, 4, causal=True, attention="combiner-fixed")  # its summaries read all queries
    with pytest.raises(ValueError, match="combiner-fixed may read the queries of later tokens"):
        CachedAttention(pooled, delayed=True, memory_attention="same")
    made = weft.make_attention("reformer", heads=4, head_dim=2)
    with pytest.raises(ValueError, match="reformer may read the queries of later tokens"):
        CachedAttention(causal, delayed=True, memory_attention=made)
    with pytest.raises(ValueError, match="eval_update=True needs"):
        CachedAttention(causal, delayed=True, eval_update=True)
    with pytest.raises(ValueError, match="eval_gate=True stores nothing in eval"):
        CachedAttention(causal, preset="authors", scope="stream", eval_update=True, position="none")
