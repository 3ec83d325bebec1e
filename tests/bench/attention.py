"""Times paged attention by shape: `python tests/bench/attention.py`. Microseconds, median of many."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from engine.batch import ForwardBatch
from engine.kernels import native, reference, vectorised

BLOCK_SIZE = 16


def make_batch(num_sequences: int, cached: int, new: int) -> tuple[ForwardBatch, int]:
    """`num_sequences` sequences of `cached + new` KV tokens over shuffled blocks."""
    blocks = -(-(cached + new) // BLOCK_SIZE)
    tables = torch.randperm(num_sequences * blocks).view(num_sequences, blocks).int()
    positions = torch.arange(cached, cached + new).repeat(num_sequences)
    owner = torch.arange(num_sequences).repeat_interleave(new)
    slots = tables[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = ForwardBatch(
        token_ids=positions,
        positions=positions,
        slots=slots,
        query_start=torch.arange(0, num_sequences * new + 1, new, dtype=torch.int32),
        context_lens=torch.full((num_sequences,), cached + new, dtype=torch.int32),
        block_tables=tables,
        logits_rows=positions[:0],
    )
    return batch, num_sequences * blocks


def median_us(run: Callable[[], object], seconds: float) -> float:
    """Median time of one call over about `seconds`, after one warm-up."""
    run()
    times = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    """One line a shape: reference, whole-array torch, C with fp32 and bf16 KV."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.3)
    args = parser.parse_args()
    library = native.load_library()
    print(f"{torch.get_num_threads()} threads; microseconds per layer")
    print(f"{'batch x (cached + new)':26}{'reference':>11}{'torch':>11}{'C fp32':>11}{'C bf16':>11}")
    for num_sequences, cached, new in [
        (1, 1023, 1), (8, 1023, 1), (16, 1023, 1), (1, 1019, 5), (8, 1019, 5), (1, 0, 512), (1, 1024, 512),
    ]:  # fmt: skip
        batch, num_blocks = make_batch(num_sequences, cached, new)
        # Several layers' worth of cache, walked in turn, so that no layer is still in the CPU's cache.
        layers = [torch.randn(2, num_blocks, args.kv_heads, BLOCK_SIZE, args.head_dim) for _ in range(8)]
        halves = [layer.bfloat16() for layer in layers]
        query = torch.randn(num_sequences * new, args.heads, args.head_dim)
        scale = args.head_dim**-0.5
        cells = []
        for call, caches in [
            (reference.paged_attention, layers),
            (vectorised.paged_attention, layers),
            (lambda *a: native.paged_attention(library, *a), layers),
            (lambda *a: native.paged_attention(library, *a), halves),
        ]:

            def run(call=call, caches=caches, query=query, batch=batch, scale=scale):
                for cache in caches:
                    call(query, cache[0], cache[1], batch, scale)

            cells.append(median_us(run, args.seconds) / len(layers))
        print(
            f"{num_sequences:3} x ({cached:5} + {new:3}){'':8}" + "".join(f"{cell:11.0f}" for cell in cells)
        )


if __name__ == "__main__":
    main()
