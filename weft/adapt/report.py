"""What surgery did to a model, and how to undo it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


class Missing:
    """Stands for an attribute that is not there."""


@dataclass
class Patch:
    """One attribute of one object, changed. `users` are the layers for which an object they share was changed."""

    owner: Any
    name: str
    new: Any
    old: Any = None
    users: list[nn.Module] = field(default_factory=list)
    place: tuple[Any, Any] | None = None  # the owner's device and dtype when it was changed

    def apply(self) -> None:
        self.old, self.place = getattr(self.owner, self.name, Missing), _place(self.owner)
        _set(self.owner, self.name, self.new)

    @property
    def in_place(self) -> bool:
        now = getattr(self.owner, self.name, Missing)
        return now is self.new or (isinstance(now, (str, bool)) and now == self.new)

    def revert(self) -> None:
        """A module that was out of the model meanwhile follows what the model went through: train(), eval(), to()."""
        now = _place(self.owner)
        if isinstance(self.old, nn.Module) and isinstance(self.new, nn.Module):
            if all(module is not self.old for module in self.new.modules()):
                self.old.train(self.new.training)
                if now is not None and now != self.place:
                    self.old.to(device=now[0], dtype=now[1])
        _set(self.owner, self.name, self.old)


@dataclass(frozen=True)
class Row:
    path: str
    layer: str  # its class
    now: str  # what it was replaced with; "" where it was left
    why: str = ""  # why it was left
    not_chosen: bool = False


@dataclass
class Report:
    """Prints as a table of what was replaced, and what was left and why; `undo()` restores the model."""

    rows: list[Row]
    patches: list[Patch] = field(default_factory=list, repr=False)
    layers: list[nn.Module] = field(default_factory=list, repr=False)  # those that were replaced
    is_changed: Callable[[nn.Module], bool] = field(default=lambda layer: False, repr=False)
    note: Callable[[], None] = field(default=lambda: None, repr=False)  # called after undo()
    undone: bool = False

    @property
    def replaced(self) -> list[str]:
        return [row.path for row in self.rows if row.now]

    @property
    def left(self) -> dict[str, str]:
        """The layers that were left as they are, and why: not chosen, or refused."""
        return {row.path: row.why for row in self.rows if not row.now}

    @property
    def refused(self) -> dict[str, str]:
        """The layers that were chosen and cannot be changed, and why."""
        return {row.path: row.why for row in self.rows if not row.now and not row.not_chosen}

    def undo(self) -> None:
        """Put everything back: the same objects with the same weights, and those as they are by now."""
        if self.undone:
            raise ValueError("this was undone already")
        mine = {id(layer) for layer in self.layers}
        shared = [user for patch in self.patches for user in patch.users if id(user) not in mine]
        if not all(patch.in_place for patch in self.patches) or any(self.is_changed(user) for user in shared):
            raise ValueError("the model was changed again after this: undo the later change first")
        for patch in reversed(self.patches):
            patch.revert()
        for layer in self.layers:
            _forget(layer)
        self.undone = True
        self.note()

    def __str__(self) -> str:
        table = [("layer", "class", "now")]
        for row in self.rows:
            now = row.now or f"{'left' if row.not_chosen else 'refused'}: {row.why}"
            table.append((row.path or "(the model)", row.layer, now))
        widths = [max(len(line[column]) for line in table) for column in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in table]
        refused = f", {len(self.refused)} of them refused" if self.refused else ""
        return "\n".join([*lines, f"{len(self.replaced)} replaced, {len(self.left)} left{refused}"])


def _forget(layer: nn.Module) -> None:
    """Leave nothing behind on a layer of transformers that no swap is on any more."""
    state = layer.__dict__.get("_weft")
    if state is not None and state.choice is None:
        if state.hook is not None:
            state.hook.remove()
        del layer.__dict__["_weft"]


def _place(owner: Any) -> tuple[Any, Any] | None:
    parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
    like = next((p for p in parameters if p.is_floating_point()), None)
    return None if like is None else (like.device, like.dtype)


def _set(owner: Any, name: str, value: Any) -> None:
    if value is Missing:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
