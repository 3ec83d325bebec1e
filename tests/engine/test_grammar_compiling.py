"""Compiling grammars: what is refused, what is kept, and that others go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from engine.engine import Engine
from engine.errors import RequestRefused
from engine.grammar.compiler import GrammarCompiler
from engine.models.tiny_files import tiny_tokenizer
from engine.service import Abort
from engine.types import FinishReason, GrammarSpec
from tests.engine.grammar_harness import (
    EOS,
    GREEDY,
    PROMPTS,
    SPECS,
    VOCAB,
    compiler,
    encode,
    grammar_engine,
    greedy_answers,
    json_grammar,
)
from tests.engine.harness import request
from tests.engine.test_service import Client, tokens

WORDS = str(Tokenizer(WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str())


@pytest.mark.parametrize(
    ("schema", "where", "what"),
    [
        ({"type": "strin"}, "r: ", "strin"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
         "r.properties.a: ", "uniqueItems"),
        ({"anyOf": [{"type": "null"}, {"type": "object", "properties": {"b c": {"not": {}}}}]},
         "r.anyOf[1].properties['b c']: ", "not"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "pattern": "(?=a)"}}},
         "r.$defs.x: ", "look-ahead"),
        ({"type": "array", "items": {"$ref": "https://example.com/s.json"}}, "r.items: ", "example.com"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "r: ", "greater than"),
        (False, "r: ", "nsatisfiable"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_compiled_is_refused_at_the_place_of_its_fault(
    schema: Any, where: str, what: str
) -> None:
    engine = grammar_engine()
    with pytest.raises(RequestRefused) as caught:
        engine.add(request("a", encode("x"), grammar=json_grammar(schema, "r")))
    assert str(caught.value).startswith(where)
    assert what in str(caught.value)
    assert caught.value.param == "r"
    engine.check_idle()


def test_the_options_of_the_compiler_are_not_the_callers() -> None:
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestRefused, match="uniqueItems"):
        compiler().compile(json_grammar(lenient))


def test_references_within_a_schema_are_followed() -> None:
    tree = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}},
                           "required": [], "additionalProperties": False}},
        "$ref": "#/$defs/node",
    }  # fmt: skip
    state = compiler().start(json_grammar(tree))
    text = encode('{"next": {"next": {}}}')
    assert all(state.allowed(text[:i], ()) is not None for i in range(len(text) + 1))
    assert compiler().start(json_grammar(tree)).allowed((), encode('{"prev":')) is None


def test_the_cache_is_bounded_and_the_least_used_goes_first() -> None:
    grammars = compiler(max_cached=2)
    a, b, c = (GrammarSpec(f'start: "{letter}"') for letter in "abc")
    grammars.compile(a)
    grammars.compile(b)
    grammars.start(a)
    grammars.compile(c)
    assert [grammars.has(spec) for spec in (a, b, c)] == [True, False, True]
    grammars.start(b)
    assert not grammars.has(a)


@pytest.mark.parametrize(
    ("grammars", "why"),
    [
        (GrammarCompiler(lambda: WORDS, 2, frozenset({0})), "decoder"),
        (GrammarCompiler(lambda: "{}", 2, frozenset({0})), "tokenizer"),
        (GrammarCompiler(lambda: str(tiny_tokenizer().to_str()), VOCAB, frozenset()), "no end token"),
    ],
)
def test_a_model_that_cannot_keep_formats_says_so(grammars: GrammarCompiler, why: str) -> None:
    with pytest.raises(RequestRefused, match=why) as caught:
        grammars.load()
    assert caught.value.param == "model"


def test_an_engine_without_grammars_refuses_them() -> None:
    engine = grammar_engine()
    engine.grammars = None
    with pytest.raises(RequestRefused) as caught:
        engine.add(request("a", encode("x"), grammar=SPECS["choice"]))
    assert caught.value.param == "grammar"


@pytest.fixture
def gate() -> threading.Event:
    """Compiling waits for it."""
    return threading.Event()


def slow_engine(gate: threading.Event) -> Engine:
    """Its first grammar takes its time."""

    def slow_tokenizer() -> str:
        assert gate.wait(30)
        return str(tiny_tokenizer().to_str())

    engine = grammar_engine()
    engine.grammars = GrammarCompiler(slow_tokenizer, VOCAB, frozenset({EOS}))
    return engine


@pytest.fixture
def client(gate: threading.Event) -> Iterator[Client]:
    """A service whose first grammar takes its time."""
    client = Client(slow_engine(gate))
    yield client
    gate.set()
    client.stop()


def test_others_go_on_while_a_grammar_is_compiled(client: Client, gate: threading.Event) -> None:
    client.add(request("held", PROMPTS["person"], GREEDY, grammar=SPECS["person"]))
    client.add(request("left", PROMPTS["choice"], GREEDY, grammar=SPECS["choice"]))
    client.add(request("free", PROMPTS["person"], replace(GREEDY, max_tokens=12, ignore_eos=True)))
    assert len(tokens(client.collect(1)["free"])) == 12
    client.inbox.put(Abort("left"))
    (last,) = client.collect(1)["left"]
    assert (last.finish_reason, last.token_ids) == (FinishReason.ABORT, ())
    assert last.stats is not None
    assert last.stats.num_prompt_tokens == len(PROMPTS["choice"])
    gate.set()
    assert tokens(client.collect(1)["held"]) == greedy_answers()["person"]


def test_nobody_compiles_the_grammar_of_an_aborted_request(gate: threading.Event) -> None:
    """One that is being compiled ends; those behind it are dropped, unless others wait for them."""
    engine = slow_engine(gate)
    client = Client(engine)
    for name, spec in (("held", "person"), ("left", "choice"), ("next", "numbers")):
        client.add(request(name, PROMPTS[spec], GREEDY, grammar=SPECS[spec]))
    client.inbox.put(Abort("held"))
    client.inbox.put(Abort("left"))
    assert client.collect(2).keys() == {"held", "left"}
    gate.set()
    assert client.collect(1).keys() == {"next"}
    client.stop()
    assert engine.grammars is not None
    assert engine.grammars.has(SPECS["numbers"])
    assert not engine.grammars.has(SPECS["choice"])


def test_an_id_that_waits_for_a_grammar_is_taken(client: Client, gate: threading.Event) -> None:
    """The second request of an id is refused, with a grammar or without, and the first is answered."""
    client.add(request("one", PROMPTS["person"], GREEDY, grammar=SPECS["person"]))
    for spec in (SPECS["choice"], None):
        client.add(request("one", PROMPTS["choice"], GREEDY, grammar=spec))
        name, refusal = client.outbox.get(timeout=30)  # type: ignore[misc]
        assert name == "one"
        assert isinstance(refusal, RequestRefused)
        assert refusal.param == "request_id"
    gate.set()
    assert tokens(client.collect(1)["one"]) == greedy_answers()["person"]


def test_an_id_is_free_again_when_who_waited_under_it_is_gone(client: Client, gate: threading.Event) -> None:
    """What was compiled for the one that left does not start its successor with another grammar."""
    client.add(request("one", PROMPTS["choice"], GREEDY, grammar=SPECS["choice"]))
    client.inbox.put(Abort("one"))
    assert client.collect(1)["one"][-1].finish_reason is FinishReason.ABORT
    client.add(request("one", PROMPTS["person"], GREEDY, grammar=SPECS["person"]))
    gate.set()
    assert tokens(client.collect(1)["one"]) == greedy_answers()["person"]


def test_a_grammar_that_fails_is_a_refusal_of_its_request_alone(
    client: Client, gate: threading.Event
) -> None:
    gate.set()
    client.add(request("bad", PROMPTS["person"], GREEDY, grammar=GrammarSpec("start: missing", param="p")))
    name, refusal = client.outbox.get(timeout=30)  # type: ignore[misc]
    assert name == "bad"
    assert isinstance(refusal, RequestRefused)
    assert refusal.param == "p"
    client.add(request("good", PROMPTS["choice"], GREEDY, grammar=SPECS["choice"]))
    assert client.collect(1)["good"][-1].finish_reason is not None


def test_stopping_ends_those_that_wait_for_a_grammar(gate: threading.Event) -> None:
    engine = grammar_engine()
    engine.grammars = GrammarCompiler(lambda: str(gate.wait(30)), VOCAB, frozenset({EOS}))
    client = Client(engine)
    client.add(request("held", PROMPTS["person"], GREEDY, grammar=SPECS["person"]))
    client.stop()
    assert client.collect(1)["held"][0].finish_reason is FinishReason.ABORT
    gate.set()
