"""Complete models."""

from .classifier import TextClassifier
from .crate import CRATE, CRATELayer, crate
from .crate_mae import CRATEMAE
from .crate_text import CRATEText
from .encoder import TextEncoder
from .image import ImageClassifier
from .language import LanguageModel
from .matcher import TextMatcher
from .presets import lra
from .pvt import PVT, pvt

__all__ = [
    "CRATE",
    "CRATELayer",
    "CRATEMAE",
    "CRATEText",
    "ImageClassifier",
    "LanguageModel",
    "PVT",
    "TextClassifier",
    "TextEncoder",
    "TextMatcher",
    "crate",
    "lra",
    "pvt",
]
