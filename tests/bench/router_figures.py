"""Figures of the router models: what the shipped classifier scores and costs, and the length model.

    python tests/bench/router_figures.py [--data FILE.jsonl]

Scores of the classifier are those its own training measured, with wordings and documents of the
validation side kept out (`specgate train-classifier --data FILE` measures them anew). The length
figures replay the file's reference answers in five random orders, each predicted before it is
learned, from its 200th row on, against the quantiles of the task's own past.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from router_models.acceptance import Acceptance, RequestCurves
from router_models.asked_length import asked_tokens
from router_models.output_length import OutputLength
from router_models.task_class import TaskClassifier
from router_models.types import AcceptanceKey, LengthFeatures, LengthOutcome, RequestText

ENGLISH = "The quick brown fox, who is 12 years old, jumps over it. "
CHINESE = "这部电影非常感人，我觉得还行吧，共有12人。"
CODE = "def foo(a, b):\n    if a > 3:\n        return [x for x in b]\n\n"


def median_us(call: Any, count: int = 400) -> float:
    """Median microseconds of a call."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return round(statistics.median(taken) * 1e6, 1)


def classifier_figures() -> dict[str, Any]:
    """The artefact's own scores, and time per request by length and script."""
    model = TaskClassifier()
    p50 = {
        f"{name}, {size} characters": median_us(partial(model.predict_one, RequestText((text * 2000)[:size])))
        for name, text in (("English", ENGLISH), ("Chinese", CHINESE), ("code", CODE))
        for size in (2000, 30_000)
    }
    return {"version": model.artefact.version, "scores": model.artefact.meta["scores"], "p50_us": p50}


def planner_figures() -> dict[str, float]:
    """Time for the curves of 64 running requests."""
    model = Acceptance()
    curves = RequestCurves([model.predict_one(AcceptanceKey("ngram", t)) for t in ("chat", "code_edit")])
    which, drafts = np.arange(64) % 2, np.arange(64.0)
    return {
        "curves_of_64_requests_us": median_us(lambda: curves.expected(which, drafts, 4 * drafts, 2 * drafts))
    }


def pinball(y: np.ndarray, guess: np.ndarray, level: float) -> float:
    """Mean pinball loss, in tokens."""
    return float(np.maximum(level * (y - guess), (level - 1) * (y - guess)).mean())


def rank_correlation(y: np.ndarray, guess: np.ndarray) -> float:
    """Spearman's, ties by mean rank."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, place, count = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[place]

    return float(np.corrcoef(ranks(y), ranks(guess))[0, 1])


def length_figures(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The length model against the quantiles of its task's past, mean of five orders."""
    rows = [r for r in rows if r["reference_kind"] == "full" and r["reference_output_len_tokens"]]
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(rows))
        model, past = OutputLength(), defaultdict(list)
        truth, ours, theirs = [], [], []
        for i in order.tolist():
            row = rows[i]
            text = row["prompt"] if row.get("prompt") else row["messages"][-1]["content"]
            x = LengthFeatures(row["task"], row["prompt_tokens"], asked_tokens=asked_tokens(text))
            q, seen, y = model.predict_one(x), past[row["task"]] or [90], row["reference_output_len_tokens"]
            truth.append(y)
            ours.append((q.p50, q.p90))
            theirs.append((np.median(seen), np.quantile(seen, 0.9)))
            model.learn_one(x, LengthOutcome(y))
            past[row["task"]].append(y)
        y = np.array(truth[200:], dtype=float)
        for name, guesses in (("model", ours), ("task's own past", theirs)):
            low, high = np.array(guesses[200:]).T
            runs[name].append(
                {
                    "pinball_p50_tokens": pinball(y, low, 0.5),
                    "pinball_p90_tokens": pinball(y, high, 0.9),
                    "rank_correlation": rank_correlation(y, low),
                    "below_p50": float((y <= low).mean()),
                    "below_p90": float((y <= high).mean()),
                }
            )
    return {n: {k: round(float(np.mean([r[k] for r in v])), 3) for k in v[0]} for n, v in runs.items()}


def main() -> None:
    """Print all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    shared = Path(__file__).parents[3] / "shared" / "data" / "tasks_dev.jsonl"
    parser.add_argument("--data", type=Path, default=shared, help="labelled rows with reference lengths")
    path: Path = parser.parse_args().data
    figures: dict[str, Any] = {"task": classifier_figures(), "planner": planner_figures()}
    if path.exists():
        with path.open(encoding="utf-8") as file:
            figures["length"] = length_figures([json.loads(line) for line in file])
    print(json.dumps(figures, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
