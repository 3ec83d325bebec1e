"""Every row of logits judged by itself: its best token, the token it decides, what its filters leave.

`scan_kernel` reads each row once, in pieces that programs work on side by side. Greedy rows and
sampled rows without filters are then all but done. For the others `settle_kernel` gathers the tokens
near the best one in order of id, and finds by bisection where min_p, top_k and top_p cut; nothing is
sorted and no softmax is stored. The order of tokens is by score, then by lower id.

A distance is (best score - score) / temperature, at least 0; as float32 bits it orders like an
integer, which is what the bisection searches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.philox import gumbel_of, gumbel_run

GREEDY = tl.constexpr(0)
KEYED = tl.constexpr(1)
RATIO = tl.constexpr(2)
BLOCK = tl.constexpr(3)

# Columns of the table of sequences (int32), of that of rows (int32), of the settings (float64).
SEQUENCE_INTS = tl.constexpr(14)
ROW_INTS = tl.constexpr(5)
SETTINGS = tl.constexpr(6)

INFINITE = tl.constexpr(0x7F800000)
_FIRST_WINDOW = tl.constexpr(8.0)
_LAST_WINDOW = tl.constexpr(128.0)


@triton.jit(do_not_specialize=["num_splits"])
def scan_kernel(
    logits_ptr,  # [rows, vocab] float32
    sequence_ptr,
    row_ptr,
    setting_ptr,
    part_ptr,  # [3, rows, splits] float32: best score, sum of exp(-distance), best noisy score
    best_ptr,  # [2, rows, splits] int32: token of the best score, of the best noisy score
    stride_row,
    vocab_size,
    num_splits,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    num_parts = tl.num_programs(1) * num_splits
    place = row * num_splits + split
    sequence = sequence_ptr + tl.load(row_ptr + row * ROW_INTS) * SEQUENCE_INTS
    mode = tl.load(sequence + 2)
    token = split * TILE + tl.arange(0, TILE)
    mask = token < vocab_size
    scores = tl.load(logits_ptr + row.to(tl.int64) * stride_row + token, mask=mask, other=float("-inf"))
    has_nan = tl.max((scores != scores).to(tl.int32), axis=0)
    best = tl.max(scores, axis=0)
    at = tl.min(tl.where(scores == best, token, 0x7FFFFFFF), axis=0)
    tl.store(part_ptr + place, tl.where(has_nan > 0, float("nan"), best))
    tl.store(best_ptr + place, tl.minimum(at, vocab_size - 1))
    if mode != GREEDY:
        temperature = tl.load(setting_ptr + tl.load(row_ptr + row * ROW_INTS) * SETTINGS).to(tl.float32)
        pivot = tl.where(best == float("-inf"), 0.0, best)
        scaled = (scores - pivot) / temperature
        tl.store(part_ptr + num_parts + place, tl.sum(tl.exp(scaled), axis=0))
        if (mode == KEYED) & (tl.load(sequence + 13) == 0):
            position = (tl.load(sequence + 7) + tl.load(row_ptr + row * ROW_INTS + 3)).to(tl.uint32)
            k0 = tl.load(sequence + 4).to(tl.uint32)
            k1 = tl.load(sequence + 5).to(tl.uint32)
            salt = tl.load(sequence + 6).to(tl.uint32)
            noisy = scaled + gumbel_run(split * TILE, position, salt, k0, k1, TILE)
            noisy = tl.where(mask, noisy, float("-inf"))
            top = tl.max(noisy, axis=0)
            tl.store(part_ptr + 2 * num_parts + place, top)
            chosen = tl.min(tl.where(noisy == top, token, 0x7FFFFFFF), axis=0)
            tl.store(best_ptr + num_parts + place, tl.minimum(chosen, vocab_size - 1))


@triton.jit
def _gather(
    row_ptr,
    score_ptr,
    id_ptr,
    vocab_size,
    best,
    temperature,
    window,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the tokens within `window` in order of id, up to CAPACITY; (number, mass) of all of them."""
    num = tl.zeros([], dtype=tl.int32)
    mass = tl.zeros([], dtype=tl.float64)
    for first in range(0, vocab_size, TILE):
        token = first + tl.arange(0, TILE)
        scores = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        distance = (best - scores) / temperature
        is_near = (distance <= window) & (distance < float("inf"))
        rank = num + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
        tl.store(score_ptr + rank, distance, mask=is_near & (rank < CAPACITY))
        tl.store(id_ptr + rank, token, mask=is_near & (rank < CAPACITY))
        num += tl.sum(is_near.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(is_near, tl.exp(-distance), 0.0), axis=0).to(tl.float64)
    tl.debug_barrier()  # what was written is read by other threads
    return num, mass


