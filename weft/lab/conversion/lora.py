"""Low-rank adapters for fine-tuning, with peft."""

from __future__ import annotations

from typing import Any

from torch import nn


class Adapters:
    """Adapters in the linear layers of the swapped attention layers; everything else is frozen, except parameters of
    the mechanisms."""

    def __init__(self, lora: int | dict[str, Any]):
        try:
            import peft
        except ImportError as error:
            raise ImportError("lora needs peft: pip install peft") from error
        self.peft: Any = peft
        self.fields = {"r": lora, "lora_alpha": 2 * lora} if isinstance(lora, int) else dict(lora)
        if not isinstance(lora, (int, dict)) or isinstance(lora, int) and lora < 1:
            raise ValueError(f"lora must be a rank of at least 1 or fields of peft.LoraConfig, got {lora!r}")

    def add(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        self.trained = {p: p.requires_grad for p in model.parameters()}
        own = [p for layer in layers.values() if "weft" in layer._modules for p in layer._modules["weft"].parameters()]  # type: ignore[union-attr]
        linear = [
            f"{path}.{name}" if path else name
            for path, layer in layers.items()
            for name, part in layer.named_modules()
            if type(part).__name__ in ("Linear", "Conv1D") and not name.startswith("weft.")
        ]
        config = self.peft.LoraConfig(**{"target_modules": linear, **self.fields})
        self.tuned = self.peft.get_peft_model(model, config)
        for p in own:
            p.requires_grad_(self.trained[p])

    def merge(self, model: nn.Module) -> None:
        self.tuned.merge_and_unload()
        del self.tuned
        for p, trained in self.trained.items():
            p.requires_grad_(trained)
