"""Which draft tokens stand, one program a sequence: the rules of `engine.spec.verify`.

Rows were judged by `scan`; here a row's distribution is evaluated where it is looked at, from its
best score, the mass of what its filters leave and the edge of that (see `scan`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.philox import uniform
from engine.kernels.triton.scan import RATIO, ROW_INTS, SEQUENCE_INTS, SETTINGS

_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit(do_not_specialize=["num_rows", "max_nodes"])
def walk_kernel(sequence_ptr, row_ptr, token_ptr, edge_ptr, result_ptr, num_rows, max_nodes):
    """Greedy and keyed sequences: down the tree along what each row decides.

    A sequence's line of the result: accepted, 1 where a row was bad, tokens, nodes.
    """
    index = tl.program_id(0)
    sequence = sequence_ptr + index * SEQUENCE_INTS
    first_row = tl.load(sequence)
    num_nodes = tl.load(sequence + 1)
    result = result_ptr + index * (2 * max_nodes + 3)
    is_bad = tl.load(edge_ptr + 2 * num_rows + first_row)
    if tl.load(sequence + 2) < RATIO:
        token = tl.load(token_ptr + first_row)
        node = index * 0 - 1
        num = index * 0
        for child in range(num_nodes):
            row = first_row + 1 + child
            is_bad = tl.maximum(is_bad, tl.load(edge_ptr + 2 * num_rows + row))
            if (tl.load(row_ptr + row * ROW_INTS + 2) == node) & (
                tl.load(row_ptr + row * ROW_INTS + 1) == token
            ):
                tl.store(result + 2 + num, token)
                tl.store(result + 3 + max_nodes + num, child)
                num += 1
                node = child
                token = tl.load(token_ptr + row)
        tl.store(result + 2 + num, token)
        tl.store(result, num)
        tl.store(result + 1, is_bad)


@triton.jit
def _target(logits_ptr, token, mask, best, temperature, edge, edge_id, mass):
    """The target's probabilities of the given tokens of one row; token, mask: a tensor or a scalar."""
    scores = tl.load(logits_ptr + token, mask=mask, other=float("-inf"))
    distance = (best - scores) / temperature
    key = distance.to(tl.int32, bitcast=True)
    stays = (distance < float("inf")) & ((key < edge) | ((key == edge) & (token <= edge_id)))
    return tl.where(stays, tl.exp(-distance) / mass, 0.0)


@triton.jit
def _target_at(logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, row, token, mask, temperature):
    """`_target` of a row by its number."""
    return _target(
        logits_ptr + row.to(tl.int64) * stride_row,
        token,
        mask,
        tl.load(stat_ptr + row),
        temperature,
        tl.load(edge_ptr + row),
        tl.load(edge_ptr + num_rows + row),
        tl.load(stat_ptr + num_rows + row),
    )


@triton.jit
def _draw(
    logits_ptr,
    stride_row,
    edge_ptr,
    stat_ptr,
    num_rows,
    row,
    temperature,
    work_ptr,
    is_residual,
    number,
    vocab_size,
    TILE: tl.constexpr,
):
    """The first token whose cumulated mass exceeds `number` times the whole; mass from the work row
    where a draft token was refused, else from the row's own distribution."""
    whole = tl.zeros([], dtype=tl.float64)
    for first in range(0, vocab_size, TILE):
        token = first + tl.arange(0, TILE)
        mask = token < vocab_size
        if is_residual:
            p = tl.load(work_ptr + token, mask=mask, other=0.0)
        else:
            p = _target_at(
                logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, row, token, mask, temperature
            )
        whole += tl.sum(p.to(tl.float64), axis=0)
    bound = number * whole
    before = tl.zeros([], dtype=tl.float64)
    drawn = row * 0 - 1
    last = row * 0
    for first in range(0, vocab_size, TILE):
        if drawn < 0:
            token = first + tl.arange(0, TILE)
            mask = token < vocab_size
            if is_residual:
                p = tl.load(work_ptr + token, mask=mask, other=0.0)
            else:
                p = _target_at(
                    logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, row, token, mask, temperature
                )
            p = p.to(tl.float64)
            inside = tl.sum(p, axis=0)
            if before + inside > bound:
                exceeds = (before + tl.cumsum(p, axis=0) > bound) & (p > 0.0)
                drawn = tl.min(tl.where(exceeds, token, 0x7FFFFFFF), axis=0)
                drawn = tl.where(drawn == 0x7FFFFFFF, -1, drawn)
            before += inside
            last = tl.maximum(last, tl.max(tl.where(p > 0.0, token, 0), axis=0))
    return tl.where(drawn < 0, last, drawn)  # rounding may leave the last bit of mass to nobody


