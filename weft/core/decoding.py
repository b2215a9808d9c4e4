"""Token-by-token decoding: `start`, `prefill`, `step`, `reorder`, `crop` and `state_size`.

    out, state = attn.prefill(q, k, v, mask)          a prompt (B, H, L, D), in parallel
    out, state = attn.step(q, k, v, state, mask)      one token (B, H, 1, D)

Both equal the parallel form. Without gradients a state is updated in place, so only the newest one can be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .dispatch import plain
from .precision import autocast, without_autocast


@dataclass
class DecodingState:
    """The mechanism's own state, and the properties that the next token must match."""

    made_for: tuple[str, int, int]  # name, heads, head_dim
    batch: int
    device: torch.device | None  # None until the first token
    dtype: torch.dtype | None
    position: int  # tokens so far
    inner: Any
    max_length: int | None = None
    history: int = 0  # how many tokens `crop` can drop if the mechanism cannot drop any number
    log: Log | None = None


@dataclass
class Log:
    """Two earlier states and all tokens since the first of them, to decode again after `crop`."""

    marks: list[tuple[int, Any]]  # (position, inner), oldest first
    tokens: list[tuple[Any, ...]]  # the arguments of `attend_next` since marks[0]

    def add(self, token: tuple[Any, ...], history: int, position: int, inner: Any) -> Log:
        marks, tokens = self.marks, [*self.tokens, token]
        if position - marks[-1][0] >= history:
            marks = [*marks, (position, tree_map(torch.clone, inner))]
        if len(marks) > 2:
            tokens, marks = tokens[marks[1][0] - marks[0][0] :], marks[1:]
        return Log(marks, tokens)


