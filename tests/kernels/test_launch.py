"""Replayed launches: the same results as the first call, on other data, for every kernel and every way to call it."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from agree import Call, poisoned_memory
from promises import DEVICE, cases
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.core import dispatch, self_test
from weft.kernels import driver, launch
from weft.kernels.operator import Operator

pytest.importorskip("triton")

CALLS = (
    Call("axial", 6, H=1, options={"block_size": 3}),
    Call("combiner-axial", 7, H=1, options={"block_size": 4}),
    Call("combiner-axial-horizontal", 4, H=1, options={"block_size": 2}),
    Call("combiner-axial-vertical", 4, H=1, causal=False, options={"block_size": 2}, mask="random"),
    Call("combiner-fixed", 20, H=1, options={"block_size": 16}, mask="ends"),
    Call("combiner-logsparse", 20, H=1),
    Call("combiner-routing", 7, H=1, options={"clusters": 2, "capacity": 3}),
    Call("linear", 20, H=1),
    Call("linformer", 20, H=1, causal=False, options={"max_length": 30, "rank": 5}),
    Call("local", 20, H=1, options={"block_size": 16}, mask="random"),
    Call("longformer", 20, H=1, options={"window": 4, "global_tokens": 2}, causal=False),
    Call("performer", 20, H=1, mask="ends"),
    Call("sparse", 20, H=1, options={"block_size": 8, "columns": 2}),
    Call("sparse", 20, H=1, options={"block_size": 3, "pattern": "strided"}),
    Call("subsampled", 20, H=1, options={"windows": 2}, bias="alibi"),
    Call("bigbird", 6, H=1, causal=False, options={"block_size": 1}),
    Call("linear", 20, H=1, causal=False),
    Call("logsparse", 20, H=1),
    Call("performer", 20, H=1, causal=False),
    Call("reformer", 6, H=1, options={"chunk": 2, "buckets": 2}),
    Call("routing", 6, H=1, options={"clusters": 2, "capacity": 3}),
    Call("sinkhorn", 6, H=1, causal=False, options={"max_length": 6, "block_size": 3}),
)


@pytest.fixture
def played(monkeypatch):
    """The tapes that were played, in order. Calls are recorded at once, to save time."""
    monkeypatch.setattr(launch, "RECORDED", 1)
    tapes: list[launch.Tape] = []
    play = launch.Tape.play
    monkeypatch.setattr(launch.Tape, "play", lambda tape, *given: (tapes.append(tape), play(tape, *given))[1])
    return tapes


def run(attn, tensors, bias=None) -> list[torch.Tensor]:
    q, k, v, dout, mask = tensors
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(1)  # the same random sample each time
    with poisoned_memory():
        out = attn(*inputs, mask, bias)
        grads = torch.autograd.grad(out, inputs, dout, allow_unused=True)  # reformer does not read k
        return [out.detach(), *(x for x in grads if x is not None)]


def forget(monkeypatch) -> None:
    monkeypatch.setattr(launch.Taped, "run", lambda self, tensors, options: (self.function(tensors, options), None))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_replays_equal_the_first_call(call, played, monkeypatch):
    torch.manual_seed(0)
    attn, bias = call.make("triton", DEVICE), call.position_bias(DEVICE)
    first, second = call.tensors(DEVICE), call.tensors(DEVICE)
    if bias is not None:  # makes the table of slopes
        with monkeypatch.context() as patch:
            patch.setattr(launch, "RECORDED", 2)
            run(attn, first, bias)
    run(attn, first, bias)
    assert not played
    replayed = run(attn, second, bias)
    assert len(played) >= 2
    forget(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(replayed, run(attn, second, bias), strict=True))


@pytest.mark.parametrize("name", ["combiner-logsparse", "combiner-routing", "reformer", "routing"])
def test_batches_of_any_size_fit_into_a_grid(name, monkeypatch):
    """CUDA allows 2^31 programs on the first axis of a grid, but only 65,535 on the others."""
    call, start, grids = next(call for call in CALLS if call.name == name), launch._timed, []

    def started(kernel, grid, *given):
        grids[-1].append(grid[1:])
        return start(kernel, grid, *given)

    monkeypatch.setattr(launch, "_timed", started)
    forget(monkeypatch)
    for B in (1, 2):
        grids.append([])
        batch = replace(call, B=B)
        run(batch.make("triton", DEVICE), batch.tensors(DEVICE))
    assert any(grids[0]) and grids[0] == grids[1]


def test_every_mechanism_with_a_kernel_is_replayed():
    names = {name for name in weft.attentions() if weft.attention_info(name).kernel}
    assert names - {call.name for call in CALLS} <= {"combiner-mixture"}  # made of the others


def local(**options) -> torch.nn.Module:
    return weft.make_attention(
        "local", heads=1, head_dim=16, block_size=4, causal=True, backend="triton", **options
    ).to(DEVICE)


def test_shared_inputs_do_not_affect_later_calls(played):
    torch.manual_seed(0)
    attn, x, y, z = local(), *torch.randn(3, 1, 1, 8, 16, device=DEVICE).unbind()
    attn(x, x, x)
    expected = attn(x, y, z)
    assert not played and torch.equal(attn(x, y, z), expected) and played
    assert torch.equal(attn(x, x, x), attn(x, x.clone(), x.clone()))


def test_inference_is_replayed(played):
    """Without gradients, combiner-fixed keeps no statistics: an empty part of its block of memory."""
    torch.manual_seed(0)
    call = Call("combiner-fixed", 20, H=1, options={"block_size": 16})
    attn, (q, k, v, *_) = call.make("triton", DEVICE), call.tensors(DEVICE)
    with torch.no_grad():
        expected = attn(q, k, v)
        assert torch.equal(attn(q, k, v), expected)
    for tape in played:  # a pointer is an address and an offset into it
        assert all(offset >= 0 for *_, slots, _ in tape.steps for _, offset, _ in slots)
    assert played


def test_dispatch_modes_see_operators_with_the_same_gradients():
    class Seen(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    attn, dout = local(), torch.randn(1, 1, 8, 16, device=DEVICE)
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 1, 8, 16, device=DEVICE).unbind()]
    expected = torch.autograd.grad(attn(*inputs), inputs, dout)
    with Seen():
        found = torch.autograd.grad(attn(*inputs), inputs, dout)
    assert {"band", "band_backward"} <= {*Seen.names}
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_second_derivatives_are_refused():
    x = torch.randn(1, 1, 8, 16, device=DEVICE, requires_grad=True)
    (dx,) = torch.autograd.grad(local()(x, x, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiat"):
        dx.sum().backward()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_derivatives_by_torch_func_are_refused(call):
    """A kernel would drop the tangents of forward mode. Also after a call that it has run."""
    attn, (q, k, v, *_) = call.make("triton", DEVICE), call.tensors(DEVICE)

    def forward_mode():
        with forward_ad.dual_level():
            attn(forward_ad.make_dual(q, q), k, v)

    attn(q, k, v)
    for differentiate in (
        forward_mode,
        lambda: torch.func.jvp(lambda x: attn(x, k, v), (q,), (q,)),
        lambda: torch.func.grad(lambda x: attn(x, k, v).sum())(q),
        lambda: torch.func.vmap(torch.func.grad(lambda x: attn(x, k, v).sum()), randomness="same")(q[None]),
    ):
        with pytest.raises(ValueError, match="torch.func.*backend='auto' or 'torch'"):
            differentiate()


TRANSFORMS = {
    "none": lambda f: f,
    "vmap": lambda f: lambda x: torch.func.vmap(f)(x[None]),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap grad": lambda f: lambda x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_compiled_code_knows_whether_torch_func_computes_derivatives(transform):
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if dispatch.derived() else 1)

    compiled = torch.compile(TRANSFORMS[transform](chosen), backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).flatten()[0] == (1 if transform in ("none", "vmap") else 2)


def test_an_expanded_gradient_is_copied_every_time(played):
    """The gradient of out.sum() is an expanded tensor, so the backward cannot be recorded."""
    torch.manual_seed(0)
    attn = local()
    x = torch.randn(3, 1, 1, 8, 16, device=DEVICE)
    found = []
    for _ in range(3):
        inputs = [t.requires_grad_() for t in x.clone().unbind()]
        found.append(torch.autograd.grad(attn(*inputs).sum(), inputs))
    assert all(torch.equal(a, b) for grads in found[1:] for a, b in zip(grads, found[0], strict=True))
    assert played and all(tape.outputs == 2 for tape in played)  # forwards only


def test_saved_tensors_may_change_their_layout(played):
    torch.manual_seed(0)
    attn, x = local(), torch.randn(3, 1, 8, 1, 16, device=DEVICE).transpose(2, 3)
    found = []
    for offload in (False, True, True, False, True):
        inputs = [t.detach().requires_grad_() for t in x.unbind()]
        with torch.autograd.graph.save_on_cpu() if offload else torch.enable_grad():
            out = attn(*inputs)
        found.append(torch.autograd.grad(out, inputs, x[0]))
    assert played and all(torch.equal(a, b) for grads in found[1:] for a, b in zip(grads, found[0], strict=True))


def test_profilers_see_every_launch(played, monkeypatch):
    attn, x = local(), torch.randn(1, 1, 8, 16, device=DEVICE)
    monkeypatch.setattr(launch, "_watched", lambda: True)
    for _ in range(2):
        attn(x, x.clone(), x.clone())
    assert not played


def test_fewer_stages_when_shared_memory_is_small():
    from triton.runtime.errors import OutOfResources

    tried = []

    class Kernel:
        def __getitem__(self, grid):
            def run(**options):
                tried.append((options["num_stages"], options["STAGES"]))
                if options["num_stages"] > 1:
                    raise OutOfResources(200_000, 100_000, "shared memory")

            return run

    launch.launch(Kernel(), (1,), num_stages=3, STAGES=3)
    assert tried == [(3, 3), (2, 2), (1, 1)]


@pytest.mark.skipif(DEVICE != "cpu", reason="in Triton's interpreter")
@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_the_check_of_untested_gpus_does_not_depend_on_the_modes_of_the_call(mode, monkeypatch):
    monkeypatch.setattr(self_test, "_results", {})
    with mode():
        assert self_test.passes("local", 16, True, 20, (("block_size", 16),), torch.float32, "cpu")


@pytest.mark.skipif(DEVICE != "cpu", reason="in Triton's interpreter")
def test_auto_checks_kernels_on_untested_gpus(monkeypatch, caplog):
    what = ("local", 16, True, 20, (("block_size", 16),), torch.float32, "cpu")
    monkeypatch.setattr(self_test, "_results", {})
    assert self_test.passes(*what)
    monkeypatch.setattr(self_test, "_results", {})
    broken = Operator.__call__
    monkeypatch.setattr(Operator, "__call__", lambda self, *arguments: broken(self, *arguments) * 1.1)
    assert not self_test.passes(*what) and "local uses its plain" in caplog.text
    monkeypatch.setenv("WEFT_SELF_TEST", "0")
    assert self_test.passes(*what)


# All on a GPU. In Triton's interpreter, which is slow, only the one that does not read k.
CHECKED = [
    x for x in cases(first_setting=True) if x.info.kernel and (DEVICE != "cpu" or str(x).startswith("reformer-causal"))
]


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_every_kernel_passes_the_check_of_untested_gpus(case):
    length = 20 if DEVICE == "cpu" else 1000 if case.info.needs_max_length else None
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    assert self_test.compare(case.name, 64, case.causal, length, {}, dtype, DEVICE) == ""


def test_kernels_are_not_compiled_again_for_other_batch_sizes():
    class Kernel:
        names = "P", "BH", "L", "n"
        params = [SimpleNamespace(name=x, is_constexpr=x == "n", do_not_specialize=False) for x in names]

        def __getitem__(self, grid):
            return lambda *args, **options: None

    kernel = Kernel()
    launch.launch(kernel, (1,), torch.empty(1), 300, 16, n=64)  # the alignment of a pointer matters, whatever its name
    assert [x.do_not_specialize for x in kernel.params] == [False, True, False, False]


class Compiled:
    """A kernel (pointer, constexpr, int32, pointer, float32, int64) as Triton compiles it."""

    function = 77
    packed_metadata = (4, 1, 512)

    def __init__(self, **about):
        self.src = SimpleNamespace(signature=dict(enumerate(["*bf16", "*i8", "constexpr", "i32", "fp32", "i64"])))
        plain = {"num_ctas": 1, "num_warps": 4, "shared": 512, "global_scratch_size": 0, "profile_scratch_size": 0}
        self.metadata = SimpleNamespace(**{**plain, "launch_pdl": False, "launch_cooperative_grid": False, **about})
        self.ran: list[tuple] = []

    def run(self, *given):
        self.ran.append(given)


def through_driver(monkeypatch, steps, in_c, status=0) -> list[tuple]:
    """The launches that the CUDA driver gets for pointers 1000 and 2000 and stream 5, from the loop in C or in
    Python."""
    found = []

    def start(config, kernel, arguments, extra):
        c = driver._Config.from_address(config)
        at = (ctypes.c_void_p * 7).from_address(arguments)
        kinds = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_int64, *[ctypes.c_uint64] * 2
        values = [kind.from_address(x).value for kind, x in zip(kinds, at, strict=True)]
        found.append(
            ((c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z), c.shared, c.stream, kernel, values)
        )
        return status

    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    monkeypatch.setattr(driver, "_start", [kind(start) if in_c else start])
    launches = driver.Launches(steps)
    assert launches.prepared is None or (launches.player is not None) == in_c
    launches([1000, 2000], 5)
    return found


@pytest.mark.parametrize("in_c", [True, False])
def test_the_driver_gets_the_arguments_of_each_launch(monkeypatch, in_c):
    places = [(0, 16, torch.bfloat16), (1, 0, torch.int8)]
    numbers = "constant", -3, 0.1, 2**40
    compiled = Compiled()
    steps = [(compiled, (9, 2, 1), None, places, numbers), (compiled, (0, 1, 1), None, places, numbers)]
    steps.append((compiled, (3, 1, 1), None, places[::-1], numbers))
    first, last = through_driver(monkeypatch, steps, in_c)  # not the empty grid
    tenth = ctypes.c_float(0.1).value
    assert first == ((9, 2, 1), (128, 1, 1), 512, 5, 77, [1016, 2000, -3, tenth, 2**40, 0, 0])
    assert last == ((3, 1, 1), (128, 1, 1), 512, 5, 77, [2000, 1016, -3, tenth, 2**40, 0, 0])
    assert not compiled.ran


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("about, status", [({}, 201), ({"num_ctas": 2}, 0), ({"global_scratch_size": 64}, 0)])
def test_triton_launches_what_the_driver_does_not(monkeypatch, about, status, in_c):
    compiled = Compiled(**about)
    step = compiled, (9, 2, 1), None, [(0, 16, torch.bfloat16), (1, 0, torch.int8)], ("constant", -3, 0.1, 2**40)
    found = through_driver(monkeypatch, [step], in_c, status)
    assert len(found) == (status > 0)
    assert compiled.ran == [(9, 2, 1, 5, 77, (4, 1, 512), None, None, None, 1016, 2000, "constant", -3, 0.1, 2**40)]


def test_many_launches_are_one_graph(monkeypatch):
    """Its nodes get new arguments if an address changes, and single launches take over if it fails."""
    started, changed, ran, status = [], [], [], [0]

    def change(graph, node, described):
        about = driver._Node.from_address(described)
        first = (ctypes.c_void_p * 7).from_address(about.arguments)[0]
        changed.append((graph, node, about.grid_x, ctypes.c_uint64.from_address(first).value))
        return 0

    def run(graph, stream):
        ran.append((graph, stream))
        return status[0]

    def make(described, nodes):
        nodes[:] = [100 + n for n in range(len(described))]
        return 9, *(ctypes.cast(x, ctypes.c_void_p).value for x in functions), lambda: None

    kinds = [ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * n) for n in (3, 2, 4)]
    functions = kinds[0](change), kinds[1](run)
    monkeypatch.setattr(driver, "_start", [kinds[2](lambda *given: started.append(given) or 0)])
    monkeypatch.setattr(driver, "_make_graph", make)
    monkeypatch.setattr(driver, "_capturing", lambda: False)
    places = [(0, 16, torch.bfloat16), (1, 0, torch.int8)]
    numbers = "constant", -3, 0.1, 2**40
    grids = [(n + 1, 1, 1) for n in range(driver.GRAPH_FROM)]
    launches = driver.Launches([(Compiled(), grid, None, places, numbers) for grid in grids])
    for _ in range(driver.GRAPHED - 1):
        launches([1000, 2000], 5)
    assert len(started) == len(grids) * (driver.GRAPHED - 1) and not ran
    for pointers in ([1000, 2000], [1000, 2000], [3000, 2000]):
        launches(pointers, 6)
    assert ran == [(9, 6)] * 3 and len(started) == len(grids) * (driver.GRAPHED - 1)
    expected = [(9, 100 + n, n + 1, first) for first in (1016, 3016) for n in range(len(grids))]
    assert changed == expected
    status[0] = 700
    launches([1000, 2000], 6)
    launches([1000, 2000], 6)
    assert len(ran) == 4 and len(started) == len(grids) * (driver.GRAPHED + 1)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: set WEFT_TEST_DEVICE=cuda")
def test_graphs_that_wait_keep_their_arguments(monkeypatch):
    """The same graph is queued with other arguments before it has run."""
    torch.manual_seed(0)
    call = Call("combiner-logsparse", 300, D=64)
    attn = call.make("triton", DEVICE)
    given = [[x.requires_grad_() for x in call.tensors(DEVICE)[:4]] for _ in range(2 * driver.GRAPHED)]
    graphs, make = [], driver._make_graph
    monkeypatch.setattr(driver, "_make_graph", lambda *x: graphs.append(x) or make(*x))

    def results() -> list[torch.Tensor]:
        found = []
        torch.cuda._sleep(10**8)
        for *inputs, dout in given:
            out = attn(*inputs)
            found += [out.detach(), *torch.autograd.grad(out, inputs, dout)]
        return found

    for _ in range(2):
        found = results()
    assert graphs
    forget(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(found, results(), strict=True))
