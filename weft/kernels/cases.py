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
    "linear": (
        Call("linear", 150, B=2, H=1, mask="random"),
        Call("linear", 135, B=2, H=1, D=20, mask="ends", layout="BHLD"),
        Call("linear", 130, H=1, D=64, dtype=torch.float16),
        Call("linear", 33, B=2, H=1, D=128, mask="all"),
        Call("linear", 3, H=1),
    ),
    "mssa": (
        Call("mssa", 67, H=1, causal=False),
        Call("mssa", 70, causal=False, B=2, H=1, mask="random"),
        Call("mssa", 75, H=2, D=20, layout="BHLD"),
        Call("mssa", 67, B=2, H=1, mask="ends"),
        Call("mssa", 33, B=2, H=1, causal=False, mask="all"),
        Call("mssa", 1, D=128, H=1, causal=False),
        Call("mssa", 150, D=64, causal=False, dtype=torch.float16),
        Call("mssa", 150, D=64, H=1, mask="random", dtype=torch.float16),
    ),
    "performer": (
        Call("performer", 150, B=2, H=1, mask="ends"),
        Call("performer", 130, H=1, D=20, options={"features": 70}, dtype=torch.float16),
        Call("performer", 35, B=2, H=1, options={"features": 100}, mask="all", layout="BHLD"),
        Call("performer", 140, H=1, options={"kernel": "relu"}, mask="random"),
    ),
    "subsampled": (
        Call("subsampled", 37, B=2, options={"windows": 3}, H=1, bias="alibi", mask="random"),
        Call("subsampled", 33, B=2, H=1, causal=False, options={"windows": 4}, mask="ends"),
        Call("subsampled", 48, H=2, causal=False, options={"windows": 2}, bias="alibi", layout="BHLD"),
        Call("subsampled", 40, D=20, H=1, options={"windows": 2, "keep": 0.3}),
        Call("subsampled", 31, B=2, H=1, options={"windows": 2, "biased": False}, mask="all"),
        Call("subsampled", 32, H=1, causal=False, options={"windows": 2, "keep": 0.5, "biased": False}),
        Call("subsampled", 3, H=1, D=128, options={"windows": 1}),
        Call("subsampled", 300, H=1, D=64, options={"windows": 1}, dtype=torch.float16),
        Call("subsampled", 35, H=1, causal=False, options={"layout": (5, 7), "windows": (2, 3)}, mask="random"),
        Call("subsampled", 35, H=1, options={"layout": (5, 7), "windows": 3}),
    ),
    "local": (
        Call("local", 37, H=1, options={"block_size": 16}),
        Call("local", 70, B=2, H=1, causal=False, options={"block_size": 50}, mask="random"),
        Call("local", 45, B=2, H=1, D=20, options={"block_size": 20}, mask="all", layout="BHLD"),
        Call("local", 130, D=64, options={"block_size": 64}, mask="ends", dtype=torch.float16),
        Call("local", 40, H=1, D=128, causal=False, options={"block_size": 50}, dtype=torch.float16),
        Call("local", 1, H=1),
    ),
    "longformer": (
        Call("longformer", 90, H=1, options={"window": 40}),
        Call("longformer", 90, B=2, H=1, D=20, causal=False, options={"window": 41}, mask="random"),
        Call("longformer", 65, B=2, H=1, causal=False, options={"window": 16, "global_tokens": 3}, mask="ends"),
        Call("longformer", 67, B=2, H=1, options={"window": 16, "global_tokens": 3}, mask="random", layout="BHLD"),
        Call(
            "longformer", 130, H=1, D=64, causal=False, options={"window": 32, "global_tokens": 40}, dtype=torch.float16
        ),
        Call("longformer", 20, B=2, H=1, causal=False, options={"window": 8, "global_tokens": 40}, mask="all"),
        Call("longformer", 1, H=1, options={"window": 8, "global_tokens": 1}),
    ),
    "sparse": (
        Call("sparse", 70, H=1, options={"block_size": 24, "columns": 3}),
        Call(
            "sparse",
            70,
            B=2,
            H=1,
            causal=False,
            options={"block_size": 24, "columns": 3, "leading_column": True},
            mask="random",
        ),
        Call("sparse", 50, B=2, H=1, D=20, options={"block_size": 16, "columns": 20}, mask="ends", layout="BHLD"),
        Call(
            "sparse",
            50,
            H=1,
            causal=False,
            options={"block_size": 16, "columns": 0, "leading_column": True, "one_way": True},
        ),
        Call("sparse", 140, H=1, D=64, options={"block_size": 32, "columns": 4}, dtype=torch.float16),
        Call("sparse", 40, B=2, H=1, causal=False, options={"block_size": 16, "columns": 4}, mask="all"),
    ),
}

