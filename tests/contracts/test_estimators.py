"""The estimator contract, run against every estimator of router_models."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from router_models.acceptance import Acceptance
from router_models.checks import EstimatorCase, check_estimator
from router_models.output_length import OutputLength
from router_models.step_latency import StepLatency
from router_models.task_class import TaskClassifier
from router_models.types import (
    AcceptanceCounts,
    AcceptanceKey,
    DraftFeatures,
    LengthFeatures,
    LengthOutcome,
    RequestText,
    StepFeatures,
    StepTiming,
    WaitFeatures,
)
from router_models.wait import Wait


def _step_latency() -> EstimatorCase[Any, Any, Any]:
    rng = random.Random(1)
    steps: list[tuple[StepFeatures, StepTiming]] = []
    for i in range(120):
        batch, depth = rng.randint(1, 8), rng.choice([0, 0, 2, 4])
        tokens, kv = batch * (1 + depth), float(batch * rng.randint(50, 900))
        work = () if depth == 0 else (DraftFeatures("draft", depth, batch, batch * depth, kv),)
        draft_s = () if depth == 0 else (0.003 * depth + 1e-4 * batch * depth,)
        prefill = 64.0 if i % 7 == 0 else 0.0
        seconds = 0.01 + 0.001 * tokens + 1e-6 * kv + 1e-4 * prefill + sum(draft_s)
        noise = math.exp(rng.gauss(0, 0.02))
        steps.append(
            (
                StepFeatures(batch, tokens + prefill, kv, prefill, 0.0, work),
                StepTiming(seconds * noise, draft_s),
            )
        )
    good = steps[0][0]
    return EstimatorCase(
        "step_latency",
        StepLatency,
        StepLatency.from_state,
        steps,
        [s[0] for s in steps[:8]],
        lambda p, x: p.seconds,
        bad=[
            (good, StepTiming(math.nan)),
            (good, StepTiming(-1.0)),
            (StepFeatures(1, math.inf, 3), StepTiming(0.1)),
            (StepFeatures(1, 1, 3, drafts=(DraftFeatures("draft"),)), StepTiming(0.1)),
        ],
    )


def _acceptance() -> EstimatorCase[Any, Any, Any]:
    keys = [
        AcceptanceKey(p, t, b) for p in ("ngram", "draft") for t in ("chat", None) for b in ("greedy", "warm")
    ]
    counts = AcceptanceCounts(20, 15, (15, 14, 12), (9, 5, 2))
    return EstimatorCase(
        "acceptance",
        lambda: Acceptance(max_depth=6),
        Acceptance.from_state,
        [(key, counts) for key in keys[:6]],
        [*keys, AcceptanceKey("unseen", "reasoning", "hot")],
        lambda p, x: p.expected_tokens[-1],
        bad=[
            (keys[0], AcceptanceCounts(3, 4, (4,), (1,))),
            (keys[0], AcceptanceCounts(4, 4, (4,), (5,))),
            (keys[0], AcceptanceCounts(-1, 0)),
        ],
    )


def _output_length() -> EstimatorCase[Any, Any, Any]:
    rng = random.Random(2)
    tasks = ["chat", "code_edit", "translation", None]
    stream = [
        (
            LengthFeatures(
                rng.choice(tasks), rng.randint(1, 3000), rng.choice([None, 64, 900]), rng.choice("abc")
            ),
            LengthOutcome(rng.randint(0, 800), rng.random() < 0.2),
        )
        for _ in range(150)
    ]
    queries = [x for x, _ in stream[:6]] + [LengthFeatures("chat", 5, 10, "new", 400.0)]
    bad = [(stream[0][0], LengthOutcome(-5))]
    return EstimatorCase(
        "output_length",
        OutputLength,
        OutputLength.from_state,
        stream,
        queries,
        lambda p, x: math.log(p.p50),
        bad,
    )


def _wait(quantity: str) -> EstimatorCase[Any, Any, Any]:
    rng = random.Random(3)
    stream = [
        (
            WaitFeatures(rng.randint(1, 2000), 0, rng.randint(0, 9), w := rng.randint(0, 5), 0, 1.0, None),
            0.05 + 0.2 * w,
        )
        for _ in range(100)
    ]
    queries = [x for x, _ in stream[:5]] + [WaitFeatures(100, prefill_s=0.3)]
    bad = [(stream[0][0], math.nan), (stream[0][0], -0.1)]
    return EstimatorCase(
        quantity, lambda: Wait(quantity), Wait.from_state, stream, queries, lambda p, x: math.log(p.p50), bad
    )


def _task_class() -> EstimatorCase[Any, Any, Any]:
    texts = [
        RequestText("Translate into German: good morning"),
        RequestText("写一首关于秋天的诗"),
        RequestText("def f(x):\n    return", is_raw_prompt=True),
        RequestText(""),
    ]

    def log_odds(p: Any, x: RequestText) -> float:
        second, best = sorted(p.probabilities.values())[-2:]
        return math.log(best / second)

    stream = [(texts[0], "translation"), (texts[1], "creative_writing"), (texts[2], "code_completion")]
    return EstimatorCase(
        "task_class",
        TaskClassifier,
        TaskClassifier.from_state,
        stream,
        texts,
        log_odds,
        bad=[(texts[0], "no such task")],
    )


CASES = {
    "step_latency": _step_latency,
    "acceptance": _acceptance,
    "output_length": _output_length,
    "ttft": lambda: _wait("ttft"),
    "queue_wait": lambda: _wait("queue_wait"),
    "task_class": _task_class,
}


@pytest.mark.parametrize("name", CASES)
def test_contract(name: str) -> None:
    check_estimator(CASES[name]())
