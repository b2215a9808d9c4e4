"""The name under which `contract.py` imports `autocast`; it is defined in `precision.py`."""

from .precision import autocast as autocast
