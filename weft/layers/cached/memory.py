"""The gated recurrent cache: a small memory that every training step updates.

Zhang et al., Cached Transformers: Improving Transformers with Differentiable Memory Cache,
https://arxiv.org/abs/2312.12742, equations 4 and 5

    g_u, g_r = σ(W_u [X̃, C]), σ(W_r [X̃, C])          X̃: the step's tokens, resampled to the cache's length
    C̃        = W_c [X̃, g_r ⊙ C]
    C'       = mean over samples of (1 - g_u) ⊙ C + g_u ⊙ C̃

C is state, not a parameter: saved with the weights, updated in train(), frozen in eval(). No gradient crosses a step.
The mean is over the samples of all ranks, so N ranks with B samples have the same cache as one rank with N·B samples.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor
from torch.autograd.function import once_differentiable

from ...core.linear import bare
from ...core.precision import autocasts
from ...core.recomputing import Replays, once, recomputing, refuse_replica
from ...core.sharding import current
from ...core.staging import transformed
from .resample import resample

State = tuple[Tensor, Tensor, Tensor]
_copies: WeakKeyDictionary[RecurrentCache, WeakSet[RecurrentCache]] = WeakKeyDictionary()


class RecurrentCache(nn.Module):
    """`cache(tokens, valid)` returns the slots that these samples read, (1 or B, length, width); training updates them.

    `scope="batch"` keeps one cache, the mean over samples; `scope="stream"` keeps one per row of the batch. With
    `delayed`, samples read only what *earlier* steps wrote: tokens are stored in `pending` and written at the next
    step, with a gradient for the gates. Without `length`, the length of the first training step is used.
    """

    cache: Tensor
    updates: Tensor
    pending: Tensor
    pending_alive: Tensor

    def __init__(
        self,
        width: int,
        length: int | None = None,
        *,
        normed: bool = False,
        bias: bool = False,
        per_sample: bool = False,
        resampling: str = "nearest",
        scope: str = "batch",
        delayed: bool = False,
        eval_update: bool = False,
        sync: str = "exact",
        group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.width, self.length, self.per_sample, self.resampling = width, length, per_sample, resampling
        self.scope, self.delayed, self.eval_update, self.sync, self.group = scope, delayed, eval_update, sync, group
        place = {"device": device, "dtype": dtype}
        self.update_gate = nn.Linear(2 * width, width, bias=bias, **place)
        self.reset_gate = nn.Linear(2 * width, width, bias=bias, **place)
        self.candidate = nn.Linear(2 * width, width, bias=bias, **place)
        self.norm = nn.LayerNorm(width, **place) if normed else None
        kept = self.update_gate.weight.dtype
        kept = torch.float32 if kept in (torch.float16, torch.bfloat16) else kept
        empty = torch.zeros(0, length or 0, width, device=device, dtype=kept)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long, device=device))
        # State of this rank alone is saved and moved like buffers. It cannot be a buffer, because
        # DistributedDataParallel overwrites buffers with those of the first rank.
        own = scope == "stream" or sync == "none"
        self.rows = (("cache",) if own else ()) + (("pending", "pending_alive") if delayed else ())
        start = empty if scope == "stream" else torch.zeros(1, length or 0, width, device=device, dtype=kept)
        if own:
            self.cache = start
        else:
            self.register_buffer("cache", start)
        if delayed:
            self.pending, self.pending_alive = empty, torch.zeros(0, dtype=torch.bool, device=device)
        self.replays = Replays()
        self.follows = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentCache:
        new = memo[id(self)] = self.__class__.__new__(self.__class__)
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        new.follows = not self.updates.is_meta and int(self.updates) == 0
        if new.follows:
            _copies.setdefault(self, WeakSet()).add(new)
        return new

    def _resize_copies(self) -> None:
        """Give copies from before the first step our sizes, without content: averages of weights need equal shapes."""
        for other in _copies.get(self, ()):
            for name in {"cache", *self.rows} if other.follows else ():
                here, there = getattr(self, name), getattr(other, name)
                if here.shape != there.shape:
                    setattr(other, name, there.new_zeros(here.shape))

    def _stop_following(self) -> None:
        """Before the first training step of a copy: forget sizes that came from the original."""
        self.follows = False
        if int(self.updates) == 0:
            rows = 0 if self.scope == "stream" else 1
            self.cache = self.cache.new_zeros(rows, self.length or 0, self.width)
            if self.delayed:
                self.pending = self.pending.new_zeros(0, self.length or 0, self.width)
                self.pending_alive = self.pending_alive[:0].clone()

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """x (B, T, width); `valid` (B, T) is True for real tokens."""
        if not (self.training or self.eval_update):
            return self.frozen(x)
        refuse_replica(self)
        again = recomputing()
        if self.follows:
            self._stop_following()
        state = self.replays.recall(x) if again else self._begin(x)
        cache, pending, pending_alive = state
        tokens, alive = resample(x, cache.shape[1], valid, self.resampling)
        tokens = tokens.to(cache.dtype)
        if self.delayed:
            kept, read = self._gated_mean(cache, pending, pending_alive)
        else:
            kept, read = self._gated_mean(cache, tokens, alive)
        if not again:
            if not torch.compiler.is_compiling():
                self._refuse_vmap(kept)
            self.replays.remember(x, state, read)
            self.cache = kept.detach()
            self.updates = (once(self.updates) if torch.compiler.is_compiling() else self.updates) + 1
            if self.delayed:
                everyone = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
                # A copy: the tokens may be x itself, whose memory the caller may reuse.
                self.pending, self.pending_alive = tokens.detach().clone(), everyone if alive is None else alive
            if not torch.compiler.is_compiling():
                self._resize_copies()
                self._leave_modes()
        return read

    def _refuse_vmap(self, kept: Tensor) -> None:
        """Unless the cache is an input of the function, as in an ensemble of models."""
        if transformed() and is_batchedtensor(_untracked(kept)) and not is_batchedtensor(_untracked(self.cache)):
            raise RuntimeError("torch.func.vmap cannot write its batches to one cache: call eval() first")

    def _leave_modes(self) -> None:
        """Tensors of inference mode could not be used in training, and those of torch.func not be saved."""
        if transformed():
            for name in {"cache", "updates", *self.rows}:
                setattr(self, name, _untracked(getattr(self, name)))
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                for name in {"cache", "updates", *self.rows}:
                    setattr(self, name, getattr(self, name).clone())

    def frozen(self, x: Tensor) -> Tensor:
        """The current cache, (1 or B, length, width); zeros before the first training step."""
        B, T = x.shape[:2]
        if (context := current()) is not None:
            context.agree(T, x.device)
            T = context.length
        rows, length = self.cache.shape[:2]
        if length == 0:
            length = self.length or (self._agree_on(T, x.device) if self.training else T)
        if self.scope == "stream":
            if rows not in (0, B):
                raise ValueError(
                    f"the cache has {rows} streams, but this batch has {B} rows: call reset() before new streams"
                )
            rows = B
        if (rows, length) == self.cache.shape[:2]:
            return self.cache
        return self.cache.new_zeros(rows, length, self.width)

    def gated(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """The cache after an update by each sample alone, (B, length, width). Stores nothing."""
        cache = self.frozen(x)
        tokens, alive = resample(x, cache.shape[1], valid, self.resampling)
        return _where_alive(alive, self._gate(cache, tokens.to(cache.dtype)), cache)

    @torch.inference_mode(False)
    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Clear the cache; with boolean `rows` (B,), only those streams, e.g. at the start of a new document."""
        if rows is not None:
            if self.scope != "stream":
                raise ValueError("reset(rows) needs scope='stream'; call reset() to clear the shared cache")
            if self.cache.shape[0]:
                self.cache = self.cache.masked_fill(rows[:, None, None], 0)
            if self.delayed and self.pending.shape[0]:
                self.pending_alive = self.pending_alive & ~rows
            return
        keep_rows = 0 if self.scope == "stream" else 1
        self.cache = torch.zeros_like(self.cache[:keep_rows])
        self.updates = torch.zeros_like(self.updates)
        if self.delayed:
            self.pending, self.pending_alive = self.pending[:0].clone(), self.pending_alive[:0].clone()

    def _gate(self, cache: Tensor, tokens: Tensor) -> Tensor:
        """Equations 4 and 5 per sample. Products use the weights' (or autocast's) dtype; the blend the cache's."""
        layers, gates = (self.update_gate, self.reset_gate, self.candidate), 2 * self.width
        dtype = self.update_gate.weight.dtype
        if autocasts(cache):
            dtype = torch.get_autocast_dtype(cache.device.type)
        old, new = cache.to(dtype), tokens.to(dtype)
        if not all(map(bare, layers)):
            old = old.expand_as(new)
            update, reset = (layer(torch.cat([new, old], -1)).sigmoid() for layer in layers[:2])
            candidate = self.candidate(torch.cat([new, reset * old], -1))
        else:
            # W [new, old] per half, and the three layers in one product: a shared `old` is multiplied only once, and
            # needs no gradient.
            for_new, for_old = torch.cat([layer.weight for layer in layers]).chunk(2, 1)
            bias = None if self.candidate.bias is None else torch.cat([layer.bias for layer in layers])
            from_new = F.linear(new, for_new, bias)
            update, reset = (from_new[..., :gates] + F.linear(old, for_old[:gates])).sigmoid().chunk(2, -1)
            candidate = from_new[..., gates:] + F.linear(reset * old, for_old[gates:])
        if self.norm is not None:
            candidate = self.norm(F.gelu(candidate))
        update = update.to(cache.dtype)
        return (1 - update) * cache + update * candidate.to(cache.dtype)

    def _gated_mean(self, cache: Tensor, tokens: Tensor, alive: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next cache, and what the samples read; a sample without real tokens changes neither."""
        rows = _where_alive(alive, self._gate(cache, tokens), cache)
        if self.scope == "stream":
            return rows, rows
        if alive is None:
            total, count = rows.sum(0, keepdim=True), rows.new_full((1,), rows.shape[0])
        else:
            total, count = (rows * alive[:, None, None]).sum(0, keepdim=True), alive.sum().to(rows.dtype).view(1)
        own = _mean(total, count, cache)
        if self._ranks() == 1 or self.sync == "none":
            return own, rows if self.per_sample else own
        summed = _SumOverRanks.apply(torch.cat([total.flatten(), count]), self.group)
        mean = _mean(summed[:-1].view_as(total), summed[-1:], cache)
        return mean, rows if self.per_sample else mean if self.sync == "exact" else own

    def _ranks(self) -> int:
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    def _begin(self, x: Tensor) -> State:
        cache = self.frozen(x)
        if not self.delayed:
            return cache, cache, cache
        if self.pending.shape[0] == 0:
            # Nothing is pending yet. Use samples without tokens, which change nothing: the gates still get (zero)
            # gradients, as data-parallel training requires of every parameter.
            return cache, torch.zeros_like(cache), torch.zeros_like(cache[:, 0, 0], dtype=torch.bool)
        return cache, self.pending, self.pending_alive

    def _agree_on(self, length: int, device: torch.device) -> int:
        if self._ranks() == 1 or self.sync == "none":
            return length
        longest = torch.tensor(length, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, self.group)
        return int(longest)

    def _apply(self, fn: Any, recurse: bool = True) -> RecurrentCache:
        exact = self.cache
        super()._apply(fn, recurse)
        for name in self.rows:
            setattr(self, name, fn(getattr(self, name)))
        # Keep the cache in float32 or higher: it accumulates over thousands of steps.
        if self.cache.dtype in (torch.float16, torch.bfloat16):
            self.cache = exact.to(self.cache.device)
            if self.delayed:
                self.pending = self.pending.to(exact.dtype)
        self.replays = Replays()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.rows:
            destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the number of rows, and the length if it is not set, from the checkpoint."""
        saved = state_dict.get(prefix + "cache")
        if saved is not None and self.length is None and saved.shape[2:] == self.cache.shape[2:]:
            self.cache = self.cache.new_zeros(self.cache.shape[0], *saved.shape[1:])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in self.rows:
            here, saved = getattr(self, name), state_dict.get(prefix + name)
            if saved is None:
                missing_keys.append(prefix + name)
                continue
            if prefix + name in unexpected_keys:
                unexpected_keys.remove(prefix + name)
            if saved.dim() != here.dim() or (self.length is not None and saved.shape[1:] != here.shape[1:]):
                error_msgs.append(f"size mismatch for {prefix}{name}: {tuple(saved.shape)}, here {tuple(here.shape)}")
                continue
            like = saved if local_metadata.get("assign_to_params_buffers") else here  # here may be on the meta device
            setattr(self, name, saved.to(device=like.device, dtype=like.dtype, copy=True))
        if self.cache.dtype in (torch.float16, torch.bfloat16):  # assigned: float32, as in `_apply`
            self.cache = self.cache.float()
            if self.delayed:
                self.pending = self.pending.float()


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, of values forward and of gradients backward: what every rank reads, every rank wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable  # what other ranks send has no graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _untracked(x: Tensor) -> Tensor:
    """x outside of the derivatives by torch.func that now run."""
    while is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    return x


def _where_alive(alive: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if alive is None else torch.where(alive[:, None, None], new, old)


def _mean(total: Tensor, count: Tensor, old: Tensor) -> Tensor:
    return torch.where(count > 0, total / count.clamp(min=1), old)
