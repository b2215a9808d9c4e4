"""Stochastically subsampled self-attention (SSA): random subsets of keys in training, full attention at inference.

The Information Pathways Hypothesis: Transformers are Dynamic Self-Ensembles, https://arxiv.org/abs/2306.01705

    training    out_t = Σ_{s ∈ S_w} softmax_s(q_t · k_s / √D + bias_ts) v_s     w = t // P, over the sampled allowed s
    eval()      full attention; the softmax needs no rescaling

Each forward draws one sample, shared by batch and heads, with 1/W of the dense pairs. `sampling.py` defines the 1-D
distribution, `sampling_2d.py` the 2-D one. Only sources (keys) are sampled, never targets (queries). There are no
parameters. Layouts:

    "1d"              windows are runs of tokens; sigma is a fraction of the length
    (height, width)   windows are bands of rows, or with windows=(rows, columns) a grid of rectangles; sigma is a
                      fraction of each side; causal in row-major order, with bands only. With `channels` c, each cell
                      is c consecutive tokens, such as the colours of a pixel, that move together
    "graph"           no windows: each source of each graph is dropped with probability 1 − keep
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.blocks import ceil_div
from ...core.contract import PositionBias
from ...core.decoding_state import Place
from ...core.dense import dense_attention, legal, positions
from ...core.dispatch import Kernel
from ...core.dropout import dropout_key
from ...core.positions import ALiBi
from ...core.precision import autocasts
from ...core.registry import register
from ...core.staging import refuse_trace, send, transformed
from ...core.state import KeyValues
from ...core.tiles import FAR
from ...kernels.operator import plain_call
from ..full import FullAttention
from . import kernel
from .device import can_draw, draw_device_key, noise_on_device, sample_grid_on_device, sample_windows_on_device
from .gather import nearest_legal, sampled_attention
from .sampling import CPU, draw_key, rank_of, sample_noise, sample_slots, sample_windows
from .sampling_2d import sample_placement, window_table
from .tiles import TILE, causal_tiles


def naive(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: PositionBias | None = None
) -> Tensor:
    """Draws the same sample as `attn` after the same `torch.manual_seed`. If a sample has no allowed source, the
    authors' code returns NaN; here the nearest allowed token is used instead."""
    (i, j), L, able = positions(q, k), k.shape[2], legal(attn, q, k, mask)
    if not attn.samples_now:
        return dense_attention(attn, q, k, v, mask, bias, able)
    if attn.layout == "graph":
        kept = drop_sources(mask, q, L, 1 - attn.keep, per_rank=not attn.same_on_all_ranks)
        return dense_attention(attn, q, k, v, kept, bias, able)
    sources = attn._sources(L, q).to(q.device)
    if attn.layout == "1d":
        window = i // ceil_div(L, attn.windows)
    else:
        (height, width), across, cell = attn._rectangle(), attn.layout[1], i // attn.channels
        window = cell // across // height * ceil_div(across, width) + cell % across // width
    sampled = (sources[:, :, None] == j).any(1)[window[:, 0]] & able
    # The nearest allowed token up to i, otherwise the nearest after i.
    distance = torch.where(j <= i, i - j, L + j - i).masked_fill(~able, 2 * L)
    nearest = distance == distance.amin(-1, keepdim=True)
    allowed = torch.where(sampled.any(-1, keepdim=True), sampled, nearest)
    return dense_attention(attn, q, k, v, mask, bias, allowed)


class Subsampling:
    """A module that samples in training only. `sampling` = True or False overrides this."""

    sampling: bool | None = None
    training: bool

    @property
    def samples_now(self) -> bool:
        return self.training if self.sampling is None else self.sampling


