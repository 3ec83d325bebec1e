"""An answer's text, token ids, logprobs and counts are cut at the same token, wherever blocks end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import (
    FinishReason,
    MethodCounts,
    PolicyChange,
    SamplingParams,
    SequenceOutput,
    SequenceStats,
    TokenLogprob,
)
from specgate.backends.embedded.answer import Answer
from specgate.backends.embedded.detokenize import TokenBytes
from specgate.types import Delta
from tests.specgate.backends.embedded.tokenizers_for_tests import byte_level

TOKENIZER = byte_level()
TABLE = TokenBytes(TOKENIZER)
END = TOKENIZER.token_to_id("<|end|>")
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "你好，世界！🎉 again 你好",
    "aaaa bbbb aaaa",
    "def add(a, b):\n    return a",
]


def blocks_of(ids: list[int], cuts: list[int], **last: object) -> list[SequenceOutput]:
    """The ids as steps would bring them, each block's tokens but its last being accepted drafts."""
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    outputs = [
        SequenceOutput(
            "r",
            tuple(ids[a:b]),
            logprobs=tuple(
                TokenLogprob(token, -float(place), ((token, -float(place)), (0, -9.0)))
                for place, token in enumerate(ids[a:b], a)
            ),
            num_accepted_tokens=b - a - 1,
            num_draft_tokens=b - a,
        )
        for a, b in pairwise(borders)
    ]
    outputs[-1] = replace(outputs[-1], **last)  # type: ignore[arg-type]
    return outputs


def run(answer: Answer, outputs: list[SequenceOutput]) -> list[Delta]:
    """Feed outputs as the backend does: after a stop string one more step comes, then the abort."""
    deltas: list[Delta] = []
    for output in outputs:
        answer.push(output)
        deltas += [delta] if (delta := answer.take()) else []
    if answer.needs_abort:
        answer.push(SequenceOutput("r", (5, 6), num_accepted_tokens=1, num_draft_tokens=4))
        answer.push(
            SequenceOutput(
                "r",
                finish_reason=FinishReason.ABORT,
                stats=SequenceStats(
                    7,
                    3,
                    999,
                    99,
                    50,
                    200,
                    100,
                    (50,),
                    (60,),
                    1,
                    0.25,
                    0.5,
                    (PolicyChange(0, "ngram", "x"), PolicyChange(990, "draft", "y")),
                ),
            )
        )
        deltas += [delta] if (delta := answer.take()) else []
    return deltas


