"""What the verify kernels read about sequences, rows and touched tokens: tables of plain numbers.

All integers travel in one transfer and all settings in another; nothing here looks at the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import upload_together
from engine.sampling_state import has_filters, has_penalties
from engine.spec.walk import Walk
from engine.types import AcceptRule

_MODES = {AcceptRule.KEYED: 1, AcceptRule.RATIO: 2, AcceptRule.BLOCK: 3}
_STOP, _KNOWN = 1, 2


@dataclass(frozen=True, slots=True)
class Tables:
    """Columns as `scan`, `adjust` and `accept` index them."""

    sequences: torch.Tensor  # [num_sequences, SEQUENCE_INTS] int32
    rows: torch.Tensor  # [num_rows, ROW_INTS] int32
    entries: torch.Tensor  # [num_entries, ENTRY_INTS] int32
    touched: torch.Tensor  # [num_touched, 2] int32
    ratio: torch.Tensor  # int32, sequences under the ratio rule
    block: torch.Tensor  # int32, sequences under the block rule
    block_nodes: torch.Tensor  # [nodes of block sequences, 2] int32
    settings: torch.Tensor  # [num_sequences, SETTINGS] float64
    biases: torch.Tensor  # [num_entries] float64
    num_kept: int  # logits that are touched, over all rows
    max_entries: int  # of one sequence
    num_filtered: int  # rows with a list of candidates
    max_nodes: int
    num_drafted: int  # rows of draft probabilities


@dataclass(slots=True)
class _Counts:
    """What has been laid out so far."""

    rows: int = 0
    entries: int = 0
    kept: int = 0
    filtered: int = 0
    drafted: int = 0


def pack(walks: Sequence[Walk], rules: Sequence[AcceptRule], vocab_size: int, device: torch.device) -> Tables:
    """The tables of one call; `walks` cover the logits' rows from 0 on without gaps."""
    sequences: list[tuple[int, ...]] = []
    settings: list[tuple[float, ...]] = []
    rows: list[tuple[int, ...]] = []
    touched: list[tuple[int, int]] = []
    block_nodes: list[tuple[int, int]] = []
    entries: list[np.ndarray] = []
    biases: list[np.ndarray] = []
    counts = _Counts()
    for index, (walk, rule) in enumerate(zip(walks, rules, strict=True)):
        params, state, num_nodes = walk.state.params, walk.state, len(walk.tree)
        mode = 0 if params.is_greedy else _MODES[rule]
        own, own_biases = _entries(walk)
        is_filtered = mode > 0 and has_filters(params)
        sequences.append(
            (
                counts.rows,
                num_nodes,
                mode,
                params.top_k if 0 < params.top_k < vocab_size else 0,
                state.key.seed & 0xFFFFFFFF,
                (state.key.seed >> 32) & 0xFFFFFFFF,
                state.key.salt & 0xFFFFFFFF,
                state.root_position & 0xFFFFFFFF,
                len(state.output_token_ids),
                params.min_tokens,
                counts.entries,
                counts.entries + len(own),
                counts.drafted,
                int(is_filtered),
            )
        )
        settings.append(
            (
                params.temperature,
                0.0 - math.log(params.min_p) if params.min_p > 0.0 else math.inf,  # never -0.0
                params.top_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        )
        for row, (token, parent, depth) in enumerate(_nodes(walk)):
            rows.append((index, token, parent, depth, counts.filtered + row if is_filtered else 0))
            if len(own):
                touched.append((counts.rows + row, counts.kept + row * len(own)))
        if mode == _MODES[AcceptRule.BLOCK]:
            block_nodes += [(index, node) for node in range(num_nodes)]
        entries.append(own)
        biases.append(own_biases)
        counts.rows += 1 + num_nodes
        counts.entries += len(own)
        counts.kept += len(own) * (1 + num_nodes)
        counts.filtered += (1 + num_nodes) * is_filtered
        counts.drafted += num_nodes if mode > 1 else 0
    modes = [sequence[2] for sequence in sequences]
    columns = [
        np.array(sequences),
        np.array(rows),
        np.concatenate(entries),
        np.array(touched).reshape(-1, 2),
        np.flatnonzero(np.array(modes) == _MODES[AcceptRule.RATIO]),
        np.flatnonzero(np.array(modes) == _MODES[AcceptRule.BLOCK]),
        np.array(block_nodes).reshape(-1, 2),
    ]
    numbers = [np.array(settings), np.concatenate(biases)]
    # int32 keeps the bits of words without sign (seeds, salts, positions).
    words = [column.astype(np.int64).astype(np.uint32).view(np.int32) for column in columns]
    integers = upload_together(words, np.int32, device)
    sequence_table, row_table, entry_table, touched_rows, ratio, block, nodes = integers
    setting_table, bias_table = upload_together(numbers, np.float64, device)
    return Tables(
        sequences=sequence_table,
        rows=row_table,
        entries=entry_table,
        touched=touched_rows,
        ratio=ratio,
        block=block,
        block_nodes=nodes,
        settings=setting_table,
        biases=bias_table,
        num_kept=counts.kept,
        max_entries=max(map(len, entries)),
        num_filtered=counts.filtered,
        max_nodes=max(len(walk.tree) for walk in walks),
        num_drafted=counts.drafted,
    )


def _nodes(walk: Walk) -> list[tuple[int, int, int]]:
    """Token, parent and depth of the root row and of each node's row; the root's parent is -2."""
    depths: list[int] = []
    for parent in walk.tree.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [(-1, -2, 0), *zip(walk.tree.token_ids, walk.tree.parents, depths, strict=True)]


def _entries(walk: Walk) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that a sequence's processors may touch, each once, [num, 3], and their biases, [num]."""
    state, params = walk.state, walk.state.params
    known = np.zeros((0, 3), dtype=np.int64)
    if has_penalties(params):
        token_ids, num_output = state.history.with_path(())
        drafted = np.setdiff1d(np.array(walk.tree.token_ids, dtype=np.int64), token_ids)
        known = np.zeros((len(token_ids) + len(drafted), 3), dtype=np.int64)
        known[:, 0] = np.concatenate((token_ids, drafted))
        known[: len(token_ids), 1] = num_output
        known[: len(token_ids), 2] = _KNOWN
    stops: set[int] = set()
    if len(state.output_token_ids) < params.min_tokens:
        stops = {*state.eos_token_ids, *params.stop_token_ids}
    if not stops and not params.logit_bias:
        return known, np.zeros(len(known))
    place = {int(token): i for i, token in enumerate(known[:, 0])}
    extra = [token for token in {*stops, *params.logit_bias} if token not in place]
    entries = np.concatenate((known, [(token, 0, 0) for token in extra])) if extra else known
    place |= {token: len(known) + i for i, token in enumerate(extra)}
    biases = np.zeros(len(entries))
    for token in stops:
        entries[place[token], 2] |= _STOP
    for token, bias in params.logit_bias.items():
        biases[place[token]] = bias
    return entries, biases
