"""Mechanisms in `torch.nn.MultiheadAttention`, and thus in nn.TransformerEncoder and nn.TransformerDecoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .core import Core, fx_leaf, is_causal_mask


class TorchMultiheadAttention(nn.MultiheadAttention):
    """PyTorch's layer with a mechanism: the same parameters, arguments and results.

    In PyTorch's masks, True (or -inf) means ignored. A pairwise mask may be causal; other patterns need `full`.
    """

    weft: Core
    weft_cross = False  # whether it is known to read another sequence

    # nn.TransformerEncoderLayer has a fast path that computes softmax attention without calling this layer. Separate
    # projections disable it, so report them here.
    _qkv_same_embed_dim = property(lambda self: False, lambda self, value: None)

    @fx_leaf
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            raise ValueError("nested tensors are not supported: use nn.TransformerEncoder(enable_nested_tensor=False)")
        same, alone = query is key, query.dim() == 2
        if alone:
            query, key, value = (t[None] for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._project(query, key, value)
        arguments = self._masks(q, k, key_padding_mask, attn_mask, is_causal, same)
        out = self.out_proj(self.weft(q, k, v, **arguments).transpose(1, 2).flatten(2))
        weights = None
        if need_weights:  # the effective matrix: the mechanism applied to the identity, without dropout
            eye = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
            core, training = self.weft, self.weft.training
            weights = core.eval()(q, k, eye, **arguments)
            core.train(training)
            weights = weights.mean(1) if average_attn_weights else weights
        if alone:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        sources = (query, key, value)
        return [
            F.linear(x, w, b).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, w, b in zip(sources, weights, biases, strict=True)
        ]

    def _masks(
        self, q: Tensor, k: Tensor, padding: Tensor | None, pairs: Tensor | None, is_causal: bool, same: bool
    ) -> dict[str, Any]:
        """Convert PyTorch's masks to arguments of `Core`. `same`: queries and keys are the same tokens."""
        B, H, Lq = q.shape[:3]
        Lk = k.shape[2]
        found: dict[str, Any] = {"causal": False, "dropout": self.dropout}
        if padding is not None:
            found["mask"] = _attended(padding, "key_padding_mask")
        if pairs is None:
            if is_causal:
                raise ValueError("is_causal is a hint about attn_mask: pass the mask as well, as PyTorch requires")
            return found
        # A causal mechanism hides masked queries too, but the padding of another sequence is none of the queries'.
        same = same or padding is None or not (self.weft_cross or self.weft.name == "full")
        read = pairs.dim() == 2 or not torch.compiler.is_compiling()  # to read a mask breaks the graph
        if same and Lq == Lk and (is_causal or (read and is_causal_mask(pairs))):
            found["causal"] = True
            return found
        pairs = pairs.view(B, H, Lq, Lk) if pairs.dim() == 3 else pairs[None, None]
        if pairs.dtype == torch.bool:
            found["allowed"] = ~pairs
        else:
            found["allowed"] = pairs > float("-inf")
            found["added"] = pairs.masked_fill(~found["allowed"], 0)
        return found


_COMBINED: dict[type, type] = {nn.MultiheadAttention: TorchMultiheadAttention}


def swapped_class(cls: type) -> type:
    """The swapped class of a layer of class `cls`. A subclass keeps its own methods; `super().forward` is ours."""
    if issubclass(cls, TorchMultiheadAttention):
        return cls
    if cls not in _COMBINED:
        reduce = {"__reduce__": lambda self: (_blank, (cls,), self.__getstate__())}  # for pickle
        _COMBINED[cls] = type(f"Torch{cls.__name__}", (cls, TorchMultiheadAttention), reduce)
    return _COMBINED[cls]


def _blank(cls: type) -> Any:
    swapped: Any = swapped_class(cls)
    return swapped.__new__(swapped)


def bypasses(cls: type) -> str:
    """The name of the class whose forward does not call `super().forward`, so that it would ignore a mechanism."""
    for each in cls.__mro__[: cls.__mro__.index(nn.MultiheadAttention)]:
        code = getattr(vars(each).get("forward"), "__code__", None)
        if code is not None and each is not TorchMultiheadAttention:
            if "__class__" not in code.co_freevars or "forward" not in code.co_names:
                return each.__name__
    return ""


def _attended(mask: Tensor, name: str) -> Tensor:
    """True for real tokens, from a mask where True or -inf means ignored."""
    if mask.dtype == torch.bool:
        return ~mask
    known = (mask == 0) | (mask == float("-inf"))
    if torch.compiler.is_compiling():
        torch._assert_async(known.all(), f"{name} may contain only 0 and -inf")
    elif not bool(known.all()):
        raise ValueError(f"{name} may contain only 0 and -inf: use a boolean mask")
    return mask == 0
