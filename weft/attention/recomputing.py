"""Whether a forward is a repetition: state that training rewrites must not be rewritten twice."""

from __future__ import annotations

import torch


def recomputing() -> bool:
    """True when this forward runs inside a backward pass, which is where activation checkpointing repeats it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
