"""Compute a batch in parts when memory is short.

    loss = Σ_p share_p · loss(part p),   share_p: of the tokens that count in the loss

The gradients are those of the whole batch. The number of parts doubles after a pass that runs out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..bench.timing import reason
from .batches import Batch, count_rows, count_tokens

SHIFTED = ("ForCausalLM", "ForConditionalGeneration", None)  # `loss_type` of transformers models; None is causal too
IGNORED = -100  # label of a token without a loss
Once = Callable[[Batch, float], Tensor]  # (part, its share) -> the share's loss


@dataclass
class Parts:
    say: Callable[[str], None] = print
    count: int = 1

    def sum(self, model: Any, batch: Batch, once: Once, seed: int = 0) -> Tensor:
        """The sum of `once` over the parts. Gradients start at zero, random numbers at `seed`."""
        while True:
            model.zero_grad()
            torch.manual_seed(seed)
            try:
                return torch.stack([once(part, share) for part, share in split(model, batch, self.count)]).sum(0)
            except RuntimeError as error:
                if reason(error) != "out of memory":
                    raise
                if self.count >= count_rows(batch):
                    raise torch.OutOfMemoryError(
                        f"one sequence of {count_tokens(batch) // count_rows(batch):,} tokens does not fit into memory"
                        f"{_free()}: lower the length, call model.gradient_checkpointing_enable() before, or train "
                        "low-rank adapters (lora=)"
                    ) from error
            # after `except`: the error keeps the tensors of the failed pass
            self.count *= 2
            torch.cuda.empty_cache()
            self.say(f"out of memory{_free()}: computing each batch in {self.count} parts")


def _free() -> str:
    return f" ({torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB are free)" if torch.cuda.is_available() else ""


def split(model: Any, batch: Batch, parts: int) -> list[tuple[Batch, float]]:
    """Groups of rows, each with its share. Those without a share are left out: their mean loss is 0 / 0."""
    if parts == 1:
        return [(batch, 1.0)]
    rows = count_rows(batch)
    size = -(-rows // parts)
    found = [
        {
            key: value[at : at + size] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
            for key, value in batch.items()
        }
        for at in range(0, rows, size)
    ]
    return [(part, share) for part, share in zip(found, shares(model, found), strict=True) if share]


def shares(model: Any, batches: Sequence[Batch]) -> list[float]:
    """The part that each batch has of the tokens that count in the loss."""
    weights = [_weight(model, batch) for batch in batches]
    total = sum(weights)
    return [weight / total if total else 1 / len(weights) for weight in weights]


def counted(model: Any, labels: Tensor) -> Tensor:
    """Which labels count in the loss. That of transformers' causal models shifts them, so the first one does not."""
    config = getattr(model, "config", None)
    shifted = getattr(model, "loss_type", "") in SHIFTED and not getattr(config, "is_encoder_decoder", False)
    return (labels[..., 1:] if shifted else labels) != IGNORED


def _weight(model: Any, batch: Batch) -> int:
    if isinstance(batch.get("labels"), Tensor):
        return int(counted(model, batch["labels"]).sum())
    if batch.get("attention_mask") is not None and batch["attention_mask"].dim() == 2:
        return int(batch["attention_mask"][:, 1:].sum())
    return batch["input_ids"][:, 1:].numel() if "input_ids" in batch else count_rows(batch)
