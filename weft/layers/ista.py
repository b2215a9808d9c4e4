"""ISTA: one step of sparse coding in a learned dictionary, instead of an MLP.

Yu et al., White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129

    ista   z' = ReLU(z + η (z − z Dᵀ) D − ηλ)                             eq 17: a proximal step on
                                                                           λ‖z‖₁ + ½‖x − Dz‖², z ≥ 0, from z = x
    mm     z' = ReLU((1 + 4 / (9 (1 + α))) z D − 4λ / (9α))               eq 92, α = dim / (L ε²)

Tokens are rows: z Dᵀ is the paper's DZ. `step` is η, `threshold` is λ; both are constants, not learned. There is no
residual connection around it, because z is part of the formula.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.contract import quiet_padding
from ..core.sharding import refuse


class ISTA(nn.Module):
    """`layer(x, mask=None)`, x (B, L, dim): the sparsification half of a CRATE layer.

    Variant "mm" (majorisation–minimisation) depends on the number of tokens, so it reads the mask. It derives its step
    from `epsilon`, the precision of the coding rate, which is then required.
    """

    def __init__(
        self,
        dim: int,
        *,
        step: float | None = None,
        threshold: float = 0.1,
        variant: str = "ista",
        epsilon: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if variant not in ("ista", "mm"):
            raise ValueError(f"variant must be 'ista' (eq 17) or 'mm' (eq 92), got {variant!r}")
        if variant == "mm" and step is not None:
            raise ValueError(f"variant 'mm' derives its step from epsilon: remove step={step}")
        if (variant == "mm") != (epsilon is not None):
            raise ValueError(f"epsilon is for variant 'mm' and required there, got epsilon={epsilon} with {variant!r}")
        if threshold < 0:
            raise ValueError(f"threshold must not be negative, got {threshold}")
        for name, value in (("step", step), ("epsilon", epsilon)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.dim, self.threshold, self.variant, self.epsilon = dim, threshold, variant, epsilon
        self.step = 0.1 if step is None else step
        self.weight = nn.Parameter(torch.empty(dim, dim, device=device, dtype=dtype))  # the dictionary D
        nn.init.kaiming_uniform_(self.weight)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, L, {self.dim}), got {tuple(x.shape)}")
        x = quiet_padding(x, mask)
        if self.variant == "ista":
            descent = F.linear(x - F.linear(x, self.weight), self.weight.T)
            return F.relu(x + self.step * descent - self.step * self.threshold)
        refuse("ISTA with variant='mm'")
        assert self.epsilon is not None
        alpha: float | Tensor = self.dim / (x.shape[1] * self.epsilon**2)
        if mask is not None:
            alpha = (self.dim / (mask.sum(1).clamp(min=1) * self.epsilon**2)).view(-1, 1, 1).to(x.dtype)
        code = F.linear(x, self.weight.T)
        return F.relu((1 + 4 / (9 * (1 + alpha))) * code - 4 * self.threshold / (9 * alpha))

    def extra_repr(self) -> str:
        how = f"step={self.step}" if self.variant == "ista" else f"variant='mm', epsilon={self.epsilon}"
        return f"dim={self.dim}, {how}, threshold={self.threshold}"