class SubsampledAttention(Subsampling, FullAttention):
    exports_any_length = True
    packs = first_sees_all = property(lambda self: not self.samples_now)  # type: ignore[assignment]

    def __init__(
        self,
        *,
        windows: int | tuple[int, int] = 4,
        sigma: float = 0.2,
        biased: bool = True,
        keep: float = 1.0,
        layout: str | tuple[int, int] = "1d",
        channels: int = 1,
        noise: str = "gaussian",
        round_sigma: bool = False,
        same_on_all_ranks: bool = False,
        **contract: Any,
    ):
        super().__init__(**contract)
        layout = tuple(layout) if isinstance(layout, list) else layout  # from JSON
        windows = tuple(windows) if isinstance(windows, list) else windows
        _check_options(windows, sigma, keep, layout, noise, self.causal)
        if channels < 1 or (channels > 1 and not isinstance(layout, tuple)):
            raise ValueError(f"channels is the number of tokens per cell of layout=(height, width), got {channels}")
        self.channels = channels
        self.windows, self.sigma, self.biased, self.keep, self.layout = windows, sigma, biased, keep, layout
        self.noise, self.round_sigma, self.same_on_all_ranks = noise, round_sigma, same_on_all_ranks
        self.last_indices: Tensor | None = None
        self._fixed: Tensor | None = None
        self._keys: list[Tensor] | None = None  # in `one_call`: the keys drawn so far

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        if not self.samples_now:
            return super().attend(q, k, v, mask, bias)
        L = q.shape[2]
        if self.layout == "graph":
            kept = drop_sources(mask, q, L, 1 - self.keep, per_rank=not self.same_on_all_ranks)
            return super().attend(q, k, v, kept, bias)
        sources, dropout = self._sources(L, q), self.dropout_now
        if self._tiles(q, v, sources, mask, bias, dropout):
            return causal_tiles(q, k, v, sources)
        targets = self.targets(L, q.device)
        return sampled_attention(
            q, k, v, sources, targets=targets, causal=self.causal, mask=mask, bias=bias, dropout=dropout
        )

    def _sources(self, length: int, q: Tensor) -> Tensor:
        """The given sample, or a random one. The device of q draws it if it can; otherwise it is on the CPU."""
        if self._fixed is not None:
            sources = self._given(length)
        elif can_draw(q.device, length, self._spread(length, self._cut(length)[0])):
            sources = self._draw_on_device(length, q)
        else:
            sources = self.draw(length)
        if not torch.compiler.is_compiling():
            self.last_indices = None if transformed() else sources  # those of torch.func cannot be saved
        return sources

    def _draw_on_device(self, length: int, q: Tensor) -> Tensor:
        """The same distribution as `draw`."""
        key, per_rank = self._key(0, lambda: draw_device_key(q)), not self.same_on_all_ranks
        if isinstance(self.layout, tuple) and self.biased:
            kept = max(1, round(self.keep * self._cut(length)[0]))
            (height, width), cells = self.layout, self._rectangle()
            sigma = self.sigma * height, self.sigma * width
            sizes = (height, width, *cells, self.channels, kept)
            return sample_grid_on_device(key, *sizes, *sigma, self.causal, 0, 0, per_rank)
        return sample_windows_on_device(key, *(*self._sample_options(length), per_rank))

    def _sample_options(self, length: int) -> tuple[Any, ...]:
        """Options of `sample_windows_on_device`."""
        size, windows, _ = self._cut(length)
        gaussian, spread = self.noise == "gaussian" and self.biased, self._spread(length, size)
        return windows, size, max(1, round(self.keep * size)), spread, gaussian, self.causal

    def run_kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> Tensor:
        L, given = q.shape[2], self._fixed is not None
        size, _, padded = self._cut(L)
        # Without a mask, only these samples can leave a target without an allowed source.
        stand_in = given or (self.keep < 1 if self.causal else padded > L)
        whole = not given and self._whole_windows(q, k, mask, bias)
        if not (given or whole) and self.layout == "1d" and mask is None and plain_call(q):
            if can_draw(q.device, L, self._spread(L, size)):
                seed, rank = self._key(0, lambda: draw_device_key(q)), rank_of(not self.same_on_all_ranks)
                sample, alibi = (*self._sample_options(L), rank), bias is not None
                key, threshold = dropout_key(self, q)
                out, self.last_indices = kernel.drawn(q, k, v, seed, key, sample, alibi, stand_in, threshold)
                return out
        if mask is not None and (reason := _too_long(self, L, len(mask))):
            raise ValueError(f"{reason}; use fewer windows, a smaller batch, or backend='torch'")
        sources = self._sources(L, q)
        if whole and sources.is_cuda:
            return kernel.whole_windows(q, k, v, sources)
        key, threshold = dropout_key(self, q)
        runs = not isinstance(self.layout, tuple) or self._rectangle()[1] == self.layout[1]
        return kernel.subsampled(
            q,
            k,
            v,
            sources,
            size=size,
            targets=None if runs else self._grid(q.device),
            causal=self.causal,
            mask=mask,
            nearest=None if mask is None else nearest_legal(mask, L, self.causal, q.device),
            alibi=bias is not None,
            stand_in=stand_in,
            once=not self.causal and not given,
            key=key,
            threshold=threshold,
        )

    def _whole_windows(self, q: Tensor, k: Tensor, mask: Tensor | None, bias: PositionBias | None) -> bool:
        """Whether PyTorch's attention on gathered keys is faster than the kernels, and equal."""
        L = q.shape[2]
        return (
            not (self.causal or isinstance(self.layout, tuple))
            and mask is None
            and bias is None
            and not self.dropout_now
            and self.keep == 1
            and self._cut(L)[2] == L
            and self._cut(L)[0] >= kernel.LEAST_WINDOW
            and q.is_cuda
            and k.shape == q.shape
            and (autocasts(q) or q.element_size() == 2)
            and not torch.are_deterministic_algorithms_enabled()
        )

    def draw(self, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw a sample (W, S) on the CPU: the sources of each window. Empty slots hold `length` or more.

        The generator must be a CPU generator, so that a sample does not depend on the device.
        """
        if self.layout == "graph":
            raise ValueError("layout='graph' has no windows to draw, because it drops single sources")
        per_rank = not self.same_on_all_ranks
        size, windows, _ = self._cut(length)
        key = self._key(0, lambda: draw_key(generator))
        if isinstance(self.layout, tuple) and self.biased:
            sources = self._placed(key, per_rank)
        else:
            gaussian, spread = self.noise == "gaussian" and self.biased, self._spread(length, size)
            sources = sample_windows(key, windows, size, spread, gaussian, self.causal, per_rank)
        if self.keep == 1:
            return sources
        n = max(1, round(self.keep * size))
        slots = sample_slots(self._key(1, lambda: draw_key(generator)), windows, size, per_rank)
        return sources.gather(1, slots[:, :n])

    def targets(self, length: int, device: torch.device | str = "cpu") -> Tensor | None:
        """The targets of each window, (W, P); None if windows are consecutive runs of tokens."""
        if not isinstance(self.layout, tuple):
            return None
        runs = self._rectangle()[1] == self.layout[1] and self._cut(length)[2] == length
        return None if runs else self._grid(torch.device(device))

    @contextmanager
    def fixed(self, indices: Tensor) -> Iterator[None]:
        """Within this block, every forward uses these sources, (W, S) or flat, instead of a random sample."""
        if self.layout == "graph":
            raise ValueError("layout='graph' has no windows to fix, because it drops single sources; use a mask")
        before, self._fixed = self._fixed, torch.as_tensor(indices, dtype=torch.long, device="cpu")
        try:
            yield
        finally:
            self._fixed = before

    @contextmanager
    def one_call(self, k: Tensor, real: Tensor | None) -> Iterator[None]:
        """Within this block (packed documents in groups), all samples come from the same keys: each document gets the
        sample that it would get alone."""
        self._keys = []
        try:
            yield
        finally:
            self._keys = None

    def pattern_for(self, length: int) -> Hashable:
        return length if self.samples_now and self.layout != "graph" else None

    def empty_state(self, k: Tensor, capacity: int) -> KeyValues:
        self._dense_now()
        return super().empty_state(k, capacity)

    def attend_next(self, q, k, v, state, mask, bias, at: Place):
        self._dense_now()
        return super().attend_next(q, k, v, state, mask, bias, at)

    def attend_more(self, q, k, v, state, mask, bias, at: Place):
        self._dense_now()
        return super().attend_more(q, k, v, state, mask, bias, at)

    def _dense_now(self) -> None:
        if self.samples_now:
            raise ValueError(
                "subsampled decodes only with full attention, but this layer is sampling; call eval() first"
            )

    def check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: PositionBias | None) -> None:
        super().check(q, k, v, mask, bias)
        if torch.jit.is_tracing() and self.samples_now:
            raise refuse_trace("random samples; call eval() first")
        if not isinstance(self.layout, tuple):
            return
        cells, c = self.layout[0] * self.layout[1], self.channels
        if q.shape[2] != cells * c:
            each = f" of {c} tokens" if c > 1 else ""
            raise ValueError(
                f"layout={self.layout} has {cells} cells{each}, but q has {q.shape[2]} tokens: change layout"
                + (", or set channels=3 for the colours of an image" if q.shape[2] == 3 * cells else "")
            )

    def _key(self, number: int, draw: Callable[[], Tensor]) -> Tensor:
        if self._keys is None:
            return draw()
        if number == len(self._keys):
            self._keys.append(draw())
        return self._keys[number]

    def _cut(self, length: int) -> tuple[int, int, int]:
        """Return targets per window, number of windows, and total number of slots."""
        if not isinstance(self.layout, tuple):
            assert isinstance(self.windows, int)
            size = ceil_div(length, self.windows)
            return size, self.windows, size * self.windows
        height, width = self._rectangle()
        number = ceil_div(self.layout[0], height) * ceil_div(self.layout[1], width)
        size = height * width * self.channels
        return size, number, size * number

    def _rectangle(self) -> tuple[int, int]:
        """Height and width of a 2-D window."""
        assert isinstance(self.layout, tuple)
        down, across = self.windows if isinstance(self.windows, tuple) else (self.windows, 1)
        return ceil_div(self.layout[0], down), ceil_div(self.layout[1], across)

    def _grid(self, device: torch.device) -> Tensor:
        assert isinstance(self.layout, tuple)
        return self._tokens(window_table(*self.layout, self._rectangle(), device=device))

    def _tokens(self, cells: Tensor) -> Tensor:
        """Cells (W, S) -> their tokens (W, S · channels)."""
        if self.channels == 1:
            return cells
        return (cells[..., None] * self.channels + torch.arange(self.channels, device=cells.device)).flatten(1)

    def _placed(self, key: Tensor, per_rank: bool) -> Tensor:
        assert isinstance(self.layout, tuple)
        height, width = self.layout
        band = self._rectangle()[0] if self.causal else height
        reach = self.sigma * height, self.sigma * width
        placement = sample_placement(key, height, width, *reach, band, 0, 0, per_rank)
        cells = window_table(height, width, self._rectangle(), device=CPU)
        return self._tokens(F.pad(placement, (0, 1), value=height * width)[cells])

    def _spread(self, length: int, size: int) -> float | None:
        """Scale of the displacement of a source by the noise, in positions."""
        if not self.biased:
            return None
        if self.noise == "uniform":
            return float(size)
        return float(round(self.sigma * length)) if self.round_sigma else self.sigma * length

    def _given(self, length: int) -> Tensor:
        assert self._fixed is not None
        size, windows, padded = self._cut(length)
        last = max(padded - 1, length)  # slots outside the sequence hold `length` or more
        if self._fixed.numel() % windows or int(self._fixed.min()) < 0 or int(self._fixed.max()) > last:
            raise ValueError(
                f"a fixed sample for length {length} must have shape ({windows}, S) and values in [0, {last}], "
                f"got shape {tuple(self._fixed.shape)}"
            )
        return self._fixed.reshape(windows, -1)

    def _tiles(
        self, q: Tensor, v: Tensor, sources: Tensor, mask: Tensor | None, bias: PositionBias | None, dropout: float
    ) -> bool:
        """Return whether the fast CPU version applies. It needs an allowed source for every target."""
        return (
            self.causal
            and mask is None
            and bias is None
            and not dropout
            and self.keep == 1
            and self._fixed is None
            and q.device.type == "cpu"
            and q.shape == v.shape
            and sources.numel() == q.shape[2]
            and sources.shape[1] > TILE
            and not torch.compiler.is_compiling()
        )


def lacks(attn: SubsampledAttention, *qkv: Tensor) -> str:
    if attn.layout == "graph":
        return "the kernel does not support layout='graph'"
    return _too_long(attn, qkv[0].shape[2], 1) if qkv else ""


def _too_long(attn: SubsampledAttention, length: int, tables: int) -> str:
    """Why the kernel cannot index its tables of (windows, length + 1), which are per sequence with a mask; or ""."""
    windows = attn._cut(length)[1]
    if tables * windows * (length + 1) < FAR:
        return ""
    each = "" if tables == 1 else f" of {tables} sequences with a mask"
    return f"the kernel supports windows x (length + 1){each} below {FAR}, got {windows} x {length + 1}"


def drop_sources(mask: Tensor | None, x: Tensor, length: int, drop: float, *, per_rank: bool = True) -> Tensor:
    """Drop each real source of each sequence of the batch x at random, but never all of them. Returns a mask (B, L).

    The source with the largest random number always stays. This does not change the distribution of the others.
    """
    count = x.shape[0] * length
    if can_draw(x.device, count, None):
        noise = noise_on_device(draw_device_key(x), count, per_rank)
    else:
        noise = send(sample_noise(draw_key(), count, per_rank), x.device)
    noise = torch.unflatten(noise, 0, (-1, length))
    if mask is None:
        return (noise >= drop) | (noise == noise.amax(1, keepdim=True))
    noise = torch.where(mask, noise, -1.0)
    return mask & ((noise >= drop) | (noise == noise.amax(1, keepdim=True)))


def _check_options(windows: Any, sigma: float, keep: float, layout: Any, noise: str, causal: bool) -> None:
    if layout not in ("1d", "graph") and not (isinstance(layout, tuple) and len(layout) == 2):
        raise ValueError(f"layout must be '1d', 'graph' or (height, width), got {layout!r}")
    down, across = windows if isinstance(windows, tuple) else (windows, 1)
    if not all(isinstance(n, Integral) and int(n) >= 1 for n in (down, across)):
        raise ValueError(f"windows must be an integer of at least 1, or two of them, got {windows!r}")
    if isinstance(windows, tuple) and not isinstance(layout, tuple):
        raise ValueError(f"windows={windows} is a grid: set layout=(height, width), or windows to one number")
    if across > 1 and causal:
        raise ValueError(f"causal windows of an image are bands of rows: use windows={down}, got {windows}")
    if layout == "graph" and causal:
        raise ValueError("layout='graph' has no order, so it cannot be causal; use causal=False")
    if not 0 <= sigma < float("inf"):
        raise ValueError(
            f"sigma, a fraction of the length, must be finite and at least 0, got {sigma}; "
            "for no local bias, use biased=False"
        )
    if isinstance(layout, tuple) and sigma == 0:
        raise ValueError("the 2-D sampler needs sigma > 0, got 0")
    if not 0 < keep <= 1:
        raise ValueError(f"keep, the fraction of sampled sources to use, must be in (0, 1], got {keep}")
    if noise not in ("gaussian", "uniform"):
        raise ValueError(f"noise must be 'gaussian' or 'uniform', got {noise!r}")
    if noise == "uniform" and isinstance(layout, tuple):
        raise ValueError("the 2-D sampler does not support noise='uniform'; use layout='1d'")


register(
    "subsampled",
    SubsampledAttention,
    naive=naive,
    paper="Hussain et al. 2023, The Information Pathways Hypothesis (2306.01705)",
    cost="L^2",  # L^2 / windows in training; dense at inference
    bias=True,
    kernel=Kernel(
        SubsampledAttention.run_kernel,
        lacks,
        kernel.LEAST_LENGTH,
        bias=lambda bias: type(bias) is ALiBi,
        dropout=True,
        far=True,
        grouped=lambda attn: True,
        applies=lambda attn: attn.samples_now,
    ),
)
