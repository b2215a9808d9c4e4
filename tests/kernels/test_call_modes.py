"""Every kernel under torch.compile, activation checkpointing, autocast, CUDA graphs and more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from agree import Call, poisoned_memory, relative_error
from calls import REAL
from promises import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import weft
from weft.lab.compiled import compile_model
from weft.models import TextClassifier

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: set WEFT_TEST_DEVICE=cuda")


def usual(name: str) -> Call:
    """The first REAL call of a mechanism in bfloat16, without a mask, and long enough for "auto" to use the kernel."""
    first = REAL[name][0]
    return replace(first, dtype=torch.bfloat16, mask="none", B=2, L=max(1100, first.L))


class Modes:
    """One mechanism. Each method tests one way to call it, and returns what is wrong, or ""."""

    def __init__(self, name: str):
        self.call = usual(name)
        self.attn = self.call.make("triton", "cuda")
        self.bias = self.call.position_bias("cuda")

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attn(q, k, v, None, self.bias)

    def leaves(self) -> tuple[list[Tensor], Tensor]:
        q, k, v, dout, _ = self.call.tensors("cuda")
        return [x.requires_grad_() for x in (q, k, v)], dout

    def run(self, fn: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
        torch.manual_seed(1)  # the same random sample each time
        out = fn(*inputs)
        grads = torch.autograd.grad(out, inputs, dout.to(out.dtype), allow_unused=True)
        return [out, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True))]

    def deterministic(self) -> str:
        inputs, dout = self.leaves()
        return same(self.run(self.attention, inputs, dout), self.run(self.attention, inputs, dout))

    def compiled(self) -> str:
        inputs, dout = self.leaves()
        fn = torch.compile(lambda q, k, v: self.attention(q * 1, k, v) * 1, fullgraph=True)
        return same(self.run(fn, inputs, dout), self.run(self.attention, inputs, dout), 1e-2)

    def compiled_for_inference(self) -> str:
        """Twice, with a mask of 2,001 tokens made in the graph, as with a CLS token: after the first compilation,
        Inductor knows the layout that the operator needs."""
        q, k, v, _, mask = replace(self.call, L=2001, mask="ends").tensors("cuda")
        assert mask is not None

        def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            mask = torch.cat([mask[:, :1], mask[:, 1:]], 1)
            q, k, v = q * 1, k * 1, v * 1
            return self.attn(q, k, v, mask, self.bias) * 1

        outs = []
        for way in (torch.compile(fn), torch.compile(fn), fn):
            torch.compiler.reset()
            torch.manual_seed(1)
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
                outs.append(way(q, k, v, mask))
        return same(outs[:1], outs[2:], 1e-2) or same(outs[1:2], outs[2:], 1e-2)

    def compiled_plain(self) -> str:
        """The plain version, which Inductor compiles itself; in both directions if the mechanism allows it."""
        causal = not weft.attention_info(self.call.name).bidirectional
        self.attn = replace(self.call, causal=causal).make("torch", "cuda")
        return self.compiled_for_inference()

    def checkpointed(self) -> str:
        inputs, dout = self.leaves()
        again = self.run(lambda *x: checkpoint(self.attention, *x, use_reentrant=False), inputs, dout)
        return same(again, self.run(self.attention, inputs, dout))

    def autocast(self) -> str:
        inputs, dout = self.leaves()
        wide = [x.detach().float().requires_grad_() for x in inputs]

        def cast(*x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.attention(*x)

        mine = self.run(cast, wide, dout)
        return same([x.bfloat16() for x in mine], self.run(self.attention, inputs, dout), 2e-2)

    def cuda_graph(self) -> str:
        inputs, dout = self.leaves()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run(self.attention, inputs, dout)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch.manual_seed(1)
        with torch.cuda.graph(graph):
            out = self.attention(*inputs)
            grads = torch.autograd.grad(out, inputs, dout, allow_unused=True)
            captured = [out, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True))]
        fresh, fresh_dout = self.leaves()
        with torch.no_grad():
            for old, new in zip((*inputs, dout), (*fresh, fresh_dout), strict=True):
                old.copy_(new)
        torch.manual_seed(1)
        graph.replay()
        return same(captured, self.run(self.attention, fresh, fresh_dout))

    def batch_mates(self) -> str:
        inputs, dout = self.leaves()
        alone = [x.detach()[:1].clone().requires_grad_() for x in inputs]
        mine = self.run(self.attention, alone, dout[:1].contiguous())
        return same(mine, [x[:1] for x in self.run(self.attention, inputs, dout)])

    def operators(self) -> str:
        """torch.library.opcheck for every operator of weft in a forward and a backward."""
        inputs, dout = self.leaves()
        seen: dict[str, tuple[Any, tuple, dict]] = {}

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.namespace == "weft":
                    seen.setdefault(str(func), (func, args, kwargs or {}))
                return func(*args, **(kwargs or {}))

        with Watch():
            self.run(self.attention, inputs, dout)
        for func, args, kwargs in seen.values():
            # opcheck needs leaves; a backward operator has no derivative.
            grad = "backward" not in str(func)
            args = tree_map_only(Tensor, lambda x, grad=grad: x.detach().requires_grad_(grad and x.requires_grad), args)
            with poisoned_memory():  # unwritten bytes are the same in every run
                torch.library.opcheck(func, args, kwargs)
        return "" if seen else "no operator of weft ran"

    def expanded_gradient(self) -> str:
        """The gradient of out.sum() has strides of 0."""
        inputs, dout = self.leaves()
        ones = dout.new_ones(()).expand_as(dout)
        return same(self.run(self.attention, inputs, ones), self.run(self.attention, inputs, torch.ones_like(dout)))

    def auto(self) -> str:
        """backend="auto" gives the same result."""
        inputs, dout = self.leaves()
        fused = self.run(self.attention, inputs, dout)
        if hasattr(self.attn, "backend"):
            self.attn.backend = "auto"
        return same(self.run(self.attention, inputs, dout), fused, 1.2e-2)

    def inside(self) -> str:
        """weights @ v is the output of the kernel."""
        if not hasattr(self.attn, "weights"):
            return ""
        (q, k, v), dout = self.leaves()
        out = self.run(self.attention, [q, k, v], dout)[0]
        torch.manual_seed(1)
        error = relative_error(self.attn.weights(q, k, v, None, self.bias) @ v, out.double())
        return "" if error < 1e-2 else f"weights @ v is {error:.1e} away"


MODES = [name for name in vars(Modes) if not name.startswith("_") and name not in ("attention", "leaves", "run")]


def same(mine: list[Tensor], theirs: list[Tensor], within: float = 0.0) -> str:
    for name, a, b in zip(("out", "dq", "dk", "dv"), mine, theirs, strict=False):
        error = relative_error(a, b.double())
        if not (torch.equal(a, b) if within == 0.0 else error < within):
            return f"{name} differs by {error:.1e}, at most {within:.0e} is allowed"
    return ""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(REAL))
def test_call_mode(name, mode):
    torch.manual_seed(0)
    wrong = getattr(Modes(name), mode)()
    assert not wrong, wrong


def test_the_lab_compiles_a_wide_performer_correctly():
    """With padded strides, Inductor of torch 2.11 is off by a factor of two here, but not for a batch of 8."""
    torch.manual_seed(0)
    model = TextClassifier(18, 10, max_length=2001, heads=48, layers=1, attention="performer").cuda().eval()
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = "torch"
    ids = torch.randint(1, 18, (32, 2000), device="cuda")
    ids[torch.arange(2000, device="cuda") >= torch.arange(400, 2000, 50, device="cuda")[:, None]] = 0
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        wrong = same([compile_model(model)(ids)], [model(ids)], 5e-2)
    assert not wrong, wrong
