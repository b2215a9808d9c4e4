"""Warn when transformers builds a model from a config that describes changes by weft, without these changes.

`import weft` does not import transformers. If that is imported later, an import hook installs the warning.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from importlib.abc import MetaPathFinder
from typing import Any

MODULE = "transformers.modeling_utils"


def _install(module: Any) -> None:
    original = module.PreTrainedModel.__init__

    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(getattr(config, "weft", None), dict):
            warnings.warn(
                f"the config of {type(self).__name__} describes changes by weft.swap or weft.cache, but the model is "
                "built without them: use weft.huggingface.load(folder) to restore them",
                stacklevel=2,
            )
        original(self, config, *args, **kwargs)

    module.PreTrainedModel.__init__ = init


class _Hook(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _install(module)

            spec.loader.exec_module = exec_module
        return spec


if MODULE in sys.modules:
    _install(sys.modules[MODULE])
else:
    sys.meta_path.insert(0, _Hook())
