import os
import signal

import pytest

# The fault tests send this signal. Under nohup, and in some CI runners, it arrives ignored, and children inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Triton reads this once, when it is imported: on a CPU the kernels run in its interpreter.
DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# With WEFT_TEST_DEVICE=cuda these modules, and tests/kernels, create their tensors on the GPU. All others stay on the
# CPU: the lab, the adapters and the golden numbers do not depend on the device.
ON_DEVICE = {
    "test_combiner",
    "test_decoding",
    "test_fuzz",
    "test_generation",
    "test_hostile",
    "test_layers",
    "test_mechanisms",
    "test_models",
    "test_packing",
    "test_promises",
    "test_recomputing",
    "test_refusals",
}


@pytest.fixture(autouse=True)
def device(request):
    """Set the default device of the test."""
    if DEVICE == "cpu" or not (request.path.stem in ON_DEVICE or request.path.parent.name == "kernels"):
        yield
        return
    import torch

    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)  # no device mode at all: torch.compile would trace it


def pytest_addoption(parser):
    parser.addoption("--every-model", action="store_true", help="sweep every architecture of transformers")
    parser.addoption("--with-kernels", action="store_true", help="on a CPU: run kernels wherever they support the call")


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """With --with-kernels, "auto" chooses kernels as on a GPU, at any length. They run in Triton's interpreter."""
    if DEVICE != "cpu" or not request.config.getoption("--with-kernels"):
        return
    from weft.core import contract, decoding, dispatch, packing
    from weft.parallel import sums

    choose, choose_step = dispatch.use_kernel, dispatch.step_kernel

    def use_kernel(attn, q, *call):
        call = q, *call
        if attn.backend != "auto" or attn.fused is None or not attn.fused.auto(attn) or q.is_meta:
            return choose(attn, *call)
        attn.backend = "triton"
        try:
            return choose(attn, *call)
        except ValueError:  # the kernel does not support this call
            return False
        finally:
            attn.backend = "auto"

    def step_kernel(attn, *call):
        before = attn.backend
        attn.backend = "triton" if before == "auto" else before
        try:
            return choose_step(attn, *call)
        finally:
            attn.backend = before

    for module in (contract, packing, sums):
        monkeypatch.setattr(module, "use_kernel", use_kernel)
    monkeypatch.setattr(decoding, "step_kernel", step_kernel)


@pytest.fixture(scope="module")
def one_thread():
    """Bit-identical sums need the same order of additions, so use one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
