"""Values by name, seed and place: entry [r, c] of a matrix is an entry of a table that a hash of (key, r, c) picks.

A value depends on nothing else, so any piece of a matrix is the slice of the whole, in any order, on any device: all
arithmetic is on whole numbers of 32 bits, and the table is made on the host. Two neighbouring columns share one hashed
word, of which each takes 16 bits. A table is a distribution as its 65,536 quantiles.

R rows, C columns, W words of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

QUANTILES = 1 << 16
# Of a chunk: what lies between two operations stays in the device's cache; a value does not depend on it.
CHUNK_WORDS = {"cpu": 1 << 17}
MOST_WORDS = 1 << 22  # elsewhere: 16 MiB
# Odd multipliers of full-avalanche hashes: of the finaliser of MurmurHash3, and the golden ratio's for counters.
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
STRIDE = 0x9E3779B9


class Key(NamedTuple):
    """Two words that a matrix's hashes start from."""

    first: int
    second: int


def key_of(name: str, seed: int) -> Key:
    """The key of what is called ``name`` under ``seed``."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return Key(*(int.from_bytes(digest[i : i + 4], "little") for i in (0, 4)))


@cache
def uniform() -> Tensor:
    """float64 [65536]: the middles of as many equal parts of (0, 1)."""
    return (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES


@cache
def normal() -> Tensor:
    """float64 [65536]: quantiles of N(0, 1), up to 4.2 on both sides; their mean square is 1 to 4 digits."""
    inverse = NormalDist().inv_cdf
    lower = torch.tensor([inverse(p) for p in uniform()[: QUANTILES // 2].tolist()], dtype=torch.float64)
    return torch.cat([lower, -lower.flip(0)])


def pick(table: Tensor, key: Key, rows: Tensor, columns: range) -> Tensor:
    """[R, C, *entry]: what the hashes of these rows and columns pick of ``table`` [65536, *entry], on its device.

    rows: numbers of rows, int64 [R], below 2^31, on the host. columns: a run of column numbers.
    """
    out = torch.empty(len(rows), len(columns), *table.shape[1:], dtype=table.dtype, device=table.device)
    num_words = (columns.stop + 1) // 2 - columns.start // 2
    most = CHUNK_WORDS.get(table.device.type, MOST_WORDS)
    step = max(1, most // max(1, num_words))
    for begin in range(0, len(rows), step):
        some = rows[begin : begin + step].to(table.device)
        into = out[begin : begin + step]
        for part, words in _runs(columns, most):
            index = _index(key, some, words)
            if len(columns) == 2 * len(words):
                torch.index_select(table, 0, index.view(-1), out=into.view(-1, *table.shape[1:]))
                continue
            skip = part.start - 2 * words.start
            picked = table.index_select(0, index.view(-1)).view(len(some), 2 * len(words), *table.shape[1:])
            into[:, part.start - columns.start : part.stop - columns.start] = picked[:, skip : skip + len(part)]
    return out


def _runs(columns: range, most_words: int) -> Iterator[tuple[range, range]]:
    """(columns, words that hold them), so that no run has more words than ``most_words``."""
    for start in range(columns.start, columns.stop, 2 * most_words):
        part = range(start, min(start + 2 * most_words, columns.stop))
        yield part, range(part.start // 2, (part.stop + 1) // 2)


def _index(key: Key, rows: Tensor, words: range) -> Tensor:
    """int32 [R, W, 2] in [0, 65536): two halves of each hashed word."""
    numbers = rows.int()
    # Two hashes of the row: with one, rows of a large matrix would repeat others, shifted by some columns.
    early_R1, late_R1 = (_hashed((numbers * _signed(STRIDE)).add_(_signed(word)))[:, None] for word in key)
    counters_W = torch.arange(words.start, words.stop, dtype=torch.int32, device=rows.device) * _signed(STRIDE)
    hashed_RW = _hashed(counters_W + early_R1, late_R1)
    zero = torch.tensor([1 << 15], dtype=torch.int32, device=rows.device)
    return hashed_RW.view(torch.int16).view(*hashed_RW.shape, 2) + zero


def _hashed(words: Tensor, late: Tensor | None = None) -> Tensor:
    """In place: each int32 word mixed with itself, and with ``late`` halfway. A bijection of words for any ``late``."""
    halves = words.view(torch.int16).view(*words.shape, 2)
    low, high = halves[..., 0], halves[..., 1]
    for number, multiplier in enumerate(MULTIPLIERS):
        low ^= high  # word ^= word >> 16, unsigned
        words *= _signed(multiplier)
        if late is not None and number == 0:
            words ^= late
    low ^= high
    return words


def _signed(word: int) -> int:
    """The int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def rows_of(shape: Sequence[int], box: Sequence[range]) -> Tensor:
    """int64 [R]: numbers of the rows of a tensor whose dimensions but the last are ``shape``, those in ``box``."""
    numbers = torch.zeros(1, dtype=torch.int64)
    for dim, run in enumerate(box):
        ahead = torch.arange(run.start, run.stop, dtype=torch.int64) * prod(shape[dim + 1 :])
        numbers = (numbers[:, None] + ahead).view(-1)
    return numbers
