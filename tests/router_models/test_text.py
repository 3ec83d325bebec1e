"""Text features: any text at all, bounded, repeatable, and nameable."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router_models.lexicon import CONCEPTS, Lexicon
from router_models.request_text import content_text, from_messages
from router_models.structure import structure
from router_models.task_features import NUM_BUCKETS, TaskFeaturizer
from router_models.text import EDGE_CHARS, edges, tokenize
from router_models.types import RequestText

ANY_TEXT = st.text(st.characters(), max_size=1200)  # lone surrogates too
FEATURIZER = TaskFeaturizer()


@settings(max_examples=150, deadline=None)
@given(ANY_TEXT, ANY_TEXT, st.booleans(), st.one_of(st.none(), ANY_TEXT))
def test_any_text_gives_finite_bounded_features(
    user: str, system: str, raw: bool, suffix: str | None
) -> None:
    x = RequestText(user, system, is_raw_prompt=raw, suffix=suffix)
    found = FEATURIZER.extract(x)
    assert found.dense.shape == (len(FEATURIZER.dense_names),)
    assert np.isfinite(found.dense).all()
    assert np.abs(found.dense).max() <= 8
    assert len(found.buckets) == len(found.weights) == sum(f.size for f in found.families)
    assert ((found.buckets >= 0) & (found.buckets < NUM_BUCKETS)).all()
    again = FEATURIZER.extract(x)
    assert (again.dense == found.dense).all()
    assert (again.buckets == found.buckets).all()


@settings(max_examples=150, deadline=None)
@given(ANY_TEXT)
def test_tokens_are_pieces_of_the_text_in_order(text: str) -> None:
    tokens = tokenize(edges(text))
    assert (tokens.starts < tokens.ends).all()
    assert (tokens.starts[1:] >= tokens.ends[:-1]).all()
    assert len(tokens.text) <= 2 * EDGE_CHARS + 1


@settings(max_examples=100, deadline=None)
@given(st.text("abcdefghij语言模型", min_size=1, max_size=12), st.text("xyz 0123", max_size=50))
def test_a_word_has_the_same_hash_wherever_it_stands(word: str, before: str) -> None:
    alone = tokenize(edges(word))
    placed = tokenize(edges(f"{before} {word}"))
    assert placed.hashes[-len(alone.hashes) :].tolist() == alone.hashes.tolist()


def test_tokens_of_mixed_text() -> None:
    tokens = tokenize(edges("Translate 这句话 into DE, 2024 times: foo_bar"))
    names = [tokens.name(i, 1) for i in range(len(tokens.hashes))]
    assert names == ["translate", "这", "句", "话", "into", "de", "2024", "times", "foo_bar"]
    assert tokens.name(1, 3) == "这句话"
    other = tokenize(edges("1999"))
    assert other.hashes[0] == tokens.hashes[6]  # numbers of a length are one token


def test_work_is_bounded_by_the_ends_of_the_text() -> None:
    long = FEATURIZER.extract(RequestText("word " * 200_000))
    assert len(long.buckets) < 6000


def test_every_lexicon_entry_finds_itself() -> None:
    lexicon = Lexicon()
    for number, (concept, entries) in enumerate(CONCEPTS.items()):
        for entry in entries.split("|"):
            tokens = tokenize(edges(entry.strip()))
            _, bits = lexicon.find_all(tokens.ngrams(4))
            assert any(int(b) >> number & 1 for b in bits), f"{entry.strip()} is not found as {concept}"


def test_shape_features_say_what_they_mean() -> None:
    question = structure(RequestText("A long document. " * 40 + "\n\nWho wrote it?"))
    assert question["document, then question"] == 1
    code = structure(RequestText("```python\ndef f(a):\n    return a\n```"))
    assert code["one fenced block"] == 1
    assert code["code marks in head"] > question["code marks in head"]
    chinese = structure(RequestText("Translate: 这是一个很长的句子，" * 3))
    assert chinese["cjk in head"] > 0.3
    assert list(question) == list(code) == list(chinese)


def test_the_last_user_message_is_the_request() -> None:
    text = from_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image_url"}, "three"]},
            {"role": "assistant", "content": "prefill"},
        ]
    )
    assert text.system == "Be brief."
    assert text.user.split() == ["two", "three"]
    assert text.history == ("one", "")
    assert from_messages([]).user == ""
    assert content_text(None) == ""
