"""Answers under a grammar: always in form, and the same token for token under every policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.reference_verify import verify_one
from engine.spec.ngram import NgramDrafter
from engine.spec.planner import SpecPlan, StepView
from engine.spec.randomness import RandomKey
from engine.spec.tree import ROOT, DraftTree
from engine.spec.verify import SamplingState, verify
from engine.types import AcceptRule, FinishReason, GrammarSpec, SamplingParams
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
    speaker,
    text_of,
)
from tests.engine.harness import POLICIES, all_drafters, drive, request

SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=160)


@pytest.fixture(scope="module")
def greedy() -> dict[str, list[int]]:
    return greedy_answers()


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
