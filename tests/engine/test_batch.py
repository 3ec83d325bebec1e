"""The batch's tensors against the plain definition, token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import BatchRow, build_batch
from engine.kv.block_manager import new_block_table


@st.composite
def rows(draw: st.DrawFn, block_size: int) -> BatchRow:
    """A sequence with some tokens cached, some new, and a table that may hold a block too many."""
    start = draw(st.integers(0, 9))
    token_ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=9))
    num_blocks = -(-(start + len(token_ids)) // block_size) + draw(st.integers(0, 1))
    table = new_block_table()
    table.extend(draw(st.permutations(range(30)))[:num_blocks])
    return BatchRow(token_ids, start, table, draw(st.integers(0, len(token_ids))))


@given(st.data(), st.integers(1, 5))
def test_every_token_has_its_place(data: st.DataObject, block_size: int) -> None:
    batch_rows = data.draw(st.lists(rows(block_size), min_size=1, max_size=5))
    batch = build_batch(batch_rows, block_size, torch.device("cpu"))
    token_ids, positions, slots, logits_rows, query_start = [], [], [], [], [0]
    for row in batch_rows:
        for offset, token in enumerate(row.token_ids):
            position = row.start + offset
            token_ids.append(token)
            positions.append(position)
            slots.append(row.block_table[position // block_size] * block_size + position % block_size)
        query_start.append(len(token_ids))
        logits_rows += range(len(token_ids) - row.num_logits, len(token_ids))
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.logits_rows.tolist() == logits_rows
    assert batch.query_start.tolist() == query_start
    assert batch.context_lens.tolist() == [row.start + len(row.token_ids) for row in batch_rows]
    width = max(len(row.block_table) for row in batch_rows)
    padded = [row.block_table.tolist() + [0] * (width - len(row.block_table)) for row in batch_rows]
    assert batch.block_tables.tolist() == padded
    assert batch.block_tables.dtype == batch.query_start.dtype == batch.context_lens.dtype == torch.int32
