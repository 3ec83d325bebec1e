"""Failures and clients that leave, in every phase, at the level of bytes and counters."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest

from specgate.config import AdmissionConfig, RequestsConfig
from tests.specgate.gateway import (
    HELLO,
    MODEL,
    Running,
    events,
    eventually,
    make_config,
    running,
    streamed_text,
)


@pytest.mark.parametrize("fault", ["fails", "deadline", "fault of ours"])
async def test_a_failure_after_the_first_byte_is_an_event_and_no_done(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(requests=RequestsConfig(allow_overrides=True, deadline_s=0.4))
    script = {"fails": {"fail_after_tokens": 3}, "deadline": {"hang_after_tokens": 3}}.get(fault, {})
    async with running(config, **script) as server:
        if fault == "fault of ours":
            original = server.fake._stumble

            async def stumble(num_out: int) -> None:
                await original(num_out)
                if num_out == 3:
                    raise RuntimeError("secret detail")

            monkeypatch.setattr(server.fake, "_stumble", stumble)
        response = await server.chat(stream=True)
        payloads = events(response.text)
        assert response.status_code == 200
        assert streamed_text(payloads) == "Hel"
        assert "[DONE]" not in payloads
        code = {"fails": "engine_lost", "deadline": "deadline_exceeded", "fault of ours": "internal_error"}[
            fault
        ]
        assert payloads[-1]["error"]["code"] == code
        assert "secret" not in response.text
        await server.settled()
        outcome = "deadline" if fault == "deadline" else "error"
        assert (await server.client.get("/admin/decisions")).json()["decisions"][0]["outcome"] == outcome


async def test_the_first_token_goes_out_before_the_second_exists() -> None:
    async with running(hang_after_tokens=1) as server:
        reader, writer = await _post(server, {"stream": True})
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        seen = b""
        async with asyncio.timeout(10):
            while b'"content":"H"' not in seen:
                seen += await reader.read(65536)
        writer.close()
        await server.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "before the first token", "in the middle"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_is_aborted_and_everything_returns_to_zero(
    stream: bool, phase: str, n: int
) -> None:
    config = make_config(admission=AdmissionConfig(max_concurrent=4, max_queue=5))
    hang = 0 if phase == "before the first token" else 4
    async with running(config, hang_after_tokens=hang) as server:
        admission = server.gateway.models[MODEL].admission
        if phase == "queued":
            async with admission.slot(4):
                _, writer = await _post(server, {"stream": stream, "n": n})
                await eventually(lambda: admission.num_queued == 1)
                writer.close()
                await eventually(lambda: admission.num_queued == 0)
        else:
            reader, writer = await _post(server, {"stream": stream, "n": n})
            await eventually(lambda: server.fake.num_running == n)
            if phase == "in the middle" and stream:
                await reader.readuntil(b'"content":"l"')
            writer.close()
        await server.settled()
        assert server.fake.num_started == (0 if phase == "queued" else n)
        labels = 'outcome="cancelled",policy="none",task="none"'
        if phase != "queued":
            labels = 'outcome="cancelled",policy="baseline",task="chat"'
        series = f'specgate_requests_total{{endpoint="chat",model="{MODEL}",{labels}}}'
        assert await server.metric(series) == 1


async def test_a_client_that_resets_the_connection_is_noticed_too() -> None:
    async with running(step_s=0.005, text="x" * 5000) as server:
        reader, writer = await _post(server, {"stream": True})
        await reader.readuntil(b"[{")
        writer.transport.abort()
        await server.settled()


async def test_a_client_that_does_not_read_is_cut_off_at_the_deadline() -> None:
    config = make_config(requests=RequestsConfig(deadline_s=1.0))
    async with running(config, text="x" * 8000, max_model_len=100_000) as server:
        # Logprobs make the answer larger than all buffers on the way.
        body = {
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
            "max_tokens": 50_000,
            "ignore_eos": True,
        }
        reader, writer = await _post(server, body)
        await reader.readuntil(b"[{")
        writer.transport.pause_reading()
        await eventually(lambda: server.fake.num_running == 0)
        await server.settled()
        writer.transport.abort()
        assert (await server.client.get("/admin/decisions")).json()["decisions"][0]["outcome"] == "deadline"


@pytest.mark.parametrize(
    ("ends", "n"), [("the client leaves", 1), ("the client leaves", 2), ("the backend fails", 1)]
)
async def test_what_was_done_for_an_answer_that_was_cut_is_counted(ends: str, n: int) -> None:
    """Three steps of 1 + 2 tokens each, and no more."""
    script = {"hang_after_tokens": 9} if ends == "the client leaves" else {"fail_after_tokens": 9}
    async with running(text="abcdefghi" * 9, **script) as server:
        body = {"stream": True, "n": n, "specgate": {"policy": "ngram"}}
        reader, writer = await _post(server, body)
        seen = b""
        while seen.count(b'"content":"ghi"') < n:
            seen += await reader.read(65536)
        writer.close()
        await server.settled()
        at = 'policy="ngram",task="chat"'
        for series, value in {
            f"drafts_total{{{at}}}": 3 * n,
            f"draft_tokens_total{{{at}}}": 12 * n,
            f"accepted_tokens_total{{{at}}}": 6 * n,
            "target_steps_total": 3 * n,
            "output_tokens_total": 9 * n,
        }.items():
            assert await server.metric(f"specgate_{series}") == value, series
        entry = (await server.client.get("/admin/decisions")).json()["decisions"][0]
        assert entry["outcome"] == ("cancelled" if ends == "the client leaves" else "error")
        assert entry["counts"]["num_accepted_tokens"] == 6 * n


async def test_every_prompt_of_a_call_gets_the_seeds_it_would_get_alone() -> None:
    async with running() as server:
        indices: list[int] = []
        generate = server.fake.generate

        def noting(*args: Any, index: int, **kwargs: Any) -> Any:
            indices.append(index)
            return generate(*args, index=index, **kwargs)

        server.fake.generate = noting  # type: ignore[method-assign]
        assert (await server.complete(prompt=["a", "b"], n=2, seed=7)).status_code == 200
        assert indices == [0, 1, 0, 1]


async def test_one_answer_of_several_failing_ends_them_all() -> None:
    async with running(fail_after_tokens=2) as server:
        assert (await server.chat(n=3)).status_code == 503
        await server.settled()


async def test_two_requests_with_one_request_id_do_not_mix() -> None:
    async with running(step_s=0.002) as server:
        headers = {"X-Request-Id": "same"}
        answers = await asyncio.gather(*(server.chat(headers=headers, max_tokens=k) for k in (3, 5, 9)))
        assert [a.json()["usage"]["completion_tokens"] for a in answers] == [3, 5, 9]


async def _post(server: Running, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare HTTP/1.1 request, so that the test decides when the connection ends."""
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"model": MODEL, "messages": HELLO} | body).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    await writer.drain()
    return reader, writer


