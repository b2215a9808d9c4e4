"""Reports of `swap`, `cache` and `subsample`, with undo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


class Missing:
    """Marks a missing attribute."""


@dataclass
class Patch:
    """One changed attribute of one object. `users` are the layers that share the object."""

    owner: Any
    name: str
    new: Any
    old: Any = None
    users: list[nn.Module] = field(default_factory=list)
    place: tuple[Any, Any] | None = None  # the owner's device and dtype when it was changed
    yields: bool = False  # undo() keeps a value that was set later

    def apply(self) -> None:
        self.old, self.place = getattr(self.owner, self.name, Missing), _place(self.owner)
        _set(self.owner, self.name, self.new)

    @property
    def in_place(self) -> bool:
        return self.yields or self._is_new

    @property
    def _is_new(self) -> bool:
        now = getattr(self.owner, self.name, Missing)  # torch.export copies dicts
        return now is self.new or (isinstance(now, (str, bool, dict)) and now == self.new)

    def revert(self) -> None:
        """Restore the attribute. A module that was outside the model gets its current mode, device and dtype."""
        if not self._is_new:
            return
        now = _place(self.owner)
        if isinstance(self.old, nn.Module):
            wraps = isinstance(self.new, nn.Module) and any(module is self.old for module in self.new.modules())
            if not wraps:
                self.old.train((self.new if isinstance(self.new, nn.Module) else self.owner).training)
                if now is not None and now != self.place:
                    self.old.to(device=now[0], dtype=now[1])
            else:  # a cache around it
                release: Any = getattr(self.new, "release", None)
                if release is not None:
                    release()
        _set(self.owner, self.name, self.old)


@dataclass(frozen=True)
class Row:
    path: str
    layer: str  # its class
    now: str  # its replacement; "" if it was skipped
    why: str = ""  # why it was skipped
    not_chosen: bool = False


@dataclass
class Report:
    """Prints as a table of replaced layers, and skipped layers with the reason; `undo()` restores the model."""

    rows: list[Row]
    patches: list[Patch] = field(default_factory=list, repr=False)
    layers: list[nn.Module] = field(default_factory=list, repr=False)  # the replaced layers
    is_changed: Callable[[nn.Module], bool] = field(default=lambda layer: False, repr=False)
    note: Callable[[], None] = field(default=lambda: None, repr=False)  # called after undo()
    undone: bool = False

    @property
    def replaced(self) -> list[str]:
        return [row.path for row in self.rows if row.now]

    @property
    def left(self) -> dict[str, str]:
        """The skipped layers, and why: not chosen, or refused."""
        return {row.path: row.why for row in self.rows if not row.now}

    @property
    def refused(self) -> dict[str, str]:
        """The layers that were chosen but cannot be changed, and why."""
        return {row.path: row.why for row in self.rows if not row.now and not row.not_chosen}

    def undo(self) -> None:
        """Restore the original modules, with their current weights."""
        if self.undone:
            raise ValueError("this report was already undone")
        mine = {id(layer) for layer in self.layers}
        shared = [user for patch in self.patches for user in patch.users if id(user) not in mine]
        if not all(patch.in_place for patch in self.patches) or any(self.is_changed(user) for user in shared):
            raise ValueError("the model was changed again after this report: undo the later change first")
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
    """Remove weft's state from a transformers layer that is no longer swapped."""
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
