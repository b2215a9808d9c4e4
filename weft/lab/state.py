"""The state of a model and its optimizer as named, unsharded tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

AVERAGE = "average/"  # prefix of the moving average of the weights, if a run has one


def collect(
    model: nn.Module, optimizer: Optimizer | None, keep: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, extra). Call it on every rank, because all ranks gather sharded tensors together. Gathered tensors go
    to CPU memory one by one; ranks without `keep` drop them, so that no GPU holds the whole state.

    `extra` holds the non-tensor values of `get_extra_state`, which must be JSON-compatible.
    """
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"model/{name}"] = _whole(value, keep)
        else:
            try:
                json.dumps(value)
            except TypeError as error:
                raise TypeError(f"the extra state of {name} is neither a tensor nor JSON: {error}") from None
            extra[name] = value
    if optimizer is not None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                value = value if isinstance(value, Tensor) else torch.tensor(value)
                tensors[f"optimizer/{names[parameter]}/{key}"] = _whole(value, keep)
    return tensors, extra


def restore(
    model: nn.Module, optimizer: Optimizer | None, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> None:
    """Restore the state that `collect` returned. The model may be sharded differently or not at all."""
    restore_model(model, tensors, extra)
    if optimizer is None:
        return
    fused = {p: bool(g.get("fused") or g.get("capturable")) for g in optimizer.param_groups for p in g["params"]}
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for name, value in tensors.items():
        if not name.startswith("optimizer/"):
            continue
        parameter_name, key = name.removeprefix("optimizer/").rsplit("/", 1)
        parameter = parameters[parameter_name]
        if value.dim() == 0:
            # Step counters live on the CPU unless the optimizer is fused.
            value = value.to(parameter.device) if fused[parameter] else value.clone()
        else:
            value = _like(value, parameter)
        optimizer.state[parameter][key] = value


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
    own = model.state_dict()
    saved = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    if set(own) != set(saved) | set(extra):
        odd = sorted(set(own) ^ (set(saved) | set(extra)))
        raise ValueError(f"the checkpoint belongs to another model: only one of the two has {', '.join(odd[:5])}")
    firsts: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(parameter, name)
        if first != name and first in saved and name in saved:
            saved[name] = saved[first]  # of tied weights, averages have only the first name
    state: dict[str, Any] = {**extra}
    for name, value in saved.items():
        if value.shape != own[name].shape:
            # For example a cache that is still empty: its module handles other shapes.
            state[name] = value
        else:
            state[name] = _like(value, own[name])
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        shapes = {name: (tuple(t.shape), tuple(own[name].shape)) for name, t in saved.items()}
        other = [f"{name} is {a} in the checkpoint and {b} in the model" for name, (a, b) in shapes.items() if a != b]
        if not other:
            raise
        raise ValueError(f"the checkpoint belongs to another model: {'; '.join(other[:3])}") from error


def with_average(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint with the average in place of the weights, if it has one."""
    found = {f"model/{name.removeprefix(AVERAGE)}": t for name, t in tensors.items() if name.startswith(AVERAGE)}
    return {**{name: t for name, t in tensors.items() if not name.startswith(AVERAGE)}, **found}


def not_finite(model: nn.Module, optimizer: Optimizer) -> str:
    """What is not finite: the weights, the optimizer's moments or nothing. Synchronises with the device once.

    A gradient of 1e20 has an infinite square: Adam would never move this weight again, without a sign in the loss."""
    state = [x for own in optimizer.state.values() for x in own.values() if isinstance(x, Tensor) and x.dim()]
    groups: dict[str, list[Tensor]] = {"weights": list(model.parameters()), "optimizer's moments": state}
    flags = {name: [torch.isfinite(_local(x)).all() for x in group] for name, group in groups.items() if group}
    found = torch.stack([torch.stack(each).all() for each in flags.values()]).tolist() if flags else []
    return next((name for name, good in zip(flags, found, strict=True) if not good), "")


def _whole(value: Tensor, keep: bool) -> Tensor:
    if not _is_sharded(value):
        return value
    whole = value.full_tensor()  # type: ignore[attr-defined]
    return whole.cpu() if keep else whole.new_empty(0)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if _is_sharded(value) else value  # type: ignore[attr-defined]


def _like(value: Tensor, template: Tensor) -> Tensor:
    value = value.to(template.device)
    if not _is_sharded(template):
        return value.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, template.device_mesh, template.placements)  # type: ignore[attr-defined]


def _is_sharded(value: Tensor) -> bool:
    return hasattr(value, "full_tensor")
