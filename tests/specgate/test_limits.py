"""Limits of keys as callers meet them, over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from typing import Any

import httpx

from specgate.admission import Entrant
from specgate.config import AdmissionConfig, AuthConfig, Config, KeyConfig, KeyLimits, ModelConfig
from tests.specgate.gateway import HELLO, MODEL, Running, eventually, make_config, running


def with_keys(admission: AdmissionConfig, **limits: KeyLimits | None) -> Config:
    keys = tuple(
        KeyConfig(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), limits=of)
        for name, of in limits.items()
    )
    return make_config(auth=AuthConfig(api_keys=keys), admission=admission)


async def ask(server: Running, key: str, **body: Any) -> httpx.Response:
    return await server.client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": HELLO} | body,
        headers={"Authorization": f"Bearer {key}"},
    )


def left(answer: httpx.Response, unit: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{unit}"])


async def test_the_limits_of_a_key_are_in_every_answer_and_kept() -> None:
    tight, few = KeyLimits(requests_per_minute=3), KeyLimits(tokens_per_minute=60)
    async with running(with_keys(AdmissionConfig(), tight=tight, few=few, loose=None)) as server:
        whole = await ask(server, "tight", max_tokens=5)
        assert (whole.status_code, left(whole, "requests")) == (200, 2)
        assert whole.headers["x-ratelimit-limit-requests"] == "3"
        assert "x-ratelimit-limit-tokens" not in whole.headers
        streamed = await ask(server, "tight", stream=True)
        assert left(streamed, "requests") == 1
        wrong = await ask(server, "tight", temperature=9)  # never became a request
        assert (wrong.status_code, left(wrong, "requests")) == (400, 1)
        used = len("user: hi\nassistant: ") + 5
        assert 60 - used <= left(await ask(server, "few", max_tokens=5), "tokens") < 60  # it fills meanwhile
        assert (await ask(server, "tight")).status_code == 200
        refused = await ask(server, "tight")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (
            429, "rate_limit_exceeded", "rate_limit_error",
        )  # fmt: skip
        assert 1 <= int(refused.headers["Retry-After"]) <= 20
        assert refused.headers["x-ratelimit-reset-requests"]
        other = await ask(server, "loose")
        assert other.status_code == 200
        assert "x-ratelimit-limit-requests" not in other.headers
        await server.settled()
        reason = 'specgate_rejected_requests_total{reason="rate_limit_exceeded"}'
        assert await server.metric(reason) == 1


async def test_a_key_with_one_request_passes_a_key_with_many() -> None:
    config = with_keys(
        AdmissionConfig(max_concurrent=1, max_queue=50, max_wait_ratio=None), many=None, one=None
    )
    async with running(config) as server:
        admission = server.gateway.models[MODEL].admission
        ended: list[str] = []

        async def client(key: str) -> None:
            assert (await ask(server, key)).status_code == 200
            ended.append(key)

        async with admission.slot(1):
            tasks = [asyncio.create_task(client("many")) for _ in range(20)]
            await eventually(lambda: admission.num_queued == 20)
            tasks.append(asyncio.create_task(client("one")))
            await eventually(lambda: admission.num_queued == 21)
        await asyncio.gather(*tasks)
        assert ended.index("one") <= 2
        await server.settled()


async def test_a_key_at_its_own_limit_leaves_the_slots_to_others() -> None:
    config = with_keys(
        AdmissionConfig(max_concurrent=8, max_wait_ratio=None),
        capped=KeyLimits(max_concurrent=2, max_queue=3),
        other=None,
    )
    async with running(config) as server:
        admission = server.gateway.models[MODEL].admission
        async with admission.slot(2, Entrant("capped")):
            tasks = [asyncio.create_task(ask(server, "capped")) for _ in range(3)]
            await eventually(lambda: admission.num_queued == 3)
            full = await ask(server, "capped")
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert (await ask(server, "other")).status_code == 200
            assert admission.num_queued == 3
        assert [(await task).status_code for task in tasks] == [200] * 3
        await server.settled()


async def test_a_full_model_turns_nobody_away_who_asks_for_another() -> None:
    """A refusal without a look at the body is for when all models are full; else the body says which."""
    config = make_config(
        models=(ModelConfig(id=MODEL, backend="fake"), ModelConfig(id="other", backend="fake")),
        admission=AdmissionConfig(max_concurrent=1, max_queue=1, max_wait_ratio=None),
    )
    async with running(config, others=("other",)) as server, AsyncExitStack() as full:
        models, pipeline = server.gateway.models, server.gateway.pipeline

        async def fill(name: str) -> None:
            await full.enter_async_context(models[name].admission.slot(1))
            full.callback(asyncio.create_task(server.chat(model=name)).cancel)
            await eventually(lambda: models[name].admission.num_queued == 1)

        await fill(MODEL)
        assert pipeline.refusal("") is None
        assert (await server.chat(model="other")).status_code == 200
        refused = await server.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        await fill("other")
        early = await server.client.post("/v1/chat/completions", content=b"no body that could be read")
        assert (early.status_code, early.json()["error"]["code"]) == (429, "queue_full")


async def test_priorities_order_the_queue_and_are_not_to_be_had_for_asking() -> None:
    limits = {"vip": KeyLimits(priority=-5), "plain": None}
    config = with_keys(AdmissionConfig(max_concurrent=1, max_wait_ratio=None), **limits)
    async with running(config) as server:
        admission = server.gateway.models[MODEL].admission
        ended: list[int] = []

        async def client(name: int, key: str, **body: Any) -> None:
            assert (await ask(server, key, **body)).status_code == 200
            ended.append(name)

        tasks = []
        async with admission.slot(1):
            for name, (key, body) in enumerate(
                [("plain", {"priority": 7}), ("plain", {}), ("vip", {"priority": 2}), ("vip", {})]
            ):
                tasks.append(asyncio.create_task(client(name, key, **body)))
                await eventually(lambda name=name: admission.num_queued == name + 1)
        await asyncio.gather(*tasks)
        assert ended == [3, 1, 2, 0]
        refused = await ask(server, "plain", priority=-1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
        await server.settled()


async def test_a_wait_that_would_be_too_long_is_refused_at_once_and_what_runs_finishes() -> None:
    limits = AdmissionConfig(max_concurrent=1, max_queue=100, max_wait_s=250.0, max_wait_ratio=None)
    async with running(make_config(admission=limits)) as server:
        admission = server.gateway.models[MODEL].admission
        admission._pace._last_s.extend([100.0] * 4)  # so far: two may wait, a third would for 300 s
        async with admission.slot(1):
            tasks = [asyncio.create_task(server.chat()) for _ in range(12)]
            await eventually(lambda: sum(task.done() for task in tasks) == 10)
            assert admission.num_queued == 2
        answers = await asyncio.gather(*tasks)
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 10
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "queue_too_slow"
        assert refused.headers["Retry-After"] == "60"  # no longer, however long the queue
        await server.settled()


async def test_who_would_be_refused_in_any_case_is_told_before_the_body_came() -> None:
    """A full queue, a limit used up, a server that drains: the head is enough."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer plain\r\nContent-Length: 100000\r\n\r\n"
    )

    async def told(server: Running) -> bytes:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        async with asyncio.timeout(5):
            line = await reader.readline()
        writer.close()
        return line.split()[1]

    one = AdmissionConfig(max_concurrent=1, max_queue=0)
    async with running(with_keys(one, plain=KeyLimits(requests_per_minute=1))) as server:
        async with server.gateway.models[MODEL].admission.slot(1):
            assert await told(server) == b"429"
        assert (await ask(server, "plain")).status_code == 200
        assert await told(server) == b"429"
        server.gateway.switches.is_draining = True
        assert await told(server) == b"503"
        assert await server.metric('specgate_rejected_requests_total{reason="queue_full"}') == 1
