"""Tool calls in the model's own form: learnt, demanded by a grammar, and read again from the text."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine.grammar.compiler import GrammarCompiler
from engine.models.tiny_files import tiny_tokenizer
from engine.types import FinishReason, GrammarSpec, SamplingParams, SequenceOutput, SequenceStats
from specgate.backends.embedded.answer import Answer
from specgate.backends.embedded.answer_grammar import MAX_CALLS, answer_grammar
from specgate.backends.embedded.chat_template import ChatTemplate
from specgate.backends.embedded.prompt import PromptEncoder
from specgate.backends.embedded.tool_format import GENERIC, ToolFormat
from specgate.backends.embedded.tool_reader import ToolReader
from specgate.errors import UnsupportedParameter
from specgate.types import Delta, GenerationRequest, ToolCallDelta, ToolChoice
from tests.specgate.backends.embedded.tool_templates import NATIVE, PLAIN, PYTHONIC, SPECIALS

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
)
PARIS = ("get_weather", '{"city": "Par\\"is}", "unit": "C"}')
NOW = ("now", "{}")
EOS = SPECIALS.index("<|im_end|>")
FORMS = (*NATIVE, "generic")


@cache
def tokenizer() -> Tokenizer:
    found = tiny_tokenizer()
    found.add_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    return found


@cache
def encoder(name: str) -> PromptEncoder:
    source = NATIVE.get(name) or {"pythonic": PYTHONIC, "generic": PLAIN}[name]
    return PromptEncoder(tokenizer(), ChatTemplate(source, {}, lambda: 0.0))


def form(name: str) -> ToolFormat:
    found = encoder(name)._form_for(request())
    assert found is not None
    return found


def request(mode: str = "auto", **fields: Any) -> GenerationRequest:
    messages = ({"role": "user", "content": "hi"},)
    choice = ToolChoice(mode, fields.pop("names", ()), fields.pop("is_parallel", True))
    base = GenerationRequest("id", "chat", "m", SamplingParams(), messages, tools=TOOLS, tool_choice=choice)
    return replace(base, **fields)


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(lambda: str(tokenizer().to_str()), tokenizer().get_vocab_size(), frozenset({EOS}))


def allows(spec: GrammarSpec | None, text: str) -> bool:
    """Whether the text may be a whole answer."""
    assert spec is not None
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    mask = grammars().start(spec).allowed((), ids)
    return mask is not None and bool(mask[EOS // 8] >> EOS % 8 & 1)


# --- learning the form --------------------------------------------------------------------------


def test_the_template_says_how_calls_are_written() -> None:
    assert form("hermes") == GENERIC
    assert form("generic") == GENERIC
    smollm = form("smollm")
    assert smollm.written([NOW, NOW]) == (
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]</tool_call>'
    )
    assert smollm.trigger == "<tool_call>"
    llama = form("llama")
    assert llama.written([NOW]) == '{"name": "now", "parameters": {}}'
    assert (llama.is_anchored, llama.between, llama.trigger) == (True, None, '{"name": "')
    mistral = form("mistral")
    assert mistral.written([PARIS, NOW]) == (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": '
        + PARIS[1]
        + '}, {"name": "now", "arguments": {}}]'
    )
    assert mistral.trigger_token == tokenizer().token_to_id("[TOOL_CALLS]")
    assert mistral.id_length == 9
    assert {form(name).id_length for name in ("hermes", "smollm", "llama", "generic")} == {None}


def test_a_form_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        form("pythonic")
    assert caught.value.param == "tools"
    assert encoder("pythonic").tool_reader(request("none"), "x") is None


def test_bare_json_calls_and_a_json_answer_cannot_be_told_apart() -> None:
    asked = request(response_format={"type": "json_object"})
    with pytest.raises(UnsupportedParameter) as caught:
        encoder("llama").tool_reader(asked, "x")
    assert caught.value.param == "response_format"


def test_a_template_without_tools_has_them_explained() -> None:
    called = {
        "role": "assistant", "content": "Let me see.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }  # fmt: skip
    messages = (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        called,
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
        {"role": "tool", "content": "Monday", "tool_call_id": "2"},
    )
    text = encoder("generic")._render(request(messages=messages))
    turns = text.split("<|im_start|>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[0].startswith("system\nBe kind.\n")
    assert '{"name": "now"}' in turns[0]
    assert '"get_weather"' in turns[0]
    assert f"Let me see.\n{GENERIC.written([NOW])}" in turns[2]
    assert turns[3].count("<tool_response>") == 2
    plain = encoder("generic")._render(request("none", messages=messages[1:]))
    assert "get_weather" not in plain
    assert called["tool_calls"], "the caller's messages stay as they are"
    assert messages[0]["content"] == "Be kind."


# --- what may come out ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_forced_calls(name: str) -> None:
    own = form(name)
    spec = answer_grammar(request("required"), own)
    assert allows(spec, own.written([PARIS]))
    assert allows(spec, own.written([NOW]))
    assert not allows(spec, "Hello.")
    assert not allows(spec, own.written([("other", "{}")]))
    assert not allows(spec, own.written([("get_weather", '{"town": "Paris"}')]))
    assert not allows(spec, own.written([("now", '{"x": 1}')]))
    assert allows(spec, own.written([PARIS, NOW])) == (own.between is not None)
    if own.between is not None:
        assert allows(spec, own.written([NOW] * MAX_CALLS))
        assert not allows(spec, own.written([NOW] * (MAX_CALLS + 1)))
    single = answer_grammar(request("required", is_parallel=False), own)
    assert allows(single, own.written([PARIS]))
    assert not allows(single, own.written([PARIS, NOW]))
    named = answer_grammar(request("required", names=("now",)), own)
    assert allows(named, own.written([NOW]))
    assert not allows(named, own.written([PARIS]))


@pytest.mark.parametrize("name", FORMS)
def test_calls_or_text(name: str) -> None:
    own = form(name)
    spec = answer_grammar(request("auto"), own)
    assert allows(spec, "Hello, 世界! {}")
    assert allows(spec, own.written([PARIS]))
    assert not allows(spec, own.written([("other", "{}")]))
    assert not allows(spec, own.written([PARIS])[:-1])
    assert allows(spec, "Let me see. " + own.written([NOW]))
    assert not allows(spec, own.written([NOW]) + " Done.")
    if not own.is_anchored:
        assert not allows(spec, "Let me see. " + own.written([("other", "{}")]))


@pytest.mark.parametrize("name", ["hermes", "smollm", "mistral", "generic"])
def test_calls_or_json(name: str) -> None:
    own = form(name)
    spec = answer_grammar(request("auto", response_format={"type": "json_object"}), own)
    assert allows(spec, '{"a": "<tool_call>"}')
    assert allows(spec, own.written([PARIS]))
    assert not allows(spec, "Hello.")


def test_formats_without_tools() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER}}
    spec = answer_grammar(request("none", response_format=schema), None)
    assert allows(spec, '{"city":"Rome"}')
    assert allows(spec, '{\n  "city": "Rome",\n  "unit": "F"\n}')
    assert not allows(spec, '{"city": 1}')
    assert not allows(spec, '{"city":\n\n"Rome"}')
    assert spec is not None
    assert spec.schemas[0].param == "response_format.json_schema.schema"
    assert answer_grammar(request("none", response_format={"type": "text"}), None) is None
    assert answer_grammar(request("none"), None) is None


# --- reading ----------------------------------------------------------------------------------------


def cut_up(text: str, cuts: list[int]) -> list[str]:
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


def read(reader: ToolReader, pieces: list[str | None]) -> tuple[str, list[tuple[str, str]], list[str]]:
    """(content, calls, ids) of a text that comes in pieces; None is the trigger token."""
    content, deltas = "", list[ToolCallDelta]()
    for piece in pieces:
        if piece is None:
            reader.begin()
            continue
        text, calls = reader.push(piece)
        content += text
        deltas += calls
    content += reader.finish()
    heads = [delta for delta in deltas if delta.id is not None]
    assert [delta.index for delta in heads] == list(range(len(heads)))
    names = [str(delta.name) for delta in heads]
    bodies = ["".join(d.arguments for d in deltas if d.index == i) for i in range(len(heads))]
    return content, list(zip(names, bodies, strict=True)), [str(delta.id) for delta in heads]


_objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
).map(lambda value: json.dumps(value, ensure_ascii=False))
_calls = st.lists(
    st.tuples(st.sampled_from(["now", "get_weather", "a-b_C"]), _objects), min_size=1, max_size=3
)
_spelled = st.just('[TOOL_CALLS] [{"name": "other", "arguments": {}}]')
_text = st.text(st.sampled_from('<tool_cal>[{"name TOL'), max_size=12) | _spelled


@given(
    name=st.sampled_from(FORMS),
    text=_text,
    calls=_calls,
    cuts=st.lists(st.integers(0, 400), max_size=30),
    is_forced=st.booleans(),
)
def test_what_was_written_is_read_however_it_is_cut(
    name: str, text: str, calls: list[tuple[str, str]], cuts: list[int], is_forced: bool
) -> None:
    own = form(name)
    calls = calls if own.between is not None else calls[:1]
    is_token = own.trigger_token is not None
    if is_forced or own.is_anchored or (not is_token and own.trigger in text + own.trigger[:-1]):
        text = ""
    written = own.written(calls)
    pieces: list[str | None] = [*cut_up(text + written, cuts)]
    if is_token:
        pieces = [*cut_up(text, cuts), None, *cut_up(written.removeprefix(own.trigger), cuts)]
    reader = ToolReader(own, "salt", is_forced=is_forced, is_anchored=own.is_anchored)
    content, found, ids = read(reader, pieces)
    assert (content, found) == (text, calls)
    assert reader.num_whole == len(calls)
    assert len(set(ids)) == len(ids)
    if own.id_length is not None:
        assert all(len(one) == own.id_length and one.isalnum() for one in ids)


@given(name=st.sampled_from(FORMS), text=_text, cuts=st.lists(st.integers(0, 20), max_size=9))
def test_text_without_a_trigger_is_content(name: str, text: str, cuts: list[int]) -> None:
    own = form(name)
    if own.trigger_token is None and own.trigger in text:
        return
    reader = ToolReader(own, "s", is_forced=False, is_anchored=own.is_anchored)
    content, found, _ = read(reader, [*cut_up(text, cuts)])
    assert (content, found) == (text, [])


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_is_cut_off_shows_what_there_was(name: str) -> None:
    own = form(name)
    whole = own.written([PARIS])
    for length in range(len(whole)):
        reader = ToolReader(own, "s", is_forced=True, is_anchored=False)
        content, found, _ = read(reader, [whole[:length]])
        assert content == ""
        assert all(call == "get_weather" and PARIS[1].startswith(body) for call, body in found)
        assert reader.num_whole == int(len(whole.split(PARIS[1])[0] + PARIS[1]) <= length)


@pytest.mark.parametrize("name", FORMS)
def test_answers_with_calls(name: str) -> None:
    """From token ids, a few a step, to deltas; the special trigger of one form gives no text elsewhere."""
    own = form(name)
    text = ("" if own.is_anchored else "So: ") + own.written([PARIS])
    ids = [*tokenizer().encode(text, add_special_tokens=False).ids, EOS]
    for size in (1, 3, len(ids)):
        tools = encoder(name).tool_reader(request(), "s")
        answer = Answer(encoder(name).table, SamplingParams(), (), 3, tools)
        deltas: list[Delta] = []
        for start in range(0, len(ids), size):
            part = tuple(ids[start : start + size])
            is_last = start + size >= len(ids)
            reason = FinishReason.STOP if is_last else None
            stats = SequenceStats() if is_last else None
            answer.push(SequenceOutput("r", part, finish_reason=reason, stats=stats))
            if (delta := answer.take()) is not None:
                deltas.append(delta)
        assert "".join(delta.text for delta in deltas) == ("" if own.is_anchored else "So: ")
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        assert pieces[0].name == "get_weather"
        assert "".join(piece.arguments for piece in pieces) == PARIS[1]
        assert deltas[-1].finish_reason == "tool_calls"
        assert [token for delta in deltas for token in delta.token_ids] == ids


def whole_answer(name: str, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[Delta, Answer]:
    """What one step with all of an answer's ids gives."""
    answer = Answer(
        encoder(name).table, SamplingParams(), stops, 3, encoder(name).tool_reader(request(), "s")
    )
    answer.push(
        SequenceOutput(
            "r", tuple(ids), finish_reason=FinishReason.STOP, stats=SequenceStats(num_prompt_tokens=3)
        )
    )
    delta = answer.take()
    assert delta is not None
    return delta, answer