@triton.jit(do_not_specialize=["num_rows", "max_nodes"])
def ratio_kernel(
    index_ptr,  # which sequences
    sequence_ptr,
    row_ptr,
    setting_ptr,
    logits_ptr,
    edge_ptr,
    stat_ptr,
    draft_ptr,  # [nodes, vocab] float32
    work_ptr,  # [sequences of this kernel, vocab] float32, scratch
    result_ptr,
    stride_row,
    vocab_size,
    num_rows,
    max_nodes,
    TILE: tl.constexpr,
):
    index = tl.load(index_ptr + tl.program_id(0))
    sequence = sequence_ptr + index * SEQUENCE_INTS
    first_row = tl.load(sequence)
    num_nodes = tl.load(sequence + 1)
    temperature = tl.load(setting_ptr + index * SETTINGS).to(tl.float32)
    k0 = tl.load(sequence + 4).to(tl.uint32)
    k1 = tl.load(sequence + 5).to(tl.uint32)
    salt = tl.load(sequence + 6).to(tl.uint32)
    position = tl.load(sequence + 7).to(tl.uint32)
    first_draft = tl.load(sequence + 12).to(tl.int64)
    work = work_ptr + tl.program_id(0).to(tl.int64) * vocab_size
    result = result_ptr + index * (2 * max_nodes + 3)
    is_bad = tl.load(edge_ptr + 2 * num_rows + first_row)
    for child in range(num_nodes):
        is_bad = tl.maximum(is_bad, tl.load(edge_ptr + 2 * num_rows + first_row + 1 + child))
    node = index * 0 - 1
    row = first_row
    num = index * 0
    num_refused = index * 0  # siblings refused at this node
    for child in range(num_nodes):
        if (tl.load(row_ptr + (first_row + 1 + child) * ROW_INTS + 2) == node) & (is_bad == 0):
            token = tl.load(row_ptr + (first_row + 1 + child) * ROW_INTS + 1)
            q_row = draft_ptr + (first_draft + child) * vocab_size
            q = tl.load(q_row + token)
            q_mass = tl.zeros([], dtype=tl.float32) + 1.0
            if num_refused > 0:  # siblings were sampled without replacement
                left = tl.zeros([], dtype=tl.float64)
                for first in range(0, vocab_size, TILE):
                    at = first + tl.arange(0, TILE)
                    some = tl.load(q_row + at, mask=at < vocab_size, other=0.0)
                    for other in range(child):
                        other_row = row_ptr + (first_row + 1 + other) * ROW_INTS
                        is_sibling = tl.load(other_row + 2) == node
                        some = tl.where(is_sibling & (at == tl.load(other_row + 1)), 0.0, some)
                    left += tl.sum(some, axis=0).to(tl.float64)
                q_mass = tl.maximum(left.to(tl.float32), _TINY)
                p = tl.load(work + token)
            else:
                p = _target_at(
                    logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, row, token, True, temperature
                )
            number = uniform(index * 0 + child, position, salt, k0, k1)
            if number * (q / q_mass).to(tl.float64) < p.to(tl.float64):
                tl.store(result + 2 + num, token)
                tl.store(result + 3 + max_nodes + num, child)
                num += 1
                node = child
                row = first_row + 1 + child
                num_refused = index * 0
            else:
                # p becomes max(p - q, 0). At tokens refused before p is 0 already, whatever q is there.
                mass = tl.zeros([], dtype=tl.float64)
                for first in range(0, vocab_size, TILE):
                    at = first + tl.arange(0, TILE)
                    mask = at < vocab_size
                    if num_refused > 0:
                        some_p = tl.load(work + at, mask=mask, other=0.0)
                    else:
                        some_p = _target_at(
                            logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, row, at, mask, temperature
                        )
                    some_q = tl.load(q_row + at, mask=mask, other=0.0) / q_mass
                    mass += tl.sum(tl.maximum(some_p - some_q, 0.0), axis=0).to(tl.float64)
                scale = tl.where(mass > 0.0, 1.0 / tl.maximum(mass, 1e-300), 1.0).to(tl.float32)
                for first in range(0, vocab_size, TILE):
                    at = first + tl.arange(0, TILE)
                    mask = at < vocab_size
                    if num_refused > 0:
                        some_p = tl.load(work + at, mask=mask, other=0.0)
                    else:
                        some_p = _target_at(
                            logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, row, at, mask, temperature
                        )
                    some_q = tl.load(q_row + at, mask=mask, other=0.0) / q_mass
                    rest = tl.where(mass > 0.0, tl.maximum(some_p - some_q, 0.0) * scale, some_p)
                    tl.store(work + at, rest, mask=mask)
                num_refused += 1
                tl.debug_barrier()
    number = uniform(num_nodes, position, salt, k0, k1)
    last = index * 0
    if is_bad == 0:
        last = _draw(
            logits_ptr,
            stride_row,
            edge_ptr,
            stat_ptr,
            num_rows,
            row,
            temperature,
            work,
            num_refused > 0,
            number,
            vocab_size,
            TILE,
        )
    tl.store(result + 2 + num, last)
    tl.store(result, num)
    tl.store(result + 1, is_bad)


