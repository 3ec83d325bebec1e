"""The structural estimate: plain cases of every task, and bounds of the length."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgate.api.parse import Caller, Parser
from specgate.config import RequestsConfig
from specgate.estimate import StructuralEstimator
from specgate.types import TASKS, GenerationRequest

PARSER = Parser(RequestsConfig(allow_overrides=True))
ESTIMATOR = StructuralEstimator()
CODE = "```python\ndef add(a, b):\n    return a - b\n```"
DOCUMENT = "The valley was settled in 1820 by farmers from the north. They grew rye and kept sheep. " * 20


def ask(text: str, **fields: Any) -> GenerationRequest:
    return PARSER.chat({"model": "m", "messages": [{"role": "user", "content": text}]} | fields, Caller("x"))


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("Hello, how are you today?", "chat"),
        ("Summarize the following text.\n" + DOCUMENT, "summarization"),
        ("请总结下面的会议内容。\n" + "会议讨论了预算和进度。" * 40, "summarization"),
        (DOCUMENT + "\nBased on the passage, who settled the valley?", "document_qa"),
        ("阅读下面的材料，回答问题。" + "长江是中国最长的河流。" * 60 + "\n长江有多长？", "document_qa"),
        ("Fix the bug in this function:\n" + CODE, "code_edit"),
        ("修复这段代码里的错误：\n" + CODE, "code_edit"),
        ("Write a Python function that reverses a list.", "code_completion"),
        ("Translate into German: The weather is nice.", "translation"),
        ("把这句话翻译成英文：今天天气很好。", "translation"),
        ("Tom has 3 apples and buys 5 more, then eats 2. How many apples are left?", "reasoning"),
        ("小明有3个苹果，又买了5个，一共有多少个？", "reasoning"),
        ("Write a short poem about autumn rain.", "creative_writing"),
        ("写一篇关于春天的散文。", "creative_writing"),
    ],
)
def test_plain_cases(text: str, task: str) -> None:
    estimate = ESTIMATOR.task(ask(text))
    assert estimate.label == task
    assert set(estimate.probabilities) == set(TASKS)
    assert sum(estimate.probabilities.values()) == pytest.approx(1)


def test_tools_raw_code_and_overrides() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    assert ESTIMATOR.task(ask("What is the weather in Paris?", tools=[tool])).label == "tool_call"
    raw = PARSER.completions(
        {"model": "m", "prompt": "def add(a, b):\n    return a + b\n\ndef mul("}, Caller("x")
    )
    assert ESTIMATOR.task(raw).label == "code_completion"
    certain = ESTIMATOR.task(ask("hi", specgate={"task": "reasoning"}))
    assert (certain.label, certain.confidence) == ("reasoning", 1.0)


def test_lengths_follow_what_is_asked_for() -> None:
    def p50(text: str) -> float:
        request = ask(text)
        return ESTIMATOR.length(request, ESTIMATOR.task(request), 4000).p50

    assert p50("Write a story of 800 words about a fox.") > 900
    assert p50("Answer in one sentence: what is rain?") <= 30
    assert p50("写一篇800字的作文。") == pytest.approx(640)


@given(text=st.text(max_size=80), max_tokens=st.integers(1, 5000), min_tokens=st.integers(0, 5000))
def test_lengths_stay_within_the_limits(text: str, max_tokens: int, min_tokens: int) -> None:
    min_tokens = min(min_tokens, max_tokens)
    request = ask(text, max_tokens=max_tokens, min_tokens=min_tokens)
    estimate = ESTIMATOR.length(request, ESTIMATOR.task(request), max_tokens)
    assert min_tokens <= estimate.p50 <= estimate.p90 <= max_tokens
