"""Why attention compresses: optimal denoising of tokens near a union of subspaces.

Yu et al., White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129, section 2.2

    x = z + σ noise,   z from a mixture of K Gaussians N(0, Σ_k) with weights π_k
    E[z | x] = x + σ² ∇log q(x)                                                        Tweedie, eq 5
    E[z | x] ≈ Σ_k softmax_k(‖U_kᵀx‖² / 2σ²) U_k U_kᵀ x    for small σ                   eq 6: a softmax over subspaces

Tokens are rows, x (…, d); subspaces U (K, d, p), covariances (K, d, d).
"""

from __future__ import annotations

import torch
from torch import Tensor


def ideal_denoiser(x: Tensor, bases: Tensor, sigma: float) -> Tensor:
    """Eq 6: project onto every subspace, weighted by how much of x lies in it."""
    w = torch.einsum("...d,kdp->...kp", x, bases)
    share = (w.pow(2).sum(-1) / (2 * sigma**2)).softmax(-1)
    return torch.einsum("...k,...kp,kdp->...d", share, w, bases)


def posterior_mean(x: Tensor, covariances: Tensor, weights: Tensor, sigma: float) -> Tensor:
    """The exact E[z | x]."""
    noisy = covariances + sigma**2 * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    share = _log_joint(x, noisy, weights).softmax(-1)
    gain = torch.linalg.solve(noisy, covariances)  # (Σ_k + σ²I)⁻¹ Σ_k; the two commute
    return torch.einsum("...k,kde,...e->...d", share, gain, x)


def log_density(x: Tensor, covariances: Tensor, weights: Tensor, sigma: float) -> Tensor:
    """log q(x) of the noisy tokens, without the Gaussian normalisation constant."""
    noisy = covariances + sigma**2 * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return _log_joint(x, noisy, weights).logsumexp(-1)


def mixture_score(x: Tensor, roots: Tensor) -> Tensor:
    """∇log q(x) by Proposition 1, from roots M_k = (Σ_k + σ²I)^(−½), where π_k det M_k is the same for all k."""
    whitened = torch.einsum("...d,kde->...ke", x, roots)
    share = (-0.5 * whitened.pow(2).sum(-1)).softmax(-1)
    return -torch.einsum("...k,...ke,kde->...d", share, whitened, roots)


def _log_joint(x: Tensor, noisy: Tensor, weights: Tensor) -> Tensor:
    precise = torch.linalg.inv(noisy)
    distance = torch.einsum("...d,kde,...e->...k", x, precise, x)
    return weights.log() - 0.5 * torch.linalg.slogdet(noisy).logabsdet - 0.5 * distance
