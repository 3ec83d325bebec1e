"""Grammars over the tiny tokenizer, and a target that speaks its tokens."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from engine.grammar.compiler import GrammarCompiler
from engine.models.interface import LanguageModel
from engine.models.tiny import tiny_model
from engine.models.tiny_files import tiny_tokenizer
from engine.types import GrammarSpec, SchemaSource

EOS = 2
VOCAB = tiny_tokenizer().get_vocab_size()


@cache
def speaker() -> LanguageModel:
    """A random model over the tokens of `tiny_tokenizer`, with a context of 256."""
    return tiny_model(vocab_size=VOCAB, max_model_len=256, eos_token_ids=frozenset({EOS}))


def compiler(**fields: Any) -> GrammarCompiler:
    """Compiles for `speaker`."""
    return GrammarCompiler(lambda: tiny_tokenizer().to_str(), VOCAB, frozenset({EOS}), **fields)


def json_grammar(schema: Any, param: str = "response_format") -> GrammarSpec:
    """JSON that fits the schema."""
    return GrammarSpec("start: @schema_0", (SchemaSource(json.dumps(schema), param),), param)


def encode(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


def text_of(token_ids: list[int]) -> str:
    """Without the end token."""
    return str(tiny_tokenizer().decode(token_ids, skip_special_tokens=True))


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