def ids_of(*parts: str) -> list[int]:
    """Each part by itself, so that a special token cut in two is ordinary text."""
    return [one for part in parts for one in tokenizer().encode(part, add_special_tokens=False).ids]


def test_the_name_of_a_trigger_token_is_ordinary_text() -> None:
    own = form("mistral")
    ids = ids_of("[TOOL", '_CALLS] [{"name": "other", "arguments": {}}]')
    assert own.trigger_token not in ids
    mask = grammars().start(answer_grammar(request("auto"), own)).allowed((), ids)
    assert mask is not None, "the grammar lets it pass as text"
    delta, _ = whole_answer("mistral", [*ids, EOS])
    assert delta.text == '[TOOL_CALLS] [{"name": "other", "arguments": {}}]'
    assert delta.tool_calls == ()
    assert delta.finish_reason == "stop"


def test_a_trigger_token_ends_the_text_that_might_have_become_a_stop_string() -> None:
    own = form("mistral")
    ids = [*ids_of("So: sto", own.written([NOW])), EOS]
    assert own.trigger_token in ids
    for stops in ((), ("stop!",), ("sto [{",), ("[TOOL_CALLS]",)):
        delta, answer = whole_answer("mistral", ids, stops)
        assert delta.text == "So: sto"
        assert [call.name for call in delta.tool_calls if call.name] == ["now"]
        assert "".join(call.arguments for call in delta.tool_calls) == NOW[1]
        assert (delta.finish_reason, answer.needs_abort) == ("tool_calls", False)
