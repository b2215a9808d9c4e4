"""Continue prompts with a causal language model: greedy or sampled, one token at a time for all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    model: Any,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int] | None = None,
    stream: Callable[[Tensor], Any] | None = None,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue the prompts ids (B, L); returns ids (B, L + new).

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the most likely tokens whose probabilities sum to p.
        stop: one or several ids; a row ends with the first of them, which also fills the rest of the row. Generation
            ends early once all rows have one.
        stream: called with the new tokens (B,) after every step.
        mask: (B, L), False for padding, which must be on the left.
        generator, seed: of the samples; pass at most one.

    Once the sequence has `model.max_length` tokens, the oldest quarter is dropped and the rest is read again. Longer
    prompts are shortened in the same way.
    """
    check_sampling(temperature, top_k, top_p)
    _check(model, ids, max_new_tokens, mask)
    ends = _ends(stop, ids.device, model.vocab)
    if generator is not None and seed is not None:
        raise ValueError(f"pass generator or seed={seed}, not both")
    if seed is not None:
        generator = torch.Generator(ids.device).manual_seed(seed)
    kept = max(1, model.max_length - max(1, model.max_length // 4))
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    def read(ids: Tensor, n: int) -> tuple[Tensor, Any]:
        """Logits of the next token and the state after the last n tokens."""
        real = None
        if mask is not None:
            real = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=True)[:, -n:]
        x, state = model._prefilled(ids[:, -n:], real, None)
        return model.scores(model.norm(x[:, -1:]))[:, 0], state

    held = ids.shape[1] if ids.shape[1] <= model.max_length else kept
    logits, state = read(ids, held)
    for number in range(max_new_tokens):
        token = sample(logits, temperature, top_k, top_p, generator)
        if ends is not None:
            token = torch.where(done, ends[0], token)
            done = done | torch.isin(token, ends)
        ids = torch.cat([ids, token[:, None]], 1)
        if stream is not None:
            stream(token)
        if number == max_new_tokens - 1 or (ends is not None and bool(done.all())):
            break
        if held < model.max_length:
            logits, state = model.step(token[:, None], state)
            logits, held = logits[:, 0], held + 1
        else:
            held = min(kept, ids.shape[1])
            logits, state = read(ids, held)
    return ids


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one id per row of logits (B, vocab)."""
    check_sampling(temperature, top_k, top_p)
    if temperature < torch.finfo(torch.float32).tiny:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # without overflow at low temperatures
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        beyond = p.cumsum(-1) - p >= top_p  # the first token that reaches p stays
        logits = logits.masked_fill(beyond.gather(-1, order.argsort(-1)), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not temperature >= 0:  # also NaN
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def _check(model: Any, ids: Tensor, max_new_tokens: int, mask: Tensor | None) -> None:
    model._check_causal()
    if model.training:
        raise ValueError("generate() needs a model in eval mode; call model.eval()")
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be an integer tensor (B, L), got {type(ids).__name__}")
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool or not ids.shape[1]:
        raise ValueError(f"ids must be integers (B, L) with at least one token, got {ids.dtype} {tuple(ids.shape)}")
    wrong = ids[(ids < 0) | (ids >= model.vocab)]
    if len(wrong):
        raise ValueError(f"ids must be in 0 … {model.vocab - 1}, got {int(wrong[0])}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != ids.shape:
            raise ValueError(f"mask must be boolean {tuple(ids.shape)} like ids, got {mask.dtype} {tuple(mask.shape)}")
        if not bool(mask[:, -1].all()):
            raise ValueError("the last token of every prompt must be real: put the padding on the left")


def _ends(stop: int | Sequence[int] | None, device: torch.device, vocab: int) -> Tensor | None:
    ids = [stop] if isinstance(stop, int) else list(stop or ())
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        raise ValueError(f"stop ids must be in 0 … {vocab - 1}, got {wrong[0]}")
    return torch.tensor(ids, device=device) if ids else None
