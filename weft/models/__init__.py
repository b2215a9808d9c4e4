"""Whole models around the layers."""

from .classifier import TextClassifier
from .encoder import TextEncoder
from .matcher import TextMatcher

__all__ = ["TextClassifier", "TextEncoder", "TextMatcher"]
