"""The documents of packed batches in transformers models, as segments.

A padding-free collator or TRL's packing puts several documents into a row. A layer learns of it in one of three ways:

- `cu_seq_lens_q`, as for FlashAttention's varlen functions: the offsets of the documents of one row;
- transformers' mask, if the model gets `position_ids` that start again, without a mask and without a cache
  (`masks.PackedMask`);
- the `position_ids` that the model passes on, in all other calls without padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.segments import Segments, version_of
from .masks import is_chunked, is_unpadded, packed_numbers

_known = WeakTensorKeyDictionary()  # offsets or position ids -> (version, documents): read once for all layers


def documents(module: nn.Module, name: str, mask: Any, q: Tensor, keys: int, kwargs: dict[str, Any]) -> Segments | None:
    """The documents of q (B, H, L, D) if the batch is packed, else None. `keys` is the number of keys."""
    offsets, numbers = kwargs.get("cu_seq_lens_q"), packed_numbers(mask)
    if offsets is None and numbers is None and (q.shape[2] != keys or q.shape[2] == 1 or not is_unpadded(mask)):
        return None
    if torch.compiler.is_compiling():
        if offsets is None and numbers is None:  # transformers treats the model as packed, unless it gets a mask
            return None
        raise ValueError(f"{name} does not support packed sequences in a compiled model: compile its other layers")
    if offsets is not None and is_chunked(mask):
        raise ValueError(
            f"{type(module).__name__} has chunks, which would start with the row and not with each packed document: "
            "pass position_ids that start again, without attention_mask, and use_cache=False"
        )
    if offsets is not None:
        other = kwargs.get("cu_seq_lens_k")
        if q.shape[0] != 1 or q.shape[2] != keys or (other is not None and not torch.equal(other, offsets)):
            raise ValueError(
                f"{type(module).__name__} passes cu_seq_lens_q to {name} for q of shape {tuple(q.shape)} and {keys} "
                "keys: packed sequences need one row, and the same offsets for queries and keys"
            )
        return _kept(offsets, q, _from_offsets)
    if numbers is not None:
        return Segments.from_tensor(numbers if numbers.device == q.device else numbers.to(q.device))
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != keys:
        return None
    return _kept(positions, q, _from_positions)


def _kept(source: Tensor, q: Tensor, read: Any) -> Segments | None:
    version, kept = version_of(source), _known.get(source)
    if kept is None or version is None or kept[0] != (version, q.shape[0], q.device):
        kept = (version, q.shape[0], q.device), read(source, q)
        _known[source] = kept
    return kept[1]


def _from_offsets(offsets: Tensor, q: Tensor) -> Segments:
    found = offsets.tolist()
    lengths = [b - a for a, b in zip(found[:-1], found[1:], strict=True)]
    if found[:1] != [0] or any(n < 0 for n in lengths):
        raise ValueError(f"cu_seq_lens_q must start with 0 and not decrease, got {found}")
    return Segments.from_lengths([n for n in lengths if n], length=q.shape[2], device=q.device)


def _from_positions(positions: Tensor, q: Tensor) -> Segments | None:
    """A document starts where the position does not grow. None if no row has two documents."""
    starts = torch.diff(positions, dim=1) <= 0
    if not bool(starts.any()):
        return None
    numbers = torch.nn.functional.pad(starts.long().cumsum(1), (1, 0)) + 1
    return Segments.from_tensor(numbers.expand(q.shape[0], -1).to(q.device))
