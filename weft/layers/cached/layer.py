"""Cached attention: any attention layer, mixed with attention over a memory of past training steps.

Zhang et al., Cached Transformers: Improving Transformers with Differentiable Memory Cache,
https://arxiv.org/abs/2312.12742

    O_h = σ(λ_h) o_mem_h + (1 - σ(λ_h)) o_self_h          one learned λ per head

o_self is the output of the wrapped layer; o_mem attends to the gated recurrent cache (`memory.py`,
`memory_attention.py`). The cache uses the first D_m = H · max(1, floor(r D / H)) channels, so o_mem_h is narrower than
o_self_h for r < 1. It is padded with zeros, as in the authors' code; the paper does not say.
"""

from __future__ import annotations

import math
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention import Attention
from ...core.blocks import both
from ...core.contract import quiet_padding, quiet_token
from ...core.linear import bare
from ...core.recomputing import refuse_replica
from ...core.segments import Segments, documents_of
from ...core.sharding import current, use
from ..multihead import MultiheadAttention
from .inputs import (
    grid_of,
    is_causal,
    parameter_names,
    per_head,
    refuse_leaks,
    slots,
    valid_tokens,
    width_and_heads,
)
from .memory import RecurrentCache
from .memory_attention import MemoryAttention, same_as
from .options import cache_options
from .projection import NAMES, channels_in, is_known, output_projection, returns_heads
from .projection import call as call_with_projection
from .resample import resample_grid


@dataclass
class Call:
    """One call of a layer whose heads are mixed inside it."""

    x: Tensor
    valid: Tensor | None
    grid: tuple[int, int] | None
    write: bool = True
    branches: tuple[Tensor, Tensor] | None = None  # o_self and o_mem, if `write` is False


