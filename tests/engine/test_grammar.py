"""Answers under a grammar: always in form, and the same token for token under every policy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from engine.engine import Engine
from engine.errors import RequestRefused
from engine.grammar.compiler import GrammarCompiler
from engine.kernels.reference_verify import verify_one
from engine.models.tiny_files import tiny_tokenizer
from engine.service import Abort
from engine.spec.ngram import NgramDrafter
from engine.spec.planner import SpecPlan, StepView
from engine.spec.randomness import RandomKey
from engine.spec.tree import ROOT, DraftTree
from engine.spec.verify import SamplingState, verify
from engine.types import AcceptRule, FinishReason, GrammarSpec, SamplingParams, SchemaSource
from tests.engine.grammar_harness import (
    EOS,
    PERSON,
    VOCAB,
    compiler,
    encode,
    grammar_engine,
    json_grammar,
    reference_greedy,
    speaker,
    text_of,
)
from tests.engine.harness import POLICIES, all_drafters, drive, request
from tests.engine.test_service import Client, tokens

WORDS = str(Tokenizer(WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str())
GREEDY = SamplingParams(temperature=0.0, max_tokens=160)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=160)
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


@pytest.fixture(scope="module")
def greedy() -> dict[str, list[int]]:
    """Each spec's greedy answer, decoded without the engine."""
    return {name: reference_greedy(PROMPTS[name], spec, GREEDY.max_tokens) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def seeded() -> dict[str, list[int]]:
    """Each spec's answer to a seeded request, decoded plainly and alone."""
    engine = grammar_engine()
    return {
        name: drive(engine, [request("a", PROMPTS[name], SEEDED, grammar=spec)]).finished["a"].token_ids
        for name, spec in SPECS.items()
    }


def known(answers: Mapping[str, list[int]]) -> dict[tuple[int, ...], list[int]]:
    """What the stub drafters are right about."""
    return {PROMPTS[name]: tokens for name, tokens in answers.items()}


def test_answers_are_in_form(greedy: dict[str, list[int]], seeded: dict[str, list[int]]) -> None:
    for answers in (greedy, seeded):
        person = json.loads(text_of(answers["person"]))
        assert list(person) == ["name", "age", "tags"]
        assert len(person["name"]) <= 6
        assert 0 <= person["age"] <= 150
        assert set(person["tags"]) <= {"red", "green", "blue"}
        assert 3 <= len(json.loads(text_of(answers["numbers"]))) <= 6
        assert text_of(answers["choice"])[-3:].strip("!?") == ""
        assert answers["person"][-1] == answers["numbers"][-1] == EOS


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [512, 48])
def test_every_policy_gives_the_same(
    policy: str, num_blocks: int, greedy: dict[str, list[int]], seeded: dict[str, list[int]]
) -> None:
    """Greedy, seeded and free requests in one batch; few blocks force preemptions within an answer."""
    stubs = all_drafters(known(greedy), speaker())
    engine = grammar_engine(stubs, num_blocks=num_blocks, max_batch_tokens=48)
    requests = [
        request(f"{kind}/{name}", PROMPTS[name], params, policy, num_speculative_tokens=4, grammar=spec)
        for name, spec in SPECS.items()
        for kind, params in (("greedy", GREEDY), ("seeded", SEEDED))
    ]
    free = request("free/person", PROMPTS["person"], replace(GREEDY, max_tokens=40, ignore_eos=True), policy)
    run = drive(engine, [*requests, free])
    for name in SPECS:
        assert run.finished[f"greedy/{name}"].token_ids == greedy[name]
        assert run.finished[f"seeded/{name}"].token_ids == seeded[name]
        assert run.finished[f"greedy/{name}"].finish_reason == (
            FinishReason.STOP if greedy[name][-1] == EOS else FinishReason.LENGTH
        )
    assert run.finished["free/person"].token_ids != greedy["person"][:40]
    if num_blocks == 48:
        assert sum(record.num_preemptions for record in run.records) > 0
    if policy == "right":
        assert run.finished["greedy/person"].num_accepted_tokens > 20
    if policy == "wrong":
        assert run.finished["greedy/person"].num_accepted_tokens == 0


@dataclass
class Turns:
    """Another method each step."""

    methods: tuple[str, ...]

    def plan(self, view: StepView) -> Mapping[str, SpecPlan]:
        method = self.methods[view.step % len(self.methods)]
        return {seq.seq_id: SpecPlan(method, 3, reason="turns") for seq in view.sequences}


