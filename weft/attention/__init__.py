"""The mechanisms: one short file each, q, k, v in and out. Importing this package registers them all."""

import importlib
import pkgutil

from .contract import Attention
from .registry import AttentionInfo, attention_info, attentions, make_attention, register

# Every file here that registers a mechanism is found by being here.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Attention", "AttentionInfo", "attention_info", "attentions", "make_attention", "register"]
