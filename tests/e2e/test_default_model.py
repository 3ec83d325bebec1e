"""The default model behind a real server: text is the same under every policy, whole and streamed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.model]

CODE = "def area(radius):\n    return 3.14 * radius * radius\n"
PROMPTS = {
    "fact": "What is the capital of France? Answer in one short sentence.",
    "edit": f"Rename the parameter to r and repeat the whole function:\n```python\n{CODE}```",
    "chinese": "用中文写一句关于春天的话。",
    "question": f"Context: {'The bridge was opened in 1932 by the mayor. ' * 8}\nWhen was the bridge opened?",
    "list": "List the numbers from one to thirty in words.",
}
POLICIES = ("baseline", "ngram", "draft")


def ask(server: Server, prompt: str, policy: str, **fields: Any) -> Any:
    return server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        extra_headers={"X-SpecGate-Policy": policy},
        **fields,
    )


def test_an_answer_makes_sense_and_streams_alike(smollm2: Server) -> None:
    whole = ask(smollm2, PROMPTS["fact"], "baseline", max_tokens=24)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    for policy in ("ngram", "draft"):
        chunks = list(ask(smollm2, PROMPTS["fact"], policy, max_tokens=24, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_chinese_is_never_split(smollm2: Server) -> None:
    whole = ask(smollm2, PROMPTS["chinese"], "baseline", max_tokens=14).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(smollm2, PROMPTS["chinese"], "ngram", max_tokens=14, stream=True)
    ]
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces[:-2])  # the limit may cut the last character


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_policy_gives_the_same_text_alone_and_in_company(smollm2: Server) -> None:
    def text(prompt: str, policy: str) -> tuple[str, str]:
        choice = ask(smollm2, prompt, policy, max_tokens=40).choices[0]
        return choice.message.content, choice.finish_reason

    alone = {prompt: text(prompt, "baseline") for prompt in PROMPTS.values()}
    jobs = [(prompt, policy) for prompt in PROMPTS.values() for policy in POLICIES]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda job: text(*job), jobs))
    for (prompt, policy), answer in zip(jobs, answers, strict=True):
        assert answer == alone[prompt], (prompt, policy)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stop_string_in_a_real_answer(smollm2: Server) -> None:
    full = ask(smollm2, PROMPTS["list"], "baseline", max_tokens=32).choices[0].message.content
    for place in (4, 15, 30):
        stop = full[place : place + 5]
        for policy in POLICIES:
            choice = ask(smollm2, PROMPTS["list"], policy, max_tokens=32, stop=[stop, "zzz"]).choices[0]
            assert choice.message.content == full[: full.index(stop)]
            assert choice.finish_reason == "stop"
