"""Digests of arrays: 64-bit sums that are the same however an array lies on devices.

The digest of an array is the sum, modulo 2**64, of its bits in words of at most 32 bits, each
multiplied by a weight. The weight of a word is the product of one odd pseudo-random number for each
index. So every process adds up the shards that it has, and the sums of all processes add up to the
digest of the array, whatever its sharding is now and was then. The change of one word always
changes the digest, as an odd number is invertible modulo 2**64; other changes go unnoticed with a
probability of about 2**-32 at most. This finds damage. It is no protection against forgery.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bridge._randomness.typed_keys import is_key, to_bits

from ._processes import is_first

_BLOCK = 4096
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def text_of(digest: int) -> str:
    """A digest as the file has it."""
    return f"{digest:016x}"


def own_part(value: Any) -> int:
    """What this process adds to the digest of an array, modulo 2**64.

    Args:
      value: an array; of one that each process has for itself, the first one's counts.
    """
    value = to_bits(value) if is_key(value) else value
    if not isinstance(value, jax.Array) or len(value.sharding.device_set) == 1:
        return whole(value) if is_first() else 0
    if value.is_fully_addressable and not is_first():
        return 0
    total = 0
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            starts = [
                index.indices(size)[0] for index, size in zip(shard.index, value.shape, strict=True)
            ]
            total += _sum(np.asarray(shard.data), starts)
    return total % 2**64


def whole(value: Any) -> int:
    """The digest of an array that this process has whole."""
    array = np.asarray(value)
    # A checkpoint stores values in the machine's byte order.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return _sum(array, [0] * array.ndim)


def _sum(block: np.ndarray, starts: Sequence[int]) -> int:
    """The part of a digest that a block of an array has.

    Args:
      block: the block.
      starts: the indices of its first element in the array.
    """
    words = _words(block)
    starts = [*starts, *[0] * (words.ndim - len(starts))]
    # NumPy warns when a sum without axes passes 2**64.
    with np.errstate(over="ignore"):
        for axis in reversed(range(words.ndim)):
            words = _contracted(words, axis, starts[axis])
    return int(words)


def _words(block: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers; what is wider has several along a last axis."""
    block = np.ascontiguousarray(block).reshape(block.shape)
    size = block.dtype.itemsize
    if size in _UNSIGNED:
        return block.view(_UNSIGNED[size])
    unsigned = np.uint32 if size % 4 == 0 else np.uint8
    return block.reshape(*block.shape, 1).view(unsigned)


def _contracted(words: np.ndarray, axis: int, start: int) -> np.ndarray:
    """Sums along the last axis, with the weights of its indices."""
    *others, size = words.shape
    if start % _BLOCK + size <= _BLOCK:
        return np.einsum("...j,j->...", words, _weights(axis, start, start + size))
    # A long axis is one of blocks and one within a block, so that few weights are made.
    head = min(-start % _BLOCK, size)
    blocks = (size - head) // _BLOCK
    full = words[..., head : head + blocks * _BLOCK].reshape(*others, blocks, _BLOCK)
    within = np.einsum("...j,j->...", full, _numbers(axis, 0)[:_BLOCK])
    first = (start + head) // _BLOCK
    total = np.einsum("...j,j->...", within, _numbers(axis, 1, first + blocks)[first:])
    for begin, end in ((0, head), (head + blocks * _BLOCK, size)):
        if begin < end:
            weights = _weights(axis, start + begin, start + end)
            total = total + np.einsum("...j,j->...", words[..., begin:end], weights)
    return total


def _weights(axis: int, start: int, end: int) -> np.ndarray:
    """The weights of indices that lie in one block."""
    block, begin = divmod(start, _BLOCK)
    return _numbers(axis, 0)[begin : begin + end - start] * _numbers(axis, 1, block + 1)[block]


def _numbers(axis: int, level: int, count: int = _BLOCK) -> np.ndarray:
    """At least `count` odd pseudo-random numbers for an axis, all those that there are.

    Args:
      axis: the axis.
      level: 0 for indices within a block, 1 for blocks.
      count: how many are needed.
    """
    found = _made(axis, level, max(count - 1, _BLOCK - 1).bit_length())
    return found if level == 0 else found[:count]


@functools.lru_cache(maxsize=64)
def _made(axis: int, level: int, log_count: int) -> np.ndarray:
    """Steele, Lea and Flood's splitmix64, from another place for each axis and level."""
    with np.errstate(over="ignore"):
        place = np.uint64((2 * axis + level) << 40) + np.arange(1 << log_count, dtype=np.uint64)
        mixed = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