@triton.jit
def _piece(
    first,
    num,
    is_listed,
    row_ptr,
    score_ptr,
    id_ptr,
    vocab_size,
    best,
    temperature,
    window,
    TILE: tl.constexpr,
):
    """Tokens, distances and mask of a piece of the candidates: of the list, or of the row where they
    are too many for the list."""
    place = first + tl.arange(0, TILE)
    if is_listed:
        mask = place < num
        distance = tl.load(score_ptr + place, mask=mask, other=float("inf"))
        token = tl.load(id_ptr + place, mask=mask, other=0x7FFFFFFF)
    else:
        token = place
        scores = tl.load(row_ptr + place, mask=place < vocab_size, other=float("-inf"))
        distance = (best - scores) / temperature
        mask = (distance <= window) & (distance < float("inf"))
    return token, distance, mask


@triton.jit
def _up_to(
    key, num, is_listed, row_ptr, score_ptr, id_ptr, vocab_size, best, temperature, window, TILE: tl.constexpr
):
    """(number, mass) of the candidates whose distance has bits at most `key`."""
    count = tl.zeros([], dtype=tl.int32)
    mass = tl.zeros([], dtype=tl.float64)
    for first in range(0, tl.where(is_listed, num, vocab_size), TILE):
        _, distance, mask = _piece(
            first, num, is_listed, row_ptr, score_ptr, id_ptr, vocab_size, best, temperature, window, TILE
        )
        mask = mask & (distance.to(tl.int32, bitcast=True) <= key)
        count += tl.sum(mask.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(mask, tl.exp(-distance), 0.0), axis=0).to(tl.float64)
    return count, mass


