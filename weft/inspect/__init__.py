"""Looking inside: the mathematics of CRATE, measurements per layer, figures, and a page to read them on."""

from .denoising import ideal_denoiser, mixture_score, posterior_mean
from .rates import coding_rate, coherence, subspace_rate, subspace_rate_gradient

__all__ = [
    "coding_rate",
    "coherence",
    "ideal_denoiser",
    "mixture_score",
    "posterior_mean",
    "subspace_rate",
    "subspace_rate_gradient",
]
