"""Activation checkpointing of layers with state does not change gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from promises import HEAD_DIM, HEADS, noise, sweep
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.core.recomputing import Replays
from weft.layers import AttentionCache

DIM = HEADS * HEAD_DIM


def behind_a_norm(layer: nn.Module) -> nn.Module:
    """Every row that the layer sees sums to zero."""
    return nn.Sequential(nn.LayerNorm(DIM), layer).double()


def multihead(**options) -> weft.MultiheadAttention:
    return weft.MultiheadAttention(DIM, HEADS, **options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "cached": lambda: weft.CachedAttention(multihead(), ratio=1),
    "delayed": lambda: weft.CachedAttention(multihead(), ratio=1, delayed=True),
    "per sample": lambda: weft.CachedAttention(multihead(), memory="per_sample"),
    "stream": lambda: weft.CachedAttention(multihead(), scope="stream"),
    "attention cache": lambda: AttentionCache(multihead()),
    "cached routing": lambda: weft.CachedAttention(multihead(attention="routing", clusters=3, capacity=4, decay=0.5)),
    "routing": lambda: multihead(attention="routing", clusters=3, capacity=4, decay=0.5),
    "combiner-routing": lambda: multihead(attention="combiner-routing", clusters=3, capacity=4, decay=0.5),
}


SAMPLED: dict[str, Callable[[], nn.Module]] = {
    "thinned": lambda: multihead(attention="subsampled", keep=0.5),
    "image": lambda: multihead(attention="subsampled", layout=(3, 3), windows=3),
    "graph": lambda: multihead(attention="subsampled", layout="graph", keep=0.5),
}


def gradients(model: nn.Module, batches: list[Tensor], order: list[int], **how) -> list[Tensor]:
    """All gradients after several forwards whose backward passes come in this order."""
    torch.manual_seed(1)
    inputs = [x.clone().requires_grad_() for x in batches]
    losses = []
    for number, x in enumerate(inputs):
        y = checkpoint(model, x, **how) if how else model(x)
        losses.append((number + 1) * y.square().sum())
        with torch.no_grad():  # an evaluation in between changes nothing
            model.eval()(x)
        model.train()
    for number in order:
        losses[number].backward()
    found = [x.grad for x in inputs] + [p.grad for p in model.parameters()]
    return [g for g in found if g is not None]


def compare(made: Callable[[], nn.Module], batches: list[Tensor], order: list[int], **how) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(len(order))
        models.append(behind_a_norm(made()).train())
    expected, got = gradients(models[0], batches, order), gradients(models[1], batches, order, **how)
    assert len(expected) == len(got)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("name", [*LAYERS, *SAMPLED])
def test_forwards_in_flight(name, same, reentrant):
    for seed, order in enumerate(([0, 1, 2], [2, 1, 0], [3, 1, 0, 5, 2, 4])):
        batches = [noise(2, 9, DIM, seed=seed if same else 10 * seed + n) for n in range(len(order))]
        compare({**LAYERS, **SAMPLED}[name], batches, order, use_reentrant=reentrant)


@sweep(first_setting=True)
def test_every_mechanism_repeats_its_forward(case):
    def made() -> nn.Module:
        attn = case.make(max_length=40, dropout=0.3 if case.name != "linformer" else 0.0)
        return weft.MultiheadAttention(DIM, HEADS, attention=attn, causal=case.causal)

    for reentrant in (False, True):
        compare(made, [noise(2, 9, DIM)] * 3, [1, 2, 0], use_reentrant=reentrant)


@pytest.mark.parametrize("name", ["cached", "delayed", "routing", "combiner-routing"])
def test_compiled_around_a_checkpoint(name):
    torch.compiler.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(behind_a_norm(LAYERS[name]()).train())
    # This backend recomputes in the backward pass what Inductor does.
    compiled = torch.compile(
        lambda x: checkpoint(models[1], x, use_reentrant=False), backend="aot_eager_decomp_partition"
    )
    batches = [noise(2, 9, DIM, seed=step) for step in range(3)]
    losses = [[run(x).square().sum() for x in batches] for run in (models[0], compiled)]
    for expected, got in zip(*losses, strict=True):
        expected.backward()
        got.backward()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)
    for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("name", LAYERS)
def test_without_the_random_state_equal_inputs_are_refused(name):
    different, same = [noise(2, 9, DIM, seed=n) for n in range(3)], [noise(2, 9, DIM)] * 3
    how = {"use_reentrant": False, "preserve_rng_state": False}
    compare(LAYERS[name], different, [1, 0, 2], **how)
    with pytest.raises(RuntimeError, match="preserve_rng_state=True"):
        compare(LAYERS[name], same, [1, 0, 2], **how)


def test_one_region_may_call_a_layer_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LAYERS["cached"]()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(x)

    for reentrant in (False, True):
        compare(Twice, [noise(2, 9, DIM)] * 3, [2, 0, 1], use_reentrant=reentrant)


def test_a_graph_may_be_kept_for_a_second_backward():
    model = behind_a_norm(LAYERS["cached"]()).train()
    losses = [checkpoint(model, noise(2, 9, DIM), use_reentrant=False).square().sum() for _ in range(3)]
    weights = list(model.parameters())
    first = torch.autograd.grad(losses[0], weights, retain_graph=True)
    model(noise(2, 9, DIM, seed=3))
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(losses[0], weights), strict=True))


def replays(model: nn.Module) -> Replays:
    return next(m.replays for m in model.modules() if isinstance(getattr(m, "replays", None), Replays))


@pytest.mark.parametrize("name", LAYERS)
def test_replays_are_released(name):
    model = behind_a_norm(LAYERS[name]()).train()
    for step in range(5):
        model(noise(2, 9, DIM, seed=step)).square().sum().backward()
    assert len(replays(model).entries) <= 2
    with torch.no_grad():
        for step in range(Replays.untied + 5):
            model(noise(2, 9, DIM, seed=step))
    assert len(replays(model).entries) <= Replays.untied + 2


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_copied_and_pickled_while_forwards_wait(name):
    model = behind_a_norm(LAYERS[name]()).train()
    x = noise(2, 9, DIM)
    loss = checkpoint(model, x, use_reentrant=False).square().sum()
    bare = pickle.loads(pickle.dumps(model.state_dict()))
    twins = [copy.deepcopy(model)]
    if name not in ("attention cache",):
        twins.append(behind_a_norm(LAYERS[name]()).train())
        twins[-1].load_state_dict(bare)
    expected = model(x)
    for twin in twins:
        assert torch.equal(twin(x), expected)
    loss.backward()
