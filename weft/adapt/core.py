"""A mechanism inside a layer of another library.

The layer keeps its projections and passes q, k and v to `Core`, which runs the causal or bidirectional mechanism. Masks
and biases (B, H, Lq, Lk) change single logits, so only mechanisms with a position bias support them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ..attention import Attention, attention_info, make_attention
from ..attention.subsampled import Subsampling
from ..core.contract import PositionBias, hide
from ..core.dispatch import constant
from ..core.precision import autocast
from ..core.softmax import softmax_attention
from ..core.unread import connected
from .biases import PairBias, total


class Core(nn.Module):
    """Mechanism `name` for one layer: `core(q, k, v, mask, causal=..., bias=..., allowed=..., added=...)`.

    Most mechanisms have no tensors; their causal and bidirectional forms are created on first use. A mechanism with
    parameters or random features is created here, so that it is part of checkpoints; its `causal` is then fixed.
    """

    def __init__(
        self,
        name: str,
        *,
        heads: int,
        head_dim: int,
        causal: bool = False,
        max_length: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ):
        super().__init__()
        self.name, self.info = name, attention_info(name)
        self.settings: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "max_length": max_length, **options}
        self.dropout = dropout
        first = make_attention(name, causal=causal, dropout=dropout, **self.settings)
        self.forms = nn.ModuleDict({_form(causal): first})
        self.fixed = bool(first.state_dict()) or any(True for _ in first.buffers())
        # A checkpoint of the original model does not have this mechanism's tensors: keep the initial values.
        self.register_load_state_dict_pre_hook(_keep_own_state)

    def form(self, causal: bool) -> Attention:
        """The causal or the bidirectional mechanism."""
        if _form(causal) not in self.forms:
            if self.fixed:
                raise ValueError(
                    f"{self.name} has its own tensors and was created with causal={not causal}, but the layer is now "
                    f"called with causal={causal}: create it with causal={causal}"
                )
            made = make_attention(self.name, causal=causal, dropout=self.dropout, **self.settings)
            self.forms[_form(causal)] = made.train(self.training)
        found: Any = self.forms[_form(causal)]
        first: Any = next(iter(self.forms.values()))
        if isinstance(found, Subsampling) and found.sampling != first.sampling:  # switched before this form existed
            found.sampling = first.sampling
        return found

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        bias: PositionBias | None = None,
        allowed: Tensor | None = None,
        added: Tensor | None = None,
        dropout: float | None = None,
    ) -> Tensor:
        q, k, v = one_dtype(q, k, v)
        if dropout is not None and dropout != self.dropout:
            self.dropout = dropout
            for form in self.forms.values():
                form.dropout = dropout  # type: ignore[assignment]
        pairs = [t for t in (allowed, added) if t is not None]
        if pairs and not self.info.bias:
            hidden = ~pairs[0] if pairs[0].dtype == torch.bool else pairs[0]
            if mask is not None or len(pairs) > 1 or torch.compiler.is_compiling() or not is_causal_mask(hidden):
                raise ValueError(
                    f"{self.name} has no matrix of logits and does not support masks or biases of shape (Lq, Lk): use "
                    "'full', or a padding mask (B, Lk) and causality, which every mechanism supports"
                )
            causal, pairs = True, []
        attn = self.form(causal)
        v = connected(attn, q, k, v)
        if not pairs:
            return attn(q, k, v, mask, bias)
        if self.name != "full" or watched():
            return attn(q, k, v, mask, total(bias, *(PairBias(t[(None,) * (4 - t.dim())]) for t in pairs)))
        return masked_full(
            q, k, v, mask, causal=causal, allowed=allowed, added=added, dropout=self.dropout if self.training else 0.0
        )

    def extra_repr(self) -> str:
        return f"name={self.name!r}"


_watched: ContextVar[bool] = ContextVar("_watched", default=False)


@contextmanager
def watching() -> Iterator[None]:
    """Within this block, full attention calls its mechanism for masks and biases of pairs, too: hooks see it."""
    token = _watched.set(True)
    try:
        yield
    finally:
        _watched.reset(token)


@constant
def watched() -> bool:
    return _watched.get()


def fx_leaf(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a layer's forward: while FX traces it, record the call of the layer instead of running it, because
    mechanisms depend on shapes, which FX does not know."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Proxy):
                tracer: Any = arg.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    return wrapped


def masked_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    allowed: Tensor | None = None,
    added: Tensor | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Full attention with tensor masks: `allowed` is boolean, `added` is added to the logits; both broadcast to
    (B, H, Lq, Lk).

    `softcap` c makes logits c tanh(logits / c); `sinks` is one extra logit without a key per head (H,), or per query
    (B, H, Lq, 1).
    When causal, the queries are the last Lq of the Lk positions, as with a key-value cache.
    """
    k, v = hide(k, mask), hide(v, mask)
    if mask is not None:
        padding = mask[:, None, None, :]
        allowed = padding if allowed is None else allowed & padding
    if causal:
        i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
        past = (torch.arange(k.shape[2], device=q.device) <= i)[None, None]
        allowed = past if allowed is None else allowed & past
    if softcap is None and sinks is None:
        return softmax_attention(q, k, v, allowed=allowed, bias=added, dropout=dropout)
    logits = (q @ k.mT / q.shape[-1] ** 0.5).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if added is not None:
        logits = logits + added
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    sink = logits.new_full((1,), float("-inf")) if sinks is None else sinks.to(logits)
    sink = sink if sink.dim() == 4 else sink.view(1, -1, 1, 1)
    highest = torch.maximum(logits.amax(-1, keepdim=True), sink).detach()
    highest = highest.masked_fill(highest == float("-inf"), 0)  # a query without keys
    exp = (logits - highest).exp()
    total = exp.sum(-1, keepdim=True) + (sink - highest).exp()
    share = exp / total.masked_fill(total == 0, 1)
    return nn.functional.dropout(share, dropout).to(v.dtype) @ v


