"""The theorems behind CRATE. Tokens are rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.inspect import rates
from weft.inspect.denoising import ideal_denoiser, log_density, mixture_score, posterior_mean

EXACT = {"rtol": 1e-9, "atol": 1e-10}


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def orthogonal(d: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(d, d)).Q


def subspaces(K: int, d: int, p: int) -> torch.Tensor:
    """K jointly orthonormal bases, (K, d, p)."""
    return orthogonal(d)[:, : K * p].unflatten(1, (K, p)).permute(1, 0, 2)


def by_autograd(f, z: torch.Tensor) -> torch.Tensor:
    z = z.clone().requires_grad_()
    return torch.autograd.grad(f(z).sum(), z)[0]


def test_worked_numbers():
    z = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    U, epsilon = torch.eye(2).unsqueeze(-1), 0.5**0.5
    near = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(rates.coding_rate(z, epsilon), torch.tensor(1.011436), **near)
    torch.testing.assert_close(rates.subspace_rate(z, U, epsilon), torch.tensor(0.676679), **near)
    gradient = torch.tensor([[0.423729, 0.0], [0.254237, 0.487805]])
    torch.testing.assert_close(rates.subspace_rate_gradient(z, U, epsilon), gradient, **near)
    gradient = torch.tensor([[0.603175, -0.253968], [0.158730, 0.634921]])
    torch.testing.assert_close(rates.coding_rate_gradient(z, epsilon), gradient, **near)
    x = torch.tensor([1.0, 0.6])
    torch.testing.assert_close(ideal_denoiser(x, U, 0.5), torch.tensor([0.782450, 0.130530]), **near)
    exact = posterior_mean(x, U @ U.mT, torch.tensor([0.5, 0.5]), 0.5)
    torch.testing.assert_close(exact, torch.tensor([0.588601, 0.126840]), **near)


@pytest.mark.parametrize("N, d", [(5, 3), (3, 5), (1, 4), (4, 1)])
def test_rate_has_two_forms_and_its_symmetries(N, d):
    z, epsilon = torch.randn(2, N, d), 0.3
    alpha = d / (N * epsilon**2)
    by_features = 0.5 * torch.logdet(torch.eye(d) + alpha * z.mT @ z)
    by_tokens = 0.5 * torch.logdet(torch.eye(N) + alpha * z @ z.mT)
    torch.testing.assert_close(rates.coding_rate(z, epsilon), by_features, **EXACT)
    torch.testing.assert_close(rates.coding_rate(z, epsilon), by_tokens, **EXACT)
    torch.testing.assert_close(rates.coding_rate(z @ orthogonal(d), epsilon), by_tokens, **EXACT)
    torch.testing.assert_close(rates.coding_rate(orthogonal(N) @ z, epsilon), by_tokens, **EXACT)
    torch.testing.assert_close(rates.coding_rate(z[:, torch.randperm(N)], epsilon), by_tokens, **EXACT)


def test_masked_tokens_are_not_coded():
    z, U = torch.randn(2, 7, 6), torch.randn(3, 6, 2)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    z[1, 5] = float("nan")
    rate = rates.subspace_rate(z, U, mask=mask, normalise=True)
    torch.testing.assert_close(rate[1], rates.subspace_rate(z[1, :4], U, normalise=True), **EXACT)


def test_bounds_for_unit_tokens():
    p, N = 4, 12
    same = F.normalize(torch.randn(1, p), dim=-1).expand(N, p)
    spread = orthogonal(p).repeat(N // p, 1)
    low, high = 0.5 * torch.log(torch.tensor(1 + p / 0.01)), p / 2 * torch.log(torch.tensor(1 + 1 / 0.01))
    torch.testing.assert_close(rates.coding_rate(same), low, **EXACT)
    torch.testing.assert_close(rates.coding_rate(spread), high, **EXACT)
    for _ in range(20):
        rate = rates.heads_rate(torch.randn(1, N, p), normalise=True)
        assert low < rate < high


def test_gradients_against_autograd():
    z, U = torch.randn(2, 5, 6), torch.randn(3, 6, 2)  # any U, not only orthonormal ones
    expected = by_autograd(lambda z: rates.coding_rate(z, 0.4), z)
    torch.testing.assert_close(rates.coding_rate_gradient(z, 0.4), expected, **EXACT)
    expected = by_autograd(lambda z: rates.subspace_rate(z, U, 0.4), z)
    torch.testing.assert_close(rates.subspace_rate_gradient(z, U, 0.4), expected, **EXACT)
    D = orthogonal(6)
    turned = rates.coding_rate_gradient(z @ D.mT, 0.4)  # (89): turning commutes with the gradient
    torch.testing.assert_close(turned, rates.coding_rate_gradient(z, 0.4) @ D.mT, **EXACT)


def test_lemma_5_hessian_against_autograd():
    z, direction = torch.randn(4, 3), torch.randn(4, 3)
    expected = torch.autograd.functional.hvp(lambda z: rates.coding_rate(z, 0.5), z, direction)[1]
    torch.testing.assert_close(rates.coding_rate_hessian(z, direction, 0.5), expected, **EXACT)
    D = orthogonal(3)
    turned = rates.coding_rate_hessian(z @ D.mT, direction @ D.mT, 0.5) * (direction @ D.mT)
    torch.testing.assert_close(turned.sum(), (expected * direction).sum(), **EXACT)


def test_lemma_6_hessian_bound():
    """‖∇²R‖ ≤ 9α/4 for every z, and its three pieces; every scale of z from tiny to huge."""
    N, d, epsilon = 5, 4, 0.5
    alpha = d / (N * epsilon**2)
    worst = 0.0
    for scale in (0.01, 0.3, 1.0, 3.0, 100.0):
        for _ in range(100):
            z, delta = scale * torch.randn(N, d), torch.randn(N, d)
            delta /= delta.norm()
            worst = max(worst, (rates.coding_rate_hessian(z, delta, epsilon) / alpha).norm().item())
            B = torch.linalg.inv(torch.eye(N) + alpha * z @ z.mT)
            assert (B @ delta).norm() <= 1
            assert (B @ delta @ z.mT @ B @ z).norm() <= 1 / alpha
            assert (B @ z @ delta.mT @ B @ z).norm() <= 1 / (4 * alpha)
    assert worst <= 9 / 4
    assert worst <= 1.0 + 1e-9  # the bound is loose: no search has passed 1


def test_majoriser_and_its_step():
    """Eq 84 for all pairs, and so the exact step (80) never raises the objective."""
    epsilon, threshold = 0.4, 0.3
    alpha = 4 / (6 * epsilon**2)
    for scale in (0.05, 0.5, 5.0):
        z, z0 = scale * torch.randn(50, 6, 4), scale * torch.randn(50, 6, 4)
        inner = (rates.coding_rate_gradient(z0, epsilon) * (z - z0)).sum((1, 2))
        bound = -rates.coding_rate(z0, epsilon) - inner + 9 * alpha / 8 * (z - z0).pow(2).sum((1, 2))
        assert (-rates.coding_rate(z, epsilon) <= bound + 1e-12).all()
        start = z.abs()
        before = rates.sparse_rate(start, threshold, epsilon)
        after = rates.sparse_rate(rates.majorisation_step(start, threshold, epsilon), threshold, epsilon)
        assert (after <= before + 1e-12).all() and (after < before).any()


def test_mm_layer_is_the_majorisation_step_on_orthonormal_tokens():
    """Eq 88 equals eq 80 where tokens are orthonormal, in a dictionary that turns them."""
    N, d, epsilon = 3, 5, 0.7
    code = orthogonal(d)[:N]
    layer = weft.ISTA(d, variant="mm", epsilon=epsilon, threshold=0.2)
    layer.weight.data = orthogonal(d)
    z = code @ layer.weight.T  # z = D code
    expected = rates.majorisation_step(code, 0.2, epsilon)
    torch.testing.assert_close(layer(z[None])[0].detach(), expected, **EXACT)


def test_compression_steps_lower_the_rate():
    """Eq 10: the exact step with κ = 1/ℓ, and its attention form with a small κ."""
    K, d, p, N, epsilon = 3, 6, 2, 8, 0.6
    gamma = p / (N * epsilon**2)
    for scale in (0.1, 1.0, 10.0):
        z, U = scale * torch.randn(20, N, d), subspaces(K, d, p)
        before = rates.subspace_rate(z, U, epsilon)
        exact = rates.compression_step(z, U, 4 / (9 * gamma), epsilon)
        assert (rates.subspace_rate(exact, U, epsilon) < before).all()
        attended = rates.attention_step(z, U, 0.1 / gamma, epsilon)
        assert (rates.subspace_rate(attended, U, epsilon) < before).all()


def test_first_order_inverse_holds_where_it_should():
    """Eqs 67 to 68: γ w (I − γ wᵀw) is within O(γ²) of the gradient when γ λ_max < 1, and far off beyond."""
    U = subspaces(2, 4, 2)
    z = torch.randn(6, 4)
    w = z @ U
    largest = torch.linalg.eigvalsh(w.mT @ w).max()

    def error(gamma: torch.Tensor) -> torch.Tensor:
        epsilon = (2 / (6 * gamma)).sqrt().item()
        first = ((gamma * w @ (torch.eye(2) - gamma * w.mT @ w)) @ U.mT).sum(0)
        exact = rates.subspace_rate_gradient(z, U, epsilon)
        return (first - exact).norm() / exact.norm()

    small, smaller = error(0.01 / largest), error(0.001 / largest)
    assert small < 2e-4 and smaller < small / 50  # quadratic: a tenth of γ, a hundredth of the error
    assert error(10 / largest) > 1


def test_one_token_attention_is_the_denoiser_with_equal_weights():
    """N = 1, κ = γ = 1: eq 10 projects on every subspace, eq 6 with uniform weights in place of a softmax."""
    U, z = subspaces(2, 6, 2), torch.randn(1, 6)
    step = rates.attention_step(z, U, 1.0, epsilon=2**0.5)
    torch.testing.assert_close(step, ((z @ U) @ U.mT).sum(0), **EXACT)


def test_bases_that_fill_the_space_sum_to_the_identity():
    U = subspaces(3, 6, 2)
    torch.testing.assert_close((U @ U.mT).sum(0), torch.eye(6), **EXACT)
    missing = (U[:2] @ U[:2].mT).sum(0)
    assert not torch.allclose(missing, torch.eye(6))


def test_proposition_1_score():
    d, K, sigma = 5, 3, 0.4
    halves = torch.randn(K, d, 2)
    covariances = halves @ halves.mT
    values, vectors = torch.linalg.eigh(covariances + sigma**2 * torch.eye(d))
    roots = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT
    weights = 1 / torch.linalg.det(roots)
    weights = weights / weights.sum()
    x = torch.randn(10, d)
    expected = by_autograd(lambda x: log_density(x, covariances, weights, sigma), x)
    torch.testing.assert_close(mixture_score(x, roots), expected, **EXACT)
    tweedie = x + sigma**2 * expected  # eq 5
    torch.testing.assert_close(posterior_mean(x, covariances, weights, sigma), tweedie, **EXACT)
    uneven = torch.tensor([0.8, 0.1, 0.1])  # and the condition on the weights is needed
    other = by_autograd(lambda x: log_density(x, covariances, uneven, sigma), x)
    assert (mixture_score(x, roots) - other).norm() > 1e-3


def test_ideal_denoiser_against_the_posterior_mean():
    """Eq 6 is off by σ²/τ for small σ, and the closed form for equal subspaces is exact."""
    d, K, p, tau = 7, 3, 2, 1.0
    U = subspaces(K, d, p)
    covariances, weights = tau * U @ U.mT, torch.full((K,), 1 / K)
    k = torch.randint(K, (4000,))
    z = torch.einsum("np,ndp->nd", torch.randn(4000, p), U[k])
    for sigma in (0.1, 0.01):
        x = z + sigma * torch.randn_like(z)
        exact = posterior_mean(x, covariances, weights, sigma)
        w = torch.einsum("nd,kdp->nkp", x, U)
        share = (tau / (2 * sigma**2 * (tau + sigma**2)) * w.pow(2).sum(-1)).softmax(-1)
        closed = tau / (tau + sigma**2) * torch.einsum("nk,nkp,kdp->nd", share, w, U)
        torch.testing.assert_close(closed, exact, **EXACT)
        error = (ideal_denoiser(x, U, sigma) - exact).norm(dim=1) / exact.norm(dim=1)
        assert abs(error.mean().item() / (sigma**2 / tau) - 1) < 0.15
    for sigma in (0.1, 1e-3):  # the smoothed projection tends to the projection
        eigen = torch.diag_embed(torch.tensor([1.0, 0.5]))
        covariance = U[0] @ eigen @ U[0].mT
        values, vectors = torch.linalg.eigh(covariance + sigma**2 * torch.eye(d))
        smooth = torch.eye(d) - sigma * vectors @ torch.diag(values.rsqrt()) @ vectors.mT
        assert (smooth - U[0] @ U[0].mT).norm() < 3 * sigma


def test_ista_step_lowers_its_objective():
    """Eq 17 is the proximal step at z = x on the non-negative LASSO: with η ≤ 1/‖D‖² it can only go down."""
    d, threshold = 6, 0.1
    layer = weft.ISTA(d, threshold=threshold, step=0.1)
    for _ in range(10):
        layer.weight.data = torch.randn(d, d)
        layer.step = 1 / torch.linalg.matrix_norm(layer.weight.data, 2).item() ** 2
        x = torch.randn(8, 5, d).abs()
        before = rates.lasso(x, x, layer.weight, threshold)
        after = rates.lasso(layer(x), x, layer.weight, threshold)
        assert (after < before).all()


def test_ista_in_an_orthogonal_dictionary():
    """η = 1 gives ReLU(D*x − λ), the exact solution; smaller steps go part of the way."""
    d, threshold = 5, 0.2
    D, x = orthogonal(d), torch.randn(1, 4, d)
    for step in (0.3, 1.0):
        layer = weft.ISTA(d, step=step, threshold=threshold)
        layer.weight.data = D
        expected = F.relu((1 - step) * x + step * x @ D - step * threshold)
        torch.testing.assert_close(layer(x).detach(), expected, **EXACT)
    solution = F.relu(x @ D - threshold)
    best = rates.lasso(solution, x, D, threshold)
    for _ in range(50):
        other = F.relu(solution + 0.05 * torch.randn_like(solution))
        assert (rates.lasso(other, x, D, threshold) >= best - 1e-12).all()


def test_random_subspaces_have_the_coherence_of_chance():
    G = rates.coherence(torch.randn(6, 400, 8))
    torch.testing.assert_close(G.diagonal(), torch.ones(48), **EXACT)
    off = G[~torch.block_diag(*[torch.ones(8, 8)] * 6).bool()].mean().item()
    assert abs(off / (2 / (torch.pi * 400)) ** 0.5 - 1) < 0.1