class Decoding:
    """The decoding half of the contract. Mechanisms that decode override `initial_state` and `attend_next`."""

    name: str
    heads: int
    head_dim: int
    causal: bool
    max_length: int | None
    dropout: float
    training: bool
    check: Callable[..., None]
    check_bias: Callable[..., None]
    clean: Callable[..., list[Tensor]]
    __call__: Callable[..., Any]

    crops = False  # True if any number of the last tokens can be dropped by setting the position back

    def initial_state(self) -> Any:
        """State passed to `attend_next` for the first token."""
        raise NotImplementedError

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: Any, mask: Tensor | None, bias: Any) -> Any:
        """Return one token's output and the next state. The arguments are checked copies; masked tokens are zero."""
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

        `max_length` limits the number of tokens. `history` is the number of tokens that `crop` must be able to drop;
        mechanisms that keep all tokens can drop any number without it.
        """
        self._check_decodes()
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
            raise ValueError(f"batch must be the number of rows, an integer >= 0, got {batch!r}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        if max_length is not None and self.max_length is not None and max_length > self.max_length:
            raise ValueError(
                f"max_length={max_length} is over the mechanism's max_length={self.max_length}; create {self.name} "
                "with a larger one"
            )
        if history < 0:
            raise ValueError(f"history must be at least 0, got {history}")
        place = None if device is None else torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        made_for = (self.name, self.heads, self.head_dim)
        inner = self.initial_state()
        state = DecodingState(made_for, batch, place, dtype, 0, inner, max_length, 0 if self.crops else history)
        return replace(state, log=Log([(0, tree_map(torch.clone, inner))], [])) if state.history else state

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
        form with the same mask.
        """
        self._check_decodes()
        self.check(q, k, v, mask, bias)
        if state is None:
            state = self.start(q.shape[0], max_length=max_length)
        elif max_length is not None and max_length != getattr(state, "max_length", max_length):
            raise ValueError(f"the state has max_length={state.max_length}, got max_length={max_length}; give only one")
        self._check_tokens(q, k, v, state, bias, q.shape[2])
        first = state.position == 0
        outs = []
        for t in range(q.shape[2]):
            at = slice(t, t + 1)
            x = {name: value[:, at] for name, value in inputs.items()}
            token_mask = None if mask is None else mask[:, t]
            out, state = self.step(q[:, :, at], k[:, :, at], v[:, :, at], state, token_mask, bias, **x)
            outs.append(out)
        return self(q, k, v, mask, bias, **inputs) if first else torch.cat(outs, 2), state

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
        self.check_step(q, k, v, state, mask, bias)
        state = replace(state, device=q.device, dtype=q.dtype, position=state.position + 1)
        q, k, v = autocast(q, k, v)
        # States keep keys, values and masks, some also queries. Copy them, because callers may reuse their buffers.
        if mask is None:
            q, k, v = q.clone(), k.clone(), v.clone()
        else:
            mask = mask.clone()
            q, k, v = (torch.where(mask[:, None, None, None], t, 0) for t in (q, k, v))
        with without_autocast(q):
            out, inner = self.attend_next(q, k, v, state.inner, mask, bias, **inputs)
        log = state.log
        if log is not None:
            log = log.add((q, k, v, mask, bias, inputs), state.history, state.position, inner)
        return out, replace(state, inner=inner, log=log)

    def reorder(self, state: DecodingState, rows: Tensor) -> DecodingState:
        """Return a copy of the state whose row b is row `rows[b]` of `state`. `rows` may have any length."""
        self._check_state(state)
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
            got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"rows must be an integer tensor (rows,), got {got}")
        if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < state.batch:
            raise ValueError(f"rows must be in 0 … {state.batch - 1}, got {rows.tolist()}")

        def take(x: Tensor) -> Tensor:
            return x.index_select(0, rows.to(x.device))

        log = state.log
        if log is not None:
            tokens = [(*(tree_map(take, part) for part in (*t[:4],)), t[4], tree_map(take, t[5])) for t in log.tokens]
            log = Log([(p, tree_map(take, inner)) for p, inner in log.marks], tokens)
        return replace(state, batch=len(rows), inner=tree_map(take, state.inner), log=log)

    def crop(self, state: DecodingState, n: int) -> DecodingState:
        """Return the state without its last n tokens."""
        self._check_state(state)
        if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= state.position:
            raise ValueError(f"n, the number of tokens to drop, must be in 0 … {state.position}, got {n!r}")
        target = state.position - n
        if n == 0:
            return state
        if state.log is None or target < state.log.marks[0][0]:
            raise ValueError(
                f"crop(state, {n}) drops {n} tokens, but {self.name} cannot undo its sums and this state can drop at "
                f"most {0 if state.log is None else state.position - state.log.marks[0][0]}; create it with "
                f"start(batch, history={n}) or more"
            )
        marks = [mark for mark in state.log.marks if mark[0] <= target]
        tokens = state.log.tokens[: target - marks[0][0]]
        position, inner = marks[-1]
        inner = tree_map(torch.clone, inner)
        for q, k, v, mask, bias, inputs in tokens[position - marks[0][0] :]:
            with without_autocast(q):
                _, inner = self.attend_next(q, k, v, inner, mask, bias, **inputs)
        return replace(state, position=target, inner=inner, log=Log(marks, tokens))

    def state_size(self, batch: int, length: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state after `length` tokens."""
        state, token = self.start(batch), torch.zeros(batch, self.heads, 1, self.head_dim, dtype=dtype)
        with torch.no_grad(), plain(self):
            for _ in range(length):
                _, state = self.step(token, token, token, state)
        return tree_bytes(state.inner)

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
        name, heads, head_dim = state.made_for
        if state.made_for != (self.name, self.heads, self.head_dim):
            raise ValueError(
                f"the state was made for {name} with heads={heads}, head_dim={head_dim}, but this is {self.name} with "
                f"heads={self.heads}, head_dim={self.head_dim}; call start() on this module to get its state"
            )

    def _check_tokens(self, q: Tensor, k: Tensor, v: Tensor, state: DecodingState, bias: Any, length: int) -> None:
        """Check `length` checked tokens against the state."""
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
        if state.dtype not in (None, q.dtype) or state.device not in (None, q.device):
            raise TypeError(
                f"the state holds {state.dtype} on {state.device}, but q is {q.dtype} on {q.device}; "
                "use the same dtype and device for all steps, or call start() again"
            )
        for limit, advice in ((self.max_length, f"create {self.name}"), (state.max_length, "start a state")):
            if limit is not None and state.position + length > limit:
                last = state.position + length - 1
                raise ValueError(f"step {last} is past max_length={limit}; {advice} with a larger one")
        self.check_bias(bias, state.batch, state.position + length, q.device)
        if self.dropout and self.training:
            raise ValueError(
                f"{self.name} has dropout={self.dropout} and is in train() mode, but decoding does not support "
                "dropout; call eval() first"
            )

    def check_step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, mask: Tensor | None, bias: Any) -> None:
        self._check_tokens(q, k, v, state, bias, 1)
        if mask is not None and (
            not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (state.batch,)
        ):
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the mask of a step must be boolean of shape (B,) = ({state.batch},), got {got}")


def tree_map(function: Callable[..., Tensor], tree: Any, *others: Any) -> Any:
    """Apply a function to every tensor of nested dataclasses, lists, tuples and dicts; `others` have the same form."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [f.name for f in fields(tree)]
        parts = {n: tree_map(function, getattr(tree, n), *(getattr(o, n) for o in others)) for n in names}
        return replace(tree, **parts)
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map(function, *parts) for parts in zip(tree, *others, strict=True))
    if isinstance(tree, dict):
        return {key: tree_map(function, value, *(o[key] for o in others)) for key, value in tree.items()}
    return tree


def tree_bytes(tree: Any) -> int:
    sizes: list[int] = []
    tree_map(lambda x: sizes.append(x.numel() * x.element_size()) or x, tree)  # type: ignore[func-returns-value]
    return sum(sizes)
