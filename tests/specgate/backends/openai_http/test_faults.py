"""Servers that refuse, hang, reset or lie, and callers who leave: what the caller and the server see."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from specgate.config import RequestsConfig
from specgate.config.upstream import BreakerConfig, PoolConfig, RetryConfig, UpstreamTimeouts
from tests.specgate.backends.openai_http.upstreams import (
    MESSAGES,
    MODEL,
    Behaviour,
    Proxy,
    Upstream,
    answers,
    chunk,
    ends_too_early,
    error_first,
    error_in_the_middle,
    hang_before_first_byte,
    hang_before_headers,
    hang_in_the_middle,
    proxy,
    reset_at_once,
    reset_in_the_middle,
    settings,
    stream,
    upstream,
    well,
)
from tests.specgate.gateway import events, eventually, streamed_text

BEFORE_THE_FIRST_BYTE: dict[str, Behaviour] = {
    "hangs before headers": hang_before_headers,
    "hangs before the first byte": hang_before_first_byte,
    "resets": reset_at_once,
    "500": answers(500),
    "503": answers(503, **{"Retry-After": "1"}),
    "429": answers(429, **{"Retry-After": "1"}),
    "redirects": answers(302, Location="http://example.invalid/"),
    "error as first event": error_first,
    "JSON where events were asked for": answers(200, {"choices": []}),
}


@pytest.mark.parametrize("fault", BEFORE_THE_FIRST_BYTE)
async def test_before_the_first_byte_another_replica_is_asked(fault: str) -> None:
    async with (
        upstream(BEFORE_THE_FIRST_BYTE[fault]) as bad,
        upstream() as good,
        proxy(settings(baseline=[bad.url, good.url])) as front,
    ):
        for _ in range(2):  # the least used comes first, so one of the two met the bad one
            response = await front.chat(stream=True)
            assert response.status_code == 200, response.text
            assert streamed_text(events(response.text)) == "Hello"
        assert len(bad.bodies) >= 1
        assert len(good.bodies) == 2
        assert bad.num_open == 0


@pytest.mark.parametrize("fault", ["hangs before headers", "resets", "500", "error in a whole body"])
async def test_a_whole_answer_is_asked_for_again_too(fault: str) -> None:
    behave = BEFORE_THE_FIRST_BYTE.get(fault) or answers(200, {"error": {"message": "lost", "code": 500}})
    async with (
        upstream(behave) as bad,
        upstream() as good,
        proxy(settings(baseline=[bad.url, good.url])) as front,
    ):
        answered = [await front.chat() for _ in range(2)]
        assert [a.json()["choices"][0]["message"]["content"] for a in answered] == ["Hello"] * 2
        assert len(bad.bodies) >= 1


async def test_nobody_listening_is_noticed_at_once_and_said() -> None:
    async with upstream() as server:
        config = settings(baseline=[server.url])
        config = replace(config, health=replace(config.health, every_s=60.0))
        async with proxy(config) as front:
            front.backend.pools["baseline"].replicas[0].url = "http://127.0.0.1:9"
            response = await front.chat()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "upstream_failed"
            assert "cannot be reached" in response.json()["error"]["message"]
            assert "127.0.0.1" not in response.text
            assert "Retry-After" in response.headers


@pytest.mark.parametrize(
    ("behave", "says"),
    [(hang_in_the_middle, "silent"), (reset_in_the_middle, "broke"), (ends_too_early, "too early"),
     (error_in_the_middle, "lost it")],
)  # fmt: skip
async def test_after_the_first_byte_a_failure_is_an_event_and_no_done(behave: Behaviour, says: str) -> None:
    async with upstream(behave) as bad, upstream() as good:
        config = settings(baseline=[bad.url])
        async with proxy(replace(config, pools={**config.pools})) as front:
            response = await front.chat(stream=True)
            payloads = events(response.text)
            assert response.status_code == 200
            assert streamed_text(payloads) == "Hel"
            assert "[DONE]" not in payloads
            assert says in payloads[-1]["error"]["message"]
            assert len(bad.bodies) == 1  # not again: something has gone out
            entry = await front.decision()
            assert entry["outcome"] == "error"
            assert entry["num_output_tokens"] == 1
            await eventually(lambda: bad.num_open == 0)
        assert good.bodies == []


async def test_an_error_event_arrives_as_the_server_wrote_it() -> None:
    async with upstream(error_in_the_middle) as bad, proxy(settings(baseline=[bad.url])) as front:
        last = events((await front.chat(stream=True)).text)[-1]
        assert last["error"]["odd"] == [1]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_refusal_is_passed_on_as_it_is_and_opens_nothing(status: int) -> None:
    told = {
        "error": {"message": "temperature!", "type": "x", "param": "temperature", "code": 7, "odd": [1.0]}
    }
    async with upstream(answers(status, told)) as server, proxy(settings(baseline=[server.url])) as front:
        for number in range(8):
            response = await front.chat(stream=bool(number % 2))
            assert response.status_code == status
            assert response.json() == told
            assert b'"odd": [1.0]' in response.content
        assert len(server.bodies) == 8
        assert _breaker(front) == "closed"


async def test_a_key_that_is_not_accepted_is_our_fault_not_the_callers() -> None:
    async with upstream(answers(401)) as server, proxy(settings(baseline=[server.url])) as front:
        response = await front.chat()
        assert response.status_code == 503
        assert "key" in response.json()["error"]["message"]


async def test_a_request_too_many_is_told_with_a_retry_after_that_is_cut() -> None:
    async with upstream(answers(429, **{"Retry-After": "86400"})) as server:
        config = replace(settings(baseline=[server.url]), max_retry_after_s=20.0)
        async with proxy(config) as front:
            response = await front.chat()
            assert (response.status_code, response.headers["Retry-After"]) == (429, "20")
            rests = await front.chat()  # and it is left alone meanwhile
            assert rests.status_code == 503
            assert 15 <= int(rests.headers["Retry-After"]) <= 20
            assert len(server.bodies) == 1
            assert _breaker(front) == "closed"


async def test_failures_open_the_breaker_and_one_probe_closes_it() -> None:
    async with upstream(answers(500)) as server:
        config = settings(baseline=[server.url])
        config = replace(
            config,
            retries=RetryConfig(max_attempts=1),
            breaker=BreakerConfig(min_failures=3, window=10, open_s=0.5, max_open_s=0.5),
        )
        async with proxy(config) as front:
            assert [(await front.chat()).status_code for _ in range(3)] == [503] * 3
            assert _breaker(front) == "open"
            num = len(server.bodies)
            assert "failed too often" in (await front.chat()).json()["error"]["message"]
            assert len(server.bodies) == num  # not asked
            assert (await front.client.get("/readyz")).status_code == 503
            server.behave = well
            await eventually(lambda: _breaker(front) == "half_open")
            answered = await asyncio.gather(*(front.chat() for _ in range(4)))
            assert 200 in [a.status_code for a in answered]
            await eventually(lambda: _breaker(front) == "closed")
            assert (await front.chat()).status_code == 200
            assert (await front.client.get("/readyz")).status_code == 200


@pytest.mark.parametrize(("behave", "is_stream"), [(ends_too_early, True), (hang_before_headers, False)])
async def test_answers_that_never_come_to_their_end_open_the_breaker(
    behave: Behaviour, is_stream: bool
) -> None:
    async with upstream(behave) as server:
        config = replace(
            settings(baseline=[server.url]),
            retries=RetryConfig(max_attempts=1),
            breaker=BreakerConfig(min_failures=2, open_s=60.0),
        )
        async with proxy(config) as front:
            for state in ("closed", "open"):
                await front.chat(stream=is_stream)
                assert _breaker(front) == state


def test_a_silent_server_is_given_up_before_the_request_is() -> None:
    whole_s = UpstreamTimeouts().whole_s
    assert whole_s is not None
    assert whole_s < RequestsConfig().deadline_s


async def test_what_a_server_says_when_it_fails_is_for_the_log_and_the_admin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with upstream(answers(500, {"error": {"message": "at /srv/private.py"}})) as server:
        config = replace(settings(baseline=[server.url]), retries=RetryConfig(max_attempts=1))
        async with proxy(config) as front:
            response = await front.chat()
            assert response.json()["error"]["message"] == "A server of the pool baseline answered 500."
            assert "private" not in response.text
            shown = (await front.client.get("/admin/state")).json()["models"][MODEL]["details"]["pools"]
            assert "/srv/private.py" in shown["baseline"][0]["last_failure"]
            told = [r.getMessage() for r in caplog.records if "private" in r.getMessage()]
            assert [server.url in line for line in told] == [True]


async def test_a_body_that_comes_in_pieces_is_read_to_its_end() -> None:
    async def behave(_: Upstream, http: web.Request) -> web.StreamResponse:
        status = 400 if http.headers["X-Request-Id"] == "plain" else 200
        response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
        await response.prepare(http)
        for piece in (b'{"error": {"message": "too', b' hot", "code": 422}}'):
            await response.write(piece)
            await asyncio.sleep(0.05)
        await response.write_eof()
        return response

    async with upstream(behave) as server, proxy(settings(baseline=[server.url])) as front:
        for name, status in (("plain", 400), ("inside", 422)):
            response = await front.client.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": MESSAGES, "stream": True},
                headers={"X-Request-Id": name},
            )
            assert response.status_code == status
            assert response.json() == {"error": {"message": "too hot", "code": 422}}


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_answer_without_end_is_not_read_into_memory(is_stream: bool) -> None:
    num_sent = 0

    async def behave(_: Upstream, http: web.Request) -> web.StreamResponse:
        nonlocal num_sent
        response = await stream(http, [])
        while True:
            await response.write(b": " + b"x" * 500_000 + b"\n\n")
            num_sent += 1

    async with upstream(behave) as server:
        config = replace(
            settings(baseline=[server.url]),
            retries=RetryConfig(max_attempts=1),
            timeouts=replace(settings().timeouts, **_LONG),
        )
        async with proxy(config) as front:
            response = await front.chat(stream=is_stream)
            assert response.status_code == 503
            assert "16 MiB" in response.json()["error"]["message"]
            await eventually(lambda: server.num_left == 1)
            assert num_sent < 100


async def test_retries_stay_within_their_budget() -> None:
    async with upstream(answers(500)) as server:
        config = replace(
            settings(baseline=[server.url]),
            retries=RetryConfig(max_attempts=3, budget_share=0.1, budget_burst=2, pause_s=0.0),
            breaker=BreakerConfig(min_failures=1000, window=1000),
        )
        async with proxy(config) as front:
            for _ in range(20):
                await front.chat()
            assert 22 <= len(server.bodies) <= 20 + 2 + 2


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("phase", "behave"),
    [("before headers", hang_before_headers), ("before the first byte", hang_before_first_byte),
     ("in the middle", hang_in_the_middle)],
)  # fmt: skip
async def test_the_server_is_let_go_when_the_caller_leaves(
    phase: str, behave: Behaviour, is_stream: bool
) -> None:
    async with upstream(behave) as server:
        patient = replace(settings(baseline=[server.url]), timeouts=replace(settings().timeouts, **_LONG))
        async with proxy(patient) as front:
            reader, writer = await _post(front, {"stream": is_stream})
            await eventually(lambda: server.num_open == 1)
            if phase == "in the middle" and is_stream:
                await reader.readuntil(b'"content": "Hel"')
            writer.close()
            await eventually(lambda: server.num_left == 1)
            await eventually(lambda: front.gateway.pipeline.num_open == 0)
            assert front.backend.load().num_running == 0
            assert (await front.decision())["outcome"] == "cancelled"
            assert _breaker(front) == "closed"


_LONG = {"first_byte_s": 60.0, "gap_s": 60.0, "whole_s": 60.0}


async def test_callers_who_leave_open_no_breaker() -> None:
    async with upstream(hang_before_headers) as server:
        config = replace(
            settings(baseline=[server.url]),
            timeouts=replace(settings().timeouts, **_LONG),
            breaker=BreakerConfig(min_failures=1, window=4),
        )
        async with proxy(config) as front:
            for number in range(6):
                _, writer = await _post(front, {"stream": True})
                await eventually(lambda: server.num_open == 1)
                writer.close()
                await eventually(lambda number=number: server.num_left == number + 1)  # type: ignore[misc]
            assert _breaker(front) == "closed"


async def test_a_deadline_lets_the_server_go() -> None:
    async with upstream(hang_in_the_middle) as server:
        patient = replace(settings(baseline=[server.url]), timeouts=replace(settings().timeouts, **_LONG))
        async with proxy(patient, requests=RequestsConfig(deadline_s=0.5)) as front:
            payloads = events((await front.chat(stream=True)).text)
            assert payloads[-1]["error"]["code"] == "deadline_exceeded"
            await eventually(lambda: server.num_left == 1)


async def test_a_caller_who_does_not_read_holds_the_server_back_and_is_cut_off() -> None:
    num_sent = 0

    async def endless(_: Upstream, http: web.Request) -> web.StreamResponse:
        nonlocal num_sent
        response = await stream(http, [])
        while True:
            await response.write(chunk("x" * 10_000))
            num_sent += 1

    async with upstream(endless) as server:
        config = settings(baseline=[server.url])
        async with proxy(config, requests=RequestsConfig(deadline_s=1.5)) as front:
            reader, writer = await _post(front, {"stream": True})
            await reader.readuntil(b"content")
            writer.transport.pause_reading()
            await eventually(lambda: server.num_left == 1)
            assert num_sent < 5_000  # not read into memory
            writer.transport.abort()


async def test_health_is_watched_and_shown() -> None:
    async with upstream() as server, proxy(settings(baseline=[server.url])) as front:
        server.health = 500
        await eventually(lambda: bool(front.gateway.missing()))
        ready = await front.client.get("/readyz")
        assert ready.status_code == 503
        assert "health check answers 500" in ready.json()["missing"][MODEL]
        refused = await front.chat()
        assert refused.status_code == 503
        assert server.url not in ready.text + refused.text
        shown = (await front.client.get("/admin/state")).json()["models"][MODEL]["details"]["pools"]
        assert shown["baseline"][0]["healthy"] is False
        server.health = 200
        await eventually(lambda: not front.gateway.missing())
        assert (await front.chat()).status_code == 200


async def test_the_least_loaded_replica_is_asked() -> None:
    patient = {"timeouts": replace(settings().timeouts, **_LONG)}
    async with (
        upstream(hang_before_headers) as busy,
        upstream() as free,
        proxy(replace(settings(baseline=[busy.url, free.url]), **patient)) as front,
    ):
        _, writer = await _post(front, {})
        await eventually(lambda: busy.num_open == 1)
        for _ in range(5):
            assert (await front.chat()).status_code == 200
        assert (len(busy.bodies), len(free.bodies)) == (1, 5)
        writer.close()


async def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOL_KEY", "s3cret")
    async with upstream() as server:
        pools = {"baseline": PoolConfig(replicas=(server.url,), api_key_env="POOL_KEY")}
        async with proxy(replace(settings(), pools=pools)) as front:
            assert (await front.chat()).status_code == 200
            assert server.headers[0]["Authorization"] == "Bearer s3cret"


def _breaker(front: Proxy) -> str:
    return str(next(iter(front.backend.pools["baseline"].describe()))["breaker"])


async def _post(front: Proxy, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare HTTP/1.1 request, so that the test decides when the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
    data = json.dumps({"model": MODEL, "messages": MESSAGES} | body).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    await writer.drain()
    return reader, writer
