"""Masks of transformers models that only weft can read.

A model requests its mask once, with a function that says which query may see which key. Plain causal or bidirectional
attention needs only the padding mask (B, Lk), and so does a sliding window, whose size is part of the mask's type.
Packed sequences are segments (see `packed.py`). Anything else (chunks, a static cache) is a matrix, which only `full`
supports.

Some models request a mask and then compute attention themselves. A boolean mask, or None, would silently show them the
future and the padding. So every mask is a `WeftMask`: a tensor that raises an error in any computation outside weft's
attention functions.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

PACKED = {"packed_sequence_mask_function"}
PLAIN = {"causal_mask_function", "bidirectional_mask_function"}
SLIDING = {"sliding_window_overlay", "sliding_window_bidirectional_overlay"}
WINDOWS = {*SLIDING, "chunked_overlay"}
MEANING = {
    "sliding_window_overlay": "a sliding window",
    "sliding_window_bidirectional_overlay": "a sliding window",
    "chunked_overlay": "chunked attention",
    "packed_sequence_mask_function": "packed sequences with other masks",
    "blockwise_overlay": "blocks of tokens with bidirectional attention",
    "compiled window": "a sliding window or chunks in a compiled model",
    "compiled": "sequences that may be packed (a compiled model cannot tell: pass an attention_mask)",
}

# What a model may do with a mask before the attention function: move it, slice it, read its shape.
HARMLESS = {
    Tensor.__getitem__,
    Tensor.__len__,
    Tensor.__repr__,
    Tensor.bool,
    Tensor.clone,
    Tensor.contiguous,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.data_ptr,
    Tensor.detach,
    Tensor.dim,
    Tensor.element_size,
    Tensor.expand,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.numel,
    Tensor.size,
    Tensor.storage_offset,
    Tensor.stride,
    Tensor.to,
    # torch.compile reads these of the inputs of a compiled layer.
    Tensor._is_view,
    Tensor.is_conj,
    Tensor.is_neg,
    Tensor.untyped_storage,
    # torch.utils.checkpoint sets this with use_reentrant=True.
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}
ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}


class WeftMask(Tensor):
    """A mask (B, 1, Lq, Lk), True if a query may see a key, that only weft's attention functions can read.

    This class is a full matrix. The subclasses are padding masks, expanded over the queries (without using memory).
    Their meaning is in the type, because torch.compile does not trace tensor attributes.
    """

    window: int | None = None  # the sliding window, counted as in `longformer`

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous and issubclass(cls, (CausalMask, BidirectionalMask)):
            return args[0]  # stay expanded
        if func in HARMLESS or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in ADDITIONS and issubclass(cls, WeftBias):
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in ADDITIONS and issubclass(cls, UnpaddedBidirectionalMask) and cls.window is None:
            return next(arg for arg in args if not isinstance(arg, WeftMask)).as_subclass(WeftBias)
        if isinstance(func, OpOverload):  # the graph of a compiled layer, which was checked when it was traced
            return func(*(_plain(arg) for arg in args), **kwargs or {})
        raise ValueError(_read_by_hand())


def _plain(x: Any) -> Any:
    """A mask as a plain tensor, also inside modes that refuse subclasses, such as that of compiled graphs of torch
    2.11."""
    if not isinstance(x, WeftMask):
        return x
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return x.as_subclass(Tensor)


class WeftBias(WeftMask):
    """A bias on the logits that a model has added to an empty mask, as BEiT does."""


class StaticMask(WeftMask):
    """A matrix for causal attention over a static cache."""


class ChunkedMask(WeftMask):
    """A matrix with chunks that are counted from the start of the row, whatever documents are in it."""


class CausalMask(WeftMask):
    """Padding mask for causal attention."""


class BidirectionalMask(WeftMask):
    """Padding alone."""


class PackedMask(CausalMask):
    """For causal attention within packed documents: the numbers of the documents, from 1, in place of True."""


class UnpaddedCausalMask(CausalMask):
    """Every token is real."""


class UnpaddedBidirectionalMask(BidirectionalMask):
    """Every token is real."""


@functools.cache
def windowed(kind: type[WeftMask], window: int) -> type[WeftMask]:
    """The same mask with a sliding window."""
    return type(f"{kind.__name__}{window}", (kind,), {"window": window})


def window_of(mask: Tensor | None) -> int | None:
    """The sliding window of one of our masks: causal tokens see `window` tokens up to themselves, others see as many
    around themselves."""
    return getattr(_kind(mask), "window", None)


def says_causal(mask: Tensor | None) -> bool | None:
    """Whether this is one of our masks for causal attention; None if unknown."""
    if is_static(mask):
        return True
    kind = _kind(mask)
    return issubclass(kind, CausalMask) if issubclass(kind, (CausalMask, BidirectionalMask)) else None


def is_static(mask: Any) -> bool:
    """Whether this is one of our masks for a static cache."""
    return issubclass(_kind(mask), StaticMask) or hasattr(mask, "weft_static")


def read(mask: Tensor) -> Tensor | None:
    """The padding mask (B, Lk), None without padding, or a matrix (B, 1, Lq, Lk)."""
    kind = _kind(mask)
    if issubclass(kind, (PackedMask, UnpaddedCausalMask, UnpaddedBidirectionalMask)):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if torch.compiler.is_compiling():  # the context is not part of the graph; this makes a plain tensor there
            mask = torch.ops.aten.alias.default(mask)
        return mask[:, 0, 0] if issubclass(kind, (CausalMask, BidirectionalMask)) else mask[:]


def last_row(mask: Tensor | None) -> Tensor | None:
    """The padding mask (B, Lk) of a static cache: what its last token may see. None for other masks."""
    if mask is None or not is_static(mask):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return mask[:, 0, -1]


def is_unpadded(mask: Any) -> bool:
    """Whether this is one of our masks, without padding, for causal attention."""
    return issubclass(_kind(mask), UnpaddedCausalMask)


def is_chunked(mask: Any) -> bool:
    """Whether this is one of our masks with chunks that do not start again in every document."""
    return issubclass(_kind(mask), ChunkedMask)


def packed_numbers(mask: Any) -> Tensor | None:
    """The numbers (B, L) of packed documents, or None. The same tensor for all layers, so that it is read only once."""
    if not issubclass(_kind(mask), PackedMask):
        return None
    numbers = getattr(mask, "weft_numbers", None)
    if numbers is None or numbers.shape != (mask.shape[0], mask.shape[-1]):  # a part of the mask
        with torch._C.DisableTorchFunctionSubclass():
            numbers = mask[:, 0, 0].as_subclass(Tensor)
    return numbers


def _static_step(mask: Tensor) -> Tensor:
    """A plain tensor, because torch.compile takes no WeftMask as input; the prompt has shown who reads the masks."""
    mask = mask.contiguous()
    mask.weft_static = True  # type: ignore[attr-defined]
    return mask


def _marked(mask: Tensor, kind: type[WeftMask], window: int | None = None) -> Tensor:
    kind = kind if window is None else windowed(kind, window)
    if type(mask) is Tensor:
        return mask.as_subclass(kind)
    mask.weft_kind = kind  # type: ignore[attr-defined]  # torch.export's tensors do not change their class
    return mask


def _kind(mask: Any) -> type:
    return type(mask) if type(mask) is Tensor else getattr(mask, "weft_kind", type(mask))


def _read_by_hand() -> str:
    """The error message for a model that computes with our mask; names the model and the layer."""
    name, layer, model = "weft", "a layer", "this model"
    if not torch.compiler.is_compiling():
        modules = modules_on_the_stack()
        if modules:
            layer = type(modules[0]).__name__
            models = [module for module in modules if isinstance(module, PreTrainedModel)]
            model = type((models or modules)[-1]).__name__
            name = next((m.config._attn_implementation for m in models if _is_ours(m.config)), name)
    return (
        f"{model} cannot use attn_implementation={name!r}: {layer} computes with the attention mask itself instead of "
        "passing it to transformers' attention interface, so it would attend to padding and to the future. Use "
        "attn_implementation='eager' for this model"
    )


def _is_ours(config: Any) -> bool:
    return str(getattr(config, "_attn_implementation", "")).startswith("weft")


def modules_on_the_stack() -> list[nn.Module]:
    """The modules whose code is running, innermost first."""
    found: list[nn.Module] = []
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found.append(owner)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _refuse_if_by_hand(name: str) -> None:
    """Reject a mask for a model, or a part of one, in which no layer can call an attention function."""
    model = next((module for module in modules_on_the_stack() if isinstance(module, PreTrainedModel)), None)
    kinds: list[Any] = [] if model is None else [type(module) for module in model.modules()]
    if model is None or any(map(_mentions_interface, kinds)):
        return
    own = next((kind.__name__ for kind in kinds if "attention" in kind.__name__.lower()), None)
    if own is not None:
        raise ValueError(
            f"{type(model).__name__} cannot use attn_implementation={name!r}: {own} does not use transformers' "
            "attention interface and computes with the attention mask itself. Use attn_implementation='eager' for "
            "this model, or for this part of it"
        )


@functools.cache
def _mentions_interface(cls: type) -> bool:
    """Whether some method of this class, or a function that it calls, uses transformers' attention interface."""

    def mentions(function: Any, depth: int = 1) -> bool:
        function = inspect.unwrap(function) if callable(function) else function
        code = getattr(function, "__code__", None)
        if code is None:
            return False
        used = [function.__globals__.get(name) for name in code.co_names]
        if "ALL_ATTENTION_FUNCTIONS" in code.co_names or any(isinstance(x, AttentionInterface) for x in used):
            return True
        return depth > 0 and any(mentions(other, depth - 1) for other in used if inspect.isfunction(other))

    own = [each for each in cls.__mro__ if each not in PreTrainedModel.__mro__]  # that one checks names
    ours = cls.__module__.startswith("weft.")
    return ours or any(mentions(value) for each in own for value in vars(each).values())


