"""Getting into other people's models: transformers, timm, torch.nn, and surgery on any of them."""

from .added import add_layer

__all__ = ["add_layer"]
