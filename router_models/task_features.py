"""A request as the task classifier sees it: shape, concepts by place, hashed n-grams by place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router_models.lexicon import Lexicon
from router_models.structure import closing, opening, structure
from router_models.text import U64, Tokens, char_ngrams, edges, mix, tokenize
from router_models.types import RequestText

HASH_BITS = 15
NUM_BUCKETS = 1 << HASH_BITS
_START_TOKENS = 4
_CHAR_N = 4
_PLACES = ("start", "opening", "closing", "anywhere", "system")
_CONTEXTS = ("with code", "long", "in Chinese")

Floats = NDArray[np.float64]
Buckets = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Family:
    """The n-grams of one length in one place: `buckets` all weigh the same."""

    place: str
    n: int  # tokens, or characters where `tokens` is None
    buckets: Buckets
    weight: float
    tokens: Tokens | None
    first: int = 0  # token at which the place begins
    text: str = ""  # of character n-grams

    def name(self, at: int) -> str:
        """What stands behind `buckets[at]`."""
        if self.tokens is None:
            return f"{self.place}: …{self.text[at : at + self.n]}…"
        return f"{self.place}: “{self.tokens.name(self.first + at, self.n)}”"


@dataclass(frozen=True, slots=True)
class TaskFeatures:
    """`dense` in the order of `TaskFeaturizer.dense_names`; `families` are the hashed n-grams."""

    dense: Floats
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
        grams = [tokens.ngrams(n) for n in (1, 2, 3, 4)]
        first, last = _zones(tokens)
        system = tokenize(edges(x.system)) if x.system else None
        dense = np.concatenate(
            [list(shape.values()), *self._concepts(tokens, grams, (first, last), system, shape)]
        )
        return TaskFeatures(dense, tuple(_families(tokens, grams, (first, last), system)))

    def _concepts(
        self,
        tokens: Tokens,
        grams: list[U64],
        zones: tuple[tuple[int, int], tuple[int, int]],
        system: Tokens | None,
        shape: dict[str, float],
    ) -> Iterator[Floats]:
        """Concepts by place, their counts, and their meetings with the context."""
        (_, first_end), (last_start, _) = zones
        places, concepts = [], []
        for hashes in grams:
            at, bits = self._lexicon.find(hashes)
            places.append(at)
            concepts.append((bits[:, None] >> self._bits) & 1)
        place, concept = np.concatenate(places), np.concatenate(concepts)
        present = {
            "start": concept[place < _START_TOKENS].any(axis=0),
            "opening": concept[place < first_end].any(axis=0),
            "closing": concept[place >= last_start].any(axis=0),
            "anywhere": concept.any(axis=0),
            "system": np.zeros(self._count, dtype=bool),
        }
        if system is not None:
            bits = np.concatenate([self._lexicon.find(system.ngrams(n))[1] for n in (1, 2, 3, 4)])
            present["system"] = ((bits[:, None] >> self._bits) & 1).any(axis=0)
        for name in _PLACES:
            yield present[name].astype(np.float64)
        yield np.asarray(np.log1p(concept.sum(axis=0)) / 2, dtype=np.float64)
        at_ends = (present["opening"] | present["closing"]).astype(np.float64)
        has_code = shape["no fence"] == 0 or shape["code marks in head"] + shape["code marks in tail"] > 0.4
        yield at_ends * has_code
        yield at_ends * (shape["log length"] > math.log(500) / 10)
        yield at_ends * (shape["cjk in head"] > 0.2 or shape["cjk in tail"] > 0.2)


def _zones(tokens: Tokens) -> tuple[tuple[int, int], tuple[int, int]]:
    """Token ranges of the opening and the closing line."""
    start, stop = opening(tokens.text)
    first = int(np.searchsorted(tokens.starts, start)), int(np.searchsorted(tokens.starts, stop))
    start, stop = closing(tokens.text)
    return first, (int(np.searchsorted(tokens.starts, start)), int(np.searchsorted(tokens.starts, stop)))


_SALT = {
    "opening": np.uint64(0x9E37),
    "closing": np.uint64(0x79B9),
    "anywhere": np.uint64(0),
    "system": np.uint64(0x7F4A),
}
_CHAR_SALT = np.uint64(0xC2B2)


def _bucket(hashes: U64, salt: np.uint64) -> Buckets:
    return (mix(hashes ^ salt) >> np.uint64(64 - HASH_BITS)).astype(np.intp)


def _families(
    tokens: Tokens, grams: list[U64], zones: tuple[tuple[int, int], tuple[int, int]], system: Tokens | None
) -> Iterator[Family]:
    """Word n-grams of the opening and closing lines, of both ends and of the system prompt; characters."""
    (first_start, first_end), (last_start, last_end) = zones
    parts = [("opening", first_start, first_end, 3), ("closing", last_start, last_end, 3)]
    parts.append(("anywhere", 0, len(tokens.starts), 2))
    for place, start, stop, longest in parts:
        for n in range(1, longest + 1):
            hashes = grams[n - 1][start : max(start, stop - n + 1)]
            if len(hashes):
                yield Family(place, n, _bucket(hashes, _SALT[place]), len(hashes) ** -0.5, tokens, start)
    if system is not None:
        for n in (1, 2):
            hashes = system.ngrams(n)
            if len(hashes):
                yield Family("system", n, _bucket(hashes, _SALT["system"]), len(hashes) ** -0.5, system)
    start, stop = opening(tokens.text)
    for place, text in (
        ("opening", tokens.text[start:stop]),
        ("closing", tokens.text[slice(*closing(tokens.text))]),
    ):
        hashes = char_ngrams(text, _CHAR_N)
        if len(hashes):
            buckets = _bucket(hashes, _CHAR_SALT ^ _SALT[place])
            yield Family(place, _CHAR_N, buckets, len(hashes) ** -0.5, None, 0, text)
