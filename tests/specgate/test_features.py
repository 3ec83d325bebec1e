"""Requests arrive at the router models as they were meant."""

from __future__ import annotations

import subprocess
import sys

from engine.types import SamplingParams
from specgate import features
from specgate.types import GenerationRequest, Overrides


def request(**changes: object) -> GenerationRequest:
    base: dict[str, object] = {
        "request_id": "r",
        "endpoint": "chat",
        "model": "m",
        "sampling": SamplingParams(max_tokens=99),
    }
    return GenerationRequest(**{**base, **changes})  # type: ignore[arg-type]


def test_chat_requests() -> None:
    text = features.request_text(
        request(
            messages=({"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}),
            tools=({"type": "function"},),
            response_format={"type": "json_object"},
            has_explicit_max_tokens=True,
        )
    )
    assert (text.system, text.user, text.num_tools, text.has_response_format) == ("S", "Hello", 1, True)
    assert text.max_tokens == 99
    plain = features.request_text(request(messages=(), response_format={"type": "text"}))
    assert not plain.has_response_format
    assert plain.max_tokens is None


def test_completions_as_text_and_as_token_ids() -> None:
    text = features.request_text(request(prompt="def f(", suffix="return"))
    assert (text.user, text.suffix, text.is_raw_prompt) == ("def f(", "return", True)
    assert features.request_text(request(prompt=(1, 2, 3))).user == ""


def test_the_learned_estimator_reads_the_task_and_obeys_an_override() -> None:
    estimator = features.LearnedEstimator()
    asks = request(messages=({"role": "user", "content": "把下面的话译成德语：我们明天见"},))
    found = estimator.task(asks)
    assert found.label == "translation"
    assert not found.is_mixed
    told = estimator.task(request(messages=asks.messages, overrides=Overrides(task="chat")))
    assert (told.label, told.confidence, told.probabilities["chat"]) == ("chat", 1.0, 1.0)


def test_no_torch_and_no_scikit_learn_are_imported() -> None:
    code = (
        "import sys, specgate.features as f; f.LearnedEstimator();"
        "bad = {'torch', 'sklearn', 'scipy', 'yaml', 'aiohttp'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
