"""Swin's window attention, subsampled in training.

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705; Swin Transformer, https://arxiv.org/abs/2103.14030

    eval()      each window x window square (starting at `shift`, smaller at the borders) attends within itself:
                softmax(q · k / √D + bias(y_t − y_s, x_t − x_s)) v
    training    the targets are unshifted squares of half that side. Their sources are the cells that a random
                shuffle (σ = sigma · window) moves into these squares; no source leaves its window
    unbiased    in training, a random fraction `keep` of every window's cells are the sources of all its targets

Smaller windows at the borders are equivalent to Swin's cyclic shift with a mask. With `gate`, the table also has a
factor for each probability (in the authors' code, not in the paper).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.subsampled import Subsampling
from ..attention.subsampled.device import can_draw, draw_device_key, sample_grid_on_device, sample_windows_on_device
from ..attention.subsampled.gather import sampled_attention
from ..attention.subsampled.sampling import draw_key, sample_slots
from ..attention.subsampled.sampling_2d import sample_placement, window_table
from ..core.staging import send, transformed


class SubsampledWindowAttention(Subsampling, nn.Module):
    """`layer(x)`, x (B, height, width, dim). `window` must be even, because it is cut into half windows."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        window: int = 14,
        shift: int = 0,
        sigma: float = 0.75,
        biased: bool = True,
        keep: float = 0.25,
        gate: bool = False,
        qkv_bias: bool = True,
        same_on_all_ranks: bool = False,
    ):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} must be divisible by heads={heads}")
        if window < 2 or window % 2:
            raise ValueError(f"window must be even, because it is cut into half windows, got {window}")
        if not 0 <= shift < window:
            raise ValueError(f"shift must be in [0, window), got {shift}")
        if biased and shift not in (0, window // 2):
            raise ValueError(
                f"shift must be 0 or half the window, {window // 2}, got {shift}: the half windows of the training "
                "would lie in several windows; for other shifts use biased=False"
            )
        if not 0 < sigma < float("inf"):
            raise ValueError(
                f"sigma must be a positive, finite fraction of the window, got {sigma}; "
                "for uniform sampling use biased=False"
            )
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {keep}")
        self.dim, self.heads, self.window, self.shift = dim, heads, window, shift
        self.sigma, self.biased, self.keep, self.same_on_all_ranks = sigma, biased, keep, same_on_all_ranks
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.out = nn.Linear(dim, dim)
        # One row per offset; the bias of each head, then, with a gate, the factor of each head.
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads * (1 + gate)))
        nn.init.trunc_normal_(self.table, std=0.02)
        self.last_indices: Tensor | None = None
        self._fixed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, height, width, {self.dim}), got {tuple(x.shape)}")
        B, height, width, _ = x.shape
        x = x.flatten(1, 2)
        rows = (self.q(x), *self.kv(x).chunk(2, -1))
        q, k, v = (torch.unflatten(t, -1, (self.heads, -1)).transpose(1, 2) for t in rows)
        targets, sources = self._sample(height, width, x)
        values = self.table[:, : self.heads], self.table[:, self.heads :]
        bias, gate = (_Offsets(t, self.window, width) if t.shape[1] else None for t in values)
        out = sampled_attention(q, k, v, sources, targets=targets, bias=bias, gate=gate)
        return torch.unflatten(self.out(out.transpose(1, 2).flatten(2)), 1, (height, width))

    def _sample(self, height: int, width: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and sources of each window as row-major indices; height · width marks slots outside the image."""
        windows = window_table(height, width, (self.window, self.window), self.shift, x.device)
        if not self.samples_now:
            return windows, windows
        if self.biased:
            targets = window_table(height, width, (self.window // 2, self.window // 2), device=x.device)
        else:
            targets = windows
        if self._fixed is not None:
            sources = self._fixed.reshape(targets.shape[0], -1)
        elif self.biased:
            sources = self._placed(x, height, width, targets)
        else:
            sources = windows[:, self._slots(x)]
        if not torch.compiler.is_compiling():
            self.last_indices = None if transformed() else sources  # those of torch.func cannot be saved
        return targets, sources

    def _placed(self, x: Tensor, height: int, width: int, targets: Tensor) -> Tensor:
        reach, half, per_rank = self.sigma * self.window, self.window // 2, not self.same_on_all_ranks
        if can_draw(x.device, height * width, reach):
            sizes = (height, width, half, half, 1, half * half)
            return sample_grid_on_device(
                draw_device_key(x), *sizes, reach, reach, False, self.window, self.shift, per_rank
            )
        bounds = height, self.window, self.shift
        placement = send(sample_placement(draw_key(), height, width, reach, reach, *bounds, per_rank), x.device)
        return F.pad(placement, (0, 1), value=height * width)[targets]

    def _slots(self, x: Tensor) -> Tensor:
        """The slots of a window that are sources."""
        cells, per_rank = self.window**2, not self.same_on_all_ranks
        kept = max(1, round(self.keep * cells))
        if can_draw(x.device, cells, None):
            return sample_windows_on_device(draw_device_key(x), 1, cells, kept, None, False, False, per_rank)[0].long()
        return send(sample_slots(draw_key(), 1, cells, per_rank)[0], x.device)[:kept]

    @contextmanager
    def fixed(self, indices: Tensor) -> Iterator[None]:
        """Context manager: use these sources, (windows, S) or flat, instead of drawing samples."""
        before, self._fixed = self._fixed, torch.as_tensor(indices, dtype=torch.long)
        try:
            yield
        finally:
            self._fixed = before

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, window={self.window}, shift={self.shift}, sigma={self.sigma}"


class _Offsets:
    """Looks up a table row for every offset, target minus source, given row-major indices."""

    def __init__(self, table: Tensor, window: int, width: int):
        self.table, self.window, self.width = table, window, width

    def __call__(self, targets: Tensor, sources: Tensor) -> Tensor:
        dy = targets // self.width - sources // self.width
        dx = targets % self.width - sources % self.width
        last = self.window - 1  # only empty slots have larger offsets, and they are masked
        offset = (dy.clamp(-last, last) + last) * (2 * self.window - 1) + dx.clamp(-last, last) + last
        return self.table[offset.squeeze(1)].movedim(-1, 1)
