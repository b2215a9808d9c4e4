"""The cache as state: checkpoints, recomputation, compilation, several ranks."""

from __future__ import annotations

import copy
import io
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft import CachedAttention, MultiheadAttention


def layer(seed: int = 0, **options: object) -> CachedAttention:
    torch.manual_seed(seed)
    return CachedAttention(MultiheadAttention(16, 4).double(), **options)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "options", [{"length": 6}, {}, {"scope": "stream"}, {"delayed": True}, {"delayed": True, "scope": "stream"}]
)
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_restore_a_new_model(options: dict, assign: bool, tmp_path: Path) -> None:
    trained = layer(**options)
    for step in range(3):
        trained(tokens(3, 6, 16, seed=step))
    torch.save(trained.state_dict(), tmp_path / "c.pt")
    with torch.device("meta" if assign else "cpu"):
        fresh = layer(seed=9, **options)
    fresh.load_state_dict(torch.load(tmp_path / "c.pt", weights_only=True), assign=assign)
    assert torch.equal(fresh.cache.cache, trained.cache.cache) and fresh.cache.updates == 3
    x = tokens(3, 6, 16, seed=8)
    assert torch.equal(fresh(x), trained(x))  # training continues identically
    assert torch.equal(fresh.eval()(x), trained.eval()(x))


@pytest.mark.parametrize("options", [{}, {"scope": "stream"}, {"delayed": True}], ids=str)
def test_an_assigned_checkpoint_in_half_precision(options: dict) -> None:
    """The weights take its dtype, the cache stays in float32, as after a cast of the model."""
    trained = layer(**options)
    trained(tokens(3, 6, 16))
    cast = copy.deepcopy(trained).bfloat16()
    half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in trained.state_dict().items()}
    loaded = layer(**options)
    loaded.load_state_dict(half, assign=True)
    assert loaded.lam.dtype == torch.bfloat16
    found, expected = ({n: t.dtype for n, t in c.state_dict().items() if "gate" not in n} for c in (loaded, cast))
    assert found == {name: torch.float32 if dtype == torch.float64 else dtype for name, dtype in expected.items()}


def test_state_exists_from_the_start_and_a_wrong_length_is_refused() -> None:
    c = layer(length=6)
    assert {"cache.cache", "cache.updates", "lam"} <= set(c.state_dict())
    other = layer(length=5)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(c.state_dict())
    assert "cache.cache" in layer().state_dict()


def test_reset_clears_the_cache() -> None:
    c, x = layer(), tokens(2, 6, 16)
    first = c(x)
    c(x)
    c.reset()
    assert c.cache.updates == 0 and (c.cache.cache == 0).all()
    assert torch.equal(c(x), first)


@pytest.mark.parametrize("options", [{}, {"scope": "stream"}, {"scope": "stream", "delayed": True}])
def test_what_is_written_in_inference_mode_can_be_trained_on(options: dict) -> None:
    x = torch.randn(2, 5, 16, requires_grad=True)
    for reset in (False, True):
        c = CachedAttention(MultiheadAttention(16, 4), **options)
        with torch.inference_mode():
            c(x)
            if reset:
                c.reset()
        for _ in range(2):
            c(x).sum().backward()
        c.load_state_dict(c.state_dict())


@pytest.mark.parametrize("options", [{}, {"scope": "stream"}, {"delayed": True}], ids=str)
def test_training_by_torch_func_is_that_by_autograd(options: dict) -> None:
    c, x = layer(**options), tokens(2, 6, 16)
    other, weights = copy.deepcopy(c), {name: p.detach() for name, p in c.named_parameters()}

    def loss(weights: dict) -> torch.Tensor:
        return torch.func.functional_call(c, weights, (x,)).square().sum()

    for _ in range(3):
        found = torch.func.grad(loss)(weights)
        other.zero_grad()
        other(x).square().sum().backward()
        for name, p in other.named_parameters():
            torch.testing.assert_close(found[name], torch.zeros_like(p) if p.grad is None else p.grad)
    torch.save(c, io.BytesIO())
    torch.testing.assert_close(c.state_dict(), other.state_dict())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_cannot_write_one_cache() -> None:
    c, x = layer(), tokens(3, 2, 6, 16)
    with pytest.raises(RuntimeError, match="vmap cannot write"):
        torch.func.vmap(c, randomness="same")(x)
    c(x[0])  # as if nothing had happened
    c.eval()
    torch.testing.assert_close(torch.func.vmap(c)(x), torch.stack([c(row) for row in x]))


def test_a_copy_has_its_own_cache() -> None:
    c = layer(length=6)
    c(tokens(2, 6, 16))
    twin = copy.deepcopy(c)
    twin(tokens(2, 6, 16, seed=2))
    assert not torch.equal(twin.cache.cache, c.cache.cache) and c.cache.updates == 1


