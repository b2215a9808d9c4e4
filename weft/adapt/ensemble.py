"""Predict with an ensemble of a model's own sub-models.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705

    p(y | x) = (1/K) Σ_m softmax(logits of sub-model m on x)          K samples of the subsampled attention

    predict = weft.ensemble(model, samples=50)
    found = predict(x)              found.probabilities, found.log_probabilities, found.spread, found.information

Probabilities are averaged, not logits. Members differ only in their sampled attention; ordinary dropout is off by
default. The disagreement of the members is an estimate of uncertainty at no extra cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.routing import Clusters
from ..attention.subsampled import Subsampling
from ..layers.cached import RecurrentCache


@dataclass(frozen=True)
class Prediction:
    """Of a classifier (B, classes) or a language model (B, L, vocab); regression has only `mean` and `spread`."""

    mean: Tensor  # mean over members of the probabilities, or of the values in regression
    spread: Tensor  # standard deviation over members, of the same shape
    information: Tensor | None  # entropy of the mean minus mean entropy of the members, in nats: 0 if all agree
    samples: int

    @property
    def probabilities(self) -> Tensor:
        if self.information is None:
            raise ValueError("regression has no probabilities: use mean")
        return self.mean

    @property
    def log_probabilities(self) -> Tensor:
        return _log(self.probabilities)


class Ensemble:
    """Callable like the model; see `ensemble`."""

    def __init__(
        self,
        model: nn.Module,
        samples: int = 50,
        *,
        micro_batch: int | None = None,
        dropout: bool = False,
        regression: bool = False,
        seed: int | None = None,
        progress: bool = True,
        output: Callable[[Any], Tensor] | None = None,
    ):
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, got {micro_batch}")
        if not dropout and not any(isinstance(m, Subsampling) for m in model.modules()):
            raise ValueError(
                "all members would be the same, because the model has no subsampled attention: "
                "add it with weft.subsample(model, 'Sall-L4')"
            )
        if any(isinstance(m, RecurrentCache) and m.eval_update for m in model.modules()):
            raise ValueError("members would write to the caches one after another: create them without eval_update")
        self.model, self.samples, self.micro_batch, self.dropout = model, samples, micro_batch, dropout
        self.regression, self.seed, self.progress, self.output = regression, seed, progress, output or _logits

    @torch.no_grad()
    def __call__(self, *inputs: Any, **named: Any) -> Prediction:
        batch = _batch_size((*inputs, *named.values()))
        size = max(1, min(self.micro_batch or batch, batch))
        starts = range(0, max(1, batch), size)  # run an empty batch once too, for the shape of its output
        # Each member has one seed, so it is the same sub-model for every micro-batch.
        seed = self.seed if self.seed is not None else int(torch.randint(2**31, ()))
        parts = []
        with self._bar(len(starts) * self.samples) as advance, _stochastic(self.model, self.dropout):
            for start in starts:
                rows = slice(start, start + size)
                part = _Moments(self.regression)
                for member in range(self.samples):
                    with torch.random.fork_rng(devices=_cuda()):
                        torch.manual_seed(seed + member)
                        answer = self.model(
                            *(_cut(x, rows, batch) for x in inputs),
                            **{name: _cut(x, rows, batch) for name, x in named.items()},
                        )
                    part.add(self.output(answer))
                    advance()
                parts.append(part.prediction())
        information = None if self.regression else torch.cat([p.information for p in parts])  # type: ignore[misc]
        mean, spread = torch.cat([p.mean for p in parts]), torch.cat([p.spread for p in parts])
        return Prediction(mean, spread, information, self.samples)

    @contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[], None]]:
        if not self.progress:
            yield lambda: None
            return
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task(f"ensemble of {self.samples}", total=total)
            yield lambda: bar.advance(task)


def ensemble(model: nn.Module, samples: int = 50, **options: Any) -> Ensemble:
    """A predictor that averages `samples` sub-models of a model with subsampled attention.

    Options: `micro_batch`, rows per forward pass; `dropout`, keep ordinary dropout on, as the authors did;
    `regression`, average values instead of probabilities; `seed`, for reproducible members (default: from torch's
    global generator); `progress`, show a progress bar; `output`, a function from the model's output to the logits.
    """
    return Ensemble(model, samples, **options)


class Members(nn.Module):
    """A model that returns the outputs of its ensemble in the model's own form: logits, values, or the negative
    log-likelihood of each target."""

    def __init__(self, model: nn.Module, samples: int, answers: str = "logits"):
        super().__init__()
        self.model, self.answers = model, answers
        output = (lambda nll: nll.double().neg().exp()) if answers == "nll" else None
        self.ensemble = Ensemble(model, samples, regression=answers != "logits", output=output, progress=False, seed=0)

    def forward(self, *inputs: Any) -> Tensor:
        found = self.ensemble(*inputs)
        if self.answers == "logits":
            return found.log_probabilities
        return -_log(found.mean) if self.answers == "nll" else found.mean


class _Moments:
    """Running mean and variance over members (Welford's algorithm), in float32 or higher."""

    def __init__(self, regression: bool):
        self.regression, self.count = regression, 0
        self.mean = self.squares = self.entropy = torch.zeros(())

    def add(self, values: Tensor) -> None:
        values = values.float() if values.dtype != torch.float64 else values
        if not self.regression:
            values = values.softmax(-1)
        self.count += 1
        away = values - self.mean
        self.mean = self.mean + away / self.count
        self.squares = self.squares + away * (values - self.mean)
        if not self.regression:
            self.entropy = self.entropy + (_entropy(values) - self.entropy) / self.count

    def prediction(self) -> Prediction:
        spread = (self.squares / max(self.count - 1, 1)).sqrt()
        information = None if self.regression else (_entropy(self.mean) - self.entropy).clamp(min=0)
        return Prediction(self.mean, spread, information, self.count)


@contextmanager
def _stochastic(model: nn.Module, dropout: bool) -> Iterator[None]:
    """Turn sampling on, with the rest in eval(), or with `dropout` in train(); restore afterwards."""
    modes = {m: m.training for m in model.modules()}
    sampling = {m: m.sampling for m in modes if isinstance(m, Subsampling)}
    try:
        train_unchanged(model, dropout)
        for sampled in sampling:
            sampled.sampling = True
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for sampled, value in sampling.items():
            sampled.sampling = value


def train_unchanged(model: nn.Module, mode: bool = True) -> None:
    """model.train(mode), except for what a pass in training would update."""
    model.train(mode)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | RecurrentCache | Clusters):
            module.eval()


def _logits(answer: Any) -> Tensor:
    answer = getattr(answer, "logits", answer)
    if not isinstance(answer, Tensor):
        raise TypeError(f"the model returned {type(answer).__name__}: pass output=, a function that returns its logits")
    return answer


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * _log(probabilities)).sum(-1)


def _batch_size(inputs: tuple[Any, ...]) -> int:
    for x in inputs:
        if isinstance(x, Tensor) and x.dim():
            return x.shape[0]
    raise ValueError("call the ensemble like the model, with at least one tensor whose first dimension is the batch")


def _cut(x: Any, rows: slice, batch: int) -> Any:
    return x[rows] if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch else x


def _cuda() -> Sequence[int]:
    """The GPUs whose random generators `torch.manual_seed` sets."""
    return range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