def test_the_policy_may_change_within_an_answer(
    greedy: dict[str, list[int]], seeded: dict[str, list[int]]
) -> None:
    turns = Turns(("right1", "baseline", "draft", "wrong", "ngram", "right"))
    engine = grammar_engine(all_drafters(known(greedy), speaker()), turns)
    for answers, params in ((greedy, GREEDY), (seeded, SEEDED)):
        requests = [request(name, PROMPTS[name], params, grammar=spec) for name, spec in SPECS.items()]
        assert drive(engine, requests).tokens() == answers


def test_min_tokens_and_ignore_eos_yield_to_a_form_that_is_complete() -> None:
    """An end is put off while anything else may follow, and taken when nothing else may."""
    digits = GrammarSpec("start: /[0-9]{1,9}/")
    params = SamplingParams(temperature=0.0, max_tokens=30)
    prompt = encode("the")
    engine = grammar_engine(all_drafters({}, speaker()))
    for changes in ({"min_tokens": 20}, {"ignore_eos": True}):
        for policy in ("baseline", "ngram", "draft"):
            item = request("a", prompt, replace(params, **changes), policy, grammar=digits)
            done = drive(engine, [item]).finished["a"]
            assert done.finish_reason is FinishReason.STOP
            assert len(text_of(done.token_ids)) == 9
            assert done.token_ids[-1] == EOS
    early = drive(engine, [request("a", prompt, replace(params, min_tokens=4), grammar=digits)]).finished["a"]
    assert 4 <= len(early.token_ids) <= 10


# --- verification by itself ---------------------------------------------------------------------


@settings(max_examples=40)
@given(st.data())
def test_verify_agrees_with_the_reference_on_trees(data: st.DataObject) -> None:
    """Chains and trees whose tokens are partly forbidden, one-hot and sampled, every rule."""
    seed = data.draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    size = data.draw(st.integers(1, 6))
    is_chain = data.draw(st.booleans())
    parents = tuple(i - 1 if is_chain else data.draw(st.integers(ROOT, i - 1)) for i in range(size))
    likely = (*encode('{"name":12 re'), EOS)
    tokens: list[int] = []
    for i, parent in enumerate(parents):
        siblings = {tokens[j] for j in range(i) if parents[j] == parent}
        tokens.append(data.draw(st.sampled_from([t for t in sorted(set(likely)) if t not in siblings])))
    probs = torch.rand(size, VOCAB, generator=generator).softmax(1) if data.draw(st.booleans()) else None
    tree = DraftTree(tuple(tokens), parents, probs)
    logits = torch.randn(1 + size, VOCAB, generator=generator)
    logits[:, list(likely)] += 4.0
    rule = data.draw(
        st.sampled_from([rule for rule in AcceptRule if is_chain or rule is not AcceptRule.BLOCK])
    )
    temperature = data.draw(st.sampled_from([0.0, 0.8]))
    params = SamplingParams(temperature=temperature, top_k=data.draw(st.sampled_from([0, 5])), seed=None)
    spec = SPECS["person"]

    def state() -> SamplingState:
        return SamplingState(
            params, (1, 2), (), frozenset({EOS}), RandomKey(seed), rule, compiler_of_module().start(spec)
        )

    result = verify([tree], logits, [state()])
    if params.is_greedy or probs is None:
        rule = AcceptRule.KEYED
    expected_tokens, expected_nodes = verify_one(tree, logits, state(), rule)
    assert (result.token_ids[0], result.accepted_nodes[0]) == (expected_tokens, expected_nodes)
    rest = compiler_of_module().start(spec)
    for place in range(len(expected_tokens)):
        assert rest.allowed(expected_tokens[:place], ()) is not None
    assert rest.allowed(expected_tokens, ()) is not None or expected_tokens[-1] == EOS


_COMPILER = compiler()


def compiler_of_module() -> Any:
    """One for all examples."""
    return _COMPILER


def test_nothing_stands_behind_a_forbidden_draft_token() -> None:
    """Its row is free of the mask, and still nothing of it comes out, however likely it was drafted."""
    spec = GrammarSpec('start: "ab" | "ac"')
    a, b, z = (encode(letter)[0] for letter in "abz")
    logits = torch.zeros(4, VOCAB)
    logits[:, z] = 50.0
    for probs in (None, torch.full((3, VOCAB), 1.0 / VOCAB)):
        for rule in AcceptRule:
            for temperature in (0.0, 1.0):
                params = SamplingParams(temperature=temperature)
                state = SamplingState(
                    params, (1,), (), frozenset({EOS}), RandomKey(3), rule, compiler().start(spec)
                )
                result = verify([DraftTree.chain((z, a, b), probs)], logits, [state])
                assert result.token_ids == ((a,),)
                assert result.accepted_nodes == ((),)


