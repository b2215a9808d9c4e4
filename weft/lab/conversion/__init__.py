"""Convert a trained model to another attention mechanism."""

from .convert import convert
from .report import Conversion

__all__ = ["Conversion", "convert"]
