"""The context-parallel forms on a GPU, with one rank: results, and which of them use a kernel."""

import socket

import pytest
import torch
import torch.distributed as dist

import weft
from weft.parallel import SHARDED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
WITH_KERNEL = {("local", False), ("local", True), ("longformer", False), ("longformer", True), ("linear", True)}


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("context",))
    dist.destroy_process_group()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHARDED)
def test_one_rank_equals_no_ranks(name, causal, mesh, monkeypatch):
    import weft.core.contract as contract
    import weft.parallel.sums as sums

    used = []
    for module in (contract, sums):
        decide = module.use_kernel
        monkeypatch.setattr(module, "use_kernel", lambda *args, d=decide: used.append(d(*args)) or used[-1])
    torch.manual_seed(0)
    attn = weft.make_attention(name, heads=2, head_dim=64, causal=causal).cuda()
    plain = weft.make_attention(name, heads=2, head_dim=64, causal=causal, backend="torch").cuda()
    plain.load_state_dict(attn.state_dict())
    q, k, v, dout = torch.randn(4, 2, 2, 4099, 64, device="cuda")
    mask = torch.rand(2, 4099, device="cuda") > 0.2
    found = []
    for split in (True, False):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        if split:
            with weft.parallel.context(mesh):
                out = attn(*x, mask)
        else:
            kernel, out = any(used), plain(*x, mask)
        out = torch.where(mask[:, None, :, None], out, 0)
        found.append([out, *torch.autograd.grad(out, x, dout)])
    assert kernel == ((name, causal) in WITH_KERNEL)
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 3e-3 * theirs.norm()  # the kernels' products are TF32
