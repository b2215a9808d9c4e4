"""The tile sizes worth trying, by kernel. What won is in the TILES table of each kernel's module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.core.partitions import default_block
from weft.core.tiles import Tiles


@dataclass(frozen=True, eq=False)
class Trial:
    mechanism: str
    module: str  # of weft.kernels, which holds the TILES
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
        "combiner_fixed",
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
        "combiner_fixed",
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
        "combiner_fixed",
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
        "subsampled",
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
        "subsampled",
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
        "subsampled",
        ("key gradients", 64, 2),
        True,
        (16384,),
        OF_A_WINDOW,
        four_windows,
    ),
    Trial(
        "subsampled",
        "subsampled",
        ("key gradients of many", 64, 2),
        True,
        (65536,),
        OF_A_WINDOW,
        four_windows,
    ),
    Trial(
        "linear",
        "linear_scan",
        ("states", 64, 2),
        True,
        (16384,),
        (Tiles(32, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 32, 4, 4), Tiles(128, 128, 4, 1), Tiles(64, 64, 8, 2)),
    ),
    Trial(
        "linear",
        "linear_scan",
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
        "linear_scan",
        ("query gradients", 64, 2),
        True,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 3), Tiles(128, 64, 8, 2)),
    ),
    Trial(
        "linear",
        "linear_scan",
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
        "random_features",
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
        "random_features",
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
        "linear_scan",
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
        "linear_scan",
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
        "linear_scan",
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
        "linear_scan",
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
        "linear_scan",
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
        "band",
        ("attend", 64, 2),
        False,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
    ),
    Trial(
        "longformer",
        "band",
        ("query gradients", 64, 2),
        True,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 3)),
    ),
    Trial(
        "longformer",
        "band",
        ("key gradients", 64, 2),
        True,
        (16384,),
        (Tiles(32, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 3, 128)),
    ),
    Trial(
        "sparse",
        "band",
        ("attend", 64, 2),
        False,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3)),
    ),
    Trial(
        "sparse",
        "band",
        ("extra gradients", 64, 2),
        True,
        (16384,),
        (Tiles(32, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 128, 8, 2)),
    ),
    Trial(
        "sparse",
        "lines",
        ("attend", 64, 2),
        False,
        LONG,
        (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 3), Tiles(64, 32, 4, 2)),
        strided,
    ),
    Trial(
        "sparse",
        "lines",
        ("query gradients", 64, 2),
        True,
        LONG,
        (Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 3)),
        strided,
    ),
    Trial(
        "sparse",
        "lines",
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
        "combiner_axial",
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
        "combiner_axial",
        ("row query gradients", 64, 2),
        True,
        (16384,),
        (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 2)),
    ),
    Trial(
        "combiner-axial",
        "combiner_axial",
        ("row key gradients", 64, 2),
        True,
        (16384,),
        (Tiles(32, 64, 4, 2, 168), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3), Tiles(64, 64, 8, 2)),
    ),
    Trial(
        "combiner-axial",
        "lines",
        ("attend", 64, 2),
        False,
        (16384,),
        (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 3)),
    ),
    Trial(
        "combiner-axial",
        "lines",
        ("key gradients", 64, 2),
        True,
        (16384,),
        (Tiles(32, 64, 4, 3, 168), Tiles(32, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
    ),
]
