"""`weft advise`: measure the mechanisms here, at your length, and recommend some with reasons.

Attention only, without projections: forward and backward, its memory, and, if causal, one decoding step after `length`
tokens with the size of its state. Mechanisms alternate in the same rounds, so their ratios are reliable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...attention import attention_info, make_attention
from .scaling import attend
from .timing import How, forget, reason, take_turns

# Every query can attend to every key: directly, through summaries, or through features.
SEES_ALL = ("full", "linear", "performer", "linformer", "synthesizer")
STEPS = 15  # decoding steps that are timed
CLOSE = 1.2  # times that count as equal
# Measured by default: those that are the best choice in some situation.
CANDIDATES = (
    "full",
    "combiner-fixed",
    "combiner-axial",
    "linear",
    "performer",
    "local",
    "longformer",
    "sparse",
    "bigbird",
)


@dataclass
class Row:
    """The measurements of one mechanism."""

    name: str
    ms: float = math.nan  # forward and backward
    mib: float = math.nan  # peak memory that a call adds
    step_ms: float = math.nan  # one decoding step
    state_mib: float = math.nan  # the decoding state
    error: str = ""

    @property
    def sees_all(self) -> bool:
        return self.name in SEES_ALL or self.name.startswith("combiner")

    @property
    def abilities(self) -> str:
        info = attention_info(self.name)
        able = {"sees all tokens": self.sees_all, "position bias": info.bias, "cross-attention": info.cross,
                "decodes": info.steps, "fused kernel": info.kernel is not None}  # fmt: skip
        return ", ".join(name for name, yes in able.items() if yes)


@dataclass
class Advice:
    rows: list[Row]
    reasons: list[str] = field(default_factory=list)
    recommended: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(f"- {text}" for text in self.reasons)


def advise(
    length: int,
    *,
    causal: bool = False,
    device: str = "",
    heads: int = 8,
    head_dim: int = 64,
    batch: int = 1,
    precision: str = "",
    only: str | Sequence[str] = (),
    budget: float = 10.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Advice:
    """Measure the candidates, or `only` those you name, on this machine and recommend.

    budget: seconds for the timed rounds. Mechanisms that cannot run are listed with the reason.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    only = [only] if isinstance(only, str) and only else only
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    how = How(device, precision or ("bf16-true" if device == "cuda" else "32-true"), repeats=7, budget=budget)
    usual = [info.name for info in map(attention_info, CANDIDATES) if not causal or info.causal]
    names = [attention_info(name).name for name in dict.fromkeys(["full", *(only or usual)])]
    rows = {name: Row(name) for name in names}
    progress(f"measuring {len(names)} mechanisms at {length:,} tokens on {device}")
    torch.manual_seed(0)
    shape = batch, heads, length, head_dim
    qkv = [torch.randn(shape, device=device, dtype=how.dtype).requires_grad_() for _ in range(3)]
    calls: dict[str, Callable[[], Any]] = {}
    for name in names:
        try:
            calls[name] = attend(name, qkv, causal, True, how)
        except Exception as error:  # listed with its reason
            rows[name].error = reason(error)
    for name, timing in take_turns(calls, how).items():
        row = rows[name]
        row.error, row.ms = timing.error, timing.median * 1e3
        row.mib = math.nan if timing.memory is None else timing.memory / 2**20
    calls.clear()
    forget(how)
    if causal:
        progress("measuring decoding")
        _measure_steps([row for row in rows.values() if not row.error and attention_info(row.name).steps], qkv, how)
    advice = Advice(sorted(rows.values(), key=lambda row: (bool(row.error), row.ms)))
    _recommend(advice, length, causal)
    return advice


@torch.no_grad()
def _measure_steps(rows: Sequence[Row], qkv: Sequence[torch.Tensor], how: How) -> None:
    q, k, v = (x.detach() for x in qkv)
    B, H, L, D = q.shape
    last_q, last_k, last_v = (x[:, :, -1:].contiguous() for x in (q, k, v))
    calls: dict[str, Callable[[], Any]] = {}
    for row in rows:
        try:
            attn = make_attention(row.name, heads=H, head_dim=D, causal=True, max_length=L + STEPS + 2)
            attn = attn.to(device=how.device, dtype=how.dtype).eval()
            _, state = attn.prefill(q, k, v)
            row.state_mib = attn.state_size(B, L, how.dtype) / 2**20
        except Exception:  # it decodes, but not at this length; the time stays empty
            continue
        calls[row.name] = _Steps(attn, state, last_q, last_k, last_v)
    for name, timing in take_turns(calls, How(how.device, how.precision, STEPS, 2.0, memory=False)).items():
        next(row for row in rows if row.name == name).step_ms = timing.median * 1e3
    calls.clear()
    forget(how)


class _Steps:
    """A call that decodes one more token."""

    def __init__(self, attn: Any, state: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        self.attn, self.state, self.token = attn, state, (q, k, v)

    def __call__(self) -> None:
        _, self.state = self.attn.step(*self.token, self.state)


def _recommend(advice: Advice, length: int, causal: bool) -> None:
    good = [row for row in advice.rows if not row.error]
    full = next((row for row in good if row.name == "full"), None)
    seeing = [row for row in good if row.sees_all and row.name not in ("full", "synthesizer")]

    def add(row: Row, text: str) -> None:
        advice.recommended.append(row.name)
        advice.reasons.append(text)

    def times(row: Row) -> str:
        if full is None:
            return f"{row.ms:.3g} ms; full attention does not run here"
        return f"{row.ms:.3g} ms, {full.ms / row.ms:.1f} times as fast as full attention ({full.ms:.3g} ms)"

    fastest = min(seeing, key=lambda row: row.ms, default=None)
    if full is not None and (fastest is None or full.ms <= CLOSE * fastest.ms):
        why = "nothing that sees all tokens is clearly faster" if seeing else "no other that sees all tokens ran"
        add(full, f"full: exact, and at {length:,} tokens {why} ({full.ms:.3g} ms)")
        if seeing:
            return
    faster = [row.name for row in good if full is None or row.ms < full.ms]
    combiners = [row for row in seeing if row.name.startswith("combiner") and row.name in faster]
    combiner = min(combiners, key=lambda row: row.ms, default=None)
    if combiner is not None:
        add(combiner, f"{combiner.name}: keeps the softmax over all tokens, in {times(combiner)}")
    if fastest is not None and fastest is not combiner and (combiner is None or fastest.ms * CLOSE < combiner.ms):
        how = "through projected keys" if fastest.name == "linformer" else "without a softmax"
        add(fastest, f"{fastest.name}: the fastest that sees all tokens, {how}, in {times(fastest)}")
    window = next((row for row in good if row.name == "longformer" and row.name in faster), None)
    if window is not None:
        add(window, f"longformer: changes a pretrained model least, a window of nearby tokens, in {times(window)}")
    steps = [row for row in seeing if row.state_mib == row.state_mib]
    if causal and steps and full is not None and full.state_mib == full.state_mib:
        small = min(steps, key=lambda row: row.state_mib)
        share = small.state_mib / full.state_mib
        advice.reasons.append(
            f"decoding: the state of {small.name} has {share:.2%} of the key-value cache "
            f"({small.state_mib:.3g} of {full.state_mib:.3g} MiB), and a step takes {small.step_ms:.3g} ms against "
            f"{full.step_ms:.3g}"
        )
