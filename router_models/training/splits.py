"""Honest validation: rows that share a document, a problem or a wording never stand on both sides."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

from router_models.training.payloads import Row, row_text

_MAX_SHARED = 60  # a line in more rows than this is wording, not content


def groups(rows: Sequence[Row]) -> list[int]:
    """A group number per row: rows that share a long line (or the whole text) are one group."""
    parent = list(range(len(rows)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    holders: dict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        for piece in _pieces(row_text(row)):
            holders[zlib.crc32(piece.encode())].append(number)
    for members in holders.values():
        if len(members) <= _MAX_SHARED:
            for other in members[1:]:
                parent[root(other)] = root(members[0])
    return [root(i) for i in range(len(rows))]


def _pieces(text: str) -> set[str]:
    """The whole text and its long lines, without white space and case."""
    pieces = {re.sub(r"\W+", "", text).lower()}
    for line in text[:20_000].split("\n"):
        bare = re.sub(r"\W+", "", line).lower()
        if len(bare.encode()) >= 70:
            pieces.add(bare[-70:])
    return pieces


def fold_of(row: Row, group: int, num_folds: int = 3) -> int:
    """Templates go to folds as a whole; rows in their source's own words go by group."""
    wrapper = str(row.get("wrapper", "none"))
    if match := re.search(r"-(\d+)$", wrapper):
        return int(match[1]) % num_folds
    if wrapper.startswith("promptsource:"):
        return zlib.crc32(wrapper.encode()) % num_folds
    return zlib.crc32(str(group).encode()) % num_folds


def folds(rows: Sequence[Row], num_folds: int = 3) -> Iterator[tuple[list[int], list[int]]]:
    """(training, validation) row numbers. No wording and no group of one side is on the other."""
    group = groups(rows)
    place = [fold_of(row, g, num_folds) for row, g in zip(rows, group, strict=True)]
    for fold in range(num_folds):
        validation = [i for i, p in enumerate(place) if p == fold]
        seen = {group[i] for i in validation}
        yield [i for i, p in enumerate(place) if p != fold and group[i] not in seen], validation
