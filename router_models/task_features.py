"""A request as the task classifier sees it: shape, concepts by place, hashed n-grams by place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router_models.lexicon import Lexicon
from router_models.structure import closing, opening, structure
from router_models.text import MAX_NGRAM, U64, Tokens, edges, mix, tokenize
from router_models.types import RequestText

HASH_BITS = 15
NUM_BUCKETS = 1 << HASH_BITS
_START_TOKENS = 4
_CHAR_N = 4
_PLACES = ("start", "opening", "closing", "anywhere", "system")
_CONTEXTS = ("with code", "long", "in Chinese")

Floats = NDArray[np.float64]
Buckets = NDArray[np.intp]
Zones = tuple[tuple[int, int], tuple[int, int]]


class Family(NamedTuple):
    """The n-grams of one length in one place; they weigh the same, together one."""

    place: str
    n: int  # tokens, or characters where `tokens` is None
    size: int
    tokens: Tokens | None
    first: int = 0  # token at which the place begins
    text: str = ""  # of character n-grams

    def name(self, at: int) -> str:
        """What stands behind n-gram `at` of this family."""
        if self.tokens is None:
            return f"{self.place}: …{self.text[at : at + self.n]}…"
        return f"{self.place}: “{self.tokens.name(self.first + at, self.n)}”"


@dataclass(frozen=True, slots=True)
class TaskFeatures:
    """`dense` in the order of `TaskFeaturizer.dense_names`; hashed n-grams, family after family."""

    dense: Floats
    buckets: Buckets
    weights: Floats
    families: tuple[Family, ...]


class TaskFeaturizer:
    """Turns requests into features. Holds only the lexicon; the same request, the same features."""

    def __init__(self) -> None:
        self._lexicon = Lexicon()
        self._count = len(self._lexicon.concepts)
        self._bits: NDArray[np.int64] = np.arange(self._count, dtype=np.int64)
        shape = tuple(structure(RequestText(user="")))
        concepts = self._lexicon.concepts
        self.dense_names: tuple[str, ...] = (
            *shape,
            *(f"{c} ({place})" for place in _PLACES for c in concepts),
            *(f"{c} (how often)" for c in concepts),
            *(f"{c} ({context})" for context in _CONTEXTS for c in concepts),
        )

    def extract(self, x: RequestText) -> TaskFeatures:
        """All features of a request. Bounded work whatever its length."""
        shape = structure(x)
        tokens = tokenize(edges(x.user))
        grams = tokens.ngrams(MAX_NGRAM)
        zones = _zones(tokens)
        system = tokenize(edges(x.system)) if x.system else None
        concepts = self._concepts(grams, zones, system, shape)
        dense = np.concatenate([np.fromiter(shape.values(), np.float64, len(shape)), concepts.ravel()])
        return TaskFeatures(dense, *_hashed(tokens, grams, zones, system))

    def _concepts(
        self, grams: list[U64], zones: Zones, system: Tokens | None, shape: dict[str, float]
    ) -> Floats:
        """Concepts by place, their counts, and their meetings with the context. [rows, concepts]"""
        (_, first_end), (last_start, _) = zones
        places, bits = self._lexicon.find_all(grams)
        start = first = last = anywhere = in_system = 0  # concepts as bits
        for place, concepts in zip(places.tolist(), bits.tolist(), strict=True):
            anywhere |= concepts
            if place < first_end:
                first |= concepts
                if place < _START_TOKENS:
                    start |= concepts
            if place >= last_start:
                last |= concepts
        if system is not None:
            _, found = self._lexicon.find_all(system.ngrams(MAX_NGRAM))
            in_system = int(np.bitwise_or.reduce(found, initial=0))
        has_code = shape["no fence"] == 0 or shape["code marks in head"] + shape["code marks in tail"] > 0.4
        is_long = shape["log length"] > math.log(500) / 10
        is_chinese = shape["cjk in head"] > 0.2 or shape["cjk in tail"] > 0.2
        contexts = [(first | last) * flag for flag in (has_code, is_long, is_chinese)]
        masks = np.array([start, first, last, anywhere, in_system, 0, *contexts], dtype=np.int64)
        rows = ((masks[:, None] >> self._bits) & 1).astype(np.float64)
        if anywhere:
            rows[len(_PLACES)] = np.log1p(((bits[:, None] >> self._bits) & 1).sum(axis=0)) / 2
        return rows


def _zones(tokens: Tokens) -> Zones:
    """Token ranges of the opening and the closing line."""
    at = tokens.starts.searchsorted([*opening(tokens.text), *closing(tokens.text)]).tolist()
    return (at[0], at[1]), (at[2], at[3])


_OPENING, _CLOSING, _SYSTEM, _CHARS = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F
_WORD_SALTS = (*(_OPENING,) * 3, *(_CLOSING,) * 3, 0, 0)
_CHAR_SALTS = (_OPENING ^ _CHARS, _CLOSING ^ _CHARS)
_SALTS: U64 = np.array((*_WORD_SALTS, *_CHAR_SALTS), dtype=np.uint64)
_SALTS_WITH_SYSTEM: U64 = np.array((*_WORD_SALTS, _SYSTEM, _SYSTEM, *_CHAR_SALTS), dtype=np.uint64)
"""By family, in the order of `_hashed`: the same n-gram in another place is another feature."""
_TO_BUCKET = np.uint64(64 - HASH_BITS)


def _hashed(
    tokens: Tokens, grams: list[U64], zones: Zones, system: Tokens | None
) -> tuple[Buckets, Floats, tuple[Family, ...]]:
    """Word n-grams of the opening and closing lines, of both ends and of the system prompt; characters."""
    (first_start, first_end), (last_start, last_end) = zones
    parts = [("opening", first_start, first_end, 3), ("closing", last_start, last_end, 3)]
    parts.append(("anywhere", 0, len(tokens.starts), 2))
    families: list[Family] = []
    hashes: list[U64] = []
    for place, start, stop, longest in parts:
        for n in range(1, longest + 1):
            hashes.append(grams[n - 1][start : max(start, stop - n + 1)])
            families.append(Family(place, n, len(hashes[-1]), tokens, start))
    if system is not None:
        for n, found in enumerate(system.ngrams(2), 1):
            hashes.append(found)
            families.append(Family("system", n, len(found), system))
    chars = tokens.chars(_CHAR_N)
    for place, (start, stop) in (("opening", opening(tokens.text)), ("closing", closing(tokens.text))):
        hashes.append(chars[start : max(start, stop - _CHAR_N + 1)])
        families.append(Family(place, _CHAR_N, len(hashes[-1]), None, 0, tokens.text[start:stop]))
    counts = [f.size for f in families]
    salts = _SALTS if system is None else _SALTS_WITH_SYSTEM
    buckets = (mix(np.concatenate(hashes) ^ salts.repeat(counts)) >> _TO_BUCKET).astype(np.intp)
    weights = np.array([max(c, 1) ** -0.5 for c in counts]).repeat(counts)
    return buckets, weights, tuple(families)
