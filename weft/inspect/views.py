"""The attention of every head of every mechanism in a model, for given inputs.

A mechanism is linear in v, so its effective matrix is the mechanism applied to the identity (`attn.weights`). This also
works for fused kernels, hashing and sampling. For long inputs, a single row is the gradient of one output by v.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..adapt.core import Core, kept_mechanisms
from ..attention import Attention
from ..core.heads import spread
from ..core.segments import documents_of
from ..layers.cached.memory_attention import MemoryAttention
from ..layers.mixed import MixedAttention
from .watch import arguments, looking, plain
from .windows import Call, Windows, windows_of

CROSS = re.compile("cross|encoder_attn|EncDec|decoder.*multihead_attn")  # in weft, transformers and PyTorch


@dataclass
class AttentionView:
    """All heads of one attention layer on one batch; a mixed layer is one view, with heads of several mechanisms."""

    path: str
    mechanisms: list[str]  # of each head
    row: Tensor  # (B, H, Lk): the attention of one query, usually the first token
    map: Tensor | None  # (B, H, Lq, Lk), if the input is short enough
    mask: Tensor | None  # (B, Lk), True for real tokens
    call: int = 1  # index of the call: a model for two documents calls its layers twice
    memory: bool = False  # the keys are the slots of a cache
    windows: Windows | None = None  # of layers that cut an image into windows; then B counts windows


def attention_views(
    model: nn.Module, inputs: Tensor | Sequence[Tensor], *, row: int = 0, map_up_to: int = 256
) -> tuple[list[AttentionView], Any]:
    """All attention layers in call order, and the model's output.

    `row` is the query of the rows; -1 is the last real token. Full maps have quadratic cost and are computed for at
    most `map_up_to` real tokens, and at most four times as many with padding; rows are always computed.
    """
    model, inputs, calls, busy = plain(model), arguments(inputs), [], False
    memories, latest = _memories(model), None  # the mask of the latest self-attention
    around: dict[str, Call] = {}  # the latest call of every module with a mechanism inside

    def see(path: str, attn: Attention) -> list[Any]:
        depth = 0  # packed documents are gathered into calls of the same mechanism

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal busy, depth, latest
            depth += 1
            given = dict(zip("qkv", args, strict=False)) | kwargs
            if busy or depth > 1 or _is_identity(given["v"]):  # `need_weights` of nn.MultiheadAttention
                return
            busy = True
            moved, own = _class_tokens_behind(model, path), path not in memories and not CROSS.search(path)
            with kept_random_state():  # the model's own call draws the same numbers as without inspection
                one, full, mask = _view(attn, map_up_to, row - moved, own, latest, *args, **kwargs)
                callers = [around[parent] for parent in _parents(path) if parent in around]
                windows = windows_of(attn, given["q"], len(inputs[0]), callers)
            latest = mask if own else latest
            full = None if full is None else full.roll((moved, moved), (2, 3))
            calls.append((path, one.roll(moved, -1), full, mask, windows))
            busy = False

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1

        return [attn.register_forward_pre_hook(hook, with_kwargs=True), attn.register_forward_hook(leave)]

    found = created(model, inputs)
    if not found and not any(map(_runs_weft, model.modules())):
        raise ValueError(
            'this model has no weft mechanism to inspect: add one with weft.swap(model, to="full"), which computes '
            "the same as the model's own attention"
        )
    names = {name: m.name for name, m in found}
    hooks = [hook for name, m in found for hook in see(name, m)]
    if inputs[0].dim() == 4:
        for parent in {parent for name, _ in found for parent in _parents(name)}:
            enter = partial(_enter, around, parent)
            hooks.append(model.get_submodule(parent).register_forward_pre_hook(enter, with_kwargs=True))
    with looking(model, hooks):
        output = model(*inputs)
    if not calls:
        raise ValueError(
            "no mechanism of this model was called: full attention with sinks, capped logits or a key-value cache is "
            "computed without one, and cannot be inspected"
        )
    return _mixed_together(model, calls, names), output


def _is_identity(v: Tensor) -> bool:
    """Whether the call asks for the effective matrix."""
    return v.shape[2] == v.shape[3] and torch.equal(v[0, 0], torch.eye(v.shape[2], dtype=v.dtype, device=v.device))


def _parents(path: str) -> list[str]:
    """The paths of the modules around this one, without the model itself."""
    names = path.split(".")
    return [".".join(names[:n]) for n in range(1, len(names))]


def _enter(around: dict[str, Call], path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    around[path] = module, args, kwargs


def _runs_weft(module: nn.Module) -> bool:
    """Whether a module of transformers calls weft's attention functions."""
    return str(getattr(getattr(module, "config", None), "_attn_implementation", "")).startswith("weft")


def _class_tokens_behind(model: nn.Module, path: str) -> int:
    """The number of class tokens that a layer of timm moves behind the patches (`prefix` of weft.timm.layer)."""
    layer, core, _ = f".{path}".rpartition(".weft.")
    return getattr(model.get_submodule(layer.removeprefix(".")), "prefix", 0) if core else 0


