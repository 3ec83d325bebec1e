"""Stop tokens, end-of-sequence and limits at every offset of an accepted block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.models.tiny import tiny_model
from engine.spec.drafter import DraftContext
from engine.spec.stub import StubDrafter, known_continuations
from engine.spec.tree import DraftTree
from engine.types import FinishReason
from tests.engine.harness import (
    EOS,
    GREEDY,
    POLICIES,
    VOCAB,
    Finished,
    all_drafters,
    drive,
    make_engine,
    prompt,
    reference_greedy,
    reference_logits,
    request,
    target,
)

PROMPT = prompt(11, 13)
NUM_TOKENS = 14
LOGGED = replace(GREEDY, num_logprobs=3, has_prompt_logprobs=False)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return reference_greedy(target(), PROMPT, 40)


def check_counts(item: Finished) -> None:
    """Tokens, logprobs and counts tell of the same tokens."""
    stats = item.stats
    assert stats is not None
    assert stats.num_output_tokens == len(item.token_ids)
    assert stats.num_prompt_tokens == len(PROMPT)
    assert [entry.token_id for entry in item.logprobs] == item.token_ids
    assert stats.num_accepted_tokens == item.num_accepted_tokens == sum(stats.accepted_per_position)
    assert stats.num_output_tokens <= stats.num_target_steps + stats.num_accepted_tokens
    assert sum(stats.drafted_per_position) <= stats.num_draft_tokens
    assert all(a <= d for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_length_at_every_offset(policy: str, expected: list[int]) -> None:
    engine = make_engine(all_drafters({PROMPT: expected}))
    requests = [
        request(f"{n}", PROMPT, replace(LOGGED, max_tokens=n), policy, num_speculative_tokens=5)
        for n in range(NUM_TOKENS)
    ]
    run = drive(engine, requests)
    for n in range(NUM_TOKENS):
        item = run.finished[f"{n}"]
        assert item.token_ids == expected[:n]
        assert item.finish_reason is FinishReason.LENGTH
        check_counts(item)


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_token_at_every_offset(policy: str, expected: list[int]) -> None:
    """Also where it falls on the last token there is room for: it is still a stop."""
    engine = make_engine(all_drafters({PROMPT: expected}))
    requests = [
        request(
            f"{n}-{room}",
            PROMPT,
            replace(LOGGED, stop_token_ids=(expected[n],), max_tokens=expected.index(expected[n]) + room),
            policy,
            num_speculative_tokens=5,
        )
        for n in range(NUM_TOKENS)
        for room in (0, 1, 2, 20)
    ]
    run = drive(engine, requests)
    for key, item in run.finished.items():
        n, room = map(int, key.split("-"))
        first = expected.index(expected[n])
        assert item.token_ids == expected[: first + (room > 0)]
        assert item.finish_reason is (FinishReason.STOP if room else FinishReason.LENGTH)
        check_counts(item)
        if policy == "right":  # what lies behind the cut says nothing about the drafter
            assert item.stats is not None
            assert item.stats.accepted_per_position == item.stats.drafted_per_position


@pytest.mark.parametrize("policy", ["baseline", "right", "right2", "wrong", "draft"])
def test_end_of_sequence_at_every_offset(policy: str, expected: list[int]) -> None:
    """The same weights with another end-of-sequence token; `ignore_eos` runs over it."""
    for end in dict.fromkeys(expected[:NUM_TOKENS]):
        model = tiny_model(vocab_size=VOCAB, max_model_len=256, eos_token_ids=frozenset({end}))
        engine = make_engine(all_drafters({PROMPT: expected}), model=model)
        params = replace(LOGGED, ignore_eos=False, max_tokens=20)
        run = drive(
            engine,
            [
                request("stops", PROMPT, params, policy, num_speculative_tokens=6),
                request("ignores", PROMPT, replace(params, ignore_eos=True), policy),
            ],
        )
        stops = run.finished["stops"]
        assert stops.token_ids == expected[: expected.index(end) + 1]
        assert stops.finish_reason is FinishReason.STOP
        check_counts(stops)
        assert run.finished["ignores"].token_ids == expected[:20]


@pytest.mark.parametrize("policy", POLICIES)
def test_min_tokens_advances_per_token(policy: str, expected: list[int]) -> None:
    """Each min_tokens gives the same text as plain decoding, which masks the ends token by token."""
    ends = tuple(dict.fromkeys(expected[2:5]))
    engine = make_engine(all_drafters({PROMPT: expected}))
    for turn_policy in ("baseline", policy):
        requests = [
            request(
                f"{turn_policy}-{n}",
                PROMPT,
                replace(LOGGED, stop_token_ids=ends, min_tokens=n, max_tokens=12),
                turn_policy,
            )
            for n in range(8)
        ]
        run = drive(engine, requests)
        for n in range(8):
            item = run.finished[f"{turn_policy}-{n}"]
            assert not set(item.token_ids[:n]) & {*ends, EOS}
            assert item.finish_reason is FinishReason.LENGTH or len(item.token_ids) > n
            check_counts(item)
        if turn_policy == "baseline":
            plain = {n: run.finished[f"baseline-{n}"].token_ids for n in range(8)}
        else:
            assert plain == {n: run.finished[f"{policy}-{n}"].token_ids for n in range(8)}


@pytest.mark.parametrize("policy", POLICIES)
def test_logprobs_are_the_targets_own(policy: str, expected: list[int]) -> None:
    engine = make_engine(all_drafters({PROMPT: expected}))
    item = drive(engine, [request("a", PROMPT, LOGGED, policy)]).finished["a"]
    rows = reference_logits(target(), PROMPT + tuple(expected)).log_softmax(-1)[len(PROMPT) - 1 :]
    for row, entry in zip(rows, item.logprobs, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        values, ids = torch.topk(row, 3)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_context_limit_ends_with_length(policy: str) -> None:
    """The draft shrinks as the context fills up, and the last token is the one the limit allows."""
    model = tiny_model(vocab_size=VOCAB, max_model_len=40, eos_token_ids=frozenset({EOS}))
    params = replace(LOGGED, max_tokens=500)
    prompts = [prompt(seed, length) for seed, length in enumerate((39, 38, 37, 33, 20, 1))]
    known = {ids: reference_greedy(model, ids, 40 - len(ids)) for ids in prompts}
    engine = make_engine(all_drafters(known, model), model=model)
    for num_speculative_tokens in (1, 4, 7):
        requests = [
            request(f"{i}", ids, params, policy, num_speculative_tokens) for i, ids in enumerate(prompts)
        ]
        run = drive(engine, requests)
        for index, ids in enumerate(prompts):
            item = run.finished[f"{index}"]
            assert item.token_ids == known[ids]
            assert item.finish_reason is FinishReason.LENGTH
        assert not any(record.drafter_errors for record in run.records)


def test_the_cache_bounds_the_context_too() -> None:
    """A lone sequence that fills every block ends with `length`, not with a deadlock."""
    expected = reference_greedy(target(), PROMPT, 11)
    engine = make_engine(all_drafters({PROMPT: expected}), num_blocks=6)
    assert engine.max_model_len == 24
    for policy in ("baseline", "right", "ngram", "draft"):
        item = drive(engine, [request("a", PROMPT, replace(GREEDY, max_tokens=99), policy)]).finished["a"]
        assert item.token_ids == expected
        assert item.finish_reason is FinishReason.LENGTH


class Unsure(StubDrafter):
    """Stops after one token, whatever it may."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return super().propose([replace(context, max_draft_tokens=1) for context in contexts])


def test_what_was_granted_is_counted_beside_what_was_drafted() -> None:
    ids = prompt(5, 12)
    known = {ids: reference_greedy(target(), ids, GREEDY.max_tokens)}
    drafter = Unsure(known_continuations(known), VOCAB)
    run = drive(make_engine({"stub": drafter}), [request("a", ids, policy="stub", num_speculative_tokens=3)])
    stats = run.finished["a"].stats
    assert stats is not None
    (counts,) = stats.by_method
    assert counts.drafted_per_position[1:] == (0, 0)
    assert counts.allowed_per_position[0] == counts.drafted_per_position[0] == counts.num_drafts
    assert 0 < counts.allowed_per_position[2] <= counts.num_drafts