def naive(ids: list[int], stops: list[str], min_tokens: int) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string, by decoding every prefix from scratch."""
    before = ""
    for num_tokens in range(1, len(ids) + 1):
        raw = b"".join(TABLE.of(token) for token in ids[:num_tokens] if token not in TABLE.special_ids)
        text = raw.decode(errors="replace" if num_tokens == len(ids) else "ignore")
        ends = [
            (text.index(stop, max(0, len(before) - len(stop) + 1)) + len(stop), -len(stop), stop)
            for stop in stops
            if text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0
        ]
        if num_tokens > min_tokens and ends:
            end, _, stop = min(ends)
            return text[: end - len(stop)], num_tokens, stop
        before = text
    return before, len(ids), None


@given(
    text=st.sampled_from(TEXTS),
    stops=st.lists(
        st.sampled_from(
            ["quick", "k b", "o", "好", "，世", "🎉", "aa", " ", "bb a", "\n", "zzz", "the lazy"]
        ),
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 60), max_size=12),
    min_tokens=st.integers(0, 6),
    num_left_out=st.integers(0, 3),
)
@settings(max_examples=400)
def test_blocks_do_not_matter(
    text: str, stops: list[str], cuts: list[int], min_tokens: int, num_left_out: int
) -> None:
    """Also where the limit falls within a character."""
    ids = TOKENIZER.encode(text + "🎉").ids
    ids = ids[: len(ids) - num_left_out]
    outputs = blocks_of(
        ids, cuts, finish_reason=FinishReason.LENGTH, stats=SequenceStats(num_output_tokens=len(ids))
    )
    answer = Answer(TABLE, SamplingParams(min_tokens=min_tokens), stops, 7, has_trace=True)
    deltas = run(answer, outputs)
    assert all("".join(text for text, _ in delta.pieces) == delta.text for delta in deltas)
    expected_text, num_tokens, stop = naive(ids, stops, min_tokens)
    assert "".join(delta.text for delta in deltas) == expected_text
    assert [token for delta in deltas for token in delta.token_ids] == ids[:num_tokens]
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == ids[:num_tokens]
    assert sum(delta.num_tokens for delta in deltas) == num_tokens
    last = deltas[-1]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (last.finish_reason, last.stop_reason) == (("stop", stop) if stop else ("length", None))
    assert last.stats is not None
    assert last.stats.num_output_tokens == num_tokens
    if stop:
        assert last.stats.num_accepted_tokens == sum(delta.num_accepted for delta in deltas)
        assert sum(last.stats.accepted_per_position) == last.stats.num_accepted_tokens
        assert last.stats.num_accepted_tokens + last.stats.num_target_steps >= num_tokens


def test_a_trace_tells_text_of_accepted_draft_tokens_from_the_targets_own() -> None:
    ids = TOKENIZER.encode("one two three").ids
    text = "".join(map(TABLE.text_of, ids))
    held = TABLE.text_of(ids[3]) + "!"  # the fourth token's text waits: a stop string may be beginning
    answer = Answer(TABLE, SamplingParams(), [held], 7, has_trace=True)
    outputs = [
        SequenceOutput("r", tuple(ids[:4]), num_accepted_tokens=3, num_draft_tokens=4, draft_method="ngram"),
        SequenceOutput("r", tuple(ids[4:]), finish_reason=FinishReason.LENGTH, stats=SequenceStats()),
    ]
    pieces = [piece for delta in run(answer, outputs) for piece in delta.pieces]
    accepted = "".join(piece for piece, method in pieces if method == "ngram")
    assert accepted == "".join(map(TABLE.text_of, ids[:3]))
    assert "".join(piece for piece, _ in pieces) == text


def test_counts_after_a_stop_string_are_those_of_what_was_delivered() -> None:
    ids = TOKENIZER.encode("one two three").ids
    answer = Answer(TABLE, SamplingParams(), ["zzz", TABLE.text_of(ids[4])], 7)
    deltas = run(
        answer,
        [
            SequenceOutput(
                "r", tuple(ids[:3]), num_accepted_tokens=2, num_draft_tokens=4, draft_method="ngram"
            ),
            SequenceOutput(
                "r", tuple(ids[3:7]), num_accepted_tokens=3, num_draft_tokens=3, draft_method="ngram"
            ),
        ],
    )
    stats = deltas[-1].stats
    assert stats == SequenceStats(
        num_prompt_tokens=7,
        num_cached_tokens=3,
        num_output_tokens=5,
        num_target_steps=2,
        num_drafts=2,
        num_draft_tokens=7,
        num_accepted_tokens=4,
        accepted_per_position=(2, 2, 0),
        drafted_per_position=(2, 2, 1),
        num_preemptions=1,
        queue_wait_s=0.25,
        draft_s=0.5,
        policy_changes=(PolicyChange(0, "ngram", "x"),),
        # Of the second draft nothing is known behind the stop; of the first all that was drafted counts.
        by_method=(MethodCounts("ngram", 2, 2, 7, (2, 2, 0, 0), (2, 2, 1, 1), (0, 0, 1, 0), (2, 2, 1, 1)),),
    )


def test_a_stop_token_gives_no_text_and_counts() -> None:
    ids = TOKENIZER.encode("the fox").ids
    stop_token = TOKENIZER.encode("x").ids[0]
    for sampling, reason in (
        (SamplingParams(stop_token_ids=(stop_token,)), stop_token),
        (SamplingParams(), None),
    ):
        answer = Answer(TABLE, sampling, (), 1)
        stats = SequenceStats(num_output_tokens=len(ids) + 1)
        (delta,) = run(
            answer, [SequenceOutput("r", (*ids, stop_token), finish_reason=FinishReason.STOP, stats=stats)]
        )
        assert (delta.text, delta.num_tokens, delta.finish_reason) == ("the fox", len(ids) + 1, "stop")
        assert delta.stop_reason == reason
        assert delta.stats is stats


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    ids = TOKENIZER.encode("a fox").ids
    answer = Answer(TABLE, SamplingParams(), ["fox jumps"], 1)
    outputs = [SequenceOutput("r", (token,)) for token in ids]
    deltas = run(answer, [*outputs, SequenceOutput("r", (END,), finish_reason=FinishReason.STOP)])
    assert "".join(delta.text for delta in deltas) == "a fox"
    assert [delta.text for delta in deltas][:1] == ["a"]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason is None


def test_tokens_without_text_wait_for_their_text() -> None:
    ids = TOKENIZER.encode("🎉").ids
    answer = Answer(TABLE, SamplingParams(), (), 1)
    for token in ids[:-1]:
        answer.push(SequenceOutput("r", (token,)))
        assert answer.take() is None
    answer.push(SequenceOutput("r", (ids[-1],)))
    delta = answer.take()
    assert delta is not None
    assert (delta.text, delta.token_ids) == ("🎉", tuple(ids))


def test_an_answer_whose_engine_died_after_the_stop_string_is_still_whole() -> None:
    ids = TOKENIZER.encode("the fox").ids
    answer = Answer(TABLE, SamplingParams(), [" fox"], 3)
    answer.push(SequenceOutput("r", tuple(ids)))
    assert answer.needs_abort
    answer.close()
    delta = answer.take()
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("the", "stop", " fox")
    assert delta.stats is not None
    assert (delta.stats.num_prompt_tokens, delta.stats.num_output_tokens) == (3, delta.num_tokens)


def test_logprobs_in_text() -> None:
    ids = TOKENIZER.encode("🎉").ids
    answer = Answer(TABLE, SamplingParams(num_logprobs=1), (), 1)
    entries = tuple(TokenLogprob(token, -0.5, ((token, -0.5), (END, -2.0))) for token in ids)
    (delta,) = run(
        answer,
        [SequenceOutput("r", tuple(ids), entries, (None, *entries), finish_reason=FinishReason.LENGTH)],
    )
    assert b"".join(entry.token_bytes for entry in delta.logprobs) == "🎉".encode()
    assert delta.logprobs[0].top[1] == ("<|end|>", END, -2.0, b"<|end|>")
    assert delta.prompt_logprobs[0] is None
    assert delta.prompt_logprobs[1:] == delta.logprobs


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_stop_string_wins_over_the_end_in_the_same_block(reason: FinishReason) -> None:
    ids = TOKENIZER.encode("the fox and more").ids
    stats = SequenceStats(num_output_tokens=len(ids), num_target_steps=1)
    answer = Answer(TABLE, SamplingParams(), ["fox"], 1)
    (delta,) = run(answer, [SequenceOutput("r", tuple(ids), finish_reason=reason, stats=stats)])
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("the ", "stop", "fox")
    assert delta.num_tokens < len(ids)
    assert delta.stats is not None
    assert delta.stats.num_output_tokens == delta.num_tokens
