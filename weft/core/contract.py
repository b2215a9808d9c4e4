"""The contract that every attention mechanism follows.

    attn(q, k, v, mask=None, bias=None, segments=None) -> out
                                                        q (B, H, Lq, D), k and v (B, H, Lk, D), out (B, H, Lq, D)

`mask` is a boolean tensor (B, Lk), True for real tokens. Masked tokens do not affect real tokens and get no
gradient. A query with no allowed key returns zeros. `bias` is a callable `(query_positions, key_positions) -> logits`,
so it stays exact in mechanisms that reorder or sample keys (see `weft/core/positions.py`). `segments` (B, L) numbers
the documents of a packed row; each is computed as if it were alone (see `weft/core/packing.py`).

`forward` checks and cleans the arguments, then calls the mechanism's kernel (`dispatch.py`) or `attend`, the only
method a mechanism must implement. Every mechanism is linear in v, so applying it to the identity gives the effective
attention matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from . import sharding
from .blocks import check_boolean, check_mask
from .decoding import Decoding
from .dispatch import Kernel, check_backend, constant, derived, use_kernel
from .heads import spread
from .packing import packed, packed_weights
from .precision import autocast, autocasts, settled, without_autocast
from .recomputing import recomputing
from .segments import Segments
from .softmax import softmax_attention
from .staging import refuse_trace

PositionBias = Callable[[Tensor, Tensor], Tensor]
REMEMBERED = 1024  # calls per mechanism that skip the checks; more are forgotten all at once
LARGEST = 1e6  # limit for padding: PyTorch's fused backward turns larger numbers into NaN, even if their gradient is 0


class Attention(Decoding, nn.Module):
    """Base class of all mechanisms. It validates the call and zeroes masked tokens; `attend` computes the output."""

    name = "attention"  # set by the registry
    info: Any = None  # set by the registry: an AttentionInfo
    options: dict[str, Any] | None = None  # set by the registry: mechanism-specific options and their values
    fused: Kernel | None = None  # set by the registry: the kernel, used according to `backend`
    reads_q = True  # False if the output does not depend on q; layers can then skip the projection
    reads_k = True
    places_queries = False  # True if the output also depends on the position of a query, without a bias
    exports_any_length = False  # whether torch.export supports a dynamic length; otherwise sizes depend on it
    was_split = False  # whether the last call was on a part of a sequence (context parallelism)
    qk_gain = 1.0  # the gains of a layer's QK-norm at the start
    long_sums = False  # True if sums over the sequence are computed in float32 for every dtype

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        causal: bool = False,
        max_length: int | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ):
        super().__init__()
        if not all(isinstance(n, Integral) and n >= 1 for n in (heads, head_dim)):
            raise ValueError(f"heads and head_dim must be integers of at least 1, got {heads!r} and {head_dim!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        if max_length is not None and not (isinstance(max_length, Integral) and max_length >= 1):
            raise ValueError(f"max_length must be an integer of at least 1, or None, got {max_length!r}")
        self.heads, self.head_dim, self.causal, self.max_length, self.dropout = (
            heads,
            head_dim,
            causal,
            max_length,
            dropout,
        )
        self.backend = check_backend(backend)
        self.fused_calls: set[Hashable] = set()  # descriptions of calls that the kernel runs

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        """Plain PyTorch version. The arguments have been checked, and masked tokens are zero."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        names = ("heads", "head_dim", "causal", *(("max_length",) if self.max_length is not None else ()))
        options = {name: getattr(self, name, given) for name, given in (self.options or {}).items()}
        shown = {**{name: getattr(self, name) for name in names}, **options}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if not isinstance(value, nn.Module))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        segments: Tensor | Segments | None = None,
        **inputs: Any,
    ) -> Tensor:
        if mask is None and bias is None and segments is None and not inputs:
            call = self._describe(q, k, v)
            if call is not None and call in self.fused_calls and self.fused.applies(self):  # type: ignore[union-attr]
                with without_autocast(q):
                    return self.fused.run(self, q, k, v, None, None)  # type: ignore[union-attr]
        if (context := sharding.current()) is not None:
            self.was_split = False  # the context may call this mechanism on tokens that it has gathered
            try:
                return context.attend(self, q, *spread(q, k, v), mask, bias, segments, **inputs)
            finally:
                self.was_split = True
        if self.was_split:
            self._check_region()
        if segments is not None:
            return packed(self, q, k, v, mask, bias, segments, inputs)
        self.check(q, k, v, mask, bias)
        return self.compute(q, k, v, mask, bias, **inputs)

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: PositionBias | None,
        *,
        zeroed: bool = False,
        **inputs: Any,
    ) -> Tensor:
        """A checked call. `zeroed`: masked tokens are zero already."""
        if not autocasts(q):
            if mask is not None and not zeroed:
                q, k, v = self.clean(q, k, v, mask)
            return self._dispatch(q, k, v, mask, bias, **inputs)
        q, k, v = self.clean(q, k, v, None if zeroed else mask)
        with without_autocast(q):
            return self._dispatch(q, k, v, mask, bias, **inputs)

    def _describe(self, q: Tensor, k: Tensor, v: Tensor) -> Hashable:
        """All that the checks and the choice of the backend depend on, in a plain eager call. None for other calls."""
        if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor:
            return None
        if self.was_split or sharding.current() is not None or not settled(q) or derived():
            return None
        options = self.backend, self.training, self.dropout, self.causal, self.max_length
        sizes = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
        return sizes, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, options

    def _check_region(self) -> None:
        """After a call on a part of a sequence: its recomputation must know that, too."""
        if recomputing():
            raise RuntimeError(
                f"activation checkpointing recomputes {self.name} outside of weft.parallel.context: call backward() "
                "inside the block"
            )
        self.was_split = False

    def _dispatch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: PositionBias | None,
        *,
        plain: bool = False,
        **inputs: Any,
    ) -> Tensor:
        if not plain and self.fused is not None and use_kernel(self, q, k, v, bias):
            if (near := self.fused.near(q, k, v)) is not None:
                q, k, v = near
            if k.shape[1] != q.shape[1] and not self.fused.grouped(self):
                k, v = spread(q, k, v)
            elif near is None and mask is None and bias is None and (call := self._describe(q, k, v)) is not None:
                if len(self.fused_calls) >= REMEMBERED:
                    self.fused_calls.clear()
                self.fused_calls.add(call)
            return self.fused.run(self, q, k, v, mask, bias)
        if k.shape[1] != q.shape[1]:
            k, v = spread(q, k, v)
        return self.attend(q, k, v, mask, bias, **inputs)

    def clean(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, self_attention: bool = False) -> list[Tensor]:
        """Cast q, k and v to the autocast dtype and zero the masked tokens, so that NaN in padding cannot spread.

        In self-attention, and so in every causal call, the mask also applies to the queries. In a mechanism that
        supports cross-attention it may not, even if Lq = Lk. There, queries at masked positions keep their values,
        except NaN and values larger than LARGEST, which become 0.
        """
        q, k, v = autocast(q, k, v)
        if mask is None:
            return [q, k, v]
        real = mask[:, None, :, None]
        if self_attention or self.causal or self.info is None or not self.info.cross:
            q = torch.where(real, q, 0)
        elif q.shape[2] == k.shape[2]:
            q = torch.where(real | (q.abs() < LARGEST), q, 0)
        return [q, torch.where(real, k, 0), torch.where(real, v, 0)]

    @torch.no_grad()
    def weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
        segments: Tensor | Segments | None = None,
    ) -> Tensor:
        """Effective matrix (B, H, Lq, Lk) with `weights @ v == attn(q, k, v)`. Quadratic in L: use it for small L."""
        sharding.refuse("weights")
        k, v = spread(q, k, v)
        if segments is not None:
            return packed_weights(self, q, k, v, mask, bias, segments, {})
        B, H, Lk, _ = k.shape
        identity = torch.eye(Lk, dtype=v.dtype, device=v.device).expand(B, H, Lk, Lk)
        with looking_on(self):
            return self(q, k, identity, mask, bias, plain=True)  # kernels don't support values of width Lk

    @property
    def dropout_now(self) -> float:
        """`dropout` in train(), 0 in eval()."""
        return self.dropout if self.training else 0.0

    @property
    def reach(self) -> int | None:
        """The output of the first token depends only on the first `reach` tokens; None: on all."""
        return None

    # Packed documents. Mechanisms whose pattern depends on the length override `pattern_for`.

    separate_blocks: int | None = None  # m if tokens attend only within blocks of m tokens
    packs = False  # whether it has `attend_packed`
    first_sees_all = False  # whether the first token attends to all tokens with one softmax, as in full attention

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, documents: Segments) -> Tensor:
        """Packed documents where they are, for mechanisms that PyTorch's variable-length attention can compute. Padding
        is zero, and its outputs are ignored. q may be the first query of each document only, (1, H, documents, D)."""
        raise NotImplementedError

    def attend_first(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The output of the first token, q (B, H, 1, D), if it sees all. k and v are finite at masked tokens."""
        q, k, v = autocast(q, *spread(q, k, v))
        if self.info is None or not self.info.cross:  # as in `clean`
            q = hide(q, None if mask is None else mask[:, :1])
        allowed = None if mask is None else mask[:, None, None]
        with without_autocast(q):
            return softmax_attention(q, k, v, allowed=allowed, dropout=self.dropout_now)

    def pattern_for(self, length: int) -> Hashable:
        """Documents whose lengths give the same value can be padded on the right to the same length, without effect."""
        return length if self.info is None or self.info.length_dependent else None

    def check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> None:
        """Raise an error for unsupported calls. The message names an alternative."""
        self.check_tensors(q, k, v, mask)
        length = max(q.shape[2], k.shape[2])
        self.check_length(length)
        if bias is not None:
            self.check_bias(bias, q.shape[0], length, q.device)

    def check_length(self, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"length {length} is over max_length={self.max_length}; create {self.name} with a larger max_length"
            )

    def check_tensors(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Check types and shapes, but not the length: a packed row may be longer than its documents."""
        if torch.jit.is_tracing() and not self.exports_any_length:
            raise refuse_trace(f"{self.name} with causal={self.causal}: its sizes are computed from the length")
        if mask is None and self._plain(q, k, v) and not exporting():
            return
        name = self.name
        for label, t in (("q", q), ("k", k), ("v", v)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{label} must be a tensor (B, H, L, D), got {type(t).__name__}")
            if t.dim() != 4:
                raise ValueError(
                    f"{label} must be (B, H, L, D), got {tuple(t.shape)}; weft.MultiheadAttention takes (B, L, dim)"
                )
            if not t.is_floating_point():
                raise TypeError(f"{label} must be floating point, got {t.dtype}")
        B, H, Lq, D = q.shape
        Lk = k.shape[2]
        if H != self.heads or D != self.head_dim:
            raise ValueError(
                f"{name} was made for heads={self.heads}, head_dim={self.head_dim}, but q has shape "
                f"(B, H, L, D) = {tuple(q.shape)}"
            )
        if k.shape != (B, k.shape[1], Lk, D) or not k.shape[1] or H % k.shape[1]:
            raise ValueError(
                f"k {tuple(k.shape)} does not match q {tuple(q.shape)}: batch and head_dim must be equal, and heads "
                "equal or, for grouped keys and values, a divisor"
            )
        if v.shape[:3] != k.shape[:3]:
            raise ValueError(
                f"v {tuple(v.shape)} does not match k {tuple(k.shape)}: batch, heads and length must be equal"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        if not q.device == k.device == v.device:
            raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
        if Lq < 1 or Lk < 1:
            raise ValueError(f"q and k need at least one token, got Lq={Lq}, Lk={Lk}")
        if Lq != Lk:
            if self.info is not None and not self.info.cross:
                raise ValueError(
                    f"{name} supports only self-attention (Lq = Lk), got Lq={Lq}, Lk={Lk}; "
                    "use 'full' for cross-attention"
                )
            if self.causal:
                raise ValueError(
                    f"causal attention needs Lq = Lk, got {Lq} and {Lk}; to decode with a cache, use attn.step"
                )
        if exporting() and not self.exports_any_length and _is_dynamic(Lk):
            raise ValueError(
                f"{name} with causal={self.causal} cannot be exported with a dynamic length: its sizes are "
                "computed from the length. Export it with a fixed length, or use one of: full, subsampled; without "
                "causality also linear, performer, linformer"
            )
        if mask is not None:
            check_mask(mask, (B, Lk))

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these are tensors of one correct shape, dtype and device: the common case, without slower checks."""
        if not isinstance(q, Tensor) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
            return False
        shape, dtype, device = q.shape, q.dtype, q.device
        if k.shape != shape or v.shape != shape or k.dtype != dtype or v.dtype != dtype or len(shape) != 4:
            return False
        if k.device != device or v.device != device:
            return False
        return shape[1] == self.heads and shape[2] > 0 and shape[3] == self.head_dim and dtype.is_floating_point

    def check_bias(self, bias: PositionBias | None, batch: int, length: int, device: torch.device) -> None:
        """Check that the bias has one value per head (or `shared_heads = True`) and covers the sequence length."""
        if bias is None:
            return
        if isinstance(bias, Tensor) or not callable(bias):
            raise TypeError(
                "bias must be a callable bias(query_positions, key_positions), such as weft.ALiBi(heads), "
                f"got {type(bias).__name__}"
            )
        if self.info is not None and not self.info.bias:
            raise ValueError(
                f"{self.name} does not support a position bias: it has no logits at single positions; use 'full'"
            )
        limit = getattr(bias, "max_length", None)
        if isinstance(limit, int) and length > limit:
            raise ValueError(
                f"the position bias covers {limit} positions, but the sequence has {length}; create a larger bias"
            )
        if getattr(bias, "shared_heads", False):
            return
        heads = getattr(bias, "heads", None)
        if not isinstance(heads, int):  # a callable without `heads`: call it on one pair
            with torch.no_grad():
                first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
                values = bias(first, first)
            fits = isinstance(values, Tensor) and values.dim() == 4 and values.shape[0] in (1, batch)
            if not fits or values.shape[2:] != (1, 1):
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"for positions (1, 1, 1, 1) the position bias must return a tensor (1 or {batch}, {self.heads}, "
                    f"1, 1), got {got}; see weft/core/positions.py"
                )
            heads = values.shape[1]
        if heads != self.heads:
            raise ValueError(
                f"the position bias has {heads} heads, but {self.name} has {self.heads}; create it with "
                f"heads={self.heads}, or set shared_heads = True on a bias that returns one value for all heads"
            )


@contextmanager
def looking_on(attn: nn.Module) -> Iterator[None]:
    """Within this block, `attn` does not update its state from the inputs, even in training mode."""
    with ExitStack() as stack:
        for module in attn.modules():
            looking: Any = getattr(module, "looking", None)
            if looking is not None:
                stack.enter_context(looking())
        yield


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, L, X) with masked tokens set to 0. `masked_fill` takes 1.5x as long and loses the layout of x."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, 0)


def quiet_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set NaN, infinity and values over LARGEST to 0 at the masked tokens of x (B, L, dim).

    Such values would reach the gradients of the layer's weights. Other values stay, so that the output at padding
    equals that of PyTorch's own layers.
    """
    if mask is None:
        return x
    check_boolean(mask)
    if mask.shape != x.shape[:2]:  # the mechanism reports a wrong shape
        return x
    return torch.where(mask[..., None] | (x.abs() < LARGEST), x, 0)


def quiet_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """`quiet_padding` for a step: x (B, 1, dim), mask (B,). The mechanism reports a wrong mask."""
    fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == x.shape[:1]
    return quiet_padding(x, mask[:, None]) if fits else x  # type: ignore[index]


@constant
def exporting() -> bool:
    """Whether torch.export traces this code. Dynamo of torch 2.11 takes `is_exporting` for True when it compiles, too,
    and calls a constant function instead of tracing it."""
    return torch.compiler.is_exporting()


def _is_dynamic(length: Any) -> bool:
    """Whether an exported length can vary. In strict export it is not a SymInt, but looks like an int."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import, and only needed here

    return not has_static_value(length)