def test_checkpointing_refuses_too_many_forwards_in_flight() -> None:
    c, x = layer(length=6), tokens(2, 6, 16).requires_grad_()
    losses = [checkpoint(c, x, use_reentrant=True).square().sum() for _ in range(65)]
    with pytest.raises(RuntimeError, match="at most 64"):
        losses[0].backward()


@pytest.mark.parametrize("options", [{}, {"delayed": True, "scope": "stream", "candidate": "ln_gelu"}])
def test_compiles_in_one_graph_in_training_and_evaluation(options: dict) -> None:
    torch._dynamo.reset()
    eager, made = layer(**options), layer(**options)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for step in range(2):
        x = tokens(2, 6, 16, seed=step)
        mask = torch.arange(6) < torch.tensor([6, 3])[:, None]
        a, b = eager(x, mask), compiled(x, mask)
        torch.testing.assert_close(b, a)
        torch.testing.assert_close(made.cache.cache, eager.cache.cache)
        a.square().sum().backward()
        b.square().sum().backward()
    assert made.cache.updates == 2
    for (name, p), q in zip(eager.named_parameters(), made.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    eager.eval(), made.eval()
    torch.testing.assert_close(compiled(x, mask), eager(x, mask))
    assert made.cache.updates == 2


def test_checkpointing_around_a_compiled_layer_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer(length=6), backend="aot_eager")
    loss = checkpoint(compiled, tokens(2, 6, 16).requires_grad_(), use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match="compile around the checkpoint"):
        loss.backward()


class Net(nn.Module):
    def __init__(self, **options: object):
        super().__init__()
        self.first, self.second = layer(0, length=5, **options), layer(1, length=5, **options)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.first(x, mask)
        return x + self.second(x, mask)


def batch() -> tuple[Tensor, Tensor]:
    """Four samples; the second half has fewer real tokens, and one sample has none."""
    return tokens(4, 7, 16), torch.arange(7) < torch.tensor([7, 5, 3, 0])[:, None]


def train(model: nn.Module, x: Tensor, mask: Tensor, steps: int = 2) -> Tensor:
    for step in range(steps):
        model.zero_grad()
        y = model(x * (1 + step), mask)
        y.square().masked_fill(~mask[..., None], 0).sum().backward()
    return y


KINDS: dict[str, dict] = {
    "exact": {},
    "delayed": {"delayed": True},
    "per_sample": {"memory": "per_sample"},
    "stored": {"sync": "stored"},
    "none": {"sync": "none"},
}


def rank(number: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    x, mask = (t[2 * number : 2 * number + 2] for t in batch())
    found = {}
    for kind, options in KINDS.items():
        model = Net(**options)
        y = train(nn.parallel.DistributedDataParallel(model), x, mask)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found[kind] = {"y": y.detach(), "caches": caches(model), "gradients": gradients}
    torch.save(found, f"{folder}/{number}.pt")
    dist.destroy_process_group()


def caches(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if name.endswith("cache.cache")}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """The results of two processes, for every kind of cache."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(rank, (folder,), nprocs=2, join=False)
        deadline = time.monotonic() + 120
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                pytest.fail("two ranks did not finish within two minutes")
        return [torch.load(f"{folder}/{number}.pt") for number in range(2)]


@pytest.mark.parametrize("kind", ["exact", "delayed", "per_sample"])
def test_two_ranks_equal_one_big_batch(kind: str, ranks: list[dict]) -> None:
    x, mask = batch()
    whole = Net(**KINDS[kind])
    y = train(whole, x, mask)
    torch.testing.assert_close(torch.cat([r[kind]["y"] for r in ranks])[mask], y[mask])
    for r in ranks:
        torch.testing.assert_close(r[kind]["caches"], caches(whole))
        for name, p in whole.named_parameters():  # ours is a sum over samples, and DDP averages over its two ranks
            torch.testing.assert_close(r[kind]["gradients"][name] * 2, p.grad, msg=name)


def test_ranks_may_read_their_own_mean(ranks: list[dict]) -> None:
    x, mask = batch()
    y = train(Net(), x, mask)
    for kind in ("stored", "none"):
        assert not torch.allclose(torch.cat([r[kind]["y"] for r in ranks])[mask], y[mask])
    torch.testing.assert_close(ranks[0]["stored"]["caches"], ranks[1]["stored"]["caches"])
    for number, found in enumerate(ranks):
        alone = Net(sync="none")
        train(alone, *(t[2 * number : 2 * number + 2] for t in (x, mask)))
        torch.testing.assert_close(found["none"]["caches"], caches(alone))
