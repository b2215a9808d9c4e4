"""Registry of attention mechanisms: list them, query what they support, create them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from .contract import Attention
from .crossovers import FASTER_FROM, SLOWER_UP_TO
from .decoding import Decoding
from .dispatch import Kernel, refuse_triton

_KINDS: dict[str, tuple[type, str]] = {  # annotation -> what is allowed
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
    "None": (type(None), "None"),
}
_CONTRACT_OPTIONS = ("heads", "head_dim", "causal", "max_length", "dropout", "backend")


@dataclass(frozen=True)
class AttentionInfo:
    """What a mechanism supports."""

    name: str
    paper: str
    cost: str  # time and memory in the length L, such as "L*sqrt(L)"
    causal: bool  # supports causal=True
    bidirectional: bool  # supports causal=False
    cross: bool  # supports Lq != Lk
    bias: bool  # supports a position bias
    learned: bool  # has learned parameters
    needs_max_length: bool  # has parameters per position
    steps: bool  # supports step-by-step decoding (start, step)
    options: dict[str, Any]  # mechanism-specific options and their defaults
    naive: Callable[..., Tensor]  # the dense specification, `naive(attn, q, k, v, mask=None, bias=None)`
    length_dependent: str = ""  # how the pattern depends on the total length, padding included; "" if it does not
    not_causal: str = ""  # why causal=True is not supported, and what to use instead
    dropout: str = "probabilities"  # what dropout acts on: attention "probabilities", or whole "keys" if there are none
    kernel: Kernel | None = None  # the fused version for GPUs

    @property
    def faster_from(self) -> int | None:
        """The length from which on eager training was faster than cuDNN's full attention on an H200 (16 heads of 64);
        None if there is none (see `slower_up_to`), or if it was not measured."""
        return FASTER_FROM.get(self.name)

    @property
    def slower_up_to(self) -> int | None:
        """The longest measured length, if eager training was still slower there than cuDNN's full attention."""
        return SLOWER_UP_TO.get(self.name)

    @property
    def backends(self) -> tuple[str, ...]:
        return ("torch",) if self.kernel is None else ("torch", "triton")

    @property
    def subquadratic(self) -> bool:
        return self.cost != "L^2"

    def __reduce__(self) -> tuple[Any, ...]:
        # By name: layers hold their info, and kernels are described with functions that cannot be pickled.
        return attention_info, (self.name,)


_classes: dict[str, type[Attention]] = {}
_infos: dict[str, AttentionInfo] = {}


def register(
    name: str,
    cls: type[Attention],
    *,
    naive: Callable[..., Tensor],
    paper: str,
    cost: str,
    causal: bool = True,
    bidirectional: bool = True,
    cross: bool = False,
    bias: bool = False,
    learned: bool = False,
    needs_max_length: bool = False,
    length_dependent: str = "",
    not_causal: str = "",
    dropout: str = "probabilities",
    kernel: Kernel | None = None,
) -> None:
    """Add a mechanism. The tests sweep the registry and check that `attend` equals `naive`, that `kernel` equals
    `attend`, and that the mechanism follows the contract."""
    old = _classes.get(name)
    if old is not None and (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"an attention named {name!r} is already registered")  # the same class: its file ran again
    if not causal and not not_causal:
        raise ValueError(f"{name} is not causal: set not_causal to the reason and the name of a causal mechanism")
    signature = inspect.signature(cls.__init__)
    options = {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    _classes[name] = cls
    cls.fused = kernel
    _infos[name] = AttentionInfo(
        name=name,
        paper=paper,
        cost=cost,
        causal=causal,
        bidirectional=bidirectional,
        cross=cross,
        bias=bias,
        learned=learned,
        needs_max_length=needs_max_length,
        steps=cls.attend_next is not Decoding.attend_next,
        options={key: value for key, value in options.items() if key not in _CONTRACT_OPTIONS},
        naive=naive,
        length_dependent=length_dependent,
        not_causal=not_causal,
        dropout=dropout,
        kernel=kernel,
    )


def attentions() -> list[str]:
    """Return the names of all registered mechanisms."""
    return sorted(_classes)


def attention_info(name: str) -> AttentionInfo:
    """Return what the mechanism `name` supports."""
    if name not in _infos:
        raise ValueError(f"unknown attention {name!r}; {_nearest(name, _infos)}")
    return _infos[name]


def make_attention(
    name: str,
    *,
    heads: int,
    head_dim: int,
    causal: bool = False,
    max_length: int | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    **options: Any,
) -> Attention:
    """Create the mechanism `name`. Call it as `attn(q, k, v, mask=None, bias=None)`.

    `backend` is "torch" for the plain version, "triton" for the fused kernel, or "auto" for the faster one.
    """
    info = attention_info(name)
    check_options(name, options)
    if causal and not info.causal:
        raise ValueError(f"{name} cannot be causal: {info.not_causal}")
    if not causal and not info.bidirectional:
        raise ValueError(f"{name} supports only causal attention; use causal=True")
    if info.needs_max_length and max_length is None:
        raise ValueError(f"{name} has parameters per position; set max_length to the longest sequence length")
    contract: dict[str, Any] = {"causal": causal, "max_length": max_length, "dropout": dropout, "backend": backend}
    attn = _classes[name](heads=heads, head_dim=head_dim, **contract, **options)
    attn.name, attn.info, attn.options = name, info, {**info.options, **options}
    if backend == "triton":
        reason = "it has no kernel" if info.kernel is None else info.kernel.lacks(attn)
        if reason:
            raise refuse_triton(name, reason)
    return attn


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Reject options that the mechanism does not have, and values of another type than its `__init__` declares."""
    known, parameters = attention_info(name).options, inspect.signature(_classes[name].__init__).parameters
    for option, value in options.items():
        if option not in known:
            raise TypeError(f"{name} has no option {option!r}; its options: {', '.join(known) or 'none'}")
        declared = inspect.formatannotation(parameters[option].annotation).strip("'").split(" | ")
        if not all(kind in _KINDS for kind in declared):  # the mechanism checks it
            continue
        allowed = tuple(_KINDS[kind][0] for kind in declared)
        if not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in declared):
            wanted = " or ".join(_KINDS[kind][1] for kind in declared)
            raise TypeError(f"{name}: {option} must be {wanted}, got {value!r}")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "weft.attentions() lists all names"
