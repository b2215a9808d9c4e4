"""Whole models around the layers."""

from .classifier import TextClassifier
from .crate import CRATE, CRATELayer, crate
from .crate_mae import CRATEMAE
from .crate_text import CRATEText
from .encoder import TextEncoder
from .matcher import TextMatcher
from .presets import lra
from .pvt import PVT, pvt

__all__ = [
    "CRATE",
    "CRATELayer",
    "CRATEMAE",
    "CRATEText",
    "PVT",
    "TextClassifier",
    "TextEncoder",
    "TextMatcher",
    "crate",
    "lra",
    "pvt",
]
