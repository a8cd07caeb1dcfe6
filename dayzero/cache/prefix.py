"""Keys of pages, which pages are cached under them, and the longest prefix that every group can restore. Paper.

A page's key is a hash over its parent's key, so equal keys mean equal tokens from the first one on:
sha256(parent, token ids, for each image that overlaps the page: content hash, offset to the page, number of tokens).
The first parent holds the fingerprint (plan, preprocessing, position rule) and the salt.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dayzero.cache.layout import Group

Media = tuple[bytes, int, int]  # (content hash, position of its first placeholder token, number of tokens)

MAX_REMEMBERED = 1 << 14  # evicted keys: what lets `why` tell an evicted page from one that was never computed


def root_key(fingerprint: bytes, salt: str | None, page_tokens: int) -> bytes:
    """The parent of first pages: nothing is shared between different fingerprints, salts or page sizes."""
    salted = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(struct.pack("<qq", page_tokens, len(fingerprint)) + fingerprint + salted).digest()


class Chain:
    """Keys of one sequence's pages, in order; grows as tokens become known."""

    __slots__ = ("_media", "_page", "_root", "keys")

    def __init__(self, root: bytes, page_tokens: int, media: Iterable[Media] = ()) -> None:
        self.keys: list[bytes] = []
        self._root, self._page = root, page_tokens
        self._media: dict[int, bytes] = {}
        for content, first, count in sorted(media, key=lambda item: item[1]):
            assert first >= 0 and count > 0, (first, count)
            for page in range(first // page_tokens, (first + count - 1) // page_tokens + 1):
                here = struct.pack("<qqq", len(content), first - page * page_tokens, count) + content
                self._media[page] = self._media.get(page, b"") + here

    def grow(self, tokens: Sequence[int], num_pages: int) -> None:
        """Keys of the first ``num_pages`` pages of tokens; those that are known already stay."""
        begin, size = len(self.keys), self._page
        if num_pages <= begin:
            return
        ids = array("q", tokens[begin * size : num_pages * size])
        assert len(ids) == (num_pages - begin) * size, "a key needs all tokens of its page"
        raw, width = ids.tobytes(), size * ids.itemsize
        parent = self.keys[-1] if begin else self._root
        for i in range(num_pages - begin):
            extra = self._media.get(begin + i, b"")
            parent = hashlib.sha256(parent + raw[i * width : (i + 1) * width] + extra).digest()
            self.keys.append(parent)


class Remembered:
    """The newest keys that were put in, up to a number."""

    __slots__ = ("_keys", "_limit")

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._limit = limit

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def clear(self) -> None:
        self._keys.clear()


class PageIndex:
    """Published pages of one token group: key -> block, and back."""

    __slots__ = ("_key_of", "blocks", "gone", "group", "number")

    def __init__(self, group: Group, number: int) -> None:
        self.group, self.number = group, number  # number: in the pool
        self.blocks: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.gone = Remembered()

    def put(self, key: bytes, block: int) -> bool:
        """False: another block has the key already, and nothing is done."""
        if key in self.blocks:
            return False
        self.blocks[key], self._key_of[block] = block, key
        return True

    def remove(self, block: int, *, remember: bool = True) -> None:
        key = self._key_of.pop(block)
        del self.blocks[key]
        if remember:
            self.gone.add(key)

    def known(self) -> set[int]:
        """All published blocks. Raises AssertionError when a block has two keys or a key two blocks."""
        assert {block: key for key, block in self.blocks.items()} == self._key_of, self.group.name
        return set(self._key_of)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are cached without a gap."""
        blocks = self.blocks
        return next((i for i, key in enumerate(keys) if key not in blocks), len(keys))

    def first_needed(self, num_pages: int) -> int:
        """First page that a sequence restored to ``num_pages`` pages needs of this group."""
        return min(self.group.first_page(num_pages * self.group.page_tokens), num_pages)

    def restorable(self, keys: Sequence[bytes], upto: int) -> list[bool]:
        """For n = 0 .. upto: whether all pages that a sequence restored to n pages needs are cached."""
        out, run = [True], 0
        for n in range(1, upto + 1):
            run = run + 1 if keys[n - 1] in self.blocks else 0
            out.append(run >= n - self.first_needed(n))
        return out


@dataclass(frozen=True, slots=True)
class Found:
    """pages: that can be restored. matched: pages whose tokens are known to the cache, restorable or not. why: what
    limited ``pages``; empty when nothing did."""

    pages: int
    matched: int
    why: str


class SnapshotKeys(Protocol):
    """What a search needs to know of snapshots. held: keys that can be restored. gone: keys of evicted ones.
    why_none: why there are never any; empty when there may be."""

    @property
    def held(self) -> Container[bytes]: ...
    @property
    def gone(self) -> Remembered: ...
    @property
    def why_none(self) -> str: ...


class PrefixSearch:
    """Finds the longest prefix that every group can restore."""

    def __init__(self, indices: Sequence[PageIndex], page_tokens: int) -> None:
        self._whole = [index for index in indices if index.group.window is None]
        self._windows = [index for index in indices if index.group.window is not None]
        self._page = page_tokens
        self.seen = Remembered()  # retired keys, where no group keeps all pages: tells where sequences branch

    def retired(self, keys: Iterable[bytes]) -> None:
        for key in () if self._whole else keys:
            self.seen.add(key)

    def find(self, keys: Sequence[bytes], snapshots: SnapshotKeys | None) -> Found:
        """keys: of the pages that may be restored at most. snapshots: None when there are no states."""
        matched = min((index.leading(keys) for index in self._whole), default=len(keys))
        if not self._whole:
            matched = next((i for i, key in enumerate(keys) if key not in self.seen), len(keys))
        windows = [index.restorable(keys, matched) for index in self._windows]

        def fits(n: int) -> bool:
            return n == 0 or (
                (snapshots is None or keys[n - 1] in snapshots.held) and all(window[n] for window in windows)
            )

        pages = next(n for n in range(matched, -1, -1) if fits(n))
        if pages == len(keys):
            return Found(pages, matched, "")
        if pages == matched:
            return Found(pages, matched, self._why_no_page(keys, matched))
        return Found(pages, matched, self._why_not_restored(keys, matched, pages, snapshots))

    def _why_no_page(self, keys: Sequence[bytes], page: int) -> str:
        tokens = f"tokens {page * self._page} to {(page + 1) * self._page - 1}"
        for index in self._whole:
            if keys[page] in index.gone:
                return f"The page of {tokens} was evicted from group {index.group.name}."
        if page == 0:
            return "No cached sequence begins with these tokens under this salt."
        return f"No cached sequence goes on with {tokens}."

    def _why_not_restored(self, keys: Sequence[bytes], matched: int, pages: int, snapshots: SnapshotKeys | None) -> str:
        """What is missing at the end of the match, and what was restored instead."""
        end = matched * self._page
        key, missing = keys[matched - 1], []
        if snapshots is not None and key not in snapshots.held:
            what = "its snapshot was evicted" if key in snapshots.gone else "no snapshot was taken there"
            missing.append(f"there is no state to go on from at {end}: {snapshots.why_none or what}")
        for index in self._windows:
            lost = [k for k in keys[index.first_needed(matched) : matched] if k not in index.blocks]
            if lost:
                how = "were evicted" if any(k in index.gone for k in lost) else "are not cached"
                missing.append(f"pages of group {index.group.name} in the window before {end} {how}")
        return f"The first {end} tokens match, but {' and '.join(missing)}; {pages * self._page} restored."