def is_causal_mask(hidden: Tensor) -> bool:
    """Whether this mask (..., L, L), where True or -inf means hidden, is causal."""
    if hidden.shape[-1] != hidden.shape[-2]:
        return False
    future = torch.ones(hidden.shape[-2:], dtype=torch.bool, device=hidden.device).triu(1)
    found = hidden if hidden.dtype == torch.bool else hidden == float("-inf")
    return bool((found == future).all() and (found | (hidden == 0)).all())


def one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to one dtype: under autocast, norms and rotations can leave q and k in float32."""
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    q, k, v = autocast(q, k, v)
    return q, k, v


def rescaled(q: Tensor, scale: float | None) -> Tensor:
    """Rescale q so that a mechanism, which divides by √D, gives logits `scale` q kᵀ."""
    root = q.shape[-1] ** 0.5
    if scale is None or abs(scale * root - 1) < 1e-7:
        return q
    return q * (scale * root)


def rows_are_independent(name: str, options: dict[str, Any]) -> bool:
    """Whether each output row depends only on its own query, as cross attention in a decoder requires.

    In a mechanism that pools queries, later tokens would affect earlier ones. Tested on the mechanism itself.
    """
    asked = {key: value for key, value in options.items() if key != "max_length"}
    return _rows_are_independent(name, tuple(sorted(asked.items())))


@functools.cache
def _rows_are_independent(name: str, options: tuple[tuple[str, Any], ...]) -> bool:
    with seeded(0), torch.no_grad():
        attn = make_attention(name, heads=2, head_dim=8, max_length=64, **dict(options)).double().eval()
        q, k, v = (torch.randn(1, 2, L, 8, dtype=torch.float64) for L in (37, 50, 50))
        together = attn(q, k, v)
        apart = torch.cat([attn(q[:, :, i : i + 1], k, v) for i in range(q.shape[2])], 2)
        return torch.allclose(together, apart, atol=1e-9)


@functools.cache
def learns(name: str) -> bool:
    """Whether training changes the mechanism: its parameters, or centroids that follow the keys."""
    info = attention_info(name)
    if info.learned or info.needs_max_length:
        return True
    with seeded(0), torch.no_grad():
        attn = make_attention(name, heads=2, head_dim=8, causal=not info.bidirectional).train()
        before = {key: value.clone() for key, value in attn.state_dict().items()}
        for _ in range(2 if before else 0):
            attn(*torch.randn(3, 1, 2, 16, 8))
        return any(not torch.equal(value, before[key]) for key, value in attn.state_dict().items())


def trains(name: str, causal: bool, options: dict[str, Any]) -> bool:
    """Whether the mechanism has parameters with these options."""
    return any(True for _ in make_attention(name, heads=2, head_dim=8, causal=causal, **options).parameters())


def kept_mechanisms(module: nn.Module) -> list[Any]:
    """The mechanisms that earlier calls of a transformers layer created outside of its state dict."""
    state = module.__dict__.get("_weft")
    return [] if state is None else list(state.mechanisms.values())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Use a fixed seed on the CPU, and restore the caller's random state."""
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        yield


def _form(causal: bool) -> str:
    return "causal" if causal else "bidirectional"


def _keep_own_state(core: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if not any(key.startswith(prefix) for key in state):
        state.update({prefix + key: value for key, value in core.state_dict().items()})
