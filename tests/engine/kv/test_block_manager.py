"""Blocks are counted right whatever the order of taking, sharing, naming and giving back."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.errors import IntegrityError
from engine.kv.block_manager import BlockManager, extend_hashes, new_block_table

SIZE = 4


def names_of(token_ids: list[int], salt: str = "") -> list[bytes]:
    names: list[bytes] = []
    extend_hashes(names, token_ids, SIZE, salt)
    return names


def test_names_are_chained_and_salted() -> None:
    tokens = list(range(12))
    names = names_of(tokens)
    assert len(names) == 3
    assert len(set(names)) == 3
    assert names_of([*tokens, 1, 2, 3]) == names  # a block that is not full has no name
    assert names_of(tokens[:8]) == names[:2]
    assert names_of([99, *tokens[1:]])[1:] != names[1:]  # equal tokens, another prefix
    assert not set(names_of(tokens, "tenant")) & set(names)
    assert names_of([0] * 8)[0] != names_of([0] * 8)[1]


def test_names_grow_with_the_tokens() -> None:
    tokens = random.Random(0).choices(range(100), k=41)
    names: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_hashes(names, tokens[:end], SIZE, "s")
        assert names == names_of(tokens[:end], "s")


def test_a_prefix_is_shared_without_a_copy() -> None:
    blocks = BlockManager(8, SIZE)
    names = names_of(list(range(8)))
    first, second = new_block_table(), new_block_table()
    assert blocks.acquire(first, [], 10)
    for block, name in zip(first, names, strict=False):
        blocks.commit(block, name)
    prefix = blocks.find_prefix(names)
    assert prefix == first[:2].tolist()
    assert blocks.acquire(second, prefix, 10)
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert blocks.num_used == 4
    blocks.release(first)
    blocks.check_integrity([second])
    assert blocks.num_used == 3
    blocks.release(second)
    blocks.check_integrity([])
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (0, 2, 8)


def test_eviction_takes_blank_blocks_first_then_the_longest_unused_leaf() -> None:
    blocks = BlockManager(4, SIZE)
    old, new = names_of([1] * 8), names_of([2] * 4)
    for names in (old, new):
        table = new_block_table()
        assert blocks.acquire(table, [], len(names) * SIZE)
        for block, name in zip(table, names, strict=True):
            blocks.commit(block, name)
        blocks.release(table)
    table = new_block_table()
    assert blocks.acquire(table, [], SIZE)  # the blank one
    assert len(blocks.find_prefix(old)) == 2
    assert blocks.extend(table, 2 * SIZE)
    assert len(blocks.find_prefix(old)) == 1  # its tail went, its head still serves
    assert len(blocks.find_prefix(new)) == 1
    assert blocks.extend(table, 3 * SIZE)
    assert blocks.find_prefix(old) == []
    assert len(blocks.find_prefix(new)) == 1
    blocks.check_integrity([table])


def test_taking_is_all_or_nothing() -> None:
    blocks = BlockManager(4, SIZE)
    table, other = new_block_table(), new_block_table()
    assert blocks.acquire(table, [], 9)
    assert not blocks.acquire(other, [], 8)
    assert not blocks.acquire(other, [], 4, num_spare=1)
    assert len(other) == 0
    assert not blocks.extend(table, 17)
    assert len(table) == 3
    assert blocks.extend(table, 16)
    blocks.trim(table, 5)
    assert len(table) == 2
    blocks.check_integrity([table])


def test_reviving_cached_blocks_counts_as_taking() -> None:
    blocks = BlockManager(3, SIZE)
    names = names_of([1] * 8)
    table, other = new_block_table(), new_block_table()
    blocks.acquire(table, [], 8)
    for block, name in zip(table, names, strict=True):
        blocks.commit(block, name)
    blocks.release(table)
    assert blocks.num_free == 3
    assert not blocks.acquire(other, blocks.find_prefix(names), 16)  # 2 revived and 2 new of 3
    assert blocks.acquire(other, blocks.find_prefix(names), 12)
    blocks.check_integrity([other])


def test_faults_are_found() -> None:
    blocks = BlockManager(4, SIZE)
    table = new_block_table()
    blocks.acquire(table, [], 8)
    with pytest.raises(IntegrityError, match="references"):
        blocks.check_integrity([])
    with pytest.raises(IntegrityError, match="twice"):
        blocks.check_integrity([table + table])
    copy = table[:]
    blocks.release(table)
    with pytest.raises(IntegrityError, match="more often"):
        blocks.release(copy)


class BlockMachine(RuleBasedStateMachine):
    """Tables of random tokens over a two-letter alphabet, so that prefixes often meet.

    The model: which tokens each block was last filled with, kept beside the manager, so that a
    shared block that holds other tokens than its user's is found.
    """

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(9, SIZE)
        self.live: dict[int, tuple[list[int], object]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.next_key = 0

    @rule(
        target=tables,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=26),
        salt=st.sampled_from("ab"),
    )
    def start(self, tokens: list[int], salt: str) -> int:
        table = new_block_table()
        names = names_of(tokens, salt)
        prefix = self.blocks.find_prefix(names[: (len(tokens) - 1) // SIZE])
        for index, block in enumerate(prefix):
            assert self.content[block] == (ord(salt), *tokens[: (index + 1) * SIZE])
        key = self.next_key
        self.next_key += 1
        if self.blocks.acquire(table, prefix, len(tokens)):
            self.live[key] = (tokens, table)
            self.fill(key, salt, names)
        return key

    def fill(self, key: int, salt: str, names: list[bytes]) -> None:
        tokens, table = self.live[key]
        for index in range(len(tokens) // SIZE):
            self.content[table[index]] = (ord(salt), *tokens[: (index + 1) * SIZE])
            self.blocks.commit(table[index], names[index])

    @rule(key=tables, more=st.integers(1, 9))
    def grow_and_trim(self, key: int, more: int) -> None:
        if key in self.live:
            tokens, table = self.live[key]
            before = table[:]
            grown = self.blocks.extend(table, len(tokens) + more)
            assert table[: len(before)] == before
            assert grown or table == before
            self.blocks.trim(table, len(tokens))
            assert len(table) == self.blocks.num_needed(len(tokens))

    @rule(key=consumes(tables))
    def stop(self, key: int) -> None:
        if key in self.live:
            self.blocks.release(self.live.pop(key)[1])

    @invariant()
    def accounts_agree(self) -> None:
        self.blocks.check_integrity(table for _, table in self.live.values())
        assert self.blocks.num_free + self.blocks.num_used == 9
        if not self.live:
            assert self.blocks.num_used == 0


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
