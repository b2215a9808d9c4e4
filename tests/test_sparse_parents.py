"""The sparse mechanisms that Combiners are built on: learning, checkpointing and decoding."""

import pytest
import torch

import weft

H, D = 2, 5


def qkv(L, seed=0, B=2):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(3, B, H, L, D, generator=g, dtype=torch.float64).unbind(0)


CASES = [
    *[("sparse", {"block_size": m, "columns": c}) for m, c in ((4, 1), (5, 2), (3, 7), (1, 1), (40, 3), (4, 0))],
    ("sparse", {"block_size": 5, "columns": 2, "leading_column": True}),
    *[("sparse", {"pattern": "strided", "block_size": m}) for m in (1, 3, 4, 40)],
    *[("axial", {"block_size": m}) for m in (1, 3, 4, 40)],
    ("logsparse", {}),
    ("logsparse", {"offsets": "powers"}),
]


def test_centroids_learn_in_training_only():
    torch.manual_seed(0)
    attn = weft.make_attention("routing", heads=H, head_dim=D, clusters=3, decay=0.5)
    q, k, v = (t.float() for t in qkv(20))
    start = attn.clusters.centroids.clone()
    attn.eval()(q, k, v)
    attn.train()(q, k, v)  # a call never sees its own batch
    assert torch.equal(attn.clusters.centroids, start)
    once = attn(q, k, v)
    assert not torch.equal(attn.clusters.centroids, start)
    torch.testing.assert_close(attn.clusters.centroids.norm(dim=-1), torch.ones(H, 3))
    assert torch.equal(attn.eval()(q, k, v), once)


def test_checkpointing_repeats_routing_exactly():
    torch.manual_seed(0)
    attn = weft.make_attention("routing", heads=H, head_dim=D, clusters=3, decay=0.2).double().train()
    grads = []
    state = {name: t.clone() for name, t in attn.state_dict().items()}
    for checkpoint in (False, True):
        attn.load_state_dict(state)
        attn(*qkv(20, 1))
        q, k, v = (t.requires_grad_() for t in qkv(20))
        if checkpoint:
            out = torch.utils.checkpoint.checkpoint(attn, q, k, v, use_reentrant=False)
        else:
            out = attn(q, k, v)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
        grads.append(tuple(t.clone() for t in attn.clusters.buffers()))
    for a, b in zip(grads[0] + grads[1], grads[2] + grads[3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_steps(name, options):
    L = 23
    attn = weft.make_attention(name, heads=H, head_dim=D, causal=True, **options)
    q, k, v = qkv(L)
    mask = torch.ones(2, L, dtype=torch.bool)
    mask[0, 3:6] = mask[1, :2] = False
    bias, state = weft.ALiBi(H), attn.start(2)
    whole = attn(q, k, v, mask, bias)
    for t in range(L):
        at = slice(t, t + 1)
        out, state = attn.step(q[:, :, at], k[:, :, at], v[:, :, at], state, mask[:, t], bias)
        torch.testing.assert_close(out[mask[:, t], :, 0], whole[mask[:, t], :, t], atol=1e-12, rtol=0)


def test_decoding_needs_a_block_size():
    for name in ("sparse", "axial"):
        with pytest.raises(ValueError, match="block_size or max_length"):
            weft.make_attention(name, heads=H, head_dim=D, causal=True).start(1)
