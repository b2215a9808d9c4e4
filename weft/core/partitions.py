"""Index sets shared by the sparse mechanisms and their Combiners.

Positions count from 0. A sequence is split into blocks of m tokens; on a grid these are rows, i = r·m + c. A sparse
mechanism attends to one set of tokens. Its Combiner attends to a similar set, and to the other tokens through spans.

    fixed       own block {j : j//m = r}, and part of every other block
    axial       own row {j : j//m = r}, own column {j : j%m = c}
    logsparse   for every set bit b of i the span [a, a + 2^b), a = (i >> (b+1)) << (b+1)

If causal, every set is limited to j ≤ i. Bidirectional logsparse adds the mirror image: the spans of L-1-i, counted
from the end. The spans of i partition {0..i-1}.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import power_of_two
from .staging import send


def default_block(length: int, max_length: int | None, levels: int = 2) -> int:
    """Default block size: the power of two nearest to the root (of degree `levels`) of the maximum length.

    With two levels it is at least 64: shorter rows are not faster, on CPU or GPU.
    """
    return power_of_two((max_length or length) ** (1 / levels), least=64 if levels == 2 else 16)


def own_block(m: int, causal: bool, device: torch.device) -> Tensor:
    """(m, m): which tokens of its own block a query attends to."""
    everything = torch.ones(m, m, dtype=torch.bool, device=device)
    return everything.tril() if causal else everything


def other_blocks(n: int, causal: bool, device: torch.device) -> Tensor:
    """(n, n): which other blocks (rows, nodes) a block attends to: the earlier ones if causal, else all but itself."""
    r = torch.arange(n, device=device)
    return r[None] < r[:, None] if causal else r[None] != r[:, None]


def log_spans(i: int) -> list[tuple[int, int]]:
    """The spans (start, size) of token i, nearest first. They are dyadic and disjoint; their union is {0..i-1}."""
    bits = range(i.bit_length())
    return [((i >> (b + 1)) << (b + 1), 1 << b) for b in bits if i >> b & 1]


def fixed_columns(m: int, columns: int, leading: bool) -> list[int]:
    """Offsets within a block that every later block attends to: the last `columns`, and the first if `leading`."""
    return sorted(set(range(max(m - columns, 0), m)) | ({0} if leading else set()))


class LogSpans:
    """The spans of `log_spans` for all tokens at once, in n blocks of m tokens (m a power of two).

    Spans shorter than m tokens are inside a block: its local nodes. Longer spans consist of whole blocks and are the
    same for all tokens of a block: upper nodes. At level b, these are the first halves of the pairs of 2^b blocks.
    One-token spans are omitted: they are the token before an odd one, which is attended to directly.
    """

    def __init__(self, n: int, m: int, device: torch.device):
        levels = m.bit_length() - 1
        nodes = [(start, 1 << b) for b in range(1, levels) for start in range(0, m, 2 << b)]
        t, g = torch.arange(m, device=device), torch.arange(n, device=device)
        start, size = send(torch.tensor(nodes, dtype=torch.long, device="cpu").view(-1, 2), device).unbind(1)
        self.last_local = start + size - 1  # (nodes,): the last token of each local node
        self.members = (t >= start[:, None]) & (t < (start + size)[:, None])  # (nodes, m)
        self.sees_local = (t[:, None] >= start + size) & (t[:, None] < start + 2 * size)  # (m, nodes)
        previous = (t[:, None] == t + 1) & (t[:, None] % 2 == 1)
        self.sees_previous, self.sees_self = previous, t[:, None] == t  # (m, m)
        self.levels = (n - 1).bit_length()  # upper levels: bits of the number of a block
        b = torch.arange(self.levels, device=device)
        self.pair = g[:, None] >> (b + 1)  # (n, levels): which pair of 2^b blocks
        self.sees_upper = (g[:, None] >> b) & 1 == 1  # (n, levels)
        # (n, m, nodes): local nodes, then upper nodes, which are the same for all tokens of a block
        self.sees_nodes = torch.cat([self.sees_local.expand(n, -1, -1), self.sees_upper[:, None].expand(-1, m, -1)], 2)
        # The last block of the span, 0 if there is none.
        self.last_upper = torch.where(self.sees_upper, (self.pair << (b + 1)) + (1 << b) - 1, 0)