class CachedAttention(nn.Module):
    """`CachedAttention(layer)` takes the arguments of `layer`: `cached(x, *args, **kwargs)`, x (B, T, dim).

    Args:
        inner: a `weft.MultiheadAttention` with any mechanism, or any module from (B, T, dim) to (B, T, dim), which may
            return a tuple that starts with its output.
        ratio: r, the fraction of channels to cache.
        length: number of slots; by default the length of the first training step.
        grid: height and width of the slots if they form an image after `prefix` other tokens.
        options: see `CacheOptions`.

    The layer's mask selects the tokens that enter the cache. If its mask has another meaning, pass `valid=` (B, T).
    In a call, `grid=` is the size of the token image; by default the layer's own size argument, or a square. With
    `segments=` (B, T), every packed document is a sample of the cache.
    """

    def __init__(
        self,
        inner: nn.Module,
        ratio: float = 0.5,
        length: int | None = None,
        *,
        preset: str = "paper",
        dim: int | None = None,
        heads: int | None = None,
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
        causal: bool | None = None,
        group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        o = self.options = cache_options(preset, options)
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"ratio is the fraction of channels to cache and must be in (0, 1], got {ratio}")
        self.dim, self.heads, inside = width_and_heads(inner, dim, heads)
        shows_heads = isinstance(inner, MultiheadAttention) or hasattr(inner, "per_head")
        projection = None if shows_heads or o.mix == "projected" else output_projection(inner, self.heads)
        inside = channels_in(projection) or inside
        self.width = self.heads * max(1, math.floor(round(ratio * min(self.dim, inside) / self.heads, 9)))
        if self.width > min(self.dim, inside):
            raise ValueError(f"{self.heads} heads need at least {self.heads} channels, but the layer has {self.dim}")
        length = slots(length, grid, prefix, o)
        self.bare = o.mix != "projected" and not shows_heads and projection is None and returns_heads(inner)
        known = shows_heads or self.bare or (projection is not None and is_known(inner))
        self.mix = o.mix or ("heads" if known else "projected")
        self._mixes_inside = self.mix == "heads" and not shows_heads and not self.bare
        if self._mixes_inside:
            if projection is None:
                raise ValueError(
                    f"mix='heads' needs the heads of {type(inner).__name__} before its output projection, but it has "
                    f"neither per_head and merge nor a linear layer named {', '.join(NAMES)}: use mix='projected'"
                )
            self._projection = next(name for name in NAMES if getattr(inner, name, None) is projection)
            self._hook = projection.register_forward_pre_hook(self._before_projection)
        self.causal = is_causal(inner) if causal is None else causal
        if o.position == "conv" and self.dim % self.width:
            raise ValueError(
                f"position='conv' has one group per cached channel: {self.dim} channels are not a multiple of "
                f"{self.width}; choose another ratio, or position='none'"
            )
        self.ratio, self.grid, self.prefix, self.inner = ratio, grid, prefix, inner
        self.names = parameter_names(inner)
        place = {"device": device, "dtype": dtype}
        if device is None and dtype is None:  # use the wrapped layer's
            like = next((p for p in inner.parameters() if p.is_floating_point()), None)
            place = {} if like is None else {"device": like.device, "dtype": like.dtype}
        self.lam = nn.Parameter(torch.full((self.heads,), float(o.lambda_init), **place))
        self.cache = RecurrentCache(
            self.width,
            length,
            normed=o.candidate == "ln_gelu",
            bias=o.gate_bias,
            per_sample=o.memory == "per_sample",
            resampling="nearest" if o.resample == "2d" else o.resample,
            scope=o.scope,
            delayed=o.delayed,
            eval_update=o.eval_update,
            sync=o.sync,
            group=group,
            **place,
        )
        how = o.memory_attention
        kind: dict[str, Any] = {}
        if isinstance(how, Attention):
            kind = {"mechanism": how}
        elif how == "same":
            kind = same_as(inner, self.width, self.heads)
        elif how != "full":
            raise ValueError(f"memory_attention must be 'full', 'same' or a mechanism, got {how!r}")
        self.memory = MemoryAttention(
            self.width,
            self.heads,
            project=self.mix == "projected",
            qkv_bias=o.qkv_bias,
            out_bias=o.out_bias,
            pool=o.pool,
            **kind,
            **place,
        )
        if self.causal:
            refuse_leaks(o, self.memory.attention)
        self.position = None
        if o.position == "conv":
            self.position = nn.Conv2d(self.dim, self.dim, 3, padding=1, groups=self.width, **place)
        self._asked = False
        self._calls: dict[int, Call] = {}  # the running call of each thread, for `_before_projection`
        for module in (*self.cache.children(), *self.memory.children()):
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        x: Tensor,
        *args: Any,
        valid: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        segments: Tensor | Segments | None = None,
        **kwargs: Any,
    ) -> Any:
        if current() is not None:
            self._check_region(segments)
        if x.is_nested:
            raise ValueError("cached attention does not support nested tensors: pad them and pass a mask")
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, L, {self.dim}), got {tuple(x.shape)}")
        if self._mixes_inside:  # the hook in the copy of `inner` would call this layer, not its copy
            refuse_replica(self)
        self._warn_if_empty()
        if segments is not None:
            documents = documents_of(segments, x)
            return self._per_document(x, documents, valid, *args, **kwargs)
        return self._forward(x, args, kwargs, valid, grid)

    def _check_region(self, segments: Any) -> None:
        """Context parallelism: each rank adds its tokens to the slots of the whole sequence."""
        if not isinstance(self.inner, MultiheadAttention) or self.options.resample == "2d" or self.memory.reads_image:
            raise ValueError(
                "the cache supports context parallelism only around a weft.MultiheadAttention, and without "
                f"resample='2d' or pooled images; got {type(self.inner).__name__}"
            )
        if segments is not None or self.position is not None:
            raise ValueError("the cache with segments or position='conv' does not support context parallelism")
        self._check_queries("context parallelism")

    def _per_document(
        self, x: Tensor, documents: Segments, valid: Tensor | None, mask: Tensor | None = None, bias: Any = None
    ) -> Tensor:
        """Every document is a sample of the cache, in its own row."""
        if not isinstance(self.inner, MultiheadAttention) or self.options.scope == "stream" or self.grid is not None:
            raise ValueError(
                "cached attention supports segments only around a weft.MultiheadAttention, with scope='batch' and "
                "without grid: pass one document per row"
            )
        if self.position is not None:
            raise ValueError("position='conv' needs images, which packed documents are not: use position='none'")
        real = documents.real(both(mask, valid))
        if not len(documents):
            return torch.where(torch.zeros((), dtype=torch.bool, device=x.device), x, 0)
        rows = Segments.from_lengths(documents.lengths[: documents.read, None].tolist(), device=x.device)
        seen = documents.as_rows(torch.ones_like(x[..., 0], dtype=torch.bool) if real is None else real)
        y = self._forward(documents.as_rows(x), (seen, bias), {"segments": rows}, None, None)
        return documents.one_per_row.repack([y], documents.shape)

    def _forward(
        self,
        x: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        valid: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> Any:
        valid, grid = valid_tokens(self, x, args, kwargs, valid), grid_of(args, kwargs, grid)
        if self._mixes_inside:
            y, rest = self._called(Call(x, valid, grid), args, kwargs)
        else:
            own, output, rest = self._own(x, args, kwargs)
            y = self._finish(self._mixed(own, self._remembered(x, output, valid, grid)))
        if self.position is not None:
            y = y + self._positions(x, valid, grid)
        return y if rest is None else (y, *rest)

    @property
    def share(self) -> Tensor:
        """σ(λ) per head: the weight of the cached branch in the output."""
        return self.lam.detach().sigmoid()

    @torch.no_grad()
    def branches(
        self, x: Tensor, *args: Any, valid: Tensor | None = None, grid: tuple[int, int] | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """o_self and o_mem before mixing, each (B, T, H, head width). Reads the cache without writing it."""
        valid, grid = valid_tokens(self, x, args, kwargs, valid), grid_of(args, kwargs, grid)
        if self._mixes_inside:
            call = Call(x, valid, grid, write=False)
            self._called(call, args, kwargs)
            assert call.branches is not None
            return call.branches
        own, output, _ = self._own(x, args, kwargs)
        return own, self._remembered(x, output, valid, grid, write=False)

    def release(self) -> None:
        """Remove what this layer has added to `inner`, which is used without a cache from now on."""
        if self._mixes_inside:
            self._hook.remove()

    def reset(self, rows: Tensor | None = None) -> None:
        """Clear the whole cache, or only the streams where `rows` (B,) is True."""
        self.cache.reset(rows)

    def start(self, batch: int, *, max_length: int | None = None, history: int = 0) -> Any:
        """The state before the first token, for `step`; see `Attention.start`."""
        return self._stepping().start(batch, max_length=max_length, history=history)

    def prefill(
        self, x: Tensor, mask: Tensor | None = None, bias: Any = None, state: Any = None, max_length: int | None = None
    ) -> tuple[Tensor, Any]:
        """Process a prompt x (B, L, dim), or the next L tokens after `state`; returns its output and the next state.
        Reads the cache without writing it."""
        own, state = self._stepping().prefill_heads(x, mask, bias, state, max_length)
        return self._with_memory(quiet_padding(x, mask), own), state

    def step(self, x: Tensor, state: Any, mask: Tensor | None = None, bias: Any = None) -> tuple[Tensor, Any]:
        """Decode one token x (B, 1, dim); returns its output and the next state. Reads the cache without writing it."""
        x = quiet_token(x, mask)
        own, state = self._stepping().step_heads(x, state, mask, bias)
        return self._with_memory(x, own), state

    def _with_memory(self, x: Tensor, own: Tensor) -> Tensor:
        slots = self.cache.frozen(x)
        memory = self.memory(x[..., : self.width], slots, self._image(slots, None))
        return self._stepping().merge(self._mixed(own.transpose(1, 2), memory).transpose(1, 2))

    def reorder(self, state: Any, rows: Tensor) -> Any:
        """The state with its rows in another order; see `Attention.reorder`."""
        return self._stepping().reorder(state, rows)

    def crop(self, state: Any, n: int) -> Any:
        """The state without its last n tokens; see `Attention.crop`."""
        return self._stepping().crop(state, n)

    def _own(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None, Any]:
        """The inner branch by heads, (B, T, H, d); its output if the cache is written from it; other return values."""
        inner: Any = self.inner
        rest = None
        if self.mix == "heads" and not self.bare:
            heads = per_head(inner, x, *args, **kwargs)
            output = inner.merge(heads) if self.options.update_from == "output" else None
            return heads.transpose(1, 2), output, rest
        output, rest = self._split(inner(x, *args, **kwargs), x)
        return torch.unflatten(output, -1, (self.heads, -1)), output, rest

    def _called(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The output of the inner layer with mixed heads, and its other return values."""
        if not torch.compiler.is_compiling():
            self._follow_projection()
        self._calls[_thread()] = call
        try:
            output = call_with_projection(self.inner, call.x, *args, **kwargs)
        finally:
            missed = self._calls.pop(_thread(), None) is not None
        if missed:
            raise ValueError(
                f"{type(self.inner).__name__} did not call its output projection, so its heads cannot be mixed: "
                "use mix='projected'"
            )
        return self._split(output, call.x)

    def _follow_projection(self) -> None:
        """Move the hook to the module that now takes the heads: an adapter may have been put around the projection."""
        now = getattr(self.inner, self._projection, None)
        if isinstance(now, nn.Module) and self._hook.id not in now._forward_pre_hooks:
            self._hook.remove()
            self._hook = now.register_forward_pre_hook(self._before_projection)

    def _before_projection(self, projection: nn.Module, given: tuple[Any, ...]) -> Any:
        """Mix the heads that enter the inner layer's output projection; outside of our calls, do nothing."""
        call = self._calls.pop(_thread(), None)
        if call is None:
            return None
        own, B, T = given[0], *call.x.shape[:2]
        if own.shape[:2] != (B, T) or own.dim() != 3:
            raise ValueError(
                f"{type(self.inner).__name__} projects {tuple(own.shape)}, not the joined heads ({B}, {T}, channels): "
                "use mix='projected'"
            )
        output = projection(own) if self.options.update_from == "output" else None
        own = torch.unflatten(own, -1, (self.heads, -1))
        memory = self._remembered(call.x, output, call.valid, call.grid, call.write)
        if not call.write:
            call.branches = own, memory
            return None
        return (self._mixed(own, memory).flatten(2), *given[1:])

    def _split(self, output: Any, x: Tensor) -> tuple[Tensor, Any]:
        """The first return value of the inner layer, and the others; None if it returns only one."""
        rest = None
        if isinstance(output, tuple):
            output, *rest = output
        if output.shape != x.shape:
            name = type(self.inner).__name__
            raise ValueError(f"{name} must keep the shape of its input {tuple(x.shape)}, got {tuple(output.shape)}")
        return output, rest

    def _remembered(
        self,
        x: Tensor,
        output: Tensor | None,
        valid: Tensor | None,
        grid: tuple[int, int] | None,
        write: bool = True,
    ) -> Tensor:
        """The cached branch by heads, (B, T, H, width / H)."""
        x = quiet_padding(x, valid)
        queries = x[..., : self.width]
        if valid is not None:  # a mechanism like reformer would read padded queries as keys
            queries = torch.where(valid[..., None], queries, 0)
        source = output if self.options.update_from == "output" and output is not None else x
        tokens = source[..., : self.width]
        if self.options.resample == "2d":
            assert self.grid is not None
            if valid is not None:
                raise ValueError("resample='2d' does not support padded tokens: use resample='nearest'")
            tokens = resample_grid(tokens, self._square(x.shape[1], grid), self.grid, self.prefix)
        if self.options.eval_gate and not (self.cache.training and write):
            memory = self.cache.gated(tokens, valid)
        else:
            memory = self.cache(tokens, valid) if write else self.cache.frozen(tokens)
        with use(None):  # every rank has all slots
            return self.memory(queries, memory, self._image(memory, grid if x.shape[1] == memory.shape[1] else None))

    def _image(self, slots: Tensor, grid: tuple[int, int] | None) -> tuple[int, int] | None:
        """Height and width of the slots, if they are read as an image."""
        return self._square(slots.shape[1], grid) if self.memory.reads_image and self.grid is None else self.grid

    def _mixed(self, own: Tensor, memory: Tensor) -> Tensor:
        share = self.lam.sigmoid().to(own.dtype)[:, None]
        wide = F.pad(memory.to(own.dtype), (0, own.shape[-1] - memory.shape[-1]))
        return share * wide + (1 - share) * own

    def _finish(self, mixed: Tensor) -> Tensor:
        inner: Any = self.inner
        return inner.merge(mixed.transpose(1, 2)) if self.mix == "heads" and not self.bare else mixed.flatten(2)

    def _positions(self, x: Tensor, valid: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
        assert self.position is not None
        if valid is not None:  # the convolution reads neighbours
            x = torch.where(valid[..., None], x, 0)
        image = torch.unflatten(x[:, self.prefix :].transpose(1, 2), 2, self._square(x.shape[1], grid))
        found = _joined(self.position, image) if image.is_cuda and bare(self.position) else self.position(image)
        return F.pad(found.flatten(2).transpose(1, 2), (0, 0, self.prefix, 0))

    def _square(self, tokens: int, grid: tuple[int, int] | None) -> tuple[int, int]:
        """Height and width of the image formed by the tokens after the prefix."""
        cells = tokens - self.prefix
        side = math.isqrt(max(cells, 0))
        found = grid or (side, side)
        if found[0] * found[1] != cells or cells < 1:
            raise ValueError(
                f"{tokens} tokens, {self.prefix} of them before the image, are not {found[0]} x {found[1]} cells: "
                "set grid=(height, width), and prefix=1 if the first is a class token"
            )
        return found

    def _stepping(self) -> MultiheadAttention:
        if self.training or self.options.eval_update:
            raise ValueError("step-by-step decoding does not write the cache: call eval() first")
        if not isinstance(self.inner, MultiheadAttention) or self.mix != "heads":
            raise ValueError("step-by-step decoding needs a weft.MultiheadAttention inside, and mix='heads'")
        self._check_queries("step-by-step decoding")
        return self.inner

    def _check_queries(self, what: str) -> None:
        """The cached branch does not get the positions of its queries."""
        if self.memory.attention.places_queries:
            raise ValueError(
                f"{what} does not support {self.memory.attention.name} as memory_attention, whose logits depend on the "
                "positions of the queries: use memory_attention='full'"
            )

    def _warn_if_empty(self) -> None:
        """Warn once if eval() reads a cache that was never written."""
        if self.training or self._asked or self.options.eval_update or torch.compiler.is_compiling():
            return
        self._asked = True
        updates = self.cache.updates
        if type(updates) is Tensor and not updates.is_meta and int(updates) == 0:
            warnings.warn("this cache was never written: train the model, or load a trained one", stacklevel=3)

    def extra_repr(self) -> str:
        return f"ratio={self.ratio}, length={self.cache.length}, cached channels={self.width}, mix={self.mix!r}"


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _joined(conv: nn.Conv2d, image: Tensor) -> Tensor:
    """`conv(image)` with its groups joined to blocks of up to 16 channels, whose other weights are 0.

    cuDNN needs 6 times as long for groups of two channels, forward and backward.
    """
    each, groups = conv.in_channels // conv.groups, conv.groups
    many = next(n for n in range(max(1, 16 // each), 0, -1) if groups % n == 0)
    own = torch.eye(many, device=image.device, dtype=conv.weight.dtype)[:, None, :, None, None, None]
    weight = torch.unflatten(conv.weight, 0, (-1, many, each))[:, :, :, None] * own
    return F.conv2d(image, weight.flatten(3, 4).flatten(0, 2), conv.bias, padding=conv.padding, groups=groups // many)
