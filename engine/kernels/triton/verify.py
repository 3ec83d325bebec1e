"""`engine.spec.verify` on the device: one upload, a handful of launches, one small download.

Every row of logits is judged side by side, also those behind a refusal: on a GPU that costs less
than coming back for each depth of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from engine.errors import InvalidLogits
from engine.kernels.triton import accept, adjust, scan
from engine.kernels.triton.launch import power_of_2
from engine.kernels.triton.pack import Tables, pack
from engine.spec.walk import Walk
from engine.types import AcceptRule

SCAN_TILE = 4096
"""Logits that one program of the scan holds; fixed, so that sums depend on the row alone."""
LIST_CAPACITY = 4096
"""Candidates a filtered row lists; beyond it the row itself is searched, slower."""
_TILE = 2048
_SEARCH_TILE = 1024
_ENTRY_TILE = 256


def decide(walks: Sequence[Walk], rules: Sequence[AcceptRule], logits: torch.Tensor) -> None:
    """Fill in `token_ids` and `nodes` of every walk. The walks cover all rows of `logits`, in order.

    `logits` [num_rows, vocab] float32 is as it was when this returns; in between it is changed.
    Raises `InvalidLogits` with the index of the first walk that has a row of NaN, infinity or no token.
    """
    if not walks:
        return
    device = logits.device
    tables = pack(walks, rules, logits.shape[1], device)
    drafts = [
        walk.tree.probs.to(device, torch.float32)
        for walk, rule in zip(walks, rules, strict=True)
        if rule is not AcceptRule.KEYED and walk.tree.probs is not None
    ]
    draft = drafts[0].contiguous() if len(drafts) == 1 else torch.cat(drafts) if drafts else logits
    lines = launch(tables, logits, draft).tolist()  # the one wait
    for index, (walk, line) in enumerate(zip(walks, lines, strict=True)):
        num_accepted, is_bad = line[:2]
        if is_bad:
            raise InvalidLogits(
                "the target's logits hold NaN or infinity, or every token is masked; "
                "check the model's weights and dtype, and the request's logit_bias",
                index,
            )
        walk.token_ids[:] = line[2 : 3 + num_accepted]
        walk.nodes[:] = line[3 + tables.max_nodes : 3 + tables.max_nodes + num_accepted]


def launch(tables: Tables, logits: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Run the kernels. Returns [num_sequences, 2 * max_nodes + 3] int32: accepted, 1 where a row was
    bad, tokens, nodes. `draft`: [num_drafted, vocab] float32, unused without such drafts."""
    num_rows, vocab_size = logits.shape
    num_sequences, max_nodes = tables.sequences.shape[0], tables.max_nodes
    stride = logits.stride(0)
    kept = _adjust(tables, logits, stride)
    judged = _judge(tables, logits, stride)
    token, edge, stat = judged
    result = torch.zeros((num_sequences, 2 * max_nodes + 3), dtype=torch.int32, device=logits.device)
    accept.walk_kernel[(num_sequences,)](
        tables.sequences, tables.rows, token, edge, result, num_rows, max_nodes, num_warps=1
    )
    num_ratio, num_block = len(tables.ratio), len(tables.block)
    common = (tables.sequences, tables.rows, tables.settings, logits, edge, stat, draft)
    if num_ratio:
        work = logits.new_empty((num_ratio, vocab_size))
        accept.ratio_kernel[(num_ratio,)](
            tables.ratio,
            *common,
            work,
            result,
            stride,
            vocab_size,
            num_rows,
            max_nodes,
            TILE=_TILE,
            num_warps=8,
        )
    if num_block:
        num_drafted = tables.num_drafted
        mass = torch.empty((2, num_drafted), dtype=torch.float64, device=logits.device)
        accept.block_mass_kernel[(len(tables.block_nodes),)](
            tables.block_nodes,
            *common,
            mass,
            stride,
            vocab_size,
            num_rows,
            num_drafted,
            TILE=_TILE,
            num_warps=8,
        )
        work = logits.new_empty((num_block, vocab_size))
        accept.block_kernel[(num_block,)](
            tables.block,
            *common,
            mass,
            work,
            result,
            stride,
            vocab_size,
            num_rows,
            max_nodes,
            num_drafted,
            TILE=_TILE,
            num_warps=8,
        )
    if kept is not None:
        grid = (len(tables.touched), triton.cdiv(tables.max_entries, _ENTRY_TILE))
        adjust.restore_kernel[grid](
            tables.touched,
            tables.sequences,
            tables.rows,
            tables.entries,
            logits,
            kept,
            stride,
            TILE=_ENTRY_TILE,
        )
    return result


def _adjust(tables: Tables, logits: torch.Tensor, stride: int) -> torch.Tensor | None:
    """Processors before the temperature, in place; what stood there before, None where nothing is touched."""
    if not tables.num_kept:
        return None
    kept = logits.new_empty(tables.num_kept)
    grid = (len(tables.touched), triton.cdiv(tables.max_entries, _ENTRY_TILE))
    adjust.adjust_kernel[grid](
        tables.touched,
        tables.sequences,
        tables.rows,
        tables.settings,
        tables.entries,
        tables.biases,
        logits,
        kept,
        stride,
        TILE=_ENTRY_TILE,
    )
    return kept


def _judge(
    tables: Tables, logits: torch.Tensor, stride: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, edge, stat) of every row; see `scan.settle_kernel`."""
    num_rows, vocab_size = logits.shape
    num_splits = triton.cdiv(vocab_size, SCAN_TILE)
    part = logits.new_empty((3, num_rows, num_splits))
    best = torch.empty((2, num_rows, num_splits), dtype=torch.int32, device=logits.device)
    token = best.new_empty(num_rows)
    edge = best.new_empty((3, num_rows))
    stat = logits.new_empty((2, num_rows))
    scores = logits.new_empty((max(1, tables.num_filtered), LIST_CAPACITY))
    ids = best.new_empty(scores.shape)
    about = (tables.sequences, tables.rows, tables.settings)
    scan.scan_kernel[(num_splits, num_rows)](
        logits, *about, part, best, stride, vocab_size, num_splits, TILE=SCAN_TILE, num_warps=8
    )
    scan.settle_kernel[(num_rows,)](
        logits,
        *about,
        part,
        best,
        scores,
        ids,
        token,
        edge,
        stat,
        stride,
        vocab_size,
        num_splits,
        SPLITS=power_of_2(num_splits),
        CAPACITY=LIST_CAPACITY,
        TILE=_TILE,
        SEARCH_TILE=_SEARCH_TILE,
        num_warps=8,
    )
    return token, edge, stat
