"""The counter-based random numbers of the kernels, in NumPy."""

from __future__ import annotations

import numpy as np


def mixed(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x).astype(np.uint32)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def words(key: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)


def random_words(position: np.ndarray, low: np.uint32, high: np.uint32) -> np.ndarray:
    return mixed(mixed(np.asarray(position).astype(np.uint32) ^ low) ^ high)


def normals(position: np.ndarray, low: np.uint32, high: np.uint32) -> np.ndarray:
    first, second = (random_words(2 * position + i, low, high) >> np.uint32(8) for i in (0, 1))
    radius = np.sqrt(-2 * np.log((first.astype(np.float64) + 0.5) / 2**24))
    return radius * np.cos(second.astype(np.float64) * (2 * np.pi / 2**24))
