"""Output length: the length asked for, callers, ceilings; better than the task's median."""

from __future__ import annotations

import random

import numpy as np
import pytest

from router_models.asked_length import asked_tokens
from router_models.output_length import OutputLength
from router_models.types import LengthFeatures, LengthOutcome, WaitFeatures
from router_models.wait import Wait


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("Describe the sea in 50 words.", 50, 90),
        ("Write an essay of about 1,000 words on bees", 1000, 1700),
        ("Give me three bullet points", 50, 120),
        ("in 2-3 sentences", 40, 90),
        ("Write two short paragraphs", 150, 300),
        ("用一句话概括", 10, 40),
        ("写一篇不少于800字的作文", 400, 800),
        ("列出五点建议", 80, 200),
        ("请简要说明", 20, 100),
        ("a 10-page report", 4000, 9000),
    ],
)
def test_lengths_asked_for_are_read(text: str, low: float, high: float) -> None:
    found = asked_tokens(text)
    assert found is not None
    assert low <= found <= high


@pytest.mark.parametrize(
    "text", ["What is love?", "今天天气怎么样", "", "line", "He paid 50 dollars", "词典"]
)
def test_other_texts_ask_for_no_length(text: str) -> None:
    assert asked_tokens(text) is None


def _world(rng: random.Random) -> tuple[LengthFeatures, int]:
    task = rng.choice(["chat", "code_edit", "summarization"])
    prompt, asked = rng.randint(20, 2000), rng.choice([None, None, 40.0, 300.0])
    caller = rng.choice(["short", "long"])
    typical = {"chat": 200.0, "code_edit": 0.8 * prompt + 5, "summarization": 80.0}[task]
    if asked is not None:
        typical = asked
    typical *= 0.4 if caller == "short" else 1.6
    return LengthFeatures(task, prompt, None, caller, asked), max(
        1, int(typical * rng.lognormvariate(0, 0.3))
    )


def test_it_beats_the_tasks_own_quantiles_and_its_quantiles_hold() -> None:
    rng, model = random.Random(0), OutputLength()
    history: dict[str, list[int]] = {}
    ours, theirs, below = [], [], []
    for i in range(2500):
        x, y = _world(rng)
        q = model.predict_one(x)
        seen = history.setdefault(str(x.task), [])
        if i > 500:
            ours.append(abs(y - q.p50) / 2)
            theirs.append(abs(y - float(np.median(seen))) / 2)
            below.append((y <= q.p50, y <= q.p90))
        seen.append(y)
        model.learn_one(x, LengthOutcome(y))
    assert np.mean(ours) < 0.65 * np.mean(theirs)
    assert np.mean([b[0] for b in below]) == pytest.approx(0.5, abs=0.06)
    assert np.mean([b[1] for b in below]) == pytest.approx(0.9, abs=0.04)


def test_max_tokens_caps_and_cut_answers_do_not_pull_down() -> None:
    model = OutputLength()
    x = LengthFeatures("chat", 50, max_tokens=20)
    assert model.predict_one(x).p90 <= 20
    free = LengthFeatures("chat", 50)
    before = model.predict_one(free).p50
    for _ in range(100):
        model.learn_one(LengthFeatures("chat", 50, max_tokens=20), LengthOutcome(20, is_cut=True))
    assert model.predict_one(free).p50 == pytest.approx(before)


def test_many_callers_are_forgotten_not_hoarded() -> None:
    model = OutputLength()
    for i in range(1500):
        model.learn_one(LengthFeatures("chat", 50, caller=f"c{i}"), LengthOutcome(10))
    assert len(model.state()["callers"]) <= 1000


def test_waits_grow_with_the_queue() -> None:
    rng, model = random.Random(1), Wait("ttft")
    for _ in range(800):
        waiting = rng.randint(0, 8)
        x = WaitFeatures(rng.randint(50, 1000), num_waiting=waiting, prefill_s=0.1)
        model.learn_one(x, (0.1 + 0.3 * waiting) * rng.lognormvariate(0, 0.2))
    idle, busy = (model.predict_one(WaitFeatures(300, num_waiting=w, prefill_s=0.1)) for w in (0, 8))
    assert idle.p50 == pytest.approx(0.1, rel=0.25)
    assert busy.p50 == pytest.approx(2.5, rel=0.3)
    assert busy.p50 < busy.p90