longest: int | None = None  # during a probe: the length that sliding windows must cover


def fits(length: int, window: int) -> bool:
    return max(length, longest or 0) <= window


def mask_function_of(name: str, takes_matrix: bool, decodes: bool = False) -> Callable[..., Tensor]:
    """The mask function that transformers calls for implementation `name`.

    `decodes`: its mechanism has a decoding state, which can be kept in a static cache (see `decoding.py`).
    """

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,  # a tensor when the cache is static
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        device: Any = None,
        **more: Any,
    ) -> Tensor:
        if isinstance(attention_mask, WeftMask):
            return attention_mask  # created by an outer model
        if isinstance(q_offset, int) and q_offset == 0 and not torch.compiler.is_compiling():
            _refuse_if_by_hand(name)
        mask_function = causal_mask_function if mask_function is None else mask_function
        if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
            parts = {"causal_mask_function" if mask_function is causal_mask_function else "bidirectional_mask_function"}
        elif torch.compiler.is_compiling():
            # transformers masks compiled models as if packed, unless it gets a mask; we cannot tell the difference.
            parts = {"causal_mask_function", "compiled" if local_size is None else "compiled window"}
        else:
            parts = _parts(mask_function)
        if local_size is not None and fits(kv_length + kv_offset, local_size):
            parts -= WINDOWS  # a window that covers the whole sequence hides nothing
        causal = "causal_mask_function" in parts
        packed = None
        if PACKED <= parts <= SLIDING | PACKED | {"causal_mask_function"} and q_length == kv_length:
            packed = _packed_in(mask_function)
            parts -= PACKED
        window = None
        if local_size is not None and parts & SLIDING:
            window = local_size if causal else 2 * local_size + 1
            parts -= SLIDING
        beyond = [MEANING.get(part, "the model's own mask") for part in sorted(parts - PLAIN)]
        static = causal and (isinstance(q_offset, Tensor) or kv_length + kv_offset != q_offset + q_length)
        if static and not decodes:
            beyond.append("a static cache")
        if beyond and window is not None:
            beyond.append(MEANING["sliding_window_overlay"])
        if beyond and not takes_matrix:
            raise ValueError(
                f"{name} does not support {' and '.join(beyond)}: this needs a pairwise mask, and the mechanism has no "
                "matrix of logits; use weft:full"
            )
        if beyond:
            matrix = sdpa_mask(
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
            assert matrix is not None  # nothing may be skipped
            if beyond == ["a static cache"]:
                return _static_step(matrix) if isinstance(q_offset, Tensor) else _marked(matrix, StaticMask)
            chunked = "chunked_overlay" in parts and PACKED.isdisjoint(parts)
            return _marked(matrix, ChunkedMask if chunked else WeftMask)
        if packed is not None:
            numbers = packed.expand(batch_size, -1) + 1
            mask = _marked(numbers[:, None, None].expand(-1, 1, q_length, -1), PackedMask, window)
            mask.weft_numbers = numbers  # type: ignore[attr-defined]
            return mask
        if attention_mask is not None:
            short = kv_length + kv_offset - attention_mask.shape[-1]
            padding = attention_mask.bool()
            if short > 0:
                padding = F.pad(padding, (0, short), value=static)
            if padding.shape[1] != kv_length:
                padding = padding[:, kv_offset : kv_offset + kv_length]
            if static and isinstance(q_offset, Tensor):
                return _static_step(padding[:, None, None])
            if torch.compiler.is_compiling() or not bool(padding.all()):
                padding = padding[:, None, None].expand(batch_size, 1, q_length, kv_length)
                return _marked(padding, CausalMask if causal else BidirectionalMask, window)
            everything = padding.as_strided((batch_size, 1, q_length, kv_length), (0, 0, 0, 0))  # its first element
        else:
            everything = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
        return _marked(everything, UnpaddedCausalMask if causal else UnpaddedBidirectionalMask, window)

    return make_mask


def _parts(function: Callable[..., Any]) -> set[str]:
    """The names of the mask functions that this one combines."""
    found = {name for item in _inside(function) for name in _parts(item)}
    return found or {getattr(function, "__qualname__", "unknown").split(".")[0]}


def _packed_in(function: Callable[..., Any]) -> Tensor:
    """The numbers of the documents (B or 1, L), from 0, that transformers found."""
    if _parts(function) == PACKED and not list(_inside(function)):
        return next(cell.cell_contents for cell in function.__closure__ or () if isinstance(cell.cell_contents, Tensor))
    return _packed_in(next(item for item in _inside(function) if PACKED <= _parts(item)))


def _inside(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for item in content if isinstance(content, (tuple, list)) else (content,):
            if callable(item) and hasattr(item, "__qualname__"):
                yield item
