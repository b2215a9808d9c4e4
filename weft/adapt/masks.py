"""Masks of transformers models, kept two-dimensional.

A model asks for its mask once, with a function that says which query may see which key. Plain causal or plain
bidirectional attention needs none of the matrix: the padding mask (B, Lk) is all that is left of it. Anything more (a
sliding window, packed sequences, a static cache) is a matrix, which `full` takes and every other mechanism refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

PLAIN = {"causal_mask_function", "bidirectional_mask_function"}
WINDOWS = {"sliding_window_overlay", "sliding_window_bidirectional_overlay", "chunked_overlay"}
MEANING = {
    "sliding_window_overlay": "a sliding window",
    "sliding_window_bidirectional_overlay": "a sliding window",
    "chunked_overlay": "chunked attention",
    "packed_sequence_mask_function": "packed sequences (position_ids that start again)",
    "blockwise_overlay": "blocks of tokens that see each other both ways",
    "compiled": "sequences that may be packed (a compiled model cannot tell: give it an attention_mask)",
}


def mask_function_of(name: str, takes_matrix: bool) -> Callable[..., Tensor | None]:
    """The mask function that transformers calls for implementation `name`."""

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,  # a tensor when the cache is static
        kv_offset: int = 0,
        mask_function: Callable | None = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        device: Any = None,
        **more: Any,
    ) -> Tensor | None:
        mask_function = causal_mask_function if mask_function is None else mask_function
        if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
            parts = {"causal_mask_function" if mask_function is causal_mask_function else "bidirectional_mask_function"}
        elif torch.compiler.is_compiling():
            # Compiled models are always masked as if packed, unless they are given a mask; nothing more can be seen.
            parts = {"causal_mask_function", "compiled"}
        else:
            parts = _parts(mask_function)
        if local_size is not None and kv_length + kv_offset <= local_size:
            parts -= WINDOWS  # a window that holds the whole sequence hides nothing
        causal = "causal_mask_function" in parts
        beyond = [MEANING.get(part, "a mask of the model's own") for part in sorted(parts - PLAIN)]
        if causal and (isinstance(q_offset, Tensor) or kv_length != q_offset + q_length):
            beyond.append("a static cache")
        if beyond and not takes_matrix:
            raise ValueError(
                f"{name} cannot follow {' and '.join(beyond)}: that is a mask over pairs of tokens, and it forms no "
                "matrix to lay one on; weft:full can"
            )
        if beyond:
            return sdpa_mask(
                batch_size=batch_size,
                q_length=q_length,
                kv_length=kv_length,
                q_offset=q_offset,
                kv_offset=kv_offset,
                mask_function=mask_function,
                attention_mask=attention_mask,
                allow_is_causal_skip=False,
                allow_is_bidirectional_skip=False,
                device=device if device is not None else "cpu",
                **{key: more[key] for key in ("use_vmap",) if key in more},
            )
        may_skip = allow_is_causal_skip if causal else allow_is_bidirectional_skip
        if attention_mask is None:
            if may_skip:
                return None
            mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        else:
            short = kv_length + kv_offset - attention_mask.shape[-1]
            mask = F.pad(attention_mask.bool(), (0, max(0, short)))[:, kv_offset : kv_offset + kv_length]
            if may_skip and not torch.compiler.is_compiling() and bool(mask.all()):
                return None
        if not torch.compiler.is_compiling():
            mask.weft_causal = causal  # type: ignore[attr-defined]  # the mask says so, as a matrix would
        return mask

    return make_mask


def _parts(function: Callable) -> set[str]:
    """The names of the mask functions that this one is put together from."""
    found: set[str] = set()
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for content in inner:
        for item in content if isinstance(content, (tuple, list)) else (content,):
            if callable(item) and hasattr(item, "__qualname__"):
                found |= _parts(item)
    return found or {getattr(function, "__qualname__", "unknown").split(".")[0]}
