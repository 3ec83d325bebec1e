"""The structural estimate: plain cases of every task, and bounds of the length."""

from __future__ import annotations

from typing import Any

import pytest

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
