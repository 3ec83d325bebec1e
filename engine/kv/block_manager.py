"""Who owns which KV block. Lists and integers; no torch.

A block is in exactly one of three states:

- *used*: referenced by one or more block tables (a shared prefix is shared by reference);
- *cached*: referenced by none, but still holding the keys and values of a known prefix. It can
  be referenced again at no cost, and is taken for other use only when no blank block is left,
  least recently used first;
- *blank*: holds nothing worth keeping.

A full block is named by a hash chained over everything before it (the salt first), so equal
names mean equal prefixes. A block gets its name by `commit`, which the engine calls only once
every token in it was computed and accepted: a name never covers a draft.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from engine.errors import IntegrityError

BlockTable = array
"""A sequence's block ids in order, as `array("i")`: a list that numpy reads without a copy."""


def new_block_table() -> BlockTable[int]:
    """An empty block table."""
    return array("i")


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str = "") -> None:
    """Append to `hashes` the names of the full blocks of `token_ids` that it does not cover yet.

    128 bits of BLAKE2b: nobody can construct two prefixes of equal name, nor a prefix of
    another salt.
    """
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        digest = hashlib.blake2b(digest_size=16)
        digest.update(hashes[-1] if hashes else b"salt:" + salt.encode())
        digest.update(array("q", token_ids[start : start + block_size]).tobytes())
        hashes.append(digest.digest())


class BlockManager:
    """Hands out blocks 0..num_blocks-1 and takes them back."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: blank and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that can be taken but still hold a reusable prefix."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks referenced by at least one table."""
        return self.num_blocks - self.num_free

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that already hold the longest known prefix of `hashes`."""
        if not self.enable_prefix_cache:
            return []
        found = map(self._block_of.get, hashes)
        return [block for block in takewhile(lambda block: block is not None, found) if block is not None]

    def acquire(
        self, table: BlockTable[int], prefix: Sequence[int], num_tokens: int, num_spare: int = 0
    ) -> bool:
        """Fill an empty `table`: share the blocks of `prefix`, take new ones up to `num_tokens`.

        All or nothing: False, and nothing changed, unless `num_spare` blocks would stay free.
        """
        num_new = self.num_needed(num_tokens) - len(prefix)
        num_revived = sum(1 for block in prefix if self._ref_counts[block] == 0)
        if num_new + num_revived + num_spare > self.num_free:
            return False
        for block in prefix:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1
        table.extend(prefix)
        table.extend(self._take() for _ in range(num_new))
        return True

    def extend(self, table: BlockTable[int], num_tokens: int) -> bool:
        """Grow `table` to hold `num_tokens` tokens. All or nothing."""
        num_new = self.num_needed(num_tokens) - len(table)
        if num_new > self.num_free:
            return False
        for _ in range(num_new):
            table.append(self._take())
        return True

    def trim(self, table: BlockTable[int], num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens` tokens."""
        num_kept = self.num_needed(num_tokens)
        while len(table) > num_kept:
            self._drop(table.pop())

    def release(self, table: BlockTable[int]) -> None:
        """Give back all blocks, last first, so that a prefix outlives what hangs on it."""
        self.trim(table, 0)

    def commit(self, block: int, name: bytes) -> None:
        """`block` is full of accepted tokens whose chained hash is `name`: it may be shared now.

        If another block already goes by that name, that one stays the shared one.
        """
        if self.enable_prefix_cache and name not in self._block_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._ref_counts[block] = 1
        return block

    def _drop(self, block: int) -> None:
        count = self._ref_counts[block] - 1
        if count < 0:
            raise IntegrityError(f"block {block} was given back more often than it was taken")
        self._ref_counts[block] = count
        if count == 0:
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def check_integrity(self, tables: Iterable[BlockTable[int]]) -> None:
        """Compare all accounts with the block tables in use. Raises IntegrityError on the first fault."""
        references: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a block table names a block twice: {table.tolist()}")
            references.update(table)
        for block, count in enumerate(self._ref_counts):
            if references[block] != count:
                raise IntegrityError(f"block {block}: {count} references counted, {references[block]} found")
        free = self._blank + list(self._cached)
        if sorted(free) != [block for block, count in enumerate(self._ref_counts) if count == 0]:
            raise IntegrityError("free blocks and reference counts disagree")
        if self._block_of != {name: block for block, name in self._hash_of.items()}:
            raise IntegrityError("names and blocks disagree")
        named = self._hash_of.keys()
        if named & set(self._blank) or not named >= set(self._cached):
            raise IntegrityError("a blank block has a name, or a cached block has none")
