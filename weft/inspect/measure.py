"""Measurements per layer: how much each layer compresses and sparsifies the tokens.

Yu et al., White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129, section 3.1

    rate             R(z), unit tokens, of a block's output                                  any model
    subspace_rate    Rᶜ(h; U) after compression, h = z + MSSA(LN(z))                         CRATE; the paper's text
    projected_rate   Rᶜ of LN(z) U before attention, unit tokens in each head               CRATE; the authors' code
    nonzero          fraction of non-zero entries after sparsification                      CRATE

Every value is for one example, over its real tokens, in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.mssa import MSSA
from ..models.crate import CRATELayer
from .rates import EPSILON, coding_rate, coherence, heads_rate, subspace_rate
from .views import created
from .watch import arguments, blocks_of, first_tensor, in_batches, looking, mask_of, on_output, plain

Measures = dict[str, Tensor]


def measure(
    model: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    *,
    epsilon: float = EPSILON,
    normalise: bool = False,
    batch_size: int = 64,
) -> Measures:
    """All measurements of the module docstring that apply to the model, each (layers, examples).

    `inputs` are the model's arguments, one row per example. `normalise` computes `subspace_rate` of unit tokens too.
    """
    model, inputs = plain(model), arguments(inputs)
    found: dict[str, list[Tensor]] = defaultdict(list)  # per batch (layers, examples)
    here: dict[str, dict[int, list[Tensor]]] = {}  # of the current batch: measurement, layer, calls

    def note(name: str, layers: list[int], value: Tensor) -> None:
        """The calls of a block that is several layers are those of these layers, in turn."""
        calls = here.setdefault(name, {})
        layer = layers[sum(len(calls.get(i, ())) for i in layers) % len(layers)]
        calls.setdefault(layer, []).append(value.cpu())

    def watch_block(layers: list[int], block: nn.Module) -> list[Any]:
        def whole(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            z = first_tensor(output)
            if z is not None:
                mask = mask_of(block, args, kwargs, z)
                if not (z if mask is None else z[mask]).isfinite().all():
                    raise ValueError(f"layer {layers[0] + 1} returns NaN or infinity: the model has diverged")
                note("rate", layers, coding_rate(F.normalize(z.double(), dim=-1), epsilon, mask))

        return [on_output(block, whole)]

    def watch_crate(layers: list[int], layer: CRATELayer) -> list[Any]:
        compressed: list[Tensor] = []  # norm2 does not get the mask: keep its input until the layer returns
        mssa = next(module for module in layer.modules() if isinstance(module, MSSA))  # may be inside a cache

        def projected(args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            w = mssa.subspaces(args[0]).unflatten(-1, (mssa.heads, -1)).transpose(1, 2)
            mask = mask_of(mssa, args, kwargs, args[0])
            note("projected_rate", layers, heads_rate(w.double(), epsilon, normalise=True, mask=mask))

        def whole(args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            mask = mask_of(layer, args, kwargs, output)
            h, U = compressed.pop().double(), mssa.bases.double()
            note("subspace_rate", layers, subspace_rate(h, U, epsilon, normalise=normalise, mask=mask))
            note("nonzero", layers, nonzero(output, mask))

        return [
            on_output(mssa, projected),
            on_output(layer.norm2, lambda args, kwargs, output: compressed.append(args[0])),
            on_output(layer, whole),
        ]

    hooks: list[Any] = []
    places: dict[nn.Module, list[int]] = defaultdict(list)
    created(model, [t[:1] for t in inputs])
    for i, (_, block) in enumerate(blocks_of(model)):
        places[block].append(i)
    for block, layers in places.items():
        hooks += watch_block(layers, block)  # first, because it rejects blocks that cannot be measured
        if isinstance(block, CRATELayer):
            hooks += watch_crate(layers, block)
    if not hooks:
        raise ValueError("this model has no weft attention blocks to measure")
    with looking(model, hooks):
        for batch in in_batches(inputs, batch_size):
            here.clear()
            model(*batch)
            for name, calls in here.items():
                # Average the calls of a block that runs twice (for two documents).
                found[name].append(torch.stack([torch.stack(calls[i]).mean(0) for i in sorted(calls)]))
    return {name: torch.cat(batches, 1) for name, batches in found.items()}


def nonzero(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """The fraction of entries that are not exactly zero, (B, L, dim) -> (B,), over the real tokens."""
    share = (z != 0).double().mean(-1)
    if mask is None:
        return share.mean(-1)
    return share.masked_fill(~mask, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def tokens_per_layer(
    model: nn.Module, inputs: Tensor | Sequence[Tensor], *, size: int = 50, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """A random sub-matrix (at most `size` tokens by `size` channels) of every block's output for one example.

    Returns the sub-matrix (layers, tokens, channels), the chosen tokens and the chosen channels. They are the same in
    all layers, so in a pyramid they are limited by its smallest layers.
    """
    model, inputs = plain(model), arguments(inputs)
    created(model, [t[:1] for t in inputs])
    layers = blocks_of(model)
    seen: list[tuple[Tensor, Tensor | None]] = []

    def see(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        z = first_tensor(output)
        if z is not None and len(seen) < len(layers):  # only the first call of each block
            seen.append((z[0].double().cpu(), mask_of(block, args, kwargs, z)))

    with looking(model, [on_output(block, partial(see, block)) for block in dict.fromkeys(b for _, b in layers)]):
        model(*(t[:1] for t in inputs))
    if not seen:
        raise ValueError("no block of this model returned tokens (B, L, dim)")
    length, width = (min(z.shape[i] for z, _ in seen) for i in (0, 1))
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.ones(length, dtype=torch.bool), *(mask[0, :length].cpu() for _, mask in seen if mask is not None)]
    real = torch.stack(masks).all(0).nonzero().flatten()
    if not len(real):
        raise ValueError("this example has no real tokens, only padding: there is nothing to show")
    tokens = real[torch.randperm(len(real), generator=generator)[:size]].sort().values
    channels = torch.randperm(width, generator=generator)[:size].sort().values
    return torch.stack([z[tokens][:, channels] for z, _ in seen]), tokens, channels


def subspace_coherence(model: nn.Module, directions: int | None = 4, seed: int = 0) -> list[tuple[str, Tensor, int]]:
    """For every MSSA: its path, |cos| between `directions` random directions of each head, and their number."""
    found = []
    for name, module in plain(model).named_modules():
        if isinstance(module, MSSA):
            generator = torch.Generator().manual_seed(seed)
            count = min(directions or module.head_dim, module.head_dim)
            take = torch.randperm(module.head_dim, generator=generator)[:count].sort().values
            bases = module.bases.detach().double().cpu()
            found.append((name, coherence(bases[:, :, take]), count))
    return found


def cache_shares(model: nn.Module) -> list[tuple[str, Tensor]]:
    """σ(λ) per head for every cached layer: the weight of the cache in its output."""
    found = []
    for name, module in plain(model).named_modules():
        lam = getattr(module, "lam", None)
        if isinstance(lam, Tensor):
            found.append((name, lam.detach().double().cpu().flatten().sigmoid()))
    return found