# --- random schemas -------------------------------------------------------------------------------

_leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
              st.integers(-99, 99), st.integers(-99, 99)),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(lambda values: {"enum": values}, st.lists(st.text("abc", max_size=3), min_size=1, max_size=3)),
)  # fmt: skip
_schemas = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2)
        ),
        st.builds(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": list(fields),
                "additionalProperties": False,
            },
            st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3),
        ),
    ),
    max_leaves=4,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value is one that the schema (of the kinds drawn above) allows."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            is_short = isinstance(value, list) and len(value) <= schema["maxItems"]
            return is_short and all(fits(item, schema["items"]) for item in value)
    fields = schema["properties"]
    return list(value) == list(fields) and all(fits(value[name], fields[name]) for name in fields)


@settings(max_examples=15)
@given(schema=_schemas, seed=st.integers(0, 100))
def test_any_schema_is_kept_under_any_policy(schema: dict[str, Any], seed: int) -> None:
    engine = grammar_engine({"ngram": NgramDrafter()}, num_blocks=256)
    spec = json_grammar(schema)
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=200)
    prompt = encode('{"x":[1,2],"y":"abc"} {"x":')
    run = drive(
        engine, [request(policy, prompt, params, policy, grammar=spec) for policy in ("baseline", "ngram")]
    )
    plain, drafted = run.finished["baseline"], run.finished["ngram"]
    assert plain.token_ids == drafted.token_ids
    if plain.finish_reason is FinishReason.STOP:
        assert fits(json.loads(text_of(plain.token_ids)), schema)


def test_a_pattern_that_grows_too_complex_ends_its_own_answer_only(greedy: dict[str, list[int]]) -> None:
    """Its states are found while it is walked, so that it cannot be refused beforehand."""
    complex_one = json_grammar({"type": "string", "pattern": "^(.*[a-p].{20}|.*[k-z].{19}|.*[ -M].{18})$"})
    engine = grammar_engine({"ngram": NgramDrafter()})
    engine.grammars = compiler(max_lexer_states=400)
    run = drive(
        engine,
        [
            request("complex", PROMPTS["person"], SEEDED, "ngram", grammar=complex_one),
            request("plain", PROMPTS["choice"], GREEDY, "ngram", grammar=SPECS["choice"]),
        ],
    )
    failed = run.finished["complex"]
    assert failed.finish_reason is FinishReason.ERROR
    assert "too many states" in (failed.error or "")
    assert 0 < len(failed.token_ids) < 160
    assert run.finished["plain"].token_ids == greedy["choice"]


# --- compiling --------------------------------------------------------------------------------------


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


def test_others_go_on_while_a_grammar_is_compiled(
    client: Client, gate: threading.Event, greedy: dict[str, list[int]]
) -> None:
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
    assert tokens(client.collect(1)["held"]) == greedy["person"]


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


def test_an_id_that_waits_for_a_grammar_is_taken(
    client: Client, gate: threading.Event, greedy: dict[str, list[int]]
) -> None:
    """The second request of an id is refused, with a grammar or without, and the first is answered."""
    client.add(request("one", PROMPTS["person"], GREEDY, grammar=SPECS["person"]))
    for spec in (SPECS["choice"], None):
        client.add(request("one", PROMPTS["choice"], GREEDY, grammar=spec))
        name, refusal = client.outbox.get(timeout=30)  # type: ignore[misc]
        assert name == "one"
        assert isinstance(refusal, RequestRefused)
        assert refusal.param == "request_id"
    gate.set()
    assert tokens(client.collect(1)["one"]) == greedy["person"]


def test_an_id_is_free_again_when_who_waited_under_it_is_gone(
    client: Client, gate: threading.Event, greedy: dict[str, list[int]]
) -> None:
    """What was compiled for the one that left does not start its successor with another grammar."""
    client.add(request("one", PROMPTS["choice"], GREEDY, grammar=SPECS["choice"]))
    client.inbox.put(Abort("one"))
    assert client.collect(1)["one"][-1].finish_reason is FinishReason.ABORT
    client.add(request("one", PROMPTS["person"], GREEDY, grammar=SPECS["person"]))
    gate.set()
    assert tokens(client.collect(1)["one"]) == greedy["person"]


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
