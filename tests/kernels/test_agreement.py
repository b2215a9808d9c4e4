"""Every kernel against its plain version: outputs and all gradients against float64, in poisoned memory.

On a CPU: small calls in Triton's interpreter, without bfloat16, whose products it gets wrong. With
WEFT_TEST_DEVICE=cuda: real sizes, in bfloat16, float16 and float32.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agree import TOLERANCE, Call, errors, relative_error
from calls import REAL, SMALL
from promises import DEVICE

import weft
from weft.core.dispatch import LARGEST_HEAD
from weft.kernels import launch

pytest.importorskip("triton")

NAMES = [name for name in weft.attentions() if weft.attention_info(name).kernel]


def calls_of(name: str) -> tuple[Call, ...]:
    """The calls listed for the mechanism, or a few of its default settings."""
    default = tuple(Call(name, L, causal=causal, mask="random") for L in (33, 150) for causal in (False, True))
    return (SMALL if DEVICE == "cpu" else REAL).get(name, default)


def with_strided_rows(calls: tuple[Call, ...]) -> list[Call]:
    """One of the calls, after the first, with rows that are not contiguous."""
    changed = next(call for call in calls[1:] if call.layout == "BLHD" and call.L > 1)
    return [replace(call, layout="BHDL") if call is changed else call for call in calls]


def with_groups(calls: tuple[Call, ...]) -> list[Call]:
    """One call of each direction and pattern, with two heads of q for each head of k and v. On a CPU, see
    `test_grouped.py`."""
    firsts = {(call.causal, call.options.get("pattern")): call for call in reversed(calls)}
    return [replace(call, H=4, group=2) for call in firsts.values()]


def calls() -> list[Call]:
    if DEVICE == "cpu":
        return [call for name in NAMES for call in with_strided_rows(calls_of(name))]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    found = []
    for given in map(calls_of, NAMES):
        found += [replace(call, dtype=dtype) for call in given for dtype in dtypes if call.fits(dtype)]
        found += [replace(call, dtype=torch.bfloat16) for call in with_groups(given)]
        wide = replace(given[0], D=LARGEST_HEAD)
        found += [replace(wide, dtype=dtype) for dtype in (torch.bfloat16, torch.float32) if wide.fits(dtype)]
    return found


def check(call: Call) -> None:
    tolerance = call.slack * TOLERANCE[call.dtype]
    wrong = {name: error for name, error in errors(call, DEVICE).items() if not error < tolerance}
    assert not wrong


@pytest.mark.parametrize("call", calls(), ids=str)
def test_backends_agree(call):
    torch.manual_seed(0)
    check(call)


@pytest.mark.parametrize("call", [Call("performer", 145, H=1, D=64, mask="random"), Call("linear", 150, H=1, D=64)])
def test_bfloat16_scan_tiles_are_correct_in_float32(call, monkeypatch):
    from weft.attention.performer import kernel as random_features
    from weft.kernels.linear_scan import kernel as linear_scan

    launch.forget()
    for table in (linear_scan.TILES, random_features.TILES):  # float16 has the tiles of float32
        for kernel, width, size in list(table):
            if size == 4:
                monkeypatch.setitem(table, (kernel, width, size), table[kernel, width, 2])
    torch.manual_seed(0)
    check(call)
    launch.forget()


@pytest.mark.parametrize("size", [2**31 - 1, 2**63 - 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "more"), [("local", {}), ("longformer", {}), ("longformer", {"global_tokens": 2})])
def test_blocks_and_windows_without_end(name, more, causal, size):
    """The kernels add positions to them, in 32 bits."""
    torch.manual_seed(0)
    options = {**more, "block_size" if name == "local" else "window": size}
    check(Call(name, 20, H=1, causal=causal, options=options))


CHUNKED = [
    Call("combiner-fixed", 150, mask="random", options={"block_size": 16}),
    Call("combiner-fixed", 150, H=1, causal=False, options={"block_size": 20}),
    Call("longformer", 150, H=1, causal=False, mask="random", options={"window": 8, "global_tokens": 3}),
    Call("sparse", 150, H=1, options={"block_size": 16, "columns": 2}),
    Call("linear", 150, H=1, causal=False, mask="random"),
]


@pytest.fixture
def chunks_of_64(monkeypatch):
    """The lengths whose sums were divided into chunks of 64 tokens. On a CPU, no call is long enough for two chunks."""
    from weft.attention.combiner.fixed import kernel as fixed
    from weft.attention.linformer import kernel as linformer
    from weft.kernels.band import kernel as band
    from weft.kernels.linear_sum import kernel as linear_sum

    def short(L: int, *rest: int) -> tuple[int, int]:
        used.append(L)
        return 64, -(-L // 64)

    used: list[int] = []
    launch.forget()
    places = (fixed, "query_chunks"), (band, "query_chunks"), (linear_sum, "chunks"), (linformer, "chunks")
    for module, name in places:
        monkeypatch.setattr(module, name, short)
    yield used
    launch.forget()


@pytest.mark.parametrize("call", CHUNKED, ids=str)
def test_sums_in_many_chunks(call, chunks_of_64):
    torch.manual_seed(0)
    check(call)
    assert chunks_of_64


@pytest.mark.parametrize("name", NAMES)
def test_queries_keys_and_values_may_be_one_tensor(name):
    call = replace(calls_of(name)[0], dtype=torch.float32)
    x, _, _, dout, mask = call.tensors(DEVICE)
    found = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)  # the same features and samples
        attn, z = call.make(backend, DEVICE), x.clone().requires_grad_()
        torch.manual_seed(0)
        out = attn(z, z, z, mask, call.position_bias(DEVICE))
        found.append((out.detach(), torch.autograd.grad(out, z, dout)[0]))
    for plain, fused in zip(*found, strict=True):
        assert relative_error(fused, plain) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", NAMES if DEVICE == "cuda" else ["bigbird"])
def test_training_after_a_call_in_inference_mode(name):
    """Tables that a kernel keeps for later calls must not be inference tensors."""
    call = replace(SMALL[name][0], H=3, L=7, mask="none")  # three heads: no other test has left its tables
    attn, (q, k, v, dout, _) = call.make("triton", DEVICE), call.tensors(DEVICE)
    with torch.inference_mode():
        attn(q, k, v)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert any(g is not None for g in torch.autograd.grad(attn(*inputs), inputs, dout, allow_unused=True))


@pytest.mark.parametrize("name", NAMES)
def test_compiled_operators_share_no_mask_with_other_nodes(name):
    """Inductor of torch 2.11 gives wrong results without an error if an operator and other nodes read the same tensor
    with rows over 1,024: it writes and reads the rows with different strides."""
    from torch._dynamo.backends.common import aot_autograd

    call = replace(calls_of(name)[0], mask="ends", B=2, dtype=torch.float32)
    attn, bias = call.make("triton", DEVICE), call.position_bias(DEVICE)
    q, k, v, _, mask = call.tensors(DEVICE)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def fn(q, k, v, mask):
        mask = torch.cat([mask[:, :1], mask[:, 1:]], 1)  # made in the graph, as a model with a CLS token makes it
        return attn(q, k, v, mask, bias)

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(fn, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(q, k, v, mask)
    ours = [node for node in graphs[0].graph.nodes if getattr(node.target, "namespace", "") == "weft"]
    given = [x for node in ours for x in node.all_input_nodes if x.op != "placeholder"]
    masks = [x for x in given if not x.meta["val"].is_floating_point()]
    assert bool(masks) == (name != "linformer")  # there, padding is zero keys and values
    assert all(len(x.users) == 1 for x in masks)


FAR = [name for name in NAMES if weft.attention_info(name).kernel.far]  # the others get copies


@pytest.mark.parametrize("name", NAMES if DEVICE == "cuda" else [*FAR, "axial", "local"])
def test_rows_may_span_more_elements_than_32_bits_count(name, chunks_of_64):
    """Such as those of a joint projection of q, k and v of a million tokens. Only the rows are touched, so on a CPU
    most of the memory does not exist."""
    call = replace(calls_of(name)[0], B=1, H=2, D=16, mask="none", bias="", dtype=torch.float16)
    if name in FAR:  # those of a tile must be near
        call = replace(call, L=300, options={"max_length": 300})
    q, k, v, dout, _ = call.tensors(DEVICE)
    step = 2**31 // (call.L - 1)
    found = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        attn = call.make(backend, DEVICE)
        inputs = []
        for x in (q, k, v, dout):
            if backend == "triton":
                memory = torch.empty((call.L - 1) * step + 2 * 16, dtype=torch.float16, device=DEVICE)
                x = memory.as_strided(x.shape, (1, 16, step, 1)).copy_(x)
            inputs.append(x.requires_grad_())
        *qkv, grad = inputs
        torch.manual_seed(0)
        out = attn(*qkv)
        found.append([out, *(x for x in torch.autograd.grad(out, qkv, grad, allow_unused=True) if x is not None)])
    for plain, fused in zip(*found, strict=True):
        assert relative_error(fused, plain.double()) <= TOLERANCE[torch.float16]


def test_every_kernel_is_compared_to_its_plain_version():
    with_kernels = {name for name in weft.attentions() if "triton" in weft.attention_info(name).backends}
    assert with_kernels == set(SMALL) == set(REAL)
    assert all(any(call.D > 128 and call.L > 1 for call in calls) for calls in SMALL.values())


@pytest.mark.parametrize("name", [name for name in NAMES if weft.attention_info(name).kernel.cross])
@pytest.mark.parametrize(("queries", "keys"), [(1, 70), (80, 20)])
def test_cross_attention(name, queries, keys):
    torch.manual_seed(0)
    fused = weft.make_attention(name, heads=2, head_dim=16, max_length=90, backend="triton").to(DEVICE)
    plain = weft.make_attention(name, heads=2, head_dim=16, max_length=90, backend="torch").to(DEVICE)
    plain.load_state_dict(fused.state_dict())
    q, k, v, dout = (
        torch.randn(2, h, L, 16, device=DEVICE) for h, L in ((2, queries), (1, keys), (1, keys), (2, queries))
    )
    found = []
    for attn in (fused, plain):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attn(*inputs)
        found.append([out, *torch.autograd.grad(out, [*inputs, *attn.parameters()], dout)])
    for mine, theirs in zip(*found, strict=True):
        assert relative_error(mine, theirs.double()) <= TOLERANCE[torch.float32]


def test_values_with_other_heads_than_the_keys_are_refused():
    from weft.kernels.band.kernel import blocks

    q, k, v = (torch.randn(1, heads, 8, 16, device=DEVICE) for heads in (2, 2, 1))
    with pytest.raises(ValueError, match="same shape"):
        blocks(q, k, v, None, block_size=4, causal=True)


def test_sums_over_blocks_do_not_overflow_in_float16():
    """The gradient of a summary value of combiner-fixed is a sum over many queries, larger than any gradient."""
    attn = weft.make_attention("combiner-fixed", heads=1, head_dim=16, causal=True, block_size=32).to(DEVICE)
    tensors = [(0.3 * torch.randn(1, 1, 600, 16, device=DEVICE)).half() for _ in range(3)]
    found = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float16)):
        attn.backend = backend
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        found.append(torch.autograd.grad(attn(*inputs), inputs, torch.full_like(inputs[0], 8000)))
    for theirs, mine in zip(*found, strict=True):
        assert relative_error(mine, theirs) < TOLERANCE[torch.float16]
