"""Grammars over the tiny tokenizer, and a target that speaks its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.state import unpacked
from engine.models.interface import LanguageModel
from engine.models.tiny import tiny_model
from engine.models.tiny_files import tiny_tokenizer
from engine.spec.drafter import Drafter
from engine.spec.planner import FollowAssignment, SpecPlanner
from engine.types import GrammarSpec, SamplingParams, SchemaSource
from tests.engine.harness import reference_logits

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


def grammar_engine(
    drafters: Mapping[str, Drafter] | None = None, planner: SpecPlanner | None = None, **config: Any
) -> Engine:
    """An engine on `speaker` that knows grammars."""
    settings = replace(EngineConfig(block_size=4, num_blocks=512, max_batch_tokens=64), **config)
    return Engine(
        settings, speaker(), drafters or {}, planner or FollowAssignment(), lambda: 0.0, lambda: 5, compiler()
    )


def reference_greedy(prompt_ids: Sequence[int], spec: GrammarSpec, num_tokens: int) -> list[int]:
    """Greedy decoding under a grammar that is walked anew for every token: no cache, batch or engine."""
    grammars = compiler()
    output: list[int] = []
    while len(output) < num_tokens:
        logits = reference_logits(speaker(), [*prompt_ids, *output])[-1].clone()
        mask = grammars.start(spec).allowed(output, ())
        assert mask is not None
        logits[~torch.from_numpy(unpacked([mask], VOCAB)[0])] = -torch.inf
        output.append(int(logits.argmax()))
        if output[-1] == EOS:
            break
    return output


GREEDY = SamplingParams(temperature=0.0, max_tokens=160)
CALL = (
    'start: text | calls\ntext: TEXT\nTEXT: /(.|\\n)*/\ntrigger[lazy]: TEXT "e"\n'
    'calls: trigger "{\\"name\\": \\"f\\", \\"arguments\\": " @schema_0 "}"'
)
SPECS = {
    "person": json_grammar(PERSON),
    "numbers": json_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 6}),
    "choice": GrammarSpec('start: ("red" | "green" | "blue") /[0-9]{2}/ ("!" | "?"){3}'),
    "call": GrammarSpec(CALL, (SchemaSource('{"enum": ["abc", "abd", 17]}', "tools"),)),
}
PROMPTS = {name: encode(f"the string in the ring {name}") for name in SPECS}


@cache
def greedy_answers() -> dict[str, list[int]]:
    """Each spec's greedy answer, decoded without the engine."""
    return {name: reference_greedy(PROMPTS[name], spec, GREEDY.max_tokens) for name, spec in SPECS.items()}
