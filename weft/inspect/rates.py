"""The mathematics behind CRATE: coding rates, their derivatives, and the optimisation steps of its layers.

Yu et al., White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129

    R(z)     = ½ logdet(I + α zᵀz),            α = d / (N ε²)              nats to encode N tokens with precision ε
    Rᶜ(z; U) = Σ_k R(z U_k),                   γ = p / (N ε²)              the same, coded in K subspaces
    ∇Rᶜ      = γ Σ_k w_k (I + γ w_kᵀ w_k)⁻¹ U_kᵀ,    w_k = z U_k            eq 9

Tokens are rows, z (…, N, d); the paper uses columns. Subspaces are U (K, d, p). A mask (…, N) excludes padded tokens
from the sums and from N. The functions compute in the dtype of their inputs: use float64 for measurements.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 0.1  # ε² = 0.01, the precision of the authors' measurements


def coding_rate(z: Tensor, epsilon: float = EPSILON, mask: Tensor | None = None) -> Tensor:
    """R(z), eq 7: z (…, N, d) -> (…)."""
    z, alpha = _clean(z, epsilon, mask)
    N, d = z.shape[-2:]
    gram = z.mT @ z if d <= N else z @ z.mT  # both have the same determinant; use the smaller one
    eye = torch.eye(gram.shape[-1], dtype=z.dtype, device=z.device)
    return torch.linalg.cholesky(eye + alpha * gram).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def coding_rate_gradient(z: Tensor, epsilon: float = EPSILON) -> Tensor:
    """∇R(z) = α z (I + α zᵀz)⁻¹, eqs 78 and 94."""
    z, alpha = _clean(z, epsilon, None)
    return alpha * torch.linalg.solve(_shifted(z, alpha), z, left=False)


def coding_rate_hessian(z: Tensor, direction: Tensor, epsilon: float = EPSILON) -> Tensor:
    """∇²R(z) applied to a direction Δ, Lemma 5: αBΔ − α²B(Δzᵀ + zΔᵀ)Bz, B = (I + αzzᵀ)⁻¹."""
    z, alpha = _clean(z, epsilon, None)
    inner = torch.eye(z.shape[-2], dtype=z.dtype, device=z.device) + alpha * z @ z.mT
    both_ways = direction @ z.mT + z @ direction.mT
    return alpha * torch.linalg.solve(inner, direction - alpha * both_ways @ torch.linalg.solve(inner, z))


def subspace_rate(
    z: Tensor, bases: Tensor, epsilon: float = EPSILON, *, normalise: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Rᶜ(z; U), eq 8: z (…, N, d), bases (K, d, p) -> (…).

    `normalise` first scales every token to unit length in every subspace, as in the authors' metric.
    """
    return heads_rate(z[..., None, :, :] @ bases, epsilon, normalise=normalise, mask=mask)


def heads_rate(w: Tensor, epsilon: float = EPSILON, *, normalise: bool = False, mask: Tensor | None = None) -> Tensor:
    """Σ_k R(w_k) of projected tokens, w (…, K, N, p) -> (…)."""
    if normalise:
        w = F.normalize(w, dim=-1)  # a zero vector stays zero
    return coding_rate(w, epsilon, None if mask is None else mask[..., None, :]).sum(-1)


def subspace_rate_gradient(z: Tensor, bases: Tensor, epsilon: float = EPSILON) -> Tensor:
    """∇Rᶜ(z; U), eq 9."""
    return (coding_rate_gradient(z[..., None, :, :] @ bases, epsilon) @ bases.mT).sum(-3)


def compression_step(z: Tensor, bases: Tensor, kappa: float, epsilon: float = EPSILON) -> Tensor:
    """z − κ ∇Rᶜ(z; U): the exact step of eq 10."""
    return z - kappa * subspace_rate_gradient(z, bases, epsilon)


def attention_step(z: Tensor, bases: Tensor, kappa: float, epsilon: float = EPSILON) -> Tensor:
    """(1 − κγ) z + κγ MSSA(z; U): the attention form of the step, eqs 10 to 12, without a scale."""
    gamma = bases.shape[-1] / (z.shape[-2] * epsilon**2)
    w = z[..., None, :, :] @ bases
    mssa = gamma * (((w @ w.mT).softmax(-1) @ w) @ bases.mT).sum(-3)
    return (1 - kappa * gamma) * z + kappa * gamma * mssa


def lasso(code: Tensor, target: Tensor, dictionary: Tensor, threshold: float) -> Tensor:
    """λ‖code‖₁ + ½‖target − D code‖²: the objective of the ISTA step (eqs 15 to 17)."""
    return threshold * code.abs().sum((-2, -1)) + 0.5 * (target - code @ dictionary.mT).pow(2).sum((-2, -1))


def sparse_rate(z: Tensor, threshold: float, epsilon: float = EPSILON) -> Tensor:
    """φ(z) = λ‖z‖₁ − R(z) for z ≥ 0: the objective of the majorisation–minimisation step."""
    return threshold * z.abs().sum((-2, -1)) - coding_rate(z, epsilon)


def majorisation_step(z: Tensor, threshold: float, epsilon: float = EPSILON) -> Tensor:
    """ReLU(z + (∇R(z) − λ) / ℓ), ℓ = 9α/4, eq 80: never increases φ, because ‖∇²R‖ ≤ ℓ everywhere (Lemma 6)."""
    lipschitz = 9 / 4 * z.shape[-1] / (z.shape[-2] * epsilon**2)
    return F.relu(z + (coding_rate_gradient(z, epsilon) - threshold) / lipschitz)


def coherence(bases: Tensor) -> Tensor:
    """|cos| between all directions of all subspaces, (K p, K p): near the identity if they are incoherent."""
    directions = F.normalize(bases, dim=1).permute(0, 2, 1).flatten(0, 1)
    return (directions @ directions.mT).abs()


def _clean(z: Tensor, epsilon: float, mask: Tensor | None) -> tuple[Tensor, float | Tensor]:
    N, d = z.shape[-2:]
    if mask is None:
        return z, d / (N * epsilon**2)
    count = mask.sum(-1).clamp(min=1).to(z.dtype)
    return z.masked_fill(~mask[..., None], 0), (d / (count * epsilon**2))[..., None, None]


def _shifted(z: Tensor, alpha: float | Tensor) -> Tensor:
    return torch.eye(z.shape[-1], dtype=z.dtype, device=z.device) + alpha * z.mT @ z