@triton.jit
def settle_kernel(
    logits_ptr,
    sequence_ptr,
    row_ptr,
    setting_ptr,
    part_ptr,
    best_ptr,
    score_ptr,  # [filtered rows, CAPACITY] float32, scratch
    id_ptr,  # [filtered rows, CAPACITY] int32, scratch
    token_ptr,  # [rows] int32: what each row decides (greedy and keyed rows)
    edge_ptr,  # [3, rows] int32: bits of the last distance that stays, last id at it, 1 for a bad row
    stat_ptr,  # [2, rows] float32: best score, mass of what stays relative to it
    stride_row,
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,  # num_splits rounded up to a power of 2
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    SEARCH_TILE: tl.constexpr,
):
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    index = tl.load(row_ptr + row * ROW_INTS)
    sequence = sequence_ptr + index * SEQUENCE_INTS
    setting = setting_ptr + index * SETTINGS
    mode = tl.load(sequence + 2)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    place = row * num_splits + split
    num_parts = num_rows * num_splits
    parts = tl.load(part_ptr + place, mask=is_split, other=float("-inf"))
    best_of = tl.load(best_ptr + place, mask=is_split, other=0x7FFFFFFF)
    has_nan = tl.max((parts != parts).to(tl.int32), axis=0) > 0
    best = tl.max(parts, axis=0)
    is_bad = has_nan | (tl.abs(best) == float("inf"))
    token = tl.min(tl.where(parts == best, best_of, 0x7FFFFFFF), axis=0)
    edge = INFINITE + index * 0
    edge_id = index * 0 - 1
    total = tl.zeros([], dtype=tl.float64) + 1.0
    if (mode != GREEDY) & (is_bad == 0):
        temperature = tl.load(setting).to(tl.float32)
        shift = (parts - best) / temperature
        sums = tl.load(part_ptr + num_parts + place, mask=is_split, other=0.0)
        total = tl.sum((sums * tl.exp(shift)).to(tl.float64), axis=0)
        if tl.load(sequence + 13) == 0:
            if mode == KEYED:
                noisy = tl.load(part_ptr + 2 * num_parts + place, mask=is_split, other=float("-inf")) + shift
                noisy_of = tl.load(best_ptr + num_parts + place, mask=is_split, other=0x7FFFFFFF)
                top = tl.max(noisy, axis=0)
                token = tl.min(tl.where(noisy == top, noisy_of, 0x7FFFFFFF), axis=0)
        else:
            list_index = tl.load(row_ptr + row * ROW_INTS + 4).to(tl.int64)
            scores = score_ptr + list_index * CAPACITY
            ids = id_ptr + list_index * CAPACITY
            logits = logits_ptr + row.to(tl.int64) * stride_row
            top_k = tl.load(sequence + 3)
            reach = tl.load(setting + 1).to(tl.float32)  # min_p as a distance
            top_p = tl.load(setting + 2)
            # 1. The candidates: all within a window that surely holds what stays.
            window = tl.where((top_k > 0) | (reach == float("inf")), tl.minimum(_FIRST_WINDOW, reach), reach)
            num, mass = _gather(logits, scores, ids, vocab_size, best, temperature, window, CAPACITY, TILE)
            lacks = tl.where(top_k > 0, num < top_k, mass < top_p * total)
            while lacks & (window < reach):
                window = tl.minimum(tl.where(window < _LAST_WINDOW, window * 4.0, float("inf")), reach)
                num, mass = _gather(
                    logits, scores, ids, vocab_size, best, temperature, window, CAPACITY, TILE
                )
                lacks = tl.where(top_k > 0, num < top_k, mass < top_p * total)
            is_listed = num <= CAPACITY
            # 2. top_k: the distance of the k-th, and how many stay of those that share it.
            edge = window.to(tl.int32, bitcast=True)
            num_edge = num  # no limit
            mass_left = tl.where(reach < float("inf"), mass, total)
            if (top_k > 0) & (num > top_k):
                low = index * 0
                while low < edge:
                    middle = low + (edge - low) // 2
                    count, _ = _up_to(
                        middle,
                        num,
                        is_listed,
                        logits,
                        scores,
                        ids,
                        vocab_size,
                        best,
                        temperature,
                        window,
                        SEARCH_TILE,
                    )
                    if count >= top_k:
                        edge = middle
                    else:
                        low = middle + 1
                count, mass_below = _up_to(
                    edge - 1,
                    num,
                    is_listed,
                    logits,
                    scores,
                    ids,
                    vocab_size,
                    best,
                    temperature,
                    window,
                    SEARCH_TILE,
                )
                num_edge = top_k - count
                mass_left = mass_below + num_edge * tl.exp(-edge.to(tl.float32, bitcast=True)).to(tl.float64)
            elif top_k > 0:
                mass_left = mass
            # 3. top_p: likewise, by mass.
            if top_p < 1.0:
                target = top_p * mass_left
                low = index * 0
                high = edge
                while low < high:
                    middle = low + (high - low) // 2
                    _, mass_below = _up_to(
                        middle,
                        num,
                        is_listed,
                        logits,
                        scores,
                        ids,
                        vocab_size,
                        best,
                        temperature,
                        window,
                        SEARCH_TILE,
                    )
                    if mass_below >= target:
                        high = middle
                    else:
                        low = middle + 1
                _, mass_below = _up_to(
                    high - 1,
                    num,
                    is_listed,
                    logits,
                    scores,
                    ids,
                    vocab_size,
                    best,
                    temperature,
                    window,
                    SEARCH_TILE,
                )
                each = tl.exp(-high.to(tl.float32, bitcast=True)).to(tl.float64)
                wanted = tl.ceil((target - mass_below) / tl.maximum(each, 1e-300))
                wanted = tl.maximum(tl.minimum(wanted, 1073741824.0), 1.0).to(tl.int32)
                num_edge = tl.where(high == edge, tl.minimum(num_edge, wanted), wanted)
                edge = high
            # 4. What stays: its mass, its last id at the edge, and the token a keyed row decides.
            seen = index * 0
            total = tl.zeros([], dtype=tl.float64)
            top = tl.zeros([], dtype=tl.float32) - float("inf")
            k0 = tl.load(sequence + 4).to(tl.uint32)
            k1 = tl.load(sequence + 5).to(tl.uint32)
            salt = tl.load(sequence + 6).to(tl.uint32)
            position = (tl.load(sequence + 7) + tl.load(row_ptr + row * ROW_INTS + 3)).to(tl.uint32)
            for first in range(0, tl.where(is_listed, num, vocab_size), SEARCH_TILE):
                candidate, distance, mask = _piece(
                    first,
                    num,
                    is_listed,
                    logits,
                    scores,
                    ids,
                    vocab_size,
                    best,
                    temperature,
                    window,
                    SEARCH_TILE,
                )
                key = distance.to(tl.int32, bitcast=True)
                is_edge = mask & (key == edge)
                rank = seen + tl.cumsum(is_edge.to(tl.int32), axis=0) - 1
                stays_at_edge = is_edge & (rank < num_edge)
                stays = mask & ((key < edge) | stays_at_edge)
                seen += tl.sum(is_edge.to(tl.int32), axis=0)
                edge_id = tl.maximum(edge_id, tl.max(tl.where(stays_at_edge, candidate, -1), axis=0))
                total += tl.sum(tl.where(stays, tl.exp(-distance), 0.0), axis=0).to(tl.float64)
                if mode == KEYED:
                    noise = gumbel_of(candidate, position, salt, k0, k1)
                    noisy = tl.where(stays, noise - distance, float("-inf"))
                    piece_top = tl.max(noisy, axis=0)
                    chosen = tl.min(tl.where(stays & (noisy == piece_top), candidate, 0x7FFFFFFF), axis=0)
                    if piece_top > top:
                        top = piece_top
                        token = chosen
    tl.store(token_ptr + row, token)
    tl.store(edge_ptr + row, edge)
    tl.store(edge_ptr + num_rows + row, edge_id)
    tl.store(edge_ptr + 2 * num_rows + row, is_bad.to(tl.int32))
    tl.store(stat_ptr + row, best)
    tl.store(stat_ptr + num_rows + row, total.to(tl.float32))
