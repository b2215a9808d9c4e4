"""An attention-based cache for images: keys and values also from the previous step's batch.

The comparison in Zhang et al., Cached Transformers, https://arxiv.org/abs/2312.12742, Table 2: Transformer-XL's cache
in a vision transformer. The paper does not say how samples are paired; here, row by row:

    y_b = Attention(q: x_b, k and v: [stop-gradient(x'_b); x_b])          x': the layer's input in the previous step
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.contract import quiet_padding
from ...core.recomputing import Replays, recomputing, refuse_replica
from ...core.sharding import refuse
from ..multihead import MultiheadAttention


class AttentionCache(nn.Module):
    """`layer(x, mask)` around a `MultiheadAttention` whose mechanism takes Lq ≠ Lk.

    In training, a batch with a new shape (e.g. the last batch of an epoch) ignores the previous step. In eval() a
    sample attends only to itself, so results do not depend on other batches. The state is not saved.
    """

    def __init__(self, inner: MultiheadAttention):
        super().__init__()
        if inner.causal or not inner.attention.info.cross or inner.rope is not None:
            raise ValueError(
                "AttentionCache needs non-causal attention without rope that supports cross attention, "
                f"got attention={inner.attention.name!r}, causal={inner.causal}, rope={inner.rope is not None}"
            )
        self.inner = inner
        self.previous: tuple[Tensor, Tensor] | None = None
        self.replays = Replays()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        refuse("AttentionCache")
        if not self.training:
            return self.inner(x, mask)
        refuse_replica(self)
        x, again = quiet_padding(x, mask), recomputing()
        previous = self.replays.recall(x) if again else self.previous
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        if previous is None or previous[0].shape != x.shape:
            y = self.inner(x, mask)
        else:
            seen = torch.cat([previous[0].to(x.dtype), x], 1)
            y = self.inner(x, torch.cat([previous[1], valid], 1), context=seen)
        if not again:
            self.replays.remember(x, previous, y)
            self.previous = x.detach().clone(), valid.clone()  # the caller may reuse their memory
        return y

    def reset(self) -> None:
        """Clear the previous step."""
        self.previous = None
