"""Digests of arrays: 64-bit sums that are the same however an array lies on devices.

The digest of an array is the sum, modulo 2**64, of its bits in words of at most 32 bits, each
multiplied by a weight. The weight of a word is the product of one odd pseudo-random number for each
index. So every process adds up the shards that it has, and the sums of all processes add up to the
digest of the array, whatever its sharding is now and was then. The change of one word always
changes the digest, as an odd number is invertible modulo 2**64; other changes go unnoticed with a
probability of about 2**-32 at most. This finds damage. It is not protection against forgery.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bridge._randomness.typed_keys import is_key, to_bits

_BLOCK = 4096
# How many weights are made at once.
_PIECE = 16 * _BLOCK
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def texts_of(parts: Sequence[int]) -> list[str]:
    """The digests of arrays as the file has them, the parts of all processes added up."""
    sums = np.asarray(parts, np.uint64)
    if jax.process_count() > 1 and sums.size:
        # JAX has no 64-bit integers by default.
        gathered = multihost_utils.process_allgather(sums.view(np.uint32))
        sums = np.ascontiguousarray(gathered).view(np.uint64).sum(axis=0, dtype=np.uint64)
    return [f"{digest:016x}" for digest in sums.tolist()]


def own_part(value: Any) -> int:
    """What this process adds to the digest of an array, modulo 2**64.

    Of an array that each process has for itself, the first one's counts.
    """
    value = to_bits(value) if is_key(value) else value
    is_shared = isinstance(value, jax.Array) and not value.is_fully_addressable
    if not is_shared and jax.process_index() > 0:
        return 0
    if not isinstance(value, jax.Array) or len(value.sharding.device_set) == 1:
        return whole(value)
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

    `starts` has the indices of the first element of the block in the array.
    """
    words = _words(block)
    starts = [*starts, *[0] * (words.ndim - len(starts))]
    # NumPy warns when a sum without axes passes 2**64.
    with np.errstate(over="ignore"):
        for axis in reversed(range(words.ndim)):
            start, end = starts[axis], starts[axis] + words.shape[axis]
            total = np.zeros(words.shape[:-1], np.uint64)
            for at in range(start, end, _PIECE):
                until = min(at + _PIECE, end)
                piece = words[..., at - start : until - start]
                total = total + np.einsum("...j,j->...", piece, _weights(axis, at, until))
            words = total
    return int(words)


def _words(block: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers; what is wider has several along a last axis."""
    block = np.ascontiguousarray(block).reshape(block.shape)
    size = block.dtype.itemsize
    if size in _UNSIGNED:
        return block.view(_UNSIGNED[size])
    unsigned = np.uint32 if size % 4 == 0 else np.uint8
    return block.reshape(*block.shape, 1).view(unsigned)


@functools.lru_cache(maxsize=64)
def _weights(axis: int, start: int, end: int) -> np.ndarray:
    """The weight of an index is the number of its block times that of its place in the block."""
    first = start // _BLOCK
    blocks, places = _numbers(2 * axis + 1, first, -(-end // _BLOCK)), _numbers(2 * axis, 0, _BLOCK)
    weights = np.multiply.outer(blocks, places).reshape(-1)
    return weights[start - first * _BLOCK : end - first * _BLOCK].copy()


def _numbers(row: int, start: int, end: int) -> np.ndarray:
    """Odd pseudo-random numbers: Steele, Lea and Flood's splitmix64, each row from its place."""
    place = np.uint64(row << 40) + np.arange(start, end, dtype=np.uint64)
    mixed = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
