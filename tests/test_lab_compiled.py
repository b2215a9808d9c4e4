"""Compiled models are compared with the eager ones before they are trained."""

import contextlib
import math
import types

import pytest
import torch

pytest.importorskip("lightning")

import runs
from runs import SHORT, short, stub, train_losses, weft

from weft.lab import compiled, train
from weft.lab.compiled import disagreement, rounding
from weft.lab.data import Rows


class Careless(torch.nn.Module):
    """A miscompiled model: correct in training, wrong in evaluation."""

    def __init__(self, model, wrong=True, options=None):
        super().__init__()
        self.model, self.wrong = model, wrong

    def forward(self, *inputs):
        out = self.model(*inputs)
        return out if self.training or not self.wrong else out.roll(1, -1) + 1


def test_a_miscompiled_model_is_detected_and_the_run_continues_without_compilation(tmp_path, monkeypatch):
    plain = train(short(tmp_path / "plain"))
    monkeypatch.setattr(torch, "compile", lambda model, **options: Careless(model, wrong=False))
    assert train(short(tmp_path / "right", compile=True)).test == plain.test
    monkeypatch.setattr(torch, "compile", Careless)
    command = ["train", "digits", "--out", tmp_path / "wrong", *runs.options(**SHORT)]
    stopped = weft(*command, "--compile")
    assert stopped.exit_code == 71 and "--no-compile" in stopped.output
    assert weft(*command, "--resume", "--no-compile").exit_code == 0
    assert train_losses(tmp_path / "wrong") == train_losses(tmp_path / "plain")


class Backwards(torch.nn.Module):
    """A miscompiled model: the right values, but twice their gradients."""

    def __init__(self, model, options=None):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        out = self.model(*inputs)
        return out + (out - out.detach())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_wrong_gradients_of_a_compiled_model_are_detected(tmp_path, monkeypatch, dropout):
    monkeypatch.setattr(torch, "compile", Backwards)
    command = ["train", "digits", "--out", tmp_path / "wrong", *runs.options(**SHORT), "--dropout", str(dropout)]
    stopped = weft(*command, "--compile")
    if dropout:  # cannot be compared
        assert stopped.exit_code == 0
        return
    assert stopped.exit_code == 71 and "gradient of" in stopped.output and "--no-compile" in stopped.output
    assert weft(*command, "--resume", "--no-compile").exit_code == 0
    train(short(tmp_path / "plain", dropout=0.0))
    assert train_losses(tmp_path / "wrong") == train_losses(tmp_path / "plain")


class Biased(torch.nn.Linear):
    """The gradient of its bias is multiplied by `bias_gradient`, in bfloat16 also by `rounding`."""

    bias_gradient, rounding = 1, 1

    def forward(self, x):
        factor = self.bias_gradient * (self.rounding if self.weight.dtype == torch.bfloat16 else 1)
        bias = self.bias.detach() if not factor else self.bias
        return x.to(self.weight.dtype) @ self.weight.T + bias + (factor - 1) * (bias - bias.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("wrong", "right", "says"),
    [
        (dict(bias_gradient=0), {}, "Miscompiled"),
        ({}, dict(bias_gradient=0), "Miscompiled"),
        ({}, {}, ""),
        ({}, dict(rounding=4), {torch.float32: "", torch.bfloat16: "bias is mostly rounding"}),
    ],
)
def test_gradients_of_compiled_models_are_compared_up_to_rounding(wrong, right, says, dtype):
    x, eager, other = torch.arange(12.0).view(4, 3), Biased(3, 2).to(dtype), Biased(3, 2)
    other.weight, other.bias = eager.weight, eager.bias
    vars(other).update(wrong)
    vars(eager).update(right)
    fabric = types.SimpleNamespace(device=x.device, autocast=contextlib.nullcontext, backward=torch.Tensor.backward)
    try:
        found = compiled.check_gradients(fabric, other, eager, lambda model: model(x).float().square().mean(), seed=0)
    except compiled.Miscompiled as error:
        found = "Miscompiled"
        assert "gradient of bias" in str(error)
    assert found == (says[dtype] if isinstance(says, dict) else says)
    assert eager.weight.dtype == dtype and eager.weight.grad is None


@pytest.mark.parametrize("says", ["cannot split", "CompiledFunctionBackward returned an invalid gradient"])
def test_compiler_errors_suggest_no_compile(tmp_path, monkeypatch, says):
    from torch._dynamo.exc import BackendCompilerFailed

    class Stuck(torch.nn.Module):
        def forward(self, *inputs):
            raise RuntimeError(says) if "gradient" in says else BackendCompilerFailed(max, TypeError(says), None)

    monkeypatch.setattr(torch, "compile", lambda model, **options: Stuck())
    command = ["train", "digits", "--out", tmp_path / "run", *runs.options(**SHORT)]
    stopped = weft(*command, "--compile")
    assert stopped.exit_code == 71 and says in stopped.output and "--no-compile" in stopped.output
    assert weft(*command, "--resume", "--no-compile").exit_code == 0


def test_differences_within_autocast_rounding_are_tolerated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", Careless)
    monkeypatch.setattr(compiled, "rounding", lambda *args: 1e6)
    train(short(tmp_path / "run", compile=True))
    assert "--precision 32-true" in capsys.readouterr().out


def test_rounding_measures_the_effect_of_autocast():
    class Twice(torch.nn.Module):
        def forward(self):
            return 2 * (torch.eye(2) @ torch.tensor([[1.001], [1.0]])).float().flatten()

    task = stub(lambda model, batch: {"loss": model()})
    rows, config = Rows({"label": torch.zeros(2)}, torch.device("cpu")), short("unused", batch_size=2)
    half = types.SimpleNamespace(autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert 1e-4 < rounding(half, Twice(), task, rows, config) < 1e-3
    assert rounding(types.SimpleNamespace(autocast=contextlib.nullcontext), Twice(), task, rows, config) == 0


@pytest.mark.parametrize(
    ("compiled", "plain", "low", "high"),
    [
        ([2.0, 1.0], [2.0, 1.0], 0.0, 0.0),
        ([2.02, 1.0], [2.0, 1.0], 0.005, 0.02),
        ([1.0, 2.0], [2.0, 1.0], 0.5, 0.7),
        ([1e-5, 3e-4], [0.0, 1e-4], 0.0, 0.01),  # near-zero losses are clamped
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0, 0.0),  # NaN in eager mode too
    ],
)
def test_disagreement_of_compiled_losses(compiled, plain, low, high):
    class Losses(torch.nn.Module):
        def __init__(self, values):
            super().__init__()
            self.values = torch.tensor(values)

    fabric = types.SimpleNamespace(autocast=contextlib.nullcontext)
    task = stub(lambda model, batch: {"loss": model.values})
    rows, config = Rows({"label": torch.zeros(2)}, torch.device("cpu")), short("unused", batch_size=2)
    assert low <= disagreement(fabric, Losses(compiled), Losses(plain), task, rows, config) <= high
    if not math.isnan(plain[0]):
        assert math.isnan(disagreement(fabric, Losses([math.nan, 1.0]), Losses(plain), task, rows, config))
