"""Text to hashed n-grams, vectorised and bounded: only the ends of a text are tokenised.

A token is a run of letters, a run of digits (all numbers of a length are one token), or one CJK
character. So "翻译成" is a trigram and "sum it up" is too. Hashes are 64-bit polynomials over code
points, computed for all tokens at once from prefix sums; the n-gram behind a hash is recovered
from its place in the text when a person asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

EDGE_CHARS = 240
"""So many characters from each end of a text are read."""
MAX_NGRAM = 4

Scalar = TypeVar("Scalar", bound=np.generic)
U64 = NDArray[np.uint64]
Index = NDArray[np.intp]
_SPACE, _LETTER, _DIGIT, _CJK, _MARK = range(5)
_BASE = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64
_MIX = np.uint64(0xD6E8FEB86659FD93)
_STEP = np.uint64(0xA0761D6478BD642F)
_NUMBER = np.uint64(0xE7037ED1A0B428DB)
_HALF = np.uint64(32)


def _frozen(array: NDArray[Scalar]) -> NDArray[Scalar]:
    array.setflags(write=False)
    return array


def _classes() -> NDArray[np.uint8]:
    table = np.full(0x10000, _MARK, dtype=np.uint8)
    table[:0x21] = _SPACE
    table[[0x85, 0xA0, 0x3000, 0xFEFF]] = _SPACE
    table[0x2000:0x2010] = _SPACE
    for low, high in ((0x61, 0x7B), (0x41, 0x5B), (0xC0, 0x2000), (0x2C00, 0x2E00), (0xA640, 0xABC0)):
        table[low:high] = _LETTER
    table[ord("_")] = _LETTER
    table[[0xD7, 0xF7]] = _MARK
    table[0x30:0x3A] = _DIGIT
    for low, high in (
        (0x3041, 0x3100),
        (0x3400, 0x4DC0),
        (0x4E00, 0xA000),
        (0xAC00, 0xD7A4),
        (0xF900, 0xFB00),
    ):
        table[low:high] = _CJK
    return table


def _powers(base: int, count: int) -> U64:
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * base % 2**64)
    return np.array(powers, dtype=np.uint64)


_MAX_CHARS = 2 * EDGE_CHARS + 1
_CLASS = _frozen(_classes())
_POWER = _frozen(_powers(_BASE, _MAX_CHARS + 1))
_INVERSE = _frozen(_powers(pow(_BASE, -1, 2**64), _MAX_CHARS + 1))


def edges(text: str) -> str:
    """The ends of `text`, lower case: all of it where it is short. At most 481 characters."""
    if len(text) > 2 * EDGE_CHARS:
        text = text[:EDGE_CHARS] + "\n" + text[-EDGE_CHARS:]
    return text.lower()[:_MAX_CHARS]


def code_points(text: str) -> NDArray[np.uint32]:
    """UTF-32 code points, whatever the text holds (lone surrogates too)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def char_classes(points: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Class of every code point; those beyond the basic plane count as CJK (ideographs) or marks."""
    found: NDArray[np.uint8] = _CLASS.take(points, mode="clip")
    if len(points) and np.maximum.reduce(points) > 0xFFFF:  # without the detour of `max()`
        wide = points > 0xFFFF
        found[wide] = np.where(points[wide] >= 0x20000, _CJK, _MARK)
    return found


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one text of at most 481 characters (see `edges`)."""

    text: str
    points: NDArray[np.uint32]  # its code points
    starts: Index
    ends: Index
    hashes: U64

    def ngrams(self, longest: int) -> list[U64]:
        """Hashes of all runs of 1, 2, ... `longest` tokens, not yet mixed for more than one. For n tokens:
        [max(0, tokens - n + 1)]"""
        found = [self.hashes]
        for n in range(1, longest):
            rest = self.hashes[n:]
            found.append((found[-1][: len(rest)] * _STEP) ^ rest)  # order counts, and so does n
        return found

    def chars(self, n: int) -> U64:
        """Hashes of all runs of n characters, not yet mixed."""
        wide = self.points.astype(np.uint64)
        count = max(0, len(wide) - n + 1)
        found = wide[:count]
        for k in range(1, n):
            found = found * _STEP + wide[k : k + count]
        return found

    def name(self, position: int, n: int) -> str:
        """The text of the n-gram that begins with token `position`."""
        return self.text[self.starts[position] : self.ends[position + n - 1]]


def mix(hashes: U64) -> U64:
    """Spread entropy over all 64 bits."""
    found: U64 = hashes * _MIX
    found ^= found >> _HALF
    found *= _MIX
    return found


def tokenize(text: str) -> Tokens:
    """Tokens of a text as `edges` returns it."""
    points = code_points(text)
    kind = char_classes(points)
    is_alone = kind == _CJK  # a token by itself
    is_token = is_alone | (kind == _LETTER) | (kind == _DIGIT)
    parts = np.ones(len(kind) + 1, dtype=bool)  # between a character and the one before it
    np.not_equal(kind[1:], kind[:-1], out=parts[1:-1])
    starts = (is_token & (parts[:-1] | is_alone)).nonzero()[0]
    ends = (is_token & (parts[1:] | is_alone)).nonzero()[0] + 1
    sums = np.zeros(len(points) + 1, dtype=np.uint64)
    np.cumsum(points * _POWER[: len(points)], out=sums[1:])
    hashes = mix((sums[ends] - sums[starts]) * _INVERSE[starts])
    numbers = kind[starts] == _DIGIT
    if numbers.any():
        digits = np.minimum(ends[numbers] - starts[numbers], 4).astype(np.uint64)
        hashes[numbers] = mix(_NUMBER + digits)
    return Tokens(text, points, starts, ends, hashes)
