"""Seeded answers are a function of the request alone; processors hold under every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.types import AcceptRule, SamplingParams
from tests.engine.harness import POLICIES, VOCAB, all_drafters, drive, make_engine, prompt, request

PROMPTS = tuple(prompt(seed, 5 + 3 * seed) for seed in range(4))
SAMPLED = SamplingParams(temperature=0.9, max_tokens=16, ignore_eos=True)
SETTINGS = {
    "plain": replace(SAMPLED, seed=1),
    "top_k": replace(SAMPLED, seed=2, top_k=8),
    "top_p": replace(SAMPLED, seed=3, top_p=0.7, temperature=1.4),
    "min_p": replace(SAMPLED, seed=-4, min_p=0.2),
    "penalties": replace(
        SAMPLED, seed=2**63 + 5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "bias": replace(SAMPLED, seed=6, logit_bias={7: -100.0, 9: 3.0}),
    "nearly_greedy": replace(SAMPLED, temperature=1e-46),  # nothing is left of it in float32
    "greedy_penalties": replace(
        SAMPLED, temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3
    ),
    "greedy_bias": replace(SAMPLED, temperature=0.0, logit_bias={11: -100.0, 12: 1.5}, min_tokens=5),
}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], list[int]]:
    """Every request by itself, decoded plainly."""
    engine = make_engine()
    return {
        (name, index): drive(engine, [request("a", ids, params)]).finished["a"].token_ids
        for name, params in SETTINGS.items()
        for index, ids in enumerate(PROMPTS)
    }


@pytest.mark.parametrize(("known_setting", "num_blocks"), [("plain", 256), ("greedy_bias", 24)])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_alone_and_in_company(
    policy: str, known_setting: str, num_blocks: int, alone: dict[tuple[str, int], list[int]]
) -> None:
    """All settings in one batch; the stubs draft what one of them answers, so right, wrong and mixed."""
    known = {ids: alone[known_setting, index] for index, ids in enumerate(PROMPTS)}
    engine = make_engine(all_drafters(known), num_blocks=num_blocks, max_batch_tokens=40)
    requests = [
        request(f"{setting}/{index}", ids, params, policy, num_speculative_tokens=1 + index)
        for setting, params in SETTINGS.items()
        for index, ids in enumerate(PROMPTS)
    ]
    run = drive(engine, requests)
    for key, tokens in run.tokens().items():
        setting, index = key.split("/")
        assert tokens == alone[setting, int(index)], key
    if num_blocks == 24:
        assert sum(record.num_preemptions for record in run.records) > 0
    if policy.startswith("right"):
        assert all(run.finished[f"{known_setting}/{i}"].num_accepted_tokens > 0 for i in range(len(PROMPTS)))


def test_a_banned_token_never_appears(alone: dict[tuple[str, int], list[int]]) -> None:
    assert all(7 not in alone["bias", index] for index in range(len(PROMPTS)))
    assert all(11 not in alone["greedy_bias", index] for index in range(len(PROMPTS)))
    everything = {token for tokens in alone.values() for token in tokens}
    assert {7, 11} <= everything  # the bias mattered


def test_requests_without_a_seed_differ_and_stay_valid() -> None:
    """A fresh seed each, from the injected source; every rule runs with sampled drafts."""
    for rule in AcceptRule:
        engine = make_engine(all_drafters({}), accept_rule=rule)
        params = replace(SAMPLED, top_k=20, num_logprobs=1)
        requests = [
            request(f"{policy}/{n}", PROMPTS[1], params, policy)
            for policy in ("baseline", "ngram", "draft", "draft_other")
            for n in range(6)
        ]
        run = drive(engine, requests)
        texts = [tuple(tokens) for tokens in run.tokens().values()]
        assert len(set(texts)) == len(texts)
        assert all(len(text) == 16 and max(text) < VOCAB for text in texts)
        assert not any(record.drafter_errors for record in run.records)
        assert sum(work.num_draft_tokens for record in run.records for work in record.drafts) > 0


def test_the_seed_source_is_used_only_where_needed() -> None:
    engine, again = make_engine(), make_engine()
    for run_engine in (engine, again):
        drive(run_engine, [request("greedy", PROMPTS[0]), request("seeded", PROMPTS[0], SETTINGS["plain"])])
    first = drive(engine, [request("a", PROMPTS[0], SAMPLED)]).tokens()
    assert first == drive(again, [request("a", PROMPTS[0], SAMPLED)]).tokens()
    assert first == drive(make_engine(), [request("a", PROMPTS[0], SAMPLED)]).tokens()