@triton.jit
def _step_weight(weight, p, q):
    """How much of the target's mass the chain carries one token further on; float64 scalars."""
    return tl.minimum(weight * p.to(tl.float64) / tl.maximum(q, _TINY).to(tl.float64), 1.0)


@triton.jit(do_not_specialize=["num_rows", "num_draft_nodes"])
def block_mass_kernel(
    node_ptr,  # [nodes of block sequences, 2] int32: sequence, node
    sequence_ptr,
    row_ptr,
    setting_ptr,
    logits_ptr,
    edge_ptr,
    stat_ptr,
    draft_ptr,
    mass_ptr,  # [2, draft nodes] float64: weight of the chain before a node, mass of its residual
    stride_row,
    vocab_size,
    num_rows,
    num_draft_nodes,
    TILE: tl.constexpr,
):
    index = tl.load(node_ptr + 2 * tl.program_id(0))
    node = tl.load(node_ptr + 2 * tl.program_id(0) + 1)
    sequence = sequence_ptr + index * SEQUENCE_INTS
    first_row = tl.load(sequence)
    temperature = tl.load(setting_ptr + index * SETTINGS).to(tl.float32)
    first_draft = tl.load(sequence + 12).to(tl.int64)
    weight = tl.zeros([], dtype=tl.float64) + 1.0
    for before in range(node):
        token = tl.load(row_ptr + (first_row + 1 + before) * ROW_INTS + 1)
        p = _target_at(
            logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, first_row + before, token, True, temperature
        )
        weight = _step_weight(weight, p, tl.load(draft_ptr + (first_draft + before) * vocab_size + token))
    row = first_row + node
    q_row = draft_ptr + (first_draft + node) * vocab_size
    mass = tl.zeros([], dtype=tl.float64)
    for first in range(0, vocab_size, TILE):
        at = first + tl.arange(0, TILE)
        mask = at < vocab_size
        p = _target_at(logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, row, at, mask, temperature)
        rest = p * weight.to(tl.float32) - tl.load(q_row + at, mask=mask, other=0.0)
        mass += tl.sum(tl.maximum(rest, 0.0), axis=0).to(tl.float64)
    tl.store(mass_ptr + first_draft + node, weight)
    tl.store(mass_ptr + num_draft_nodes + first_draft + node, mass)


