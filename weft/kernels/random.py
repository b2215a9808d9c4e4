"""Triton helpers: counter-based random numbers. A number is a hash of a 64-bit key and a position, so it can be
computed again anywhere, in any order, and nothing is stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x):
    """A bijection of 32-bit words in which every bit of x affects every bit of the result: lowbias32 of
    https://nullprogram.com/blog/2018/07/31/."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_key(KEY):
    """The two words of a key, an int64 in memory."""
    key = tl.load(KEY)
    return (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def random_words(position, low, high):
    """32 random bits for each position, given the words of a key."""
    return mixed(mixed(position.to(tl.uint32) ^ low) ^ high)


@triton.jit
def normals(position, low, high):
    """Standard normal numbers, float32."""
    first, second = random_words(2 * position, low, high), random_words(2 * position + 1, low, high)
    radius = tl.sqrt(-2.0 * tl.log(((first >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216)))
    return radius * tl.cos((second >> 8).to(tl.float32) * (6.283185307179586 / 16777216))


@triton.jit
def row_words(KEY, bh, i, DROPOUT: tl.constexpr):
    """A random word for each query i of head bh, for `kept`. KEY is not read without DROPOUT."""
    word = i
    if DROPOUT:
        low, high = load_key(KEY)
        word = mixed(mixed(i.to(tl.uint32) ^ low) ^ high ^ mixed(bh.to(tl.uint32)))
    return word


@triton.jit
def kept(word, j, threshold, DROPOUT: tl.constexpr):
    """Dropout's factors of the probabilities of keys j, for queries with these words: 1/(1 − p), or 0 with probability
    p = threshold / 2**24."""
    factor = 1.0
    if DROPOUT:
        drawn = (mixed(word ^ (j.to(tl.uint32) * 0x9E3779B1)) >> 8).to(tl.int32)
        factor = tl.where(drawn >= threshold, 16777216.0 / (16777216 - threshold), 0.0)
    return factor
