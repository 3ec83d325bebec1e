"""What goes through the proxy unchanged, and what little is changed."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from openai import AsyncOpenAI

from specgate.config.upstream import OpenAIHttpConfig, PoolConfig
from tests.specgate.backends.openai_http.upstreams import (
    MESSAGES,
    MODEL,
    STREAM,
    WHOLE,
    Upstream,
    chunk,
    proxy,
    settings,
    stream,
    upstream,
    usage_event,
    well,
)

SPECGATE = {"num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 3, "num_target_steps": 2,
            "accepted_per_position": [2, 1, 0, 0]}  # fmt: skip


async def test_the_body_arrives_byte_for_byte() -> None:
    body = (
        b'{ "model":"big",  "messages":[{"role":"user","content":'
        b'[{"type":"image_url","image_url":{"url":"data:x"}}]}],\n "guided_regex":"[0-9]+",'
        b' "temperature":7.50, "tools":[], "unheard_of": {"a": [1e2, null]} }'
    )
    async with upstream() as server, proxy(settings(baseline=[server.url])) as front:
        response = await front.client.post(
            "/v1/chat/completions",
            content=body,
            headers={"Content-Type": "application/json", "X-Request-Id": "me"},
        )
        assert response.status_code == 200, response.text
        assert server.bodies == [body]
        assert server.headers[0]["X-Request-Id"] == "me"


async def test_the_callers_trace_goes_on_and_nothing_else_by_that_name() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with upstream() as server, proxy(settings(baseline=[server.url])) as front:
        for given in (trace, "anything; else"):
            body = {"model": MODEL, "messages": MESSAGES}
            await front.client.post("/v1/chat/completions", json=body, headers={"traceparent": given})
        assert [headers.get("traceparent") for headers in server.headers] == [trace, None]


async def test_only_our_own_members_are_taken_out_or_put_in() -> None:
    config = OpenAIHttpConfig(pools={"baseline": PoolConfig(replicas=("http://x",), model="served-name")})
    async with upstream() as server:
        pool = PoolConfig(replicas=(server.url,), model="served-name", headers={"X-Extra": "yes"})
        async with proxy(OpenAIHttpConfig(pools={**config.pools, "baseline": pool})) as front:
            asked = {
                "specgate": {"explore": False},
                "stream": True,
                "odd": 1.0,
                "stream_options": {"chunk": 2},
            }
            assert (await front.chat(**asked)).status_code == 200
        sent = json.loads(server.bodies[0])
        assert sent == {
            "model": "served-name", "messages": MESSAGES, "stream": True, "odd": 1.0,
            "stream_options": {"chunk": 2, "include_usage": True},
        }  # fmt: skip
        assert b'"odd":1.0' in server.bodies[0]
        assert server.headers[0]["X-Extra"] == "yes"


async def test_a_whole_answer_keeps_its_bytes_and_gets_specgate() -> None:
    async with upstream() as server, proxy(settings(baseline=[server.url])) as front:
        response = await front.chat()
        assert response.content.startswith(json.dumps(WHOLE).encode()[:-1])
        own = response.json()["specgate"]
        assert own["policy"] == response.headers["X-SpecGate-Policy"] == "baseline"
        assert own["timings"]["ttft_ms"] is None  # it cannot be seen from here
        entry = await front.decision()
        assert (entry["num_prompt_tokens"], entry["num_output_tokens"], entry["outcome"]) == (7, 5, "ok")


async def test_a_stream_keeps_its_bytes_and_hides_usage_that_only_we_asked_for() -> None:
    async with upstream() as server, proxy(settings(baseline=[server.url])) as front:
        response = await front.chat(stream=True)
        assert response.content == b"".join((*STREAM[:3], STREAM[4]))
        entry = await front.decision()
        assert (entry["num_prompt_tokens"], entry["num_output_tokens"]) == (7, 5)
        seen = await front.chat(stream=True, stream_options={"include_usage": True})
        *events, last, done = seen.content.split(b"\n\n")[:-1]
        assert b"\n\n".join(events) + b"\n\n" == b"".join(STREAM[:3])
        assert last.startswith(STREAM[3].strip()[:-1])
        assert json.loads(last[6:])["specgate"]["policy"] == "baseline"
        assert done == b"data: [DONE]"


@pytest.mark.parametrize("is_continuous", [False, True])
async def test_usage_on_a_chunk_with_text_is_hidden_or_shown_likewise(is_continuous: bool) -> None:
    usage = {"usage": WHOLE["usage"]}
    pieces = [chunk("Hel", **(usage if is_continuous else {})), chunk("lo", "stop", **usage)]
    pieces += [usage_event()] if is_continuous else []

    async def behave(_: Upstream, http: web.Request) -> web.StreamResponse:
        response = await stream(http, [*pieces, STREAM[4]])
        await response.write_eof()
        return response

    async with upstream(behave) as server, proxy(settings(baseline=[server.url])) as front:
        hidden = (await front.chat(stream=True)).text
        assert "usage" not in hidden
        assert [json.loads(e)["choices"] for e in _payloads(hidden)] == [
            json.loads(chunk(*told)[6:])["choices"] for told in (("Hel",), ("lo", "stop"))
        ]
        assert (await front.decision())["num_output_tokens"] == 5
        shown = await front.chat(stream=True, stream_options={"include_usage": True})
        assert shown.content.startswith(b"".join(pieces[:-1]) + pieces[-1].strip()[:-1])
        last = json.loads(_payloads(shown.text)[-1])
        assert last["usage"] == WHOLE["usage"]
        assert last["specgate"]["policy"] == "baseline"
        assert len(_payloads(shown.text)) == len(pieces)


def _payloads(text: str) -> list[str]:
    return [e.removeprefix("data: ") for e in text.split("\n\n") if e not in ("", "data: [DONE]")]


async def test_every_way_to_cut_and_to_end_lines_gives_the_same_bytes() -> None:
    whole = (
        b": hello\r\n\r\n"
        + chunk("Hel").replace(b"\n\n", b"\r\n\r\n")
        + b"event: x\ndata: {}\n\n"
        + b"".join(STREAM)
    )
    shown = whole.replace(STREAM[3], b"")
    for size in (1, 2, 3, 7, 100, 10_000):

        async def behave(_: Upstream, http: web.Request, size: int = size) -> web.StreamResponse:
            response = await stream(http, [])
            for at in range(0, len(whole), size):
                await response.write(whole[at : at + size])
            await response.write_eof()
            return response

        async with upstream(behave) as server, proxy(settings(baseline=[server.url])) as front:
            assert (await front.chat(stream=True)).content == shown, size


async def test_the_first_event_goes_out_before_the_second_exists() -> None:
    is_seen = asyncio.Event()

    async def behave(_: Upstream, http: web.Request) -> web.StreamResponse:
        response = await stream(http, [chunk("Hel")])
        await is_seen.wait()
        for piece in STREAM[1:]:
            await response.write(piece)
        return response

    async with upstream(behave) as server, proxy(settings(baseline=[server.url])) as front:
        body = {"model": MODEL, "messages": MESSAGES, "stream": True}
        async with front.client.stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.aiter_bytes()
            assert await anext(pieces) == chunk("Hel")
            is_seen.set()
            assert b"".join([piece async for piece in pieces]).endswith(b"data: [DONE]\n\n")


async def test_counts_of_another_specgate_and_of_vllm_are_carried_over() -> None:
    vllm = {"num_spec_steps": 3, "num_accepted_draft_tokens": 4, "num_draft_tokens": 9,
            "acceptance_histogram": [1, 0, 2, 0], "num_spec_tokens": 3}  # fmt: skip
    details = {
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
    }
    told = {
        "specgate": ({"specgate": SPECGATE}, (2, 8, 3, [2, 1, 0, 0])),
        "vllm": ({"metrics": {"speculative_decoding": vllm}}, (3, 9, 4, [2, 2, 0])),
        "openai": ({"usage": WHOLE["usage"] | details}, (0, 5, 3, [])),
        "nonsense": ({"specgate": SPECGATE | {"accepted_per_position": [-1, 90]}}, (0, 0, 3, [])),
    }
    for extra, (drafts, tokens, accepted, depths) in told.values():

        async def behave(
            _: Upstream, http: web.Request, extra: dict[str, object] = extra
        ) -> web.StreamResponse:
            if json.loads(await http.read()).get("stream"):
                response = await stream(http, (*STREAM[:3], usage_event(**extra), STREAM[4]))
                await response.write_eof()
                return response
            return web.json_response(WHOLE | extra)

        async with (
            upstream() as plain,
            upstream(behave) as server,
            proxy(settings(baseline=[plain.url], ngram=[server.url])) as front,
        ):
            for is_stream in (False, True):
                answer = await front.chat("ngram", stream=is_stream, **_usage(is_stream))
                text = answer.text.split("data: ")[-2] if is_stream else answer.text
                own = json.loads(text)["specgate"]
                found = (own["num_drafts"], own["num_draft_tokens"], own["num_accepted_tokens"])
                assert (*found, own["accepted_per_position"]) == (drafts, tokens, accepted, depths)
            text = (await front.client.get("/metrics")).text
            series = 'specgate_drafts_total{policy="ngram",task="chat"}'
            assert (f"{series} {2.0 * drafts}" in text) == bool(drafts)


def _usage(is_stream: bool) -> dict[str, object]:
    return {"stream_options": {"include_usage": True}} if is_stream else {}


async def test_several_answers_and_prompts_are_one_request() -> None:
    body = {"id": "c", "object": "text_completion", "usage": {"prompt_tokens": 4, "completion_tokens": 9}}
    choices = [{"index": i, "text": "abc", "finish_reason": "stop"} for i in range(4)]

    async def behave(_: Upstream, http: web.Request) -> web.StreamResponse:
        return web.json_response(body | {"choices": choices})

    async with upstream(behave) as server, proxy(settings(baseline=[server.url])) as front:
        asked = {"model": MODEL, "prompt": ["a", "b"], "n": 2}
        response = await front.client.post("/v1/completions", json=asked)
        assert response.json()["choices"] == choices
        assert len(server.bodies) == 1
        entry = await front.decision()
        assert (entry["num_answers"], entry["num_prompt_tokens"], entry["num_output_tokens"]) == (4, 4, 9)


async def test_the_official_client_sees_what_the_server_said() -> None:
    call = {"index": 0, "id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    event = {"id": "x-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
             "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}  # fmt: skip
    pieces = [
        b"data: " + json.dumps(event).encode() + b"\n\n",
        chunk(finish="tool_calls"),
        b"data: [DONE]\n\n",
    ]

    async def behave(server: Upstream, http: web.Request) -> web.StreamResponse:
        if not json.loads(await http.read()).get("stream"):
            return await well(server, http)
        response = await stream(http, pieces)
        await response.write_eof()
        return response

    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with upstream(behave) as server, proxy(settings(baseline=[server.url])) as front:
        client = AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "Hello"
        assert answer.model_extra is not None
        assert answer.model_extra["specgate"]["policy"] == "baseline"
        seen = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=[tool],
            stream=True,  # type: ignore[arg-type,call-overload]
        )
        names = [c.function.name async for e in seen for c in e.choices[0].delta.tool_calls or ()]
        assert names == ["look"]
        assert json.loads(server.bodies[1])["tools"] == [tool]
        await client.close()
