"""The calls that hold each mechanism's kernel to its plain version: SMALL ones for Triton's interpreter on a CPU, REAL
ones for a GPU, each in bfloat16, float16 and float32 there."""

from __future__ import annotations

import torch

from .agree import Call

SMALL: dict[str, tuple[Call, ...]] = {
    "combiner-fixed": (
        Call("combiner-fixed", 37, H=1, D=8, options={"block_size": 16}, mask="random"),
        Call(
            "combiner-fixed",
            45,
            H=1,
            D=8,
            B=2,
            causal=False,
            options={"block_size": 16, "summary": "mean"},
            mask="ends",
        ),
        Call("combiner-fixed", 33, H=1, D=8, options={"block_size": 16, "summary": "sum"}, dtype=torch.float16),
        Call(
            "combiner-fixed", 31, H=1, D=8, B=2, causal=False, options={"block_size": 16, "summary": "sum"}, mask="all"
        ),
    ),
}

REAL: dict[str, tuple[Call, ...]] = {
    "combiner-fixed": (
        Call("combiner-fixed", 1000, D=64, B=2, H=4, options={"block_size": 128, "summary": "sum"}, mask="random"),
        Call("combiner-fixed", 1000, D=64, B=2, H=4, options={"block_size": 128}, causal=False, mask="ends"),
    ),
}
