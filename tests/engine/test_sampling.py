"""The processors against their plain statement, one by one and together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidLogits
from engine.kernels import CHOICE_VARIABLE, reference_verify
from engine.processors import adjusted_rows, filtered, filtered_rows, probabilities
from engine.sampling import LogitsRow, SamplingState, argmax_rows, choose, token_logprobs
from engine.spec.randomness import RandomKey
from engine.types import AcceptRule, SamplingParams

EOS = 0


@pytest.fixture(scope="module", params=["auto", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for the C kernels and for torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE_VARIABLE, request.param)
        yield


def state(
    params: SamplingParams, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = ()
) -> SamplingState:
    return SamplingState(params, prompt, output, frozenset({EOS}), RandomKey(1), AcceptRule.RATIO)


def kept(scores: list[float], params: SamplingParams) -> list[int]:
    token_ids, left = filtered(torch.tensor(scores) - max(scores), params)
    assert left.tolist() == sorted(left.tolist(), reverse=True)
    by_sorting = filtered_rows(torch.tensor([scores]) - max(scores), [params])
    assert set((by_sorting[0] > -math.inf).nonzero()[:, 0].tolist()) == set(token_ids.tolist())
    return token_ids.tolist()


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([{}, {3: 2.0, 5: -100.0}]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (4,)]),
)


def test_top_k_keeps_exactly_k_and_of_equals_the_lower_ids() -> None:
    assert kept([0.0, 2.0, 1.0, 2.0, 1.0], SamplingParams(top_k=3)) == [1, 3, 2]
    assert kept([1.0] * 5, SamplingParams(top_k=2)) == [0, 1]
    assert sorted(kept([0.0, 1.0], SamplingParams(top_k=9))) == [0, 1]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    scores = logs(0.1, 0.4, 0.3, 0.2)
    assert kept(scores, SamplingParams(top_p=0.39)) == [1]
    assert kept(scores, SamplingParams(top_p=0.41)) == [1, 2]
    assert kept(scores, SamplingParams(top_p=0.71)) == [1, 2, 3]
    assert kept(logs(0.25, 0.25, 0.25, 0.25), SamplingParams(top_p=0.3)) == [0, 1]
    assert kept(scores, SamplingParams(top_p=1e-9)) == [1]


def test_top_p_is_of_what_min_p_and_top_k_left() -> None:
    scores = logs(0.5, 0.3, 0.1, 0.1)
    assert kept(scores, SamplingParams(top_k=2, top_p=0.62)) == [0]  # 0.5 of 0.8
    assert kept(scores, SamplingParams(min_p=0.5, top_p=0.62)) == [0]
    assert kept(scores, SamplingParams(top_p=0.62)) == [0, 1]


def test_min_p_is_relative_to_the_best() -> None:
    assert kept(logs(0.5, 0.26, 0.24), SamplingParams(min_p=0.5)) == [0, 1]


def test_the_nucleus_is_found_in_a_flat_vocabulary_too() -> None:
    flat = torch.zeros(5000)
    token_ids, _ = filtered(flat, SamplingParams(top_p=0.5))
    assert token_ids.tolist() == list(range(2500))
    steep = -torch.arange(5000.0)  # far below the first window
    assert filtered(steep, SamplingParams(top_p=0.9999999))[0].tolist() == list(range(17))


@given(st.integers(0, 2**31), any_params, st.booleans())
@settings(max_examples=100, deadline=None)
def test_both_ways_to_filter_keep_the_same_tokens(seed: int, params: SamplingParams, ties: bool) -> None:
    scores = torch.randn(2000, generator=torch.Generator().manual_seed(seed)) * 4
    scores = (scores.round() if ties else scores) - scores.max()
    scores -= scores.max()
    token_ids, left = filtered(scores, params)
    by_sorting = filtered_rows(scores[None], [params])[0]
    assert (by_sorting > -math.inf).nonzero()[:, 0].tolist() == sorted(token_ids.tolist())
    assert torch.equal(by_sorting[token_ids], left)


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    logits = torch.tensor([[1.0, 2.0, -2.0, 4.0, -4.0]])
    row = LogitsRow(0, state(SamplingParams(repetition_penalty=2.0), prompt=(1, 2), output=(4,)), path=(3,))
    assert adjusted_rows(logits, [row]).tolist()[0] == [1.0, 1.0, -4.0, 2.0, -8.0]
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    row = LogitsRow(0, state(params, prompt=(1, 2), output=(4, 4)), path=(3, 4))
    assert adjusted_rows(logits, [row]).tolist()[0] == [1.0, 2.0, -2.0, 3.25, -5.75]
    assert logits.tolist() == [[1.0, 2.0, -2.0, 4.0, -4.0]], "the logits are only read"


def test_bias_comes_before_the_repetition_penalty() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 3.0, 2: -100.0})
    adjusted = adjusted_rows(torch.tensor([[0.0, 1.0, 1.0]]), [LogitsRow(0, state(params, prompt=(1,)))])
    assert adjusted.tolist()[0] == [0.0, 2.0, -99.0]


def test_min_tokens_masks_every_end_until_it_is_reached() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(2,), ignore_eos=True)
    logits = torch.tensor([[9.0, 1.0, 8.0, 0.0]])
    for path, best in (((), 1), ((1,), 1), ((1, 1), 0)):
        assert choose(logits, [LogitsRow(0, state(params, output=(1,)), path)]) == [best]
    # A bias cannot bring back what min_tokens forbids.
    biased = replace(params, logit_bias={EOS: 100.0})
    assert choose(logits, [LogitsRow(0, state(biased))]) == [1]


def test_argmax_takes_the_lowest_of_equals() -> None:
    assert argmax_rows(torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])) == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(temperature=0.0)]
)
def test_logits_that_are_no_numbers_are_refused(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 17] = bad
    choose(logits, [LogitsRow(0, state(params))])
    with pytest.raises(InvalidLogits, match="NaN or infinity"):
        choose(logits, [LogitsRow(0, state(params)), LogitsRow(1, state(params))])


def test_a_request_that_masks_every_token_is_refused() -> None:
    params = SamplingParams(logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(InvalidLogits, match="every token is masked"):
        choose(torch.zeros(1, 2), [LogitsRow(0, state(params))])


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_neither_overflow_nor_fail(temperature: float) -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) * 30
    row = LogitsRow(0, state(SamplingParams(temperature=temperature)))
    p = probabilities(logits, [row])
    assert p.sum() == pytest.approx(1.0, abs=1e-5)
    token = choose(logits, [row])[0]
    assert token == logits.argmax() if temperature < 1 else 0 <= token < 64


@given(st.integers(0, 2**31), st.lists(any_params, min_size=1, max_size=4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_all_processors_together_match_the_reference(
    seed: int, params: list[SamplingParams], ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), 40, generator=generator) * 3
    if ties:
        logits = logits.round()
    history = torch.randint(0, 40, (8,), generator=generator).tolist()
    rows = [
        LogitsRow(i, state(p, tuple(history[:3]), tuple(history[3:5])), tuple(history[5:]) if i % 2 else ())
        for i, p in enumerate(params)
    ]
    found = probabilities(logits, rows)
    for i, row in enumerate(rows):
        expected = reference_verify.distribution(logits[i], row.state, row.path)
        assert torch.equal(found[i] > 1e-30, expected > 1e-30)  # below it float32 knows no numbers
        torch.testing.assert_close(found[i].double(), expected, atol=2e-6, rtol=1e-4)


def test_a_row_is_decided_alike_alone_and_in_any_company() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 500, generator=generator) * 2
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=5, temperature=0.7),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(frequency_penalty=0.3),
    ]
    rows = [LogitsRow(i, state(params, output=(7, 7))) for i, params in enumerate(kinds)]
    together = choose(logits, rows)
    assert together == [choose(logits, [row])[0] for row in rows]
    assert together == list(reversed(choose(logits, list(reversed(rows)))))


def test_logprobs_are_raw_and_the_best_come_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.5, 0.0]])
    first, second = token_logprobs(logits, [0, 1], [2, 0])
    expected = logits.log_softmax(1)
    assert first.token_id == 0
    assert first.logprob == pytest.approx(expected[0, 0].item())
    assert [token for token, _ in first.top] == [1, 2]
    assert [value for _, value in first.top] == pytest.approx(expected[0, [1, 2]].tolist())
    assert second.top == ()
    assert token_logprobs(logits[:0], [], []) == []
    (whole,) = token_logprobs(logits[:1], [0], [99])
    assert [token for token, _ in whole.top] == [1, 2, 0]  # all there are
