"""/v1/completions: prompts in all four forms, echo, legacy logprobs."""

from __future__ import annotations

import json
from typing import Any, cast

import openai
import pytest

from engine.types import PolicyAssignment, SamplingParams
from specgate.api.formats import CompletionsFormat
from specgate.clock import SystemClock
from specgate.generation import Generation, Prompt, Times
from specgate.types import Delta, DeltaLogprob, GenerationRequest, PreparedPrompt
from tests.specgate.gateway import MODEL, TEXT, events, running, streamed_text


async def test_default_length_is_that_of_the_api() -> None:
    async with running() as server:
        body = (await server.complete()).json()
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == TEXT[:16]
        assert body["choices"][0]["finish_reason"] == "length"


async def test_prompts_as_text_texts_ids_and_lists_of_ids() -> None:
    async with running() as server:
        ids = [ord(c) for c in "ab"]
        for prompt, echoed in (
            ("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), (ids, ["ab"]), ([ids, [99]], ["ab", "c"]),
        ):  # fmt: skip
            body = (await server.complete(prompt=prompt, echo=True, max_tokens=2, n=2)).json()
            texts = [choice["text"] for choice in body["choices"]]
            assert texts == [p + TEXT[:2] for p in echoed for _ in range(2)]
            assert [c["index"] for c in body["choices"]] == list(range(2 * len(echoed)))
            assert body["usage"]["prompt_tokens"] == sum(map(len, echoed))
            assert body["usage"]["completion_tokens"] == 2 * len(texts)


async def test_legacy_logprobs_with_echo_are_aligned_whole_and_streamed() -> None:
    async with running() as server:
        whole = (await server.complete(prompt="añ", echo=True, logprobs=2, max_tokens=3)).json()
        logprobs = whole["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "ñ", *TEXT[:3]]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
        assert all(tops[token] == value for token, value, tops in list(
            zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        )[1:])  # fmt: skip
        assert whole["specgate"]["reason"] == "unsupported_params"  # prompt logprobs are for plain decoding
        response = await server.complete(prompt="añ", echo=True, logprobs=2, max_tokens=3, stream=True)
        payloads = events(response.text)
        assert streamed_text(payloads) == "añ" + TEXT[:3]
        parts = [c["logprobs"] for p in payloads[:-1] for c in p["choices"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [v for part in parts for v in part[name]] == logprobs[name]


@pytest.mark.parametrize(
    ("first", "rest", "offsets"),
    [
        ("a", ["b", "c"], [0, 1, 2, 3]),
        ("<s>", ["a", "b", "c"], [0, 0, 1, 2, 3]),
        ("<s>", ["\ufffd"], [0, 3, 4]),
    ],
)  # fmt: skip
def test_the_prompts_first_token_is_named_also_where_it_is_no_text(
    first: str, rest: list[str], offsets: list[int]
) -> None:
    """A bos token put there by the encoding takes no place in the text."""
    request = GenerationRequest(
        "id", "completions", "m", SamplingParams(num_logprobs=0, has_prompt_logprobs=True), prompt="abc",
        has_echo=True,
    )  # fmt: skip
    prepared = PreparedPrompt(tuple(range(1 + len(rest))), "abc", first_token=first)
    clock = SystemClock()
    generation = Generation(
        request, cast(Any, None), [Prompt(request, prepared, 1)], cast(Any, None), Times(0, 0, 0), clock
    )
    shape = CompletionsFormat(generation)
    entries = [DeltaLogprob(token, 1, -1.0, token.encode()) for token in [*rest, "!"]]
    before = (None, *entries[:-1])
    shape.add(0, Delta("!", 1, logprobs=(entries[-1],), prompt_logprobs=before, finish_reason="length"))
    (choice,) = shape.choices()
    assert choice["text"] == "abc!"
    assert choice["logprobs"]["tokens"] == [first, *rest, "!"]
    assert choice["logprobs"]["text_offset"] == offsets
    assert choice["logprobs"]["token_logprobs"][0] is None


async def test_no_tokens_but_echo_and_logprobs_score_the_prompt() -> None:
    async with running() as server:
        for stream in (False, True):
            response = await server.complete(prompt="abc", echo=True, logprobs=1, max_tokens=0, stream=stream)
            choices = events(response.text)[0]["choices"] if stream else response.json()["choices"]
            assert choices[0]["text"] == "abc"
            assert choices[0]["logprobs"]["tokens"] == ["a", "b", "c"]
            assert choices[0]["finish_reason"] == "length"
        assert (await server.complete(max_tokens=0)).json()["usage"]["completion_tokens"] == 0
        await server.settled()


async def test_sixteen_tokens_unless_asked_otherwise_and_never_more_than_fit() -> None:
    async with running(text="x" * 99, max_model_len=32) as server:
        assert (await server.complete(prompt="p" * 16)).json()["usage"]["completion_tokens"] == 16
        short = (await server.complete(prompt="p" * 25)).json()
        assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (7, "length")
        refused = await server.complete(prompt="p" * 25, max_tokens=16)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        assert (await server.chat()).json()["usage"]["completion_tokens"] == 32 - len("user: hi\nassistant: ")


async def test_what_may_be_tried_on_a_request_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as server:
        seen: list[bool] = []
        generate = server.fake.generate

        def watched(request: Any, prepared: Any, policy: PolicyAssignment, **rest: Any) -> Any:
            seen.append(policy.may_probe)
            return generate(request, prepared, policy, **rest)

        monkeypatch.setattr(server.fake, "generate", watched)
        for wish in ({}, {"explore": False}, {"learn": False}):
            assert (await server.complete(specgate=wish)).status_code == 200
    assert seen == [True, False, False]


async def test_the_official_client_streams_completions() -> None:
    async with running() as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = await client.completions.create(
            model=MODEL, prompt="x", stream=True, max_tokens=5, logprobs=0
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == TEXT[:5]
        assert chunks[0].choices[0].logprobs is not None
        await client.close()


async def test_tokenize_and_detokenize_in_the_shapes_of_vllm() -> None:
    async with running() as server:
        body = (
            await server.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
        ).json()
        assert body == {"count": 2, "max_model_len": 8192, "tokens": [104, 233], "token_strs": ["h", "é"]}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        ids = (await server.client.post("/tokenize", json=chat)).json()["tokens"]
        back = await server.client.post("/detokenize", json={"model": MODEL, "tokens": ids})
        assert back.json() == {"prompt": "user: x\nassistant: "}
        bare = chat | {"add_generation_prompt": False, "add_special_tokens": False}
        ids = (await server.client.post("/tokenize", json=bare)).json()["tokens"]
        assert "".join(map(chr, ids)) == "user: x\n"
        for path, bad, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
            ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
            ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
            ("/tokenize", chat | {"add_special_tokens": True}, "add_special_tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": [2**30]}, "tokens"),
            ("/detokenize", {"tokenz": [1]}, "tokenz"),
        ):
            response = await server.client.post(path, json=bad)
            assert response.status_code == 400, json.dumps(bad)
            assert response.json()["error"]["param"] == param
