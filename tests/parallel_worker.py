"""One rank of tests/test_parallel.py: calls split over the ranks, against the same calls on the whole sequence.

Rank 0 writes {case: largest difference}, and the bytes that all ranks sent in the forward passes of `SENT`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from promises import HEAD_DIM, HEADS, Case, cases
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.parallel import SHARDED

LENGTHS = (9, 130)
SENT = {"length": 300, "heads": 2, "head_dim": 8}


def here(mesh, length: int, even: bool = False) -> slice:
    if even:
        at = weft.parallel.shard(torch.arange(length), mesh, 0)
        return slice(int(at[0]), int(at[-1]) + 1)
    bounds = [0, *sorted(random.Random(length).sample(range(1, length), mesh.size() - 1)), length]
    return slice(*bounds[mesh.get_local_rank() :][:2])


def difference(expected: list[Tensor], found: list[Tensor]) -> float:
    worst = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
    everywhere = torch.tensor([worst], dtype=torch.float64)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return everywhere.item()


def packed(length: int) -> Tensor:
    """Two rows of documents, some of one token, with padding in between."""
    rows = []
    for row in range(2):
        rng = random.Random(2 * length + row)
        ends = sorted(rng.sample(range(1, length), min(4, length - 1)))
        numbers = torch.bucketize(torch.arange(length), torch.tensor(ends), right=True) + 1
        rows.append(torch.where(numbers == 3, 0, numbers))
    return torch.stack(rows)


def mechanism(case: Case, mesh, length: int, masked: bool, segments: Tensor | None = None) -> float:
    """All ranks draw the same inputs; each keeps its part."""
    attn = case.make(max_length=200)
    torch.manual_seed(length)
    q, k, v, dout = (torch.randn(2, HEADS, length, HEAD_DIM, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(2, length) > 0.3 if masked else None
    bias = weft.ALiBi(HEADS).double() if masked and case.info.bias else None
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    weights = list(attn.parameters())
    out = attn(*whole, mask, bias, segments)
    expected = [out, *torch.autograd.grad(out, [*whole, *weights], dout, materialize_grads=True)]
    at = here(mesh, length)
    parts = [x[:, :, at].clone().requires_grad_() for x in (q, k, v)]
    with weft.parallel.context(mesh):
        own = None if segments is None else segments[:, at].clone()
        out = attn(*parts, None if mask is None else mask[:, at], bias, own)
    found = [out, *torch.autograd.grad(out, [*parts, *weights], dout[:, :, at], materialize_grads=True)]
    for gradient in found[4:]:
        dist.all_reduce(gradient)
    return difference([x[:, :, at] for x in expected[:4]] + expected[4:], found)


def language_model(mesh, attention: str, positions: str, segments: Tensor | None = None) -> float:
    """A training step: the loss of every token, and the gradient of every weight."""
    torch.manual_seed(0)
    model = weft.models.LanguageModel(
        vocab=11, max_length=64, dim=16, heads=2, layers=2, attention=attention, positions=positions, dropout=0.0
    ).double()
    ids = torch.randint(11, (2, 33))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    losses = []
    for sharded in (False, True):
        model.zero_grad()
        if sharded:
            weft.parallel.shard_sequence(model, mesh)
        loss = model(inputs, segments=segments, targets=targets).sum()
        loss.backward()
        found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if sharded:
            for x in found:
                dist.all_reduce(x)
        losses.append(found)
    return difference(*losses)


def changed_documents(mesh) -> float:
    """NumPy changes the part of one rank only."""
    attn = weft.make_attention("linear", heads=HEADS, head_dim=HEAD_DIM, causal=True)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, 130, HEAD_DIM, dtype=torch.float64)
    whole, at = packed(130), here(mesh, 130)
    own, outs = whole[:, at].clone(), []
    for _ in range(2):
        with weft.parallel.context(mesh):
            outs.append(attn(q[:, :, at], k[:, :, at], v[:, :, at], None, None, own))
        whole[:, 0], whole[:, 1:5] = 9, 8
        if mesh.get_local_rank() == 0:
            own.numpy()[:] = whole[:, at]
    return difference([attn(q, k, v, None, None, whole)[:, :, at]], outs[1:])


def cache(mesh, how: str, delayed: bool, masked: bool) -> float:
    """Two training steps of a cached layer: outputs, the cache, and gradients."""
    torch.manual_seed(0)
    inner = weft.MultiheadAttention(12, 2, attention="linear", causal=delayed)
    layer = weft.CachedAttention(inner, ratio=0.5, length=5, resample=how, delayed=delayed).double()
    xs, douts = torch.randn(2, 3, 37, 12, dtype=torch.float64), torch.randn(2, 3, 37, 12, dtype=torch.float64)
    mask = (torch.rand(3, 37) > 0.3) & (torch.arange(3) < 2)[:, None] if masked else None
    found = []
    for sharded in (False, True):
        layer.zero_grad()
        layer.reset()
        at = here(mesh, 37) if sharded else slice(0, 37)
        results: list[Tensor] = []
        for x, dout in zip(xs, douts, strict=True):
            part = x[:, at].clone().requires_grad_()
            with weft.parallel.context(mesh) if sharded else torch.enable_grad():
                y = layer(part, None if mask is None else mask[:, at])
            y.backward(dout[:, at] if mask is None else dout[:, at] * mask[:, at, None])
            real = 1.0 if mask is None else mask[:, at, None]
            results += [y.detach() * real, part.grad]
        results = [x if sharded else x[:, here(mesh, 37)] for x in results]
        weights = [p.grad.clone() for p in layer.parameters()]
        if sharded:
            for x in weights:
                dist.all_reduce(x)
        found.append([*results, *weights, layer.cache.cache.clone()])
    return difference(*found)


def repeated(mesh, name: str) -> bool:
    """Whether two runs give the same bits."""
    attn = weft.make_attention(name, heads=2, head_dim=8, causal=True)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 131, 8)[:, :, here(mesh, 131)] for _ in range(4))
    runs = []
    for _ in range(2):
        parts = [x.clone().requires_grad_() for x in (q, k, v)]
        with weft.parallel.context(mesh):
            out = attn(*parts)
        runs.append([out, *torch.autograd.grad(out, parts, dout)])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def sent(mesh, name: str, causal: bool) -> int:
    torch.manual_seed(0)
    attn = weft.make_attention(name, heads=SENT["heads"], head_dim=SENT["head_dim"], causal=causal)
    at = here(mesh, SENT["length"], even=True)
    q, k, v = (torch.randn(1, SENT["heads"], at.stop - at.start, SENT["head_dim"]) for _ in range(3))
    with torch.no_grad(), weft.parallel.context(mesh, length=SENT["length"]) as context:
        attn(q, k, v)
    total = torch.tensor([context.bytes])
    dist.all_reduce(total)
    return int(total)


def supported(case: Case) -> bool:
    options = dict(case.options)
    return case.name in SHARDED and options.get("pattern") != "strided" and options.get("levels", 2) == 2


def lose_a_rank(mesh, file: str) -> None:
    """Rank 1 dies; the others must end with an error."""
    attn = weft.make_attention("combiner-fixed", heads=2, head_dim=4)
    if dist.get_rank() == 1:
        os._exit(3)
    q = torch.randn(1, 2, 70, 4)
    began = time.time()
    try:
        with weft.parallel.context(mesh, length=70 * mesh.size()):
            attn(q, q, q)
    except RuntimeError as error:
        if dist.get_rank() == 0:
            with open(file, "w") as out:
                json.dump({"error": str(error), "seconds": time.time() - began}, out)
    os._exit(0)


def call_differently(mesh, file: str) -> None:
    """One rank passes another mask, segments or dtype than the others: all must say so."""
    attn = weft.make_attention("combiner-fixed", heads=2, head_dim=4)
    size = dict(max_length=14, dim=8, heads=2, head_dim=4, layers=1)
    model = weft.models.LanguageModel(9, attention="linear", positions="sinusoid", **size)
    odd, q, real = dist.get_rank() == 1, torch.randn(1, 2, 7, 4), torch.ones(1, 7, dtype=torch.long)
    errors = []
    for length in (None, 14):
        for x, given in ((q, {"mask": real.bool()}), (q, {"segments": real}), (q.double(), {}), (None, {})):
            try:
                with weft.parallel.context(mesh, length=length):
                    if x is None:
                        model(real, segments=real if odd else None)
                    else:
                        attn(*[x if odd else q] * 3, **(given if odd else {}))
            except ValueError as error:
                errors.append(str(error))
    everywhere: list = [None] * mesh.size()
    dist.all_gather_object(everywhere, errors)
    if dist.get_rank() == 0:
        with open(file, "w") as out:
            json.dump(everywhere, out)


def main(file: str, what: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    if what == "lose a rank":
        lose_a_rank(mesh, file)
    if what == "call differently":
        return call_differently(mesh, file)
    results: dict[str, float] = {}
    for case in filter(supported, cases(first_setting=mesh.size() > 2)):
        for length in LENGTHS if mesh.size() == 2 else LENGTHS[1:]:
            for masked in (False, True):
                results[f"{case} {length}{' masked' if masked else ''}"] = mechanism(case, mesh, length, masked)
        results[f"{case} 9 packed"] = mechanism(case, mesh, 9, False, packed(9))
        results[f"{case} 130 packed masked"] = mechanism(case, mesh, 130, True, packed(130))
    for attention, positions in (("combiner-fixed", "rope"), ("linear", "sinusoid"), ("full", "alibi")):
        results[f"model {attention} {positions}"] = language_model(mesh, attention, positions)
    results["linear packed changed"] = changed_documents(mesh)
    results["model packed"] = language_model(mesh, "combiner-fixed", "rope", packed(32))
    results["model packed learned"] = language_model(mesh, "longformer", "learned", packed(32))
    for how in ("nearest", "linear", "area"):
        for delayed in (False, True):
            results[f"cache {how} {delayed}"] = cache(mesh, how, delayed, masked=False)
            results[f"cache {how} {delayed} masked"] = cache(mesh, how, delayed, masked=True)
    same = {name: repeated(mesh, name) for name in SHARDED}
    traffic = {f"{name} {causal}": sent(mesh, name, causal) for name in SHARDED for causal in (False, True)}
    if dist.get_rank() == 0:
        with open(file, "w") as out:
            json.dump({"differences": results, "sent": traffic, "same": same}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
