"""Generation with every mechanism that decodes, compared with PyTorch's `scaled_dot_product_attention` and a key-value
cache.

    prefill   `attn.prefill` of a prompt, tokens per second
    step      `attn.step` after that many tokens, milliseconds per token
    state     bytes of `attn.state_size`

Attention only, without projections. At every length, each mechanism alternates with the cache on the same q, k, v. On a
CPU the state grows; on a GPU it has `max_length`, and the step of both is a CUDA graph.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention import Attention, attention_info, attentions, make_attention
from ...core.decoding_state import DecodingState
from .report import Line, Report, Table, cell, log_plot
from .scaling import costs
from .timing import Call, How, Timing, forget, ratio, reason, take_turns

BASELINE = "sdpa with a cache"
STEPS = 16  # tokens per call
STARTS = 16  # the calls start at different positions, so that blocks are closed as often as in a long run

QKV = Sequence[Tensor]


def decoding() -> list[str]:
    """The mechanisms that decode."""
    return [name for name in attentions() if attention_info(name).steps]


def state_of(attn: Attention, qkv: QKV, max_length: int | None) -> DecodingState:
    """The state after the tokens, without their outputs."""
    q, k, v = qkv
    B, L = q.shape[0], q.shape[2]
    state = attn.start(B, max_length=max_length, device=q.device, dtype=q.dtype)
    state.capacity = max_length or L
    inner = attn.state_after(q, k, v, None, state.capacity)
    if state.place is not None:
        state.place.fill_(L)
    return replace(state, inner=inner, count=L, newest=[L])


def mechanism_steps(attn: Attention, qkv: QKV, how: How) -> Call:
    """STEPS steps near the end of the tokens. Going back to an earlier position keeps the sums as they are, which does
    not change the time."""
    L = qkv[0].shape[2]
    first = L - STEPS * STARTS
    state = state_of(attn, [x[:, :, :first] for x in qkv], L if how.device == "cuda" else None)
    q, k, v = (x[:, :, :1].clone() for x in qkv)
    at = _starts(first)
    if how.device == "cuda":
        assert state.place is not None
        return _graph_steps(lambda: attn.step(q, k, v, state), state.place, at)

    def call() -> None:
        position = at()
        current = replace(state, count=position, newest=[position])
        with torch.no_grad():
            for _ in range(STEPS):
                _, current = attn.step(q, k, v, current)
        state.inner, state.capacity = current.inner, current.capacity

    return call


def cache_steps(qkv: QKV, how: How) -> Call:
    """The same with a cache that has room for all tokens."""
    L = qkv[0].shape[2]
    first = L - STEPS * STARTS
    keys, values = (x.clone() for x in qkv[1:])
    q, k, v = (x[:, :, :1].clone() for x in qkv)
    at = _starts(first)
    if how.device == "cuda":
        place = torch.full((1,), first, device=q.device)

        def step() -> None:  # without a mask, over the whole cache: the fastest form with static shapes
            keys.index_copy_(2, place, k)
            values.index_copy_(2, place, v)
            F.scaled_dot_product_attention(q, keys, values)
            place.add_(1)

        return _graph_steps(step, place, at)

    def call() -> None:
        n = at()
        with torch.no_grad():
            for i in range(n, n + STEPS):
                keys[:, :, i : i + 1], values[:, :, i : i + 1] = k, v
                F.scaled_dot_product_attention(q, keys[:, :, : i + 1], values[:, :, : i + 1])

    return call


def _starts(first: int) -> Callable[[], int]:
    calls = iter(range(2**31))
    return lambda: first + STEPS * (next(calls) % STARTS)


def _graph_steps(step: Callable[[], Any], place: Tensor, at: Callable[[], int]) -> Call:
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

    def call() -> None:
        place.fill_(at())
        for _ in range(STEPS):
            graph.replay()

    call.step = step  # type: ignore[attr-defined]  # keeps the tensors that the graph uses
    return call


def prompts(attn: Attention, qkv: QKV) -> dict[str, Call]:
    q, k, v = qkv

    def prefill() -> None:
        with torch.no_grad():
            attn.prefill(q, k, v)

    def baseline() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            k.clone(), v.clone()

    return {attn.name: prefill, BASELINE: baseline}


def measure(
    names: Sequence[str],
    lengths: Sequence[int],
    how: How,
    report: Report,
    *,
    batch: int,
    heads: int,
    head_dim: int,
    limit: float = 20.0,
) -> None:
    """Add one record per length and mechanism. A prompt is skipped if the shorter ones predict that it takes over
    `limit` seconds."""
    taken: dict[str, dict[int, float]] = {}  # seconds per prompt
    with Line(len(lengths) * len(names)) as line:
        for L in lengths:
            torch.manual_seed(0)
            like = torch.empty(0, device=how.device, dtype=how.dtype)
            qkv = [like.new_empty(batch, heads, L, head_dim).normal_() for _ in range(3)]
            for name in names:
                line.next(f"{name}, {L:,} tokens")
                record: dict[str, Any] = {"attention": name, "length": L}
                try:
                    sizes = {"heads": heads, "head_dim": head_dim, "causal": True, "max_length": L}
                    attn = make_attention(name, **sizes).eval().to(how.device, how.dtype)  # type: ignore[arg-type]
                    record |= _prompt(attn, qkv, how, taken, limit)
                    pair = {name: mechanism_steps(attn, qkv, how), BASELINE: cache_steps(qkv, how)}
                    mine, cache = (_milliseconds(t) for t in take_turns(pair, replace(how, memory=False)).values())
                    record |= {"ms": mine, "cache_ms": cache, "of_cache": ratio(mine, cache)}
                    record["state_bytes"] = attn.state_size(batch, L, how.dtype)
                    record["cache_bytes"] = 2 * qkv[0].numel() * qkv[0].element_size()
                    del pair
                except Exception as error:  # show failures in the table
                    record["error"] = reason(error)
                report.add(record)
                forget(how)


def _prompt(attn: Attention, qkv: QKV, how: How, taken: dict[str, dict[int, float]], limit: float) -> dict[str, Any]:
    L, tokens = qkv[0].shape[2], qkv[0].shape[0] * qkv[0].shape[2]
    calls = {}
    for name, call in prompts(attn, qkv).items():
        # The cache is the same for all mechanisms: measure its prompt once per length.
        if L not in taken.setdefault(name, {}) and predicted(taken[name], L) <= limit:
            calls[name] = call
    for name, timing in take_turns(calls, replace(how, memory=False)).items():
        if timing.error:
            raise RuntimeError(timing.error)
        taken[name][L] = timing.median
    mine, cache = (taken[name].get(L) for name in (attn.name, BASELINE))
    return {
        "prefill_tokens_per_s": None if mine is None else tokens / mine,
        "cache_prefill_tokens_per_s": None if cache is None else tokens / cache,
    }


def predicted(taken: dict[int, float], length: int) -> float:
    """Seconds at a length, from the power law through the two longest shorter ones; from one alone, quadratic."""
    known = sorted(L for L in taken if L < length)
    if not known:
        return 0.0
    last, slope = known[-1], 2.0
    if len(known) > 1:
        slope = math.log(taken[last] / taken[known[-2]]) / math.log(last / known[-2])
    return taken[last] * (length / last) ** slope


def _milliseconds(timing: Timing) -> float:
    if timing.error:
        raise RuntimeError(timing.error)
    return timing.median * 1e3 / STEPS


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    lengths = sorted({record["length"] for record in records})
    trouble = {(r["attention"], r["length"]): r["error"] for r in records if "error" in r}

    def table(title: str, what: str, cache: str, digits: int, scale: float = 1) -> Table:
        found = Table(title, ["", *(f"{L:,}" for L in lengths)])

        def row(values: dict[int, float | None], name: str) -> list[str]:
            scaled = {L: None if v is None else v * scale for L, v in values.items()}
            return [name, *(trouble.get((name, L)) or cell(scaled.get(L), digits) for L in lengths)]

        reference = _reference(records, cache, lengths)
        found.rows = [row(reference, BASELINE), *(row(values, name) for name, values in costs(records, what).items())]
        return found

    return [
        table("step, ms per token", "ms", "cache_ms", 3),
        table("prefill, thousand tokens per second", "prefill_tokens_per_s", "cache_prefill_tokens_per_s", 1, 1e-3),
        table("state, MiB", "state_bytes", "cache_bytes", 2, 2**-20),
    ]


def _reference(records: Sequence[dict[str, Any]], what: str, lengths: Sequence[int]) -> dict[int, float | None]:
    """The median of the cache's values at each length."""
    known = {L: [r[what] for r in records if r["length"] == L and r.get(what)] for L in lengths}
    return {L: statistics.median_high(values) if values else None for L, values in known.items()}


def plot(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Plot step time and state memory over the context."""
    lengths = sorted({record["length"] for record in records})
    panels = {}
    for title, what, cache, scale in (
        ("ms per token", "ms", "cache_ms", 1.0),
        ("state, MiB", "state_bytes", "cache_bytes", 2.0**-20),
    ):
        rows = {BASELINE: _reference(records, cache, lengths), **costs(records, what)}
        panels[title] = {name: {L: scale * y for L, y in row.items() if y} for name, row in rows.items()}
    log_plot(path, panels, "tokens of context", BASELINE, lambda name, points: name)
