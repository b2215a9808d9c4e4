"""weft: drop-in efficient, cached and interpretable attention layers for PyTorch."""

from typing import TYPE_CHECKING

from . import _interrupt, _load_warning  # noqa: F401
from ._lazy import lazy

if TYPE_CHECKING or not _interrupt.IS_COMMAND:  # the command `weft` imports torch only when it needs it
    from .attention import Attention, AttentionInfo, attention_info, attentions, make_attention, register
    from .core.positions import ALiBi, RelativeBias, RelativeBias2d, Rotary
    from .core.segments import Segments
    from .core.state import state_size
    from .layers import ISTA, MSSA, CachedAttention, MixedAttention, MultiheadAttention

if TYPE_CHECKING:
    from . import adapt, inspect, lab, layers, models, parallel, tasks
    from .adapt import huggingface as huggingface
    from .adapt import timm as timm
    from .adapt.ensemble import ensemble
    from .adapt.saved import apply, describe
    from .adapt.subsample import make_dense, subsample, subsampling
    from .adapt.surgery import cache, swap
    from .lab.bench.advise import advise
    from .lab.conversion.convert import convert
    from .lab.trained import load

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Attention",
    "AttentionInfo",
    "CachedAttention",
    "ISTA",
    "MSSA",
    "MixedAttention",
    "MultiheadAttention",
    "RelativeBias",
    "RelativeBias2d",
    "Rotary",
    "Segments",
    "adapt",
    "advise",
    "apply",
    "attention_info",
    "attentions",
    "cache",
    "convert",
    "describe",
    "ensemble",
    "inspect",
    "lab",
    "layers",
    "load",
    "make_attention",
    "make_dense",
    "models",
    "parallel",
    "register",
    "state_size",
    "subsample",
    "subsampling",
    "swap",
    "tasks",
]

# Imported on first use, so that `import weft` stays quick: names, and the modules they come from.
_MODULES = {"parallel": "parallel", "inspect": "inspect", "layers": "layers", "models": "models"}
_MODULES |= {"lab": "lab", "tasks": "tasks"}
_MODULES |= {"adapt": "adapt", "huggingface": "adapt.huggingface", "timm": "adapt.timm"}  # these need their library
_NAMES = {"cache": "adapt.surgery", "swap": "adapt.surgery", "ensemble": "adapt.ensemble"}
_NAMES |= {"load": "lab.trained", "advise": "lab.bench.advise", "convert": "lab.conversion"}
_NAMES |= {"apply": "adapt.saved", "describe": "adapt.saved"}
_NAMES |= dict.fromkeys(("make_dense", "subsample", "subsampling"), "adapt.subsample")

_NAMES |= dict.fromkeys(("Attention", "AttentionInfo", "attention_info", "attentions"), "attention")
_NAMES |= dict.fromkeys(("make_attention", "register"), "attention")
_NAMES |= dict.fromkeys(("ALiBi", "RelativeBias", "RelativeBias2d", "Rotary"), "core.positions")
_NAMES |= {"Segments": "core.segments", "state_size": "core.state"}
_NAMES |= dict.fromkeys(("ISTA", "MSSA", "CachedAttention", "MixedAttention", "MultiheadAttention"), "layers")

__getattr__, __dir__ = lazy(__name__, _NAMES, _MODULES)
