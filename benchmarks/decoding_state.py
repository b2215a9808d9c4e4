"""Size of decoding states, relative to the keys and values of all tokens.

    python benchmarks/decoding_state.py [--lengths 1024 4096 16384]

Feeds L random tokens one by one through `step` and prints the number of values in the largest state / 2·L·D.
"""

from __future__ import annotations

import argparse

import torch

import weft

CASES: list[tuple[str, dict]] = [
    ("full", {}),
    ("combiner-fixed", {}),
    ("combiner-fixed", {"levels": 3}),
    ("combiner-axial", {}),
    ("combiner-axial-vertical", {}),
    ("combiner-axial-horizontal", {}),
    ("combiner-logsparse", {}),
    ("combiner-routing", {"clusters": 16}),
    ("combiner-mixture", {}),
    ("linear", {}),
]


@torch.no_grad()
def largest_state(name: str, options: dict, length: int, head_dim: int) -> float:
    attn = weft.make_attention(name, heads=1, head_dim=head_dim, causal=True, max_length=length, **options).eval()
    state, largest = attn.start(1), 0
    for _ in range(length):
        _, state = attn.step(*torch.randn(3, 1, 1, 1, head_dim), state)
        largest = max(largest, weft.state_size(state))
    return largest / (2 * length * head_dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'largest state / 2·L·D':40}" + "".join(f"{length:>10,}" for length in args.lengths))
    for name, options in CASES:
        shown = name + "".join(f" {key}={value}" for key, value in options.items())
        cells = [largest_state(name, options, length, args.head_dim) for length in args.lengths]
        print(f"{shown:40}" + "".join(f"{cell:10.3f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
