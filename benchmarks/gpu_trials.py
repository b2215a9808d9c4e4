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
    tiles: str  # queries/keys/warps/stages, and /registers if they are limited
    options: Callable[[int], dict[str, Any]] = lambda L: {}

    def choices(self) -> list[Tiles]:
        return [Tiles(*map(int, word.split("/"))) for word in self.tiles.split()]


def square_root(L: int) -> dict[str, Any]:
    return {"block_size": default_block(L, None)}


def four_windows(L: int) -> dict[str, Any]:
    return {"windows": 4}


def strided(L: int) -> dict[str, Any]:
    return {"pattern": "strided"}


LONG = (16384, 65536)
TRIALS = [
    Trial(
        "combiner-fixed", "attention.combiner.fixed", ("summarise", 64, 2), False, LONG,
        "32/0/4/3 32/0/4/4 16/0/2/4 64/0/8/3 32/0/4/2 32/0/2/3 16/0/4/4 16/0/1/4", square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed", "attention.combiner.fixed", ("summarise and keep", 64, 2), True, LONG,
        "32/0/4/3 32/0/4/4 16/0/2/4 64/0/8/3 16/0/4/4 32/0/8/3 32/0/4/3/128", square_root,
    ),  # fmt: skip
    Trial(
        "combiner-fixed", "attention.combiner.fixed", ("attend", 64, 2), False, LONG,
        "64/32/4/3 64/32/4/2 64/32/4/4 64/64/4/2 64/64/4/3 128/64/8/3 128/32/8/3 64/32/4/3/80 64/64/4/2/96",
        square_root,
    ),  # fmt: skip
    Trial(
        "subsampled", "attention.subsampled", ("attend", 64, 2), False, (16384,),
        "128/64/8/3/128 128/64/8/4/128 128/64/4/3 64/64/4/3/128 64/64/4/4/128 128/128/8/2/128 128/32/8/4/128 "
        "64/64/4/3/168", four_windows,
    ),  # fmt: skip
    Trial(
        "subsampled", "attention.subsampled", ("query gradients", 64, 2), True, (16384,),
        "128/64/8/3/128 128/64/8/4/128 64/64/4/3/128 128/32/8/4/128 128/64/8/2/128 64/64/4/3/168", four_windows,
    ),  # fmt: skip
    Trial(
        "subsampled", "attention.subsampled", ("key gradients", 64, 2), True, (16384,),
        "32/64/4/3 64/64/4/3 32/128/8/3/128 32/128/8/2/128 64/128/8/2/128 64/128/8/3/128 32/64/4/3/128 32/64/4/4 "
        "64/64/4/3/160 64/64/4/4/160 32/128/8/4/128 64/128/8/3", four_windows,
    ),  # fmt: skip
    Trial(
        "subsampled", "attention.subsampled", ("key gradients of many", 64, 2), True, (65536,),
        "32/64/4/3 64/64/4/3 32/128/8/3/128 32/128/8/2/128 64/128/8/2/128 64/128/8/3/128 32/64/4/3/128 32/64/4/4 "
        "64/64/4/3/160 64/64/4/4/160 32/128/8/4/128 64/128/8/3", four_windows,
    ),  # fmt: skip
    Trial(
        "linear", "kernels.linear_scan", ("states", 64, 2), True, (16384,),
        "32/32/4/3 64/64/4/2 32/32/4/4 128/128/4/1 64/64/8/2",
    ),  # fmt: skip
    Trial(
        "linear", "kernels.linear_scan", ("outputs", 64, 2), False, (16384,),
        "64/32/4/3 64/32/4/2 64/64/4/2 128/64/8/2 64/64/8/2 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "linear", "kernels.linear_scan", ("query gradients", 64, 2), True, (16384,),
        "64/32/4/3 64/32/4/2 64/64/4/2 128/32/8/3 128/64/8/2",
    ),  # fmt: skip
    Trial(
        "linear", "kernels.linear_scan", ("key gradients", 64, 2), True, (16384,),
        "32/64/4/2 32/64/4/3 16/64/4/3 32/64/4/1 64/64/8/2 64/128/8/2",
    ),  # fmt: skip
    Trial(
        "performer", "attention.performer", ("features", 64, 2), False, LONG,
        "64/32/4/3 64/32/4/2 64/64/4/3 64/16/4/3 128/32/8/3 128/32/4/3 128/64/8/3 128/16/4/3",
    ),  # fmt: skip
    Trial(
        "performer", "attention.performer", ("feature gradients", 64, 2), True, LONG,
        "64/32/4/3 64/32/4/2 64/32/4/4 64/16/4/3 64/64/4/2 128/32/8/3 128/64/8/2",
    ),  # fmt: skip
    Trial(
        "performer", "kernels.linear_scan", ("wide states", 64, 2), True, (16384,),
        "64/64/4/2 64/64/4/2/128 128/128/4/1 32/32/4/3 64/64/8/2",
    ),  # fmt: skip
    Trial(
        "performer", "kernels.linear_scan", ("wide outputs", 64, 2), False, LONG,
        "64/32/4/3 64/64/4/2 64/32/4/2 64/64/4/3 64/32/4/3/128 128/32/8/3 128/64/8/2 64/16/4/4",
    ),  # fmt: skip
    Trial(
        "performer", "kernels.linear_scan", ("wide query gradients", 64, 2), True, LONG,
        "64/32/4/3 64/16/4/3 64/32/4/2 64/64/4/2 32/32/4/3 64/32/8/3 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "performer", "kernels.linear_scan", ("wide key gradients", 64, 2), True, LONG,
        "64/32/4/3/168 64/32/4/2/168 64/16/4/3/168 64/32/4/3 64/64/4/2 64/32/8/3 32/32/4/3",
    ),  # fmt: skip
    Trial(
        "performer", "kernels.linear_scan", ("wide value gradients", 64, 2), True, LONG,
        "64/32/4/2 64/32/4/3 64/32/4/3/168 64/64/4/2 64/64/4/2/168 64/32/8/3 128/32/8/2",
    ),  # fmt: skip
    Trial(
        "longformer", "kernels.band", ("attend", 64, 2), False, (16384,),
        "64/32/4/3 64/64/4/3 64/64/4/2 128/64/8/3 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "longformer", "kernels.band", ("query gradients", 64, 2), True, (16384,),
        "64/32/4/3 64/32/4/2 64/64/4/2 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "longformer", "kernels.band", ("key gradients", 64, 2), True, (16384,),
        "32/64/4/3 32/64/4/2 64/64/4/2 32/128/8/2 32/64/4/3/128",
    ),  # fmt: skip
    Trial(
        "sparse", "kernels.band", ("attend", 64, 2), False, (16384,),
        "64/32/4/3 64/64/4/3 64/64/4/2 128/64/8/3",
    ),  # fmt: skip
    Trial(
        "sparse", "kernels.band", ("extra gradients", 64, 2), True, (16384,),
        "32/64/4/3 32/64/4/2 64/64/4/2 32/128/8/2",
    ),  # fmt: skip
    Trial(
        "sparse", "kernels.lines", ("attend", 64, 2), False, LONG,
        "64/32/4/3 64/64/4/2 64/64/4/3 128/32/8/3 64/32/4/2", strided,
    ),  # fmt: skip
    Trial(
        "sparse", "kernels.lines", ("query gradients", 64, 2), True, LONG,
        "64/32/4/3 64/32/4/2 64/64/4/2 128/32/8/3", strided,
    ),  # fmt: skip
    Trial(
        "sparse", "kernels.lines", ("key gradients", 64, 2), True, LONG,
        "32/64/4/3/168 32/64/4/3 64/64/4/2 32/64/4/2 32/64/4/3/128", strided,
    ),  # fmt: skip
    Trial(
        "combiner-axial", "attention.combiner.axial", ("summarise", 64, 2), False, (16384,),
        "64/32/4/3/128 64/32/4/3 64/64/4/2 128/32/8/3 128/64/8/2",
    ),  # fmt: skip
    Trial(
        "combiner-axial", "attention.combiner.axial", ("row query gradients", 64, 2), True, (16384,),
        "64/32/4/2 64/32/4/3 64/64/4/2 128/32/8/2",
    ),  # fmt: skip
    Trial(
        "combiner-axial", "attention.combiner.axial", ("row key gradients", 64, 2), True, (16384,),
        "32/64/4/2/168 32/64/4/2 64/64/4/2 32/64/4/3 64/64/8/2",
    ),  # fmt: skip
    Trial(
        "combiner-axial", "kernels.lines", ("attend", 64, 2), False, (16384,),
        "64/32/4/3 64/64/4/2 64/64/4/3 128/32/8/3",
    ),  # fmt: skip
    Trial(
        "combiner-axial", "kernels.lines", ("key gradients", 64, 2), True, (16384,),
        "32/64/4/3/168 32/64/4/3 64/64/4/2 32/64/4/2",
    ),  # fmt: skip
]
