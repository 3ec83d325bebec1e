"""Suffix decoding: the automaton against brute force, what is shared and what is not, and bounds."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.config import NgramConfig, SuffixConfig
from engine.spec.drafter import DraftContext, Drafter
from engine.spec.ngram import NgramDrafter
from engine.spec.randomness import RandomKey
from engine.spec.suffix import PastOutputs, SuffixDrafter
from engine.spec.suffix_automaton import ROOT, SuffixAutomaton

small_texts = st.lists(st.integers(0, 2), max_size=40)


def context(
    token_ids: Sequence[int],
    seq_id: str = "a",
    salt: str | None = "tenant",
    label: str = "",
    num: int = 8,
    prompt_length: int | None = None,
) -> DraftContext:
    length = len(token_ids) if prompt_length is None else prompt_length
    return DraftContext(seq_id, token_ids, length, num, 0.0, None, RandomKey(0), salt, label)


def draft(drafter: Drafter, token_ids: Sequence[int], **fields: object) -> tuple[int, ...]:
    return drafter.propose([context(token_ids, **fields)])[0].token_ids  # type: ignore[arg-type]


def longest_earlier_suffix(text: Sequence[int]) -> int:
    """Length of the longest suffix that also ends earlier."""
    return max(
        (
            n
            for n in range(len(text))
            for end in range(n, len(text))
            if text[end - n : end] == text[len(text) - n :]
        ),
        default=0,
    )


@given(small_texts)
def test_the_place_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for length in range(1, len(text) + 1):
        automaton.extend(text[length - 1 : length])
        assert automaton.match_length(automaton.place) == longest_earlier_suffix(text[:length])


@given(small_texts, small_texts, small_texts)
def test_matches_are_the_longest_suffixes_that_any_text_holds(
    first: list[int], second: list[int], read: list[int]
) -> None:
    automaton = SuffixAutomaton()
    for text in (first, second):
        automaton.begin_text()
        automaton.extend(text)
    state, length = ROOT, 0
    for end in range(1, len(read) + 1):
        state, length = automaton.step(state, length, read[end - 1])
        held = [
            n
            for n in range(end + 1)
            if any(
                text[i : i + n] == read[end - n : end]
                for text in (first, second)
                for i in range(len(text) + 1)
            )
        ]
        assert length == max(held)


@given(small_texts, small_texts)
def test_a_guess_has_followed_before(first: list[int], second: list[int]) -> None:
    automaton = SuffixAutomaton()
    for text in (first, second):
        automaton.begin_text()
        automaton.extend(text)
    place = automaton.place
    guess = automaton.guess(place)
    if guess is not None:
        token, times, times_any = guess
        assert 0 < times <= times_any
        suffix = second[len(second) - automaton.match_length(place) :]
        grams = [*suffix, token]
        texts = (first, second)
        assert any(t[i : i + len(grams)] == grams for t in texts for i in range(len(t)))


def test_what_followed_most_often_is_drafted() -> None:
    text = [7, 8, 1, 5, 7, 8, 2, 6, 7, 8, 2, 4, 7, 8, 3, 9, 7, 8]
    assert draft(SuffixDrafter(), text, num=1) == (2,)
    assert draft(NgramDrafter(NgramConfig()), text, num=1) == (3,), "the newest, whatever came before"


def test_longer_and_surer_matches_give_longer_drafts() -> None:
    run = list(range(100, 130))
    long_match = [*run, 1, 2, *run[:20]]
    short_match = [*run, 1, 2, *run[:2]]
    config = SuffixConfig(min_confidence=0.4)
    assert len(draft(SuffixDrafter(config), long_match)) == 8
    assert 0 < len(draft(SuffixDrafter(config), short_match)) < 4
    varied = [7, 8, 9, 1, 7, 8, 9, 2, 7, 8, 9, 3, 7, 8, 9, 4, 7, 8, 9]
    assert draft(SuffixDrafter(SuffixConfig(min_confidence=0.6)), varied) == ()


def answer(
    drafter: SuffixDrafter, seq_id: str, prompt: list[int], output: list[int], **fields: object
) -> None:
    """One request from begin to end, drafted for at every step."""
    drafter.begin(seq_id, prompt)
    for num in range(1, len(output)):
        draft(drafter, prompt + output[:num], seq_id=seq_id, prompt_length=len(prompt), **fields)
        drafter.observe(seq_id, [output[num]], 0)
    drafter.end(seq_id)


OUTPUT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


def test_past_outputs_serve_the_same_tenant_and_task_only() -> None:
    drafter = SuffixDrafter()
    answer(drafter, "first", [1, 2, 3], OUTPUT, salt="tenant", label="chat")
    begun = [5, 6, *OUTPUT[:5]]
    assert draft(drafter, begun, seq_id="b", salt="tenant", label="chat", num=4) == tuple(OUTPUT[5:9])
    assert draft(drafter, begun, seq_id="c", salt="other", label="chat") == ()
    assert draft(drafter, begun, seq_id="d", salt="tenant", label="code_edit") == ()
    assert draft(drafter, begun, seq_id="e", salt=None, label="chat") == ()
    assert draft(drafter, [5, 6, 1, 2, 3], seq_id="f", salt="tenant", label="chat") == (), (
        "prompts are not kept"
    )


def test_an_answer_is_kept_to_its_last_token() -> None:
    drafter = SuffixDrafter()
    answer(drafter, "first", [1, 2, 3], OUTPUT)
    assert drafter.past.num_tokens == len(OUTPUT)


def test_sharing_can_be_off() -> None:
    drafter = SuffixDrafter(SuffixConfig(share_past_outputs=False))
    answer(drafter, "first", [1, 2, 3], OUTPUT)
    assert draft(drafter, [5, 6, *OUTPUT[:5]], seq_id="b") == ()
    assert drafter.past.num_tokens == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=40))
def test_past_outputs_are_bounded(outputs: list[tuple[int, int]]) -> None:
    past = PastOutputs(scope_tokens=80, max_tokens=160)
    for tenant, length in outputs:
        past.add((str(tenant), ""), list(range(length)))
        assert past.num_tokens <= 160
        assert past.automata((str(tenant), "")), "what was just said is there"


def test_the_longest_unused_scope_goes_first() -> None:
    past = PastOutputs(scope_tokens=80, max_tokens=80)
    past.add(("old", ""), [1] * 30)
    past.add(("used", ""), [1] * 30)
    past.automata(("old", ""))
    past.add(("new", ""), [1] * 30)
    assert past.automata(("old", ""))
    assert not past.automata(("used", ""))


@given(small_texts, small_texts, st.integers(1, 6), st.integers(0, 40), st.lists(small_texts, max_size=2))
def test_hindsight_tells_what_drafting_would_have_done(
    prompt: list[int], more: list[int], num: int, looked_at: int, past: list[list[int]]
) -> None:
    """Every step as `propose` would have drafted it then; in two looks as in one."""

    def drafter() -> SuffixDrafter:
        made = SuffixDrafter(SuffixConfig(share_past_outputs=True))
        for output in past:
            made.past.add(("tenant", ""), output)
        return made

    text = [0, *prompt, *more]
    at = begin = 1 + len(prompt)
    expected, asked = [], drafter()
    while at + num < len(text):
        drafted = draft(asked, text[:at], num=num, prompt_length=begin)
        right = next((i for i, token in enumerate(drafted) if token != text[at + i]), len(drafted))
        expected.append((len(drafted), right))
        asked.observe("a", text[at : at + right + 1], right)
        at += right + 1
    looking = drafter()
    first, begins = looking.hindsight(context(text[: begin + looked_at], num=num, prompt_length=begin), begin)
    rest, ends = looking.hindsight(context(text, num=num, prompt_length=begin), begins)
    assert first + rest == expected
    assert ends == at
    at_end = draft(drafter(), text, num=num, prompt_length=begin)
    assert draft(looking, text, num=num, prompt_length=begin) == at_end


def test_looking_back_reads_a_long_prompt_bit_by_bit_and_never_twice() -> None:
    drafter = SuffixDrafter()
    text = [token % 40 for token in range(400)]
    looks, start = 0, 360
    while not (told := drafter.hindsight(context(text, prompt_length=350), start))[0]:
        assert told == ([], start)
        looks += 1
    assert looks == 2
    assert told[0] == [(8, 8)] * 4
    assert draft(drafter, text)  # it has its turn, and knows more than what was judged
    for token in (0, 1):
        text.append(token)
        drafter.observe("a", [token], 0)
    assert drafter.hindsight(context(text), told[1]) == ([], 402)
    text += [token % 40 for token in range(2, 20)]  # another's turn: what comes is judged
    drafter.observe("a", text[402:], 0)
    assert drafter.hindsight(context(text), 402)[0] == [(8, 8)] * 2


def test_answers_that_were_only_looked_at_are_not_kept() -> None:
    drafter = SuffixDrafter()
    text = [1, 2, 3] * 12
    assert drafter.hindsight(context(text, prompt_length=3), 20)[0]
    drafter.end("a")
    assert drafter.past.num_tokens == 0


def test_a_long_prompt_is_read_over_several_steps() -> None:
    drafter = SuffixDrafter()
    text = [*range(3, 5003), *range(3, 23)]
    assert draft(drafter, text) == (), "not all read yet"
    assert draft(drafter, text) == tuple(range(23, 31))