def created(model: nn.Module, inputs: Sequence[Tensor]) -> list[tuple[str, Attention]]:
    """`outermost`. Layers of other libraries create mechanisms when they are called."""
    if any(isinstance(module, Core) or hasattr(module, "set_attn_implementation") for module in model.modules()):
        with looking(model, []), kept_random_state():
            model(*inputs)
    return outermost(model)


def outermost(model: nn.Module) -> list[tuple[str, Attention]]:
    """The mechanisms of a model, without those nested inside another mechanism."""
    found: list[tuple[str, Attention]] = []

    def visit(module: nn.Module, path: str) -> None:
        if isinstance(module, Attention):
            found.append((path, module))
            return
        found.extend((path, attn) for attn in kept_mechanisms(module))
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


def _view(
    attn: Attention,
    map_up_to: int,
    row: int,
    own: bool,
    latest: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Any = None,
    segments: Any = None,
    **inputs: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A row, the map if the input is short, and the mask of the keys. Unless the queries are the keys' `own` tokens,
    they are those with the mask `latest`."""
    mask = None if mask is None else mask.clone()  # not one of inference mode
    packed = {} if segments is None else {"segments": segments}
    real = mask if segments is None else documents_of(segments, q[:, 0]).real(mask)
    at: int | Tensor = row
    asking = real if own else latest
    if row == -1 and asking is not None and asking.shape[1] == q.shape[2]:
        at = asking.cumsum(1).argmax(1)
    length = max(q.shape[2], k.shape[2])
    tokens = length if real is None else int(real.sum(1).max())
    short = length <= map_up_to or (tokens <= map_up_to and length <= 4 * map_up_to)
    if short or inputs:  # the layer's input is for keys that may depend on v, so v cannot be replaced
        full = attn.weights(q, k, v, mask, bias, **packed, **inputs).float()
        one = full[torch.arange(len(full)), :, at].cpu()
        return one, full.cpu() if short else None, None if real is None else real.cpu()
    one = attention_row(attn, q, k, mask, bias, row=at, **packed)
    return one.float().cpu(), None, None if real is None else real.cpu()


def attention_row(
    attn: Attention,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    bias: Any = None,
    *,
    row: int | Tensor = 0,
    **packed: Any,
) -> Tensor:
    """One row of `attn.weights` for each example, (B, H, Lk), at the cost of one call and its backward pass."""
    k, _ = spread(q, k, k)  # one row for each head of q
    with torch.enable_grad():
        v = torch.zeros(*k.shape[:3], 1, dtype=k.dtype, device=k.device, requires_grad=True)
        out = attn(q.detach(), k.detach(), v, mask, bias, **packed)
        (gradient,) = torch.autograd.grad(out[torch.arange(len(out)), :, row].sum(), v)
    return gradient[..., 0]


class kept_random_state:
    """Context manager that restores PyTorch's random state on exit."""

    def __enter__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def __exit__(self, *_: Any) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


def _memories(model: nn.Module) -> set[str]:
    """The paths of the mechanisms that read the slots of a cache."""
    return {f"{name}.attention" for name, m in model.named_modules() if isinstance(m, MemoryAttention)}


def _mixed_together(model: nn.Module, calls: list[tuple], names: dict[str, str]) -> list[AttentionView]:
    """Convert calls to views: merge the blocks of a mixed layer, and number repeated calls."""
    mixed = [name for name, m in model.named_modules() if isinstance(m, MixedAttention)]
    memories = _memories(model)
    views: list[AttentionView] = []
    last: dict[tuple[str, bool], tuple[int, AttentionView]] = {}  # mixed layer, own or memory -> its latest block, view
    seen: dict[str, int] = {}
    for path, row, full, mask, windows in calls:
        kinds, memory = [names[path]] * row.shape[1], path in memories
        seen[path] = seen.get(path, 0) + 1
        layer, swapped, _ = path.partition(".weft.")
        label = layer if swapped else path.removesuffix(".attention")
        parent = next((name for name in mixed if path.startswith(f"{name}.blocks.")), None)
        if parent is not None:
            number = int(path.removeprefix(f"{parent}.blocks.").split(".")[0])
            before, view = last.get((parent, memory), (number, None))
            if view is not None and number > before:
                view.row, view.mechanisms = torch.cat([view.row, row], 1), view.mechanisms + kinds
                view.map = None if view.map is None or full is None else torch.cat([view.map, full], 1)
                last[parent, memory] = number, view
                continue
            label = f"{parent}.memory" if memory else parent
        label = label or "attention"
        if seen[path] > 1:
            label += f" (call {seen[path]})"
        views.append(AttentionView(label, kinds, row, full, mask, seen[path], memory, windows))
        if parent is not None:
            last[parent, memory] = number, views[-1]
    return views
