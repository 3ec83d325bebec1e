"""/v1/chat/completions over a real socket: shapes, counts, streams, the official client."""

from __future__ import annotations

import openai
import pytest

from tests.specgate.gateway import HELLO, MODEL, SUMMARY, TEXT, events, running, streamed_text


async def test_whole_answer_has_text_usage_headers_and_true_counts() -> None:
    async with running() as server:
        response = await server.chat(messages=SUMMARY, max_tokens=7)
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT[:7], "refusal": None}
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 7
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 7
        assert response.headers["X-SpecGate-Policy"] == "ngram"
        assert response.headers["X-SpecGate-Reason"] == "cold_start"
        assert response.headers["X-SpecGate-Task"] == "summarization"
        assert "X-SpecGate-Arm" not in response.headers
        extra = body["specgate"]
        # Steps of 1 + 2 accepted tokens: 3, 3, 1 (no room for a draft in the last).
        assert (extra["num_target_steps"], extra["num_drafts"], extra["num_accepted_tokens"]) == (3, 2, 4)
        assert extra["num_draft_tokens"] == 4 + 3
        assert extra["mean_acceptance_length"] == 3.0
        assert set(extra["predicted"]) == {"ttft_ms", "tpot_ms", "e2e_ms", "output_tokens"}
        assert extra["timings"]["e2e_ms"] >= extra["timings"]["ttft_ms"] >= extra["timings"]["queue_wait_ms"]
        assert extra["policy_changes"] == []


async def test_baseline_has_no_acceptance_length() -> None:
    async with running() as server:
        extra = (await server.chat(max_tokens=3)).json()["specgate"]
        assert (extra["policy"], extra["num_drafts"], extra["num_target_steps"]) == ("baseline", 0, 3)
        assert extra["mean_acceptance_length"] is None


async def test_stream_is_role_then_text_then_reason_then_done() -> None:
    async with running() as server:
        response = await server.chat(stream=True)
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        payloads = events(response.text)
        assert payloads[-1] == "[DONE]"
        chunks = payloads[:-1]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert streamed_text(payloads) == TEXT
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert all("usage" not in c and "specgate" not in c for c in chunks)
        assert len({c["id"] for c in chunks}) == 1


async def test_usage_chunk_comes_last_without_choices_and_only_if_asked_for() -> None:
    async with running() as server:
        response = await server.chat(
            stream=True, stream_options={"include_usage": True}, specgate={"policy": "ngram"}, max_tokens=6
        )
        *chunks, last, done = events(response.text)
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 6
        assert last["specgate"]["num_accepted_tokens"] == 4
        assert all(c["usage"] is None for c in chunks)


async def test_several_answers_stream_interleaved_and_each_is_whole() -> None:
    async with running() as server:
        payloads = events((await server.chat(stream=True, n=3)).text)
        assert [streamed_text(payloads, i) for i in range(3)] == [TEXT] * 3
        usage = (await server.chat(n=3, max_tokens=2)).json()["usage"]
        assert usage["completion_tokens"] == 6
        assert usage["prompt_tokens"] == len("user: hi\nassistant: ")


@pytest.mark.parametrize("policy", ["baseline", "ngram"])
async def test_stop_string_cuts_text_counts_and_logprobs_together(policy: str) -> None:
    stop = "there"
    for stream in (False, True):
        async with running() as server:
            response = await server.chat(
                stop=[stop, "zzz"], logprobs=True, specgate={"policy": policy}, stream=stream,
                **({"stream_options": {"include_usage": True}} if stream else {}),
            )  # fmt: skip
            if stream:
                payloads = events(response.text)
                text, usage = streamed_text(payloads), payloads[-2]["usage"]
                choices = [c for p in payloads[:-1] for c in p["choices"]]
                logprobs = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
                end = choices[-1]
            else:
                body = response.json()
                end, usage = body["choices"][0], body["usage"]
                text, logprobs = end["message"]["content"], end["logprobs"]["content"]
            assert text == "Hello "
            assert (end["finish_reason"], end["stop_reason"]) == ("stop", stop)
            assert usage["completion_tokens"] == len(logprobs) == len("Hello there")


async def test_logprobs_have_tokens_bytes_and_the_best() -> None:
    async with running(text="世a") as server:
        body = (await server.chat(logprobs=True, top_logprobs=2)).json()
        first = body["choices"][0]["logprobs"]["content"][0]
        assert first["token"] == "世"
        assert bytes(first["bytes"]).decode() == "世"
        assert len(first["top_logprobs"]) == 2
        assert first["top_logprobs"][0]["logprob"] == first["logprob"]
        assert (await server.chat()).json()["choices"][0]["logprobs"] is None


async def test_the_official_client_reads_everything() -> None:
    async with running() as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2, logprobs=True)  # type: ignore[arg-type,call-overload]
        assert [c.message.content for c in whole.choices] == [TEXT, TEXT]
        assert len(whole.choices[0].logprobs.content) == len(TEXT)
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage.completion_tokens == len(TEXT)
        assert [m.id async for m in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)  # type: ignore[call-overload]
        with pytest.raises(openai.NotFoundError, match=MODEL):
            await client.chat.completions.create(model="other", messages=HELLO)  # type: ignore[call-overload]
        await client.close()