REAL: dict[str, tuple[Call, ...]] = {
    "combiner-fixed": (
        Call("combiner-fixed", 1000, D=64, B=2, H=4, options={"block_size": 128, "summary": "sum"}, mask="random"),
        Call("combiner-fixed", 1000, D=64, B=2, H=4, options={"block_size": 128}, causal=False, mask="ends"),
    ),
    "linear": (
        Call("linear", 1000, D=64, B=2, H=4),
        Call("linear", 1000, D=64, B=2, H=4, mask="random"),
        Call("linear", 4099, D=64, B=2, H=3, mask="ends", layout="BHLD"),
        Call("linear", 17001, D=64, B=1, H=2),
        Call("linear", 129, D=64, B=2, H=2, mask="all"),
        Call("linear", 777, D=128, B=2, H=2, mask="random"),
        Call("linear", 300, D=16, B=2, H=2),
        Call("linear", 301, D=20, B=2, H=2, mask="ends"),
        Call("linear", 63, D=64, B=2, H=2),
        Call("linear", 2, D=64, B=2, H=2),
    ),
    "mssa": (
        Call("mssa", 1000, D=64, B=2, H=4, causal=False),
        Call("mssa", 1000, D=64, B=2, H=4, causal=False, mask="random"),
        Call("mssa", 197, D=48, B=3, H=3, causal=False, mask="ends"),
        Call("mssa", 777, D=64, B=2, H=3, layout="BHLD"),
        Call("mssa", 1025, D=128, B=1, H=2),
        Call("mssa", 640, D=128, B=2, H=2, causal=False, mask="all"),
        Call("mssa", 300, D=20, B=2, H=2, mask="random"),
        Call("mssa", 1, D=64, B=2, H=2),
    ),
    "performer": (
        Call("performer", 1000, D=64, B=2, H=4),
        Call("performer", 1000, D=64, B=2, H=4, mask="random"),
        Call("performer", 4099, D=64, B=1, H=2, options={"features": 256}, mask="ends"),
        Call("performer", 17001, D=32, B=1, H=2, options={"features": 64}),
        Call("performer", 129, D=64, B=2, H=2, mask="all", layout="BHLD"),
        Call("performer", 777, D=128, B=1, H=2, mask="random"),
        Call("performer", 301, D=20, B=2, H=2, options={"features": 33}, mask="ends"),
        Call("performer", 1000, D=64, B=2, H=4, options={"kernel": "relu"}, mask="random"),
    ),
    "subsampled": (
        Call("subsampled", 1000, D=64, B=2, H=4, options={"windows": 4}),
        Call("subsampled", 1000, D=64, B=2, H=4, options={"windows": 4}, bias="alibi", mask="random"),
        Call("subsampled", 2048, D=64, B=2, H=4, causal=False, options={"windows": 4}),
        Call("subsampled", 2047, D=64, B=2, H=3, causal=False, options={"windows": 4}, bias="alibi", mask="ends"),
        Call("subsampled", 4096, D=64, B=1, H=2, options={"windows": 4, "sigma": 0.35}, bias="alibi"),
        Call("subsampled", 1500, D=64, B=1, H=2, options={"windows": 2, "biased": False}, layout="BHLD"),
        Call("subsampled", 1025, D=128, B=1, H=2, options={"windows": 3, "keep": 0.3}, mask="random"),
        Call("subsampled", 900, D=128, B=1, H=2, causal=False, options={"windows": 3, "keep": 0.5}),
        Call("subsampled", 301, D=16, B=2, H=2, options={"windows": 8}, mask="all"),
        Call("subsampled", 613, D=20, B=2, H=3, causal=False, options={"windows": 5, "noise": "uniform"}),
        Call("subsampled", 3, D=64, B=2, H=2, options={"windows": 1}),
        Call("subsampled", 600, D=64, B=2, H=2, causal=False, options={"layout": (20, 30), "windows": (2, 4)}),
        Call("subsampled", 600, D=64, B=2, H=2, options={"layout": (20, 30), "windows": 3}, mask="random"),
    ),
    "local": (
        Call("local", 1000, D=64, B=2, H=4),
        Call("local", 1000, D=64, B=2, H=4, causal=False, options={"block_size": 128}, mask="random"),
        Call("local", 777, D=128, B=1, H=3, options={"block_size": 64}, mask="ends", layout="BHLD"),
        Call("local", 300, D=20, B=2, H=2, causal=False, options={"block_size": 16}, mask="all"),
        Call("local", 1000, D=96, B=1, H=2, options={"block_size": 4096}),
        Call("local", 1, D=64, B=2, H=2),
    ),
    "longformer": (
        Call("longformer", 2047, D=64, B=2, H=3),
        Call("longformer", 1000, D=64, B=2, H=4, causal=False, options={"window": 129}, mask="random"),
        Call(
            "longformer", 1500, D=64, B=2, H=2, causal=False, options={"window": 256, "global_tokens": 5}, mask="ends"
        ),
        Call("longformer", 1500, D=64, B=2, H=2, options={"window": 100, "global_tokens": 70}, mask="random"),
        Call("longformer", 777, D=128, B=1, H=3, options={"window": 64, "global_tokens": 1}, causal=False),
        Call("longformer", 300, D=20, B=2, H=2, options={"window": 7}, mask="all", layout="BHLD"),
    ),
    "sparse": (
        Call("sparse", 2000, D=64, B=2, H=3, options={"block_size": 128}),
        Call("sparse", 1000, D=64, B=2, H=4, causal=False, options={"leading_column": True}, mask="random"),
        Call("sparse", 1500, D=128, B=1, H=2, options={"block_size": 64, "columns": 3}, mask="ends", layout="BHLD"),
        Call("sparse", 777, D=40, B=2, H=2, causal=False, options={"block_size": 100, "one_way": True}, mask="all"),
        Call("sparse", 300, D=20, B=2, H=2, causal=False, options={"block_size": 16, "columns": 16}),
    ),
}
