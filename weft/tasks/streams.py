"""Texts as parallel streams, for models with memory: step t has the t-th piece of every stream.

A batch has `batch_size` streams. A memory (a gated recurrent cache, or Transformer-XL's) is carried from piece to piece
and cleared when the text starts again. An evaluation starts with empty memories and preserves those of training;
caches without `eval_update` are read as training left them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..layers.cached import RecurrentCache
from .base import BuiltFromData, DataMissing, Known, TaskData
from .config import TrainConfig
from .registry import add_task
from .text import Bytes, Enwik8, only_test


def in_streams(ids: np.ndarray, streams: int, length: int) -> Tensor:
    """(pieces x streams, length + 1): piece by piece, each with the id after it."""
    count = (len(ids) - 1) // (streams * length)
    if not count:
        raise DataMissing(f"{len(ids)} tokens are not enough for {streams} streams of {length}: lower --batch-size")
    starts = np.arange(count)[:, None] * length + np.arange(streams)[None] * count * length
    return torch.from_numpy(ids[starts.reshape(-1, 1) + np.arange(length + 1)])


class Streams(BuiltFromData, Bytes):
    """A task of `Bytes` whose rows are pieces of streams."""

    streams, splits = True, False

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.accumulate * config.devices * config.nodes != 1:
            raise ValueError(f"{self.name} needs one device and accumulate=1: increase --batch-size instead")

    def texts(self, config: TrainConfig, known: Known | None) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The ids of the three parts, or of one (`Known.whole`), and what they mean: facts, vocabulary, tokenizer of
        `TaskData`."""
        content = self.content(config)
        parts = (content,) if known is not None and known.whole and self.undivided else self.parts(content)
        return [np.frombuffer(part, np.uint8) for part in parts], {"facts": {"vocab": self.vocab}}

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        length = config.max_length or self.length
        parts, meaning = self.texts(config, known)
        rows = [{"bytes": in_streams(part, config.batch_size, length)} for part in parts]
        if len(rows) == 1:
            return only_test(rows[0], length, **meaning)
        train, val, test = rows
        return TaskData(train, val, test, length, **meaning)

    def restart(self, model: nn.Module) -> None:
        for module in memories(model):
            module.reset()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        caches = [(m, copy.deepcopy(m.state_dict())) for m in memories(model) if isinstance(m, RecurrentCache)]
        others = [(m, m.get_extra_state()) for m in memories(model) if not isinstance(m, RecurrentCache)]
        for module in memories(model):
            if getattr(module, "eval_update", True):  # eval() does not write other caches: they stay as trained
                module.reset()
        try:
            yield
        finally:
            self.restart(model)
            for cache, state in caches:
                cache.load_state_dict(state)
            for module, state in others:
                module.set_extra_state(state)


def memories(model: nn.Module) -> list[Any]:
    """The caches of the model, and modules with `remembers` that keep their memory as extra state."""
    return [m for m in model.modules() if isinstance(m, RecurrentCache) or getattr(type(m), "remembers", False)]


class Enwik8Streams(Streams, Enwik8):
    name, about = "enwik8-streams", "predict the next byte of enwik8, read as parallel streams"


class TextStreams(Streams):
    name, about = "text-streams", "predict the next byte of any text, read as parallel streams: --data FILE"


add_task(Enwik8Streams())
add_task(TextStreams())
