"""A forward on a GPU never waits for a copy from the CPU. Checked on fake CUDA tensors, so no GPU is needed."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from weft.layers import EdgeAttention, SubsampledWindowAttention

SENT = {"weft.send"}  # from page-locked memory


class Crossings(TorchDispatchMode):
    """Records every operator that copies from one device to another."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
        if len(devices) > 1:
            self.found.append(str(function).removesuffix(".default"))
        return out


def crossings(module, *shapes, mask=None):
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = module.cuda()
        inputs = [torch.empty(shape, device="cuda") for shape in shapes]
        masks = [] if mask is None else [torch.ones(mask, dtype=torch.bool, device="cuda")]
        with Crossings() as seen:
            module(*inputs, *masks)
    return seen.found


CASES = [
    ("subsampled", {}),
    ("subsampled", {"biased": False}),
    ("subsampled", {"keep": 0.5}),
    ("subsampled", {"layout": (6, 7), "windows": (2, 3)}),
    ("subsampled", {"layout": (6, 7), "windows": 3, "biased": False}),
    ("subsampled", {"layout": "graph", "keep": 0.5}),
    ("sparse", {"block_size": 4}),
    ("sparse", {"block_size": 4, "columns": 1, "leading_column": True}),
    ("sparse", {"block_size": 4, "pattern": "strided"}),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_plain_versions_copy_nothing(name, options, causal):
    if causal and (options.get("layout") == "graph" or isinstance(options.get("windows"), tuple)):
        pytest.skip("not causal")
    attn = weft.make_attention(name, heads=2, head_dim=8, causal=causal, backend="torch", **options)
    for mask in (None, (2, 42)):
        assert crossings(attn, *[(2, 2, 42, 8)] * 3, mask=mask) == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", weft.attentions())
def test_no_mechanism_waits(name, causal):
    info = weft.attention_info(name)
    if causal and not info.causal:
        pytest.skip("not causal")
    plain = {"backend": "torch"} if "triton" in info.backends else {}
    for length, masked in itertools.product((42, 300), (False, True)):
        attn = weft.make_attention(name, heads=2, head_dim=8, causal=causal, max_length=length, **plain)
        found = crossings(attn, *[(2, 2, length, 8)] * 3, mask=(2, length) if masked else None)
        assert set(found) <= SENT, (length, masked)


@pytest.mark.parametrize("biased", [False, True])
def test_layers_copy_nothing(biased):
    for training in (True, False):
        windows = SubsampledWindowAttention(8, 2, window=4, biased=biased).train(training)
        assert crossings(windows, (2, 9, 7, 8)) == []
    edges = EdgeAttention(8, 2, 3, source_dropout=0.5)
    assert crossings(edges, (2, 9, 8), (2, 9, 9, 3), mask=(2, 9)) == []


def test_crossings_are_noticed():
    class Careless(torch.nn.Module):
        def forward(self, x):
            return x[torch.tensor([1, 0], device=x.device)] + torch.arange(3, device="cpu").to(x.device)

    # PyTorch hides the copy inside torch.tensor(..., device="cuda") if there is a GPU.
    assert len(crossings(Careless(), (2, 3))) == (1 if torch.cuda.is_available() else 2)
