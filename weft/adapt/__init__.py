"""weft mechanisms in existing models: transformers, timm, torch.nn, and `swap` and `cache` for any of them."""

from .added import add_layer

__all__ = ["add_layer"]
