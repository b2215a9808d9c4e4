"""Token-by-token decoding: `start`, `prefill`, `step`, `reorder`, `crop` and `state_size`.

    out, state = attn.prefill(q, k, v, mask)          a prompt (B, H, L, D), in parallel
    out, state = attn.step(q, k, v, state, mask)      one token (B, H, 1, D)

Both equal the parallel form. A mechanism keeps its state in buffers with room for a number of tokens, and defines

    empty_state(k, capacity)                          buffers for `capacity` tokens, with the dtype and device of k
    state_after(q, k, v, mask, capacity)              the same buffers after the tokens of a prompt
    attend_next(q, k, v, state, mask, bias, at)       one token's output and the next buffers

With `max_length` the buffers are allocated once and the position is a tensor, so that a step can be captured in a CUDA
graph. Otherwise the buffers grow by an eighth when they are full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import sharding
from .decoding_state import DecodingState, Log, Place, Ready, tree_bytes, tree_map
from .dispatch import step_kernel
from .heads import spread
from .precision import autocast, dtype_after, without_autocast
from .softmax import without_cudnn
from .staging import refuse_trace


class Decoding:
    """The decoding half of the contract."""

    name: str
    heads: int
    head_dim: int
    causal: bool
    max_length: int | None
    options: dict[str, Any] | None
    dropout: float
    training: bool
    check: Callable[..., None]
    check_bias: Callable[..., None]
    clean: Callable[..., list[Tensor]]
    parameters: Callable[..., Any]
    __call__: Callable[..., Any]

    crops = False  # True if any number of the last tokens can be dropped by setting the position back

    def empty_state(self, k: Tensor, capacity: int) -> Any:
        raise NotImplementedError

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capacity: int) -> Any:
        raise NotImplementedError

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, mask: Tensor | None, bias: Any, at: Place
    ) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def attend_more(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, mask: Tensor | None, bias: Any, at: Place
    ) -> tuple[Tensor, Any]:
        """`attend_next` for several tokens, the first at the known position `at.i`. Optional: steps replace it."""
        raise NotImplementedError

    def start(
        self,
        batch: int,
        *,
        max_length: int | None = None,
        history: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> DecodingState:
        """Return the state before the first token. `device` and `dtype` default to those of the first token.

        With `max_length` the state is allocated once, for that many tokens, and every call updates it in place.
        `history` is the number of tokens that `crop` must be able to drop; mechanisms that keep all tokens can drop any
        number without it.
        """
        self._check_decodes()
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
            raise ValueError(f"batch must be the number of rows, an integer >= 0, got {batch!r}")
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length must be an integer of at least 1, or None, got {max_length!r}")
        if max_length is not None and self.max_length is not None and max_length > self.max_length:
            raise ValueError(
                f"max_length={max_length} is over the mechanism's max_length={self.max_length}; create {self.name} "
                "with a larger one"
            )
        if not isinstance(history, int) or history < 0:
            raise ValueError(f"history must be an integer of at least 0, got {history!r}")
        self._shapes(batch, 1, torch.float32)  # raises an error if the block size is unknown
        place = None if device is None else torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        state = DecodingState(self._settings(), batch, place, dtype, max_length=max_length)
        state.crops, state.history = self.crops, 0 if self.crops else history
        if max_length is not None and place is not None and dtype is not None:
            self._allocate(state, torch.empty(batch, self.heads, 0, self.head_dim, device=place, dtype=dtype), 1)
        return state

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        bias: Any = None,
        state: DecodingState | None = None,
        max_length: int | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, DecodingState]:
        """Process a prompt (B, H, L, D), or the next L tokens after `state`; return its output and the next state.

        `mask` (B, L) is False for padding, which may be on the left. Padding counts as positions, as in the parallel
        form with the same mask. Tokens after earlier ones are processed step by step by most mechanisms.
        """
        sharding.refuse("prefill")
        k, v = spread(q, k, v)
        self._check_decodes()
        self.check(q, k, v, mask, bias)
        if state is None:
            state = self.start(q.shape[0], max_length=max_length)
        elif max_length is not None and max_length != getattr(state, "max_length", max_length):
            raise ValueError(f"the state has max_length={state.max_length}, got max_length={max_length}; pass only one")
        L = q.shape[2]
        self._check_tokens(q, k, v, state, bias, L)
        if state.position and (state.history or type(self).attend_more is Decoding.attend_more):
            return self._steps(q, k, v, mask, bias, state, inputs)
        if state.position:
            return self._more(q, k, v, mask, bias, state)
        out = self(q, k, v, mask, bias, **inputs)
        state = self._own(state, q)
        state.whole = mask is None
        q, k, v = self.clean(q, k, v, mask)
        with without_autocast(q):
            if state.max_length is None:
                state.capacity = L
                state.inner = self.state_after(q, k, v, mask, L, **inputs)
            else:
                self._allocate(state, k, L)
                state.inner = self._write(state.inner, self.state_after(q, k, v, mask, state.capacity, **inputs))
            state.advance(L, in_place=False)
            if state.history:
                early = max(0, L - state.history)
                state.log = Log([(early, self._after(q, k, v, mask, inputs, early, state.capacity))], [])
                state.log.tokens += [_token(q, k, v, mask, bias, inputs, t) for t in range(early, L)]
        return out, state

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: DecodingState,
        mask: Tensor | None = None,
        bias: Any = None,
        **inputs: Any,
    ) -> tuple[Tensor, DecodingState]:
        """Process one token (B, H, 1, D); return its output and the next state. `mask` (B,) is False for padding."""
        k, v = spread(q, k, v)
        compiling = torch.compiler.is_compiling()
        plain = bias is None and not inputs
        ready = getattr(state, "ready", None) if plain and not compiling else None
        if ready is not None and not ready.fits(self, q, k, v, state):
            ready = None
        if ready is None:
            self._check_tokens(q, k, v, state, bias, 1)
        if mask is not None:
            self._check_row(mask, state)
        state = self._own(state, q)
        state.whole = state.whole and mask is None
        if ready is not None:
            in_place, kernel = True, ready.kernel
        else:
            q, k, v = autocast(q, k, v)
            self._allocate(state, k, 1)
            in_place = not self._differentiable(q, k, v, bias, state.inner)
            kernel = self._kernel(q, v, state) if in_place and plain and not state.history else None
        if kernel is not None:
            out = kernel(q, k, v, mask, state.count if state.place is None else state.place)
        else:
            if mask is not None:
                q, k, v = (torch.where(mask[:, None, None, None], t, 0) for t in (q, k, v))
            with without_autocast(q), without_cudnn(q):
                at, before = self._place(state, not in_place), state.inner
                out, state.inner = self.attend_next(q, k, v, before, mask, bias, at, **inputs)
            if not in_place and state.place is None:  # both states may go on without gradients, in place
                state.inner = tree_map(lambda new, old: new.clone() if new is old else new, state.inner, before)
            if not compiling and state.ready is not None and state.ready.kernel is None:
                state.ready.inner = state.inner
        if compiling and state.place is not None:  # a number would be compiled again in every step
            state.place.add_(1)
            return out, state
        state.advance(1, in_place)
        if state.history:
            token = _token(q, k, v, None if mask is None else mask[:, None], bias, inputs, 0)
            log = state.log or Log([(0, self._after(q, k, v, None, inputs, 0, state.capacity))], [])
            state.log = log.add(token, state.history, state.count, state.inner)
        return out, state

    def repeat(self, q: Tensor, k: Tensor, v: Tensor, state: DecodingState, mask: Tensor | None) -> Tensor | None:
        """The output of `step`, for a caller that owns the state, which is changed itself, and whose tokens are all
        alike: k and v like q, without gradients and autocast. None, without effect, if `step` must run."""
        ready, i = state.ready, state.count
        if ready is None or ready.kernel is None or q.shape != ready.shape or not ready.serves(self, q, state.inner):
            return None
        if i >= state.capacity or (self.max_length is not None and i >= self.max_length):
            return None
        out = ready.kernel(q, k, v, mask, i if state.place is None else state.place)
        state.whole = state.whole and mask is None
        state.advance(1, in_place=True)
        return out

    def reorder(self, state: DecodingState, rows: Tensor) -> DecodingState:
        """Return the state whose row b is row `rows[b]` of `state`, for example after a step of beam search.

        It is a copy, unless the state has `max_length` and the number of rows stays the same: then it is in place.
        """
        self._check_state(state)
        self._check_newest(state)
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
            got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"rows must be an integer tensor (rows,), got {got}")
        if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < state.batch:
            raise ValueError(f"rows must be in 0 … {state.batch - 1}, got {rows.tolist()}")

        def take(x: Tensor) -> Tensor:
            return x.index_select(0, rows.to(x.device))

        log = state.log
        if log is not None:
            tokens = [(*tree_map(take, t[:4]), t[4], tree_map(take, t[5])) for t in log.tokens]
            log = Log([(p, tree_map(take, inner)) for p, inner in log.marks], tokens)
        inner = tree_map(take, state.inner)
        if state.place is not None and len(rows) == state.batch:
            state.inner, state.log = self._write(state.inner, inner), log
            return state
        place = None if state.place is None else state.place.clone()
        return replace(state, batch=len(rows), inner=inner, log=log, place=place, newest=[state.count])

    def crop(self, state: DecodingState, n: int) -> DecodingState:
        """Return the state without its last n tokens. Mechanisms that do not keep all tokens need `start(history=n)`,
        where crops one after another count together; dropping all tokens is always possible."""
        self._check_state(state)
        self._check_newest(state)
        state.check_crop(n)
        target, inner, log = state.position - n, state.inner, state.log
        if n == 0:
            return state
        if target == 0:
            like = torch.empty(state.batch, self.heads, 0, self.head_dim, device=state.device, dtype=state.dtype)
            inner, log = tree_map(lambda x, y: x.to(y.dtype), self.empty_state(like, state.capacity), inner), None
        elif not self.crops:
            assert log is not None
            marks = [mark for mark in log.marks if mark[0] <= target]
            log = Log(marks, log.tokens[: target - marks[0][0]])
            inner = tree_map(torch.clone, marks[-1][1])
            capacity = max(state.capacity, target)
            inner = self._grown(inner, state.batch, capacity)
            for t in range(marks[-1][0], target):
                q, k, v, mask, bias, inputs = log.tokens[t - marks[0][0]]
                mask = None if mask is None else mask[:, 0]
                at = Place(t, capacity, q.device, not self._differentiable(q, k, v, bias, inner))
                with without_autocast(q):
                    _, inner = self.attend_next(q, k, v, inner, mask, bias, at, **inputs)
        if state.place is not None:
            state.place.fill_(target)
            state.inner, state.count, state.log, state.newest = self._write(state.inner, inner), target, log, [target]
            return state
        state.newest[0] = -1  # no earlier state is valid, whatever its count
        return replace(state, count=target, inner=inner, log=log, newest=[target])

    def state_size(self, batch: int, length: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of a state with room for `length` tokens."""
        self._check_decodes()
        return tree_bytes(self._shapes(batch, length, dtype))

    def _more(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, state: DecodingState
    ) -> tuple[Tensor, DecodingState]:
        state, first, L = self._own(state, q), state.position, q.shape[2]
        q, k, v = self.clean(q, k, v, mask)
        state.whole = state.whole and mask is None
        self._allocate(state, k, L)
        in_place = not self._differentiable(q, k, v, bias, state.inner)
        at = Place(first, state.capacity, q.device, in_place, state.whole)
        with without_autocast(q):
            out, state.inner = self.attend_more(q, k, v, state.inner, mask, bias, at)
        state.advance(L, in_place)
        return out, state

    def _steps(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: Any,
        state: DecodingState,
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, DecodingState]:
        outs = []
        for t in range(q.shape[2]):
            at = slice(t, t + 1)
            x = {name: value[:, at] for name, value in inputs.items()}
            row = None if mask is None else mask[:, t]
            out, state = self.step(q[:, :, at], k[:, :, at], v[:, :, at], state, row, bias, **x)
            outs.append(out)
        return torch.cat(outs, 2), state

    def _after(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, inputs: dict[str, Tensor], n: int, capacity: int
    ) -> Any:
        """The buffers after the first n of the given tokens."""
        if n == 0:
            return self.empty_state(k, capacity)
        x = {name: value[:, :n] for name, value in inputs.items()}
        mask = None if mask is None else mask[:, :n]
        return self.state_after(q[:, :, :n], k[:, :, :n], v[:, :, :n], mask, capacity, **x)

    def _own(self, state: DecodingState, q: Tensor) -> DecodingState:
        """The state to change: a new one around the same buffers, or with `max_length` the given one."""
        if state.max_length is None:
            state = state.twin()
        if state.device is None or state.dtype is None:
            state.device, state.dtype = q.device, dtype_after(q)
        return state

    def _kernel(self, q: Tensor, v: Tensor, state: DecodingState) -> Callable[..., Tensor] | None:
        """The kernel for the buffers of this state, prepared once."""
        if torch.compiler.is_compiling():
            # A known position is a number, and the step would be compiled again for each.
            return None if state.place is None else step_kernel(self, q, v, state.inner)
        if state.ready is None or not state.ready.serves(self, q, state.inner):
            state.ready = Ready(self, q, state.inner, step_kernel(self, q, v, state.inner))
        return state.ready.kernel

    def _allocate(self, state: DecodingState, k: Tensor, n: int) -> None:
        """Make room for n more tokens."""
        if state.inner is None:
            state.capacity = state.max_length or 16
            state.inner = self.empty_state(k, state.capacity)
            state.newest = [0]
            if state.max_length is not None:
                state.place = torch.zeros((), dtype=torch.long, device=k.device)
        if state.max_length is None and state.count + n > state.capacity:
            state.capacity = max(state.count + n, state.capacity + max(16, state.capacity // 8))
            state.capacity = min(state.capacity, self.max_length or state.capacity)
            state.inner = self._grown(state.inner, state.batch, state.capacity)

    def _grown(self, inner: Any, batch: int, capacity: int) -> Any:
        def pad(x: Tensor, shape: Tensor) -> Tensor:
            short = [new - old for new, old in zip(shape.shape, x.shape, strict=True)]
            return F.pad(x, [side for s in reversed(short) for side in (0, s)]) if any(short) else x

        return tree_map(pad, inner, self._shapes(batch, capacity, torch.float32))

    def _shapes(self, batch: int, capacity: int, dtype: torch.dtype) -> Any:
        like = torch.empty(batch, self.heads, 0, self.head_dim, device="meta", dtype=dtype)
        return self.empty_state(like, capacity)

    def _place(self, state: DecodingState, differentiable: bool) -> Place:
        assert state.device is not None
        i: Any = state.count
        if state.place is not None:  # a number where reading it is free
            free = state.device.type == "cpu" and not torch.compiler.is_compiling()
            i = int(state.place) if free else state.place
        return Place(i, state.capacity, state.device, not differentiable, state.whole)

    def _differentiable(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, inner: Any) -> bool:
        """Whether a gradient may be computed through the state, whose tensors must then stay as they are."""
        if not torch.is_grad_enabled():
            return False
        if bias is not None and (not isinstance(bias, nn.Module) or any(p.requires_grad for p in bias.parameters())):
            return True
        found = [q, k, v, *self.parameters()]
        tree_map(lambda x: found.append(x) or x, inner)  # type: ignore[func-returns-value]
        return any(x.requires_grad for x in found)

    def _write(self, old: Any, new: Any) -> Any:
        """Copy into the allocated buffers, or use the new ones if gradients need them."""
        found: list[bool] = []
        tree_map(lambda x, y: found.append(x.requires_grad or y.requires_grad) or x, old, new)  # type: ignore
        if torch.is_grad_enabled() and any(found):
            return tree_map(lambda y, x: y.to(x.dtype), new, old)
        return tree_map(lambda y, x: x.copy_(y), new, old)

    def _check_decodes(self) -> None:
        if type(self).attend_next is Decoding.attend_next:
            from .registry import attention_info, attentions

            able = ", ".join(n for n in attentions() if attention_info(n).steps)
            raise ValueError(f"{self.name} does not support step-by-step decoding; use one of: {able}")
        if not self.causal:
            raise ValueError(f"{self.name} decodes step by step only with causal=True; this one has causal=False")

    def _check_state(self, state: DecodingState) -> None:
        if not isinstance(state, DecodingState):
            raise TypeError(
                f"state must come from start(), prefill() or from the previous step, got {type(state).__name__}"
            )
        theirs, mine = state.made_for, self._settings()
        if theirs != mine:
            differ = {key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)} | {"heads", "head_dim"}

            def words(x: dict[str, Any]) -> str:
                return f"{x['name']} with " + ", ".join(f"{k}={x[k]!r}" for k in x if k in differ and k != "name")

            raise ValueError(
                f"the state was made for {words(theirs)}, but this is {words(mine)}; call start() on this module to "
                "get its state"
            )

    def _settings(self) -> dict[str, Any]:
        """The options as they are now; those that became modules as they were given."""
        sizes = {key: getattr(self, key) for key in ("name", "heads", "head_dim", "causal", "max_length")}
        return {**{key: self.__dict__.get(key, value) for key, value in (self.options or {}).items()}, **sizes}

    def _check_newest(self, state: DecodingState) -> None:
        if state.inner is not None and state.place is None and state.newest[0] != state.count:
            raise ValueError(
                f"this state of {state.count} tokens was overwritten by later steps, because without gradients states "
                "are updated in place; use copy.deepcopy(state) before decoding branches"
            )

    def _check_tokens(self, q: Tensor, k: Tensor, v: Tensor, state: DecodingState, bias: Any, length: int) -> None:
        """Check `length` tokens against the state."""
        if torch.jit.is_tracing():
            raise refuse_trace(f"decoding with {self.name}: the position is a number")
        self._check_state(state)
        shape = (state.batch, self.heads, length, self.head_dim)
        for label, t in (("q", q), ("k", k), ("v", v)):
            if not isinstance(t, Tensor) or not t.is_floating_point():
                kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"{label} must be a floating point tensor (B, H, {length}, D), got {kind}")
            if t.shape != shape:
                what = "step() takes one token" if length == 1 else f"prefill() takes {length} tokens"
                raise ValueError(
                    f"{what} of shape (B, H, {length}, D) = {shape} with a state of {state.batch} rows; "
                    f"got {label} of shape {tuple(t.shape)}"
                )
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        dtype = dtype_after(q)
        if state.dtype not in (None, dtype) or state.device not in (None, q.device):
            cast = "" if dtype == q.dtype else " (autocast)"
            raise TypeError(
                f"the state holds {state.dtype} on {state.device}, but q is {dtype}{cast} on {q.device}; "
                "use the same dtype and device for all steps, or call start() again"
            )
        if state.place is None or not torch.compiler.is_compiling():  # compiled steps do not know the position
            self._check_newest(state)
            for limit, advice in ((self.max_length, f"create {self.name}"), (state.max_length, "start a state")):
                if limit is not None and state.count + length > limit:
                    last = state.count + length - 1
                    raise ValueError(f"step {last} is past max_length={limit}; {advice} with a larger one")
            self.check_bias(bias, state.batch, state.count + length, q.device)
        if self.dropout and self.training:
            raise ValueError(
                f"{self.name} has dropout={self.dropout} and is in train() mode, but decoding does not support "
                "dropout; call eval() first"
            )

    def _check_row(self, mask: Tensor, state: DecodingState) -> None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (state.batch,):
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the mask of a step must be boolean of shape (B,) = ({state.batch},), got {got}")


def _token(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, inputs: dict[str, Tensor], t: int
) -> tuple[Any, ...]:
    """A copy of token t, because callers may reuse their buffers."""
    at = slice(t, t + 1)
    x = {name: value[:, at].clone() for name, value in inputs.items()}
    row = None if mask is None else mask[:, at].clone()
    return q[:, :, at].clone(), k[:, :, at].clone(), v[:, :, at].clone(), row, bias, x
