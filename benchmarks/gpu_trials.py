"""Tile sizes to try, by kernel. The best ones are in the TILES table of each kernel's module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.core.partitions import default_block
from weft.core.tiles import Tiles


@dataclass(frozen=True, eq=False)
class Trial:
    mechanism: str
    folder: str  # module in weft; its kernel.py has the TILES
    key: tuple[str, int, int]  # in TILES
    backward: bool  # whether it runs in the backward
    lengths: tuple[int, ...]
    tiles: tuple[Tiles, ...]
    options: Callable[[int], dict[str, Any]] = lambda L: {}


def square_root(L: int) -> dict[str, Any]:
    return {"block_size": default_block(L, None)}


def four_windows(L: int) -> dict[str, Any]:
    return {"windows": 4}


def strided(L: int) -> dict[str, Any]:
    return {"pattern": "strided"}


LONG = (16384, 65536)

# For the gradients of a window's sources: few, and many.
OF_A_WINDOW = (
    Tiles(32, 64, 4, 3),
    Tiles(64, 64, 4, 3),
    Tiles(32, 128, 8, 3, 128),
    Tiles(32, 128, 8, 2, 128),
    Tiles(64, 128, 8, 2, 128),
    Tiles(64, 128, 8, 3, 128),
    Tiles(32, 64, 4, 3, 128),
    Tiles(32, 64, 4, 4),
    Tiles(64, 64, 4, 3, 160),
    Tiles(64, 64, 4, 4, 160),
    Tiles(32, 128, 8, 4, 128),
    Tiles(64, 128, 8, 3),
)

TRIALS = [
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("summarise", 64, 2),
        False,
        LONG,
        (
            Tiles(32, 0, 4, 3),
            Tiles(32, 0, 4, 4),
            Tiles(16, 0, 2, 4),
            Tiles(64, 0, 8, 3),
            Tiles(32, 0, 4, 2),
            Tiles(32, 0, 2, 3),
            Tiles(16, 0, 4, 4),
            Tiles(16, 0, 1, 4),
        ),
        square_root,
    ),
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("summarise and keep", 64, 2),
        True,
        LONG,
        (
            Tiles(32, 0, 4, 3),
            Tiles(32, 0, 4, 4),
            Tiles(16, 0, 2, 4),
            Tiles(64, 0, 8, 3),
            Tiles(16, 0, 4, 4),
            Tiles(32, 0, 8, 3),
            Tiles(32, 0, 4, 3, 128),
        ),
        square_root,
    ),
    Trial(
        "combiner-fixed",
        "attention.combiner.fixed",
        ("attend", 64, 2),
        False,
        LONG,
        (
            Tiles(64, 32, 4, 3),
            Tiles(64, 32, 4, 2),
            Tiles(64, 32, 4, 4),
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 3),
            Tiles(128, 64, 8, 3),
            Tiles(128, 32, 8, 3),
            Tiles(64, 32, 4, 3, 80),
            Tiles(64, 64, 4, 2, 96),
        ),
        square_root,
    ),
    Trial(
        "subsampled",
        "attention.subsampled",
        ("attend", 64, 2),
        False,
        (16384,),
        (
            Tiles(128, 64, 8, 3, 128),
            Tiles(128, 64, 8, 4, 128),
            Tiles(128, 64, 4, 3),
            Tiles(64, 64, 4, 3, 128),
            Tiles(64, 64, 4, 4, 128),
            Tiles(128, 128, 8, 2, 128),
            Tiles(128, 32, 8, 4, 128),
            Tiles(64, 64, 4, 3, 168),
        ),
        four_windows,
    ),
    Trial(
        "subsampled",
        "attention.subsampled",
        ("query gradients", 64, 2),
        True,
        (16384,),
        (
            Tiles(128, 64, 8, 3, 128),
            Tiles(128, 64, 8, 4, 128),
            Tiles(64, 64, 4, 3, 128),
            Tiles(128, 32, 8, 4, 128),
            Tiles(128, 64, 8, 2, 128),
            Tiles(64, 64, 4, 3, 168),
        ),
        four_windows,
    ),
    Trial(
        "subsampled",
        "attention.subsampled",
        ("key gradients", 64, 2),
        True,
        (16384,),
        OF_A_WINDOW,
        four_windows,
    ),
    Trial(
        "subsampled",
        "attention.subsampled",
        ("key gradients of many", 64, 2),
        True,
        (65536,),
        OF_A_WINDOW,
        four_windows,
    ),
    Trial(
        "linear",
        "kernels.linear_scan",
        ("states", 64, 2),
        True,
        (16384,),
        (Tiles(32, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 32, 4, 4), Tiles(128, 128, 4, 1), Tiles(64, 64, 8, 2)),
    ),
    Trial(
        "linear",
        "kernels.linear_scan",
        ("outputs", 64, 2),
        False,
        (16384,),
        (
            Tiles(64, 32, 4, 3),
            Tiles(64, 32, 4, 2),
            Tiles(64, 64, 4, 2),
            Tiles(128, 64, 8, 2),
            Tiles(64, 64, 8, 2),
            Tiles(128, 32, 8, 3),
        ),
    ),
    Trial(
        "linear",
        "kernels.linear_scan",
        ("query gradients", 64, 2),
        True,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 3), Tiles(128, 64, 8, 2)),
    ),
    Trial(
        "linear",
        "kernels.linear_scan",
        ("key gradients", 64, 2),
        True,
        (16384,),
        (
            Tiles(32, 64, 4, 2),
            Tiles(32, 64, 4, 3),
            Tiles(16, 64, 4, 3),
            Tiles(32, 64, 4, 1),
            Tiles(64, 64, 8, 2),
            Tiles(64, 128, 8, 2),
        ),
    ),
    Trial(
        "performer",
        "attention.performer",
        ("features", 64, 2),
        False,
        LONG,
        (
            Tiles(64, 32, 4, 3),
            Tiles(64, 32, 4, 2),
            Tiles(64, 64, 4, 3),
            Tiles(64, 16, 4, 3),
            Tiles(128, 32, 8, 3),
            Tiles(128, 32, 4, 3),
            Tiles(128, 64, 8, 3),
            Tiles(128, 16, 4, 3),
        ),
    ),
    Trial(
        "performer",
        "attention.performer",
        ("feature gradients", 64, 2),
        True,
        LONG,
        (
            Tiles(64, 32, 4, 3),
            Tiles(64, 32, 4, 2),
            Tiles(64, 32, 4, 4),
            Tiles(64, 16, 4, 3),
            Tiles(64, 64, 4, 2),
            Tiles(128, 32, 8, 3),
            Tiles(128, 64, 8, 2),
        ),
    ),
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide states", 64, 2),
        True,
        (16384,),
        (
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 2, 128),
            Tiles(128, 128, 4, 1),
            Tiles(32, 32, 4, 3),
            Tiles(64, 64, 8, 2),
        ),
    ),
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide outputs", 64, 2),
        False,
        LONG,
        (
            Tiles(64, 32, 4, 3),
            Tiles(64, 64, 4, 2),
            Tiles(64, 32, 4, 2),
            Tiles(64, 64, 4, 3),
            Tiles(64, 32, 4, 3, 128),
            Tiles(128, 32, 8, 3),
            Tiles(128, 64, 8, 2),
            Tiles(64, 16, 4, 4),
        ),
    ),
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide query gradients", 64, 2),
        True,
        LONG,
        (
            Tiles(64, 32, 4, 3),
            Tiles(64, 16, 4, 3),
            Tiles(64, 32, 4, 2),
            Tiles(64, 64, 4, 2),
            Tiles(32, 32, 4, 3),
            Tiles(64, 32, 8, 3),
            Tiles(128, 32, 8, 3),
        ),
    ),
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide key gradients", 64, 2),
        True,
        LONG,
        (
            Tiles(64, 32, 4, 3, 168),
            Tiles(64, 32, 4, 2, 168),
            Tiles(64, 16, 4, 3, 168),
            Tiles(64, 32, 4, 3),
            Tiles(64, 64, 4, 2),
            Tiles(64, 32, 8, 3),
            Tiles(32, 32, 4, 3),
        ),
    ),
    Trial(
        "performer",
        "kernels.linear_scan",
        ("wide value gradients", 64, 2),
        True,
        LONG,
        (
            Tiles(64, 32, 4, 2),
            Tiles(64, 32, 4, 3),
            Tiles(64, 32, 4, 3, 168),
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 2, 168),
            Tiles(64, 32, 8, 3),
            Tiles(128, 32, 8, 2),
        ),
    ),
    Trial(
        "longformer",
        "kernels.band",
        ("attend", 64, 2),
        False,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
    ),
    Trial(
        "longformer",
        "kernels.band",
        ("query gradients", 64, 2),
        True,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 3)),
    ),
    Trial(
        "longformer",
        "kernels.band",
        ("key gradients", 64, 2),
        True,
        (16384,),
        (Tiles(32, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 3, 128)),
    ),
    Trial(
        "sparse",
        "kernels.band",
        ("attend", 64, 2),
        False,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3)),
    ),
    Trial(
        "sparse",
        "kernels.band",
        ("extra gradients", 64, 2),
        True,
        (16384,),
        (Tiles(32, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 128, 8, 2)),
    ),
    Trial(
        "sparse",
        "kernels.lines",
        ("attend", 64, 2),
        False,
        LONG,
        (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 3), Tiles(64, 32, 4, 2)),
        strided,
    ),
    Trial(
        "sparse",
        "kernels.lines",
        ("query gradients", 64, 2),
        True,
        LONG,
        (Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 3)),
        strided,
    ),
    Trial(
        "sparse",
        "kernels.lines",
        ("key gradients", 64, 2),
        True,
        LONG,
        (
            Tiles(32, 64, 4, 3, 168),
            Tiles(32, 64, 4, 3),
            Tiles(64, 64, 4, 2),
            Tiles(32, 64, 4, 2),
            Tiles(32, 64, 4, 3, 128),
        ),
        strided,
    ),
    Trial(
        "combiner-axial",
        "attention.combiner.axial",
        ("summarise", 64, 2),
        False,
        (16384,),
        (
            Tiles(64, 32, 4, 3, 128),
            Tiles(64, 32, 4, 3),
            Tiles(64, 64, 4, 2),
            Tiles(128, 32, 8, 3),
            Tiles(128, 64, 8, 2),
        ),
    ),
    Trial(
        "combiner-axial",
        "attention.combiner.axial",
        ("row query gradients", 64, 2),
        True,
        (16384,),
        (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 2)),
    ),
    Trial(
        "combiner-axial",
        "attention.combiner.axial",
        ("row key gradients", 64, 2),
        True,
        (16384,),
        (Tiles(32, 64, 4, 2, 168), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3), Tiles(64, 64, 8, 2)),
    ),
    Trial(
        "combiner-axial",
        "kernels.lines",
        ("attend", 64, 2),
        False,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 3)),
    ),
    Trial(
        "combiner-axial",
        "kernels.lines",
        ("key gradients", 64, 2),
        True,
        (16384,),
        (Tiles(32, 64, 4, 3, 168), Tiles(32, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
    ),
]