@triton.jit(do_not_specialize=["num_rows", "max_nodes", "num_draft_nodes"])
def block_kernel(
    index_ptr,
    sequence_ptr,
    row_ptr,
    setting_ptr,
    logits_ptr,
    edge_ptr,
    stat_ptr,
    draft_ptr,
    mass_ptr,
    work_ptr,
    result_ptr,
    stride_row,
    vocab_size,
    num_rows,
    max_nodes,
    num_draft_nodes,
    TILE: tl.constexpr,
):
    """Sun et al., arXiv:2403.10444, algorithm 2, for one chain."""
    index = tl.load(index_ptr + tl.program_id(0))
    sequence = sequence_ptr + index * SEQUENCE_INTS
    first_row = tl.load(sequence)
    num_nodes = tl.load(sequence + 1)
    temperature = tl.load(setting_ptr + index * SETTINGS).to(tl.float32)
    k0 = tl.load(sequence + 4).to(tl.uint32)
    k1 = tl.load(sequence + 5).to(tl.uint32)
    salt = tl.load(sequence + 6).to(tl.uint32)
    position = tl.load(sequence + 7).to(tl.uint32)
    first_draft = tl.load(sequence + 12).to(tl.int64)
    work = work_ptr + tl.program_id(0).to(tl.int64) * vocab_size
    result = result_ptr + index * (2 * max_nodes + 3)
    is_bad = tl.load(edge_ptr + 2 * num_rows + first_row)
    num = index * 0
    for node in range(num_nodes):
        is_bad = tl.maximum(is_bad, tl.load(edge_ptr + 2 * num_rows + first_row + 1 + node))
        number = uniform(index * 0 + node, position, salt, k0, k1)
        if node + 1 == num_nodes:
            token = tl.load(row_ptr + (first_row + 1 + node) * ROW_INTS + 1)
            p = _target_at(
                logits_ptr,
                stride_row,
                edge_ptr,
                stat_ptr,
                num_rows,
                first_row + node,
                token,
                True,
                temperature,
            )
            q = tl.load(draft_ptr + (first_draft + node) * vocab_size + token)
            chance = _step_weight(tl.load(mass_ptr + first_draft + node), p, q)
        else:
            mass = tl.load(mass_ptr + num_draft_nodes + first_draft + node + 1)
            left = mass + 1.0 - tl.load(mass_ptr + first_draft + node + 1)
            chance = tl.where(left > 0.0, mass / tl.where(left > 0.0, left, 1.0), 1.0)
        if number < chance:
            num = node + 1
        tl.store(result + 2 + node, tl.load(row_ptr + (first_row + 1 + node) * ROW_INTS + 1))
        tl.store(result + 3 + max_nodes + node, node)
    number = uniform(num_nodes, position, salt, k0, k1)
    row = first_row + num
    is_residual = num < num_nodes
    if is_residual:
        is_residual = tl.load(mass_ptr + num_draft_nodes + first_draft + num) > 0.0
    if is_residual & (is_bad == 0):
        weight = tl.load(mass_ptr + first_draft + num).to(tl.float32)
        q_row = draft_ptr + (first_draft + num) * vocab_size
        for first in range(0, vocab_size, TILE):
            at = first + tl.arange(0, TILE)
            mask = at < vocab_size
            p = _target_at(logits_ptr, stride_row, edge_ptr, stat_ptr, num_rows, row, at, mask, temperature)
            rest = p * weight - tl.load(q_row + at, mask=mask, other=0.0)
            tl.store(work + at, tl.maximum(rest, 0.0), mask=mask)
        tl.debug_barrier()
    last = index * 0
    if is_bad == 0:
        last = _draw(
            logits_ptr,
            stride_row,
            edge_ptr,
            stat_ptr,
            num_rows,
            row,
            temperature,
            work,
            is_residual,
            number,
            vocab_size,
            TILE,
        )
    tl.debug_barrier()  # the drafted tokens were all written; the last one goes over one of them
    tl.store(result + 2 + num, last)
    tl.store(result, num)
    tl.store(result + 1, is_bad)