async def test_many_requests_with_random_leavers_leave_nothing_behind() -> None:
    random = Random(11)
    limits = AdmissionConfig(max_concurrent=8, max_queue=1000, max_wait_ratio=None)
    config = make_config(admission=limits)
    async with running(config, step_s=0.001, text="abcdefgh" * 8) as server:

        def tasks() -> set[asyncio.Task[Any]]:  # but for connections that are kept alive
            return {t for t in asyncio.all_tasks() if "RequestHandler" not in repr(t.get_coro())}

        before = tasks()

        async def one() -> None:
            ask = server.chat(
                stream=random.random() < 0.5,
                n=random.choice((1, 1, 3)),
                max_tokens=random.randint(1, 60),
                specgate={"policy": random.choice(("auto", "baseline", "ngram", "draft"))},
            )
            patience_s = random.choice((0.0, 0.01, 0.05, 0.3, 20.0))
            try:
                async with asyncio.timeout(patience_s):
                    assert (await ask).status_code == 200
            except TimeoutError:
                pass  # this client left

        for _ in range(5):
            await asyncio.gather(*(one() for _ in range(30)))
        await server.settled()
        await eventually(lambda: tasks() == before)
        text = (await server.client.get("/metrics")).text
        ended = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("specgate_requests_total{")
        ]
        counted = len(
            (await server.client.get("/admin/decisions", params={"limit": 1000})).json()["decisions"]
        )
        undecided = await server.metric(
            f'specgate_requests_total{{endpoint="chat",model="{MODEL}",outcome="cancelled",policy="none",task="none"}}'
        )
        assert sum(ended) == counted + undecided  # every request counts once
