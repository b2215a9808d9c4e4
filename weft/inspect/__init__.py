"""Model inspection: the mathematics of CRATE, measurements per layer, figures, and an HTML report."""

from . import figures
from .branches import BranchView, branch_views
from .denoising import ideal_denoiser, mixture_score, posterior_mean
from .measure import cache_shares, measure, subspace_coherence, tokens_per_layer
from .page import report
from .rates import coding_rate, coherence, subspace_rate, subspace_rate_gradient
from .views import AttentionView, attention_row, attention_views

__all__ = [
    "AttentionView",
    "BranchView",
    "attention_row",
    "attention_views",
    "branch_views",
    "cache_shares",
    "coding_rate",
    "coherence",
    "figures",
    "ideal_denoiser",
    "measure",
    "mixture_score",
    "posterior_mean",
    "report",
    "subspace_coherence",
    "subspace_rate",
    "subspace_rate_gradient",
    "tokens_per_layer",
]
