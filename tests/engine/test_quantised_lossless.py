"""On integer products even the logprobs are the same bits, whatever shares the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.kernels import native
from engine.models.quantised import build_quantised
from engine.models.tiny import random_weights, tiny_spec
from engine.models.weights import DictWeights
from tests.engine.harness import (
    EOS,
    GREEDY,
    POLICIES,
    VOCAB,
    all_drafters,
    drive,
    make_engine,
    prompt,
    request,
)

pytestmark = pytest.mark.skipif(native.load_library() is None, reason="no C compiler on this machine")
PROMPTS = ((5,) * 30, prompt(1, 1), prompt(4, 6) * 4, prompt(5, 40), prompt(5, 40) + prompt(6, 9))
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
