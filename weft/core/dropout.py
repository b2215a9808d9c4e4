"""Dropout inside kernels. Which probabilities are dropped is a hash of a key, the head, the query and its key
(`weft/kernels/random.py`): nothing is stored, and the backward computes it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEPS = 2**24  # probabilities are multiples of 1 / STEPS


def dropout_key(attn: Any, q: Tensor) -> tuple[Tensor | None, int]:
    """A key (1,) from the generator of q's device, and the probability in steps; None and 0 without dropout. Activation
    checkpointing restores the generator, so it repeats the same dropout."""
    if not attn.training or not attn.dropout:
        return None, 0
    return torch.randint(2**62, (1,), device=q.device), min(round(attn.dropout * STEPS), STEPS - 1)
