"""Pools that stand for policies: the router's choice, guards, and the way back to baseline."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specgate.clock import FakeClock
from specgate.config.guards import DoorTiming, DrafterGuard, GuardsConfig
from specgate.config.upstream import BreakerConfig, OpenAIHttpConfig, PoolConfig
from tests.specgate.backends.openai_http.upstreams import (
    MODEL,
    Behaviour,
    answers,
    error_first,
    hang_before_headers,
    proxy,
    reset_at_once,
    settings,
    upstream,
    well,
)
from tests.specgate.gateway import SUMMARY, events, eventually, running, streamed_text


async def test_the_router_chooses_the_pool() -> None:
    async with upstream() as plain, upstream() as ngram, upstream() as draft:
        config = settings(baseline=[plain.url], ngram=[ngram.url], draft=[draft.url])
        async with proxy(config) as front:
            chat, summary = await front.chat(), await front.chat(messages=SUMMARY)
            assert chat.headers["X-SpecGate-Policy"] == "baseline"
            assert summary.headers["X-SpecGate-Policy"] == "ngram"  # a rule's choice: it repeats its input
            assert (await front.chat("draft")).headers["X-SpecGate-Reason"] == "override"
            assert [len(server.bodies) for server in (plain, ngram, draft)] == [1, 1, 1]
            models = (await front.client.get("/v1/models")).json()["data"]
            assert models[0]["specgate"]["methods"] == {"baseline": 0, "ngram": 4, "draft": 4}
            await front.client.put("/admin/policy", json={"force": "baseline"})
            forced = await front.chat("ngram")
            assert forced.headers["X-SpecGate-Reason"] == "kill_switch"
            assert len(plain.bodies) == 2


async def test_a_pool_that_is_down_is_shut_with_the_reason() -> None:
    async with upstream() as plain, upstream() as ngram:
        config = settings(baseline=[plain.url], ngram=[ngram.url])
        async with proxy(config) as front:
            ngram.health = 500
            await eventually(lambda: bool(front.backend.status().closed))
            for response in (await front.chat(messages=SUMMARY), await front.chat("ngram")):
                assert response.status_code == 200
                assert response.headers["X-SpecGate-Policy"] == "baseline"
                assert response.headers["X-SpecGate-Reason"] == "drafter_error"
            candidates = {c["policy"]: c for c in (await front.decision())["candidates"]}
            assert "health check answers 500" in candidates["ngram"]["why_not"]
            assert candidates["ngram"]["allowed"] is False
            assert (await front.client.get("/readyz")).status_code == 200
            assert ngram.bodies == []
            ngram.health = 200
            await eventually(lambda: not front.backend.status().closed)
            assert (await front.chat(messages=SUMMARY)).headers["X-SpecGate-Policy"] == "ngram"


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("behave", "reason"),
    [(answers(500), "drafter_error"), (reset_at_once, "drafter_error"), (error_first, "drafter_error"),
     (hang_before_headers, "drafter_error"), (answers(400), "unsupported_params")],
)  # fmt: skip
async def test_a_request_that_a_pool_fails_is_served_by_baseline(
    behave: Behaviour, reason: str, is_stream: bool
) -> None:
    async with (
        upstream() as plain,
        upstream(behave) as ngram,
        proxy(settings(baseline=[plain.url], ngram=[ngram.url])) as front,
    ):
        response = await front.chat("ngram", stream=is_stream)
        assert response.status_code == 200
        if is_stream:
            assert streamed_text(events(response.text)) == "Hello"
        else:
            assert response.json()["choices"][0]["message"]["content"] == "Hello"
        change = {"token_index": 0, "policy": "baseline", "reason": reason}
        assert (await front.decision())["policy_changes"] == [change]


async def test_a_fault_of_the_request_itself_comes_from_baseline() -> None:
    async with (
        upstream(answers(400, {"error": {"message": "plain says no"}})) as plain,
        upstream(answers(400, {"error": {"message": "ngram says no"}})) as ngram,
        proxy(settings(baseline=[plain.url], ngram=[ngram.url])) as front,
    ):
        response = await front.chat("ngram")
        assert (response.status_code, response.json()["error"]["message"]) == (400, "plain says no")


async def test_a_pool_that_keeps_failing_is_shut_by_the_guard_and_let_in_again() -> None:
    timing = DoorTiming(cooldown_s=0.3, probe_share=0.5, probe_samples=1)
    guards = GuardsConfig(timing=timing, drafter=DrafterGuard(max_errors=2))
    async with upstream() as plain, upstream(answers(500)) as ngram:
        config = settings(baseline=[plain.url], ngram=[ngram.url])
        config = replace(config, breaker=BreakerConfig(min_failures=1000, window=1000))  # the guard's turn
        async with proxy(config, guards=guards) as front:
            for _ in range(3):
                assert (await front.chat(messages=SUMMARY)).status_code == 200
            shut = await front.chat(messages=SUMMARY)
            assert shut.headers["X-SpecGate-Reason"] == "drafter_error"
            doors = (await front.client.get("/admin/state")).json()["models"][MODEL]["guards"]
            state = {d["policy"]: d["state"] for d in doors if d["guard"] == "drafter_error"}
            assert state["ngram"] == "shut"
            metrics = (await front.client.get("/metrics")).text
            assert 'specgate_drafter_errors_total{kind="exception",policy="ngram"}' in metrics
            ngram.behave = well
            async with asyncio.timeout(10):
                while True:
                    response = await front.chat(messages=SUMMARY)
                    if response.headers["X-SpecGate-Policy"] == "ngram":
                        break
                    await asyncio.sleep(0.05)


async def test_in_front_of_another_specgate_counts_and_texts_are_its_own() -> None:
    async with running(text="abcdefghijkl") as inner:
        pools = {
            name: PoolConfig(replicas=(inner.url,), model="fake-1", headers={"X-SpecGate-Policy": name},
                             health_path="/readyz")
            for name in ("baseline", "ngram")
        }  # fmt: skip
        async with proxy(replace(settings(), pools=pools)) as front:
            texts = {}
            for policy in pools:
                answer = (await front.chat(policy, max_tokens=9)).json()
                texts[policy] = answer["choices"][0]["message"]["content"]
                assert answer["specgate"]["num_accepted_tokens"] == (6 if policy == "ngram" else 0)
                assert answer["specgate"]["num_target_steps"] == (3 if policy == "ngram" else 9)
            assert texts["ngram"] == texts["baseline"] == "abcdefghi"
            await front.chat("ngram", stream=True, max_tokens=9)
            readings = (await front.client.get("/admin/state")).json()["models"][MODEL]["acceptance"]
            assert [(r["policy"], r["num_requests"]) for r in readings] == [("ngram", 2)]
            refused = await front.chat("ngram", specgate={"num_speculative_tokens": 2})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "specgate.num_speculative_tokens"
            tokens = await front.client.post("/tokenize", json={"model": MODEL, "prompt": "a"})
            assert tokens.json()["error"]["code"] == "no_tokenizer"


def test_a_missing_key_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from specgate.backends.openai_http.backend import OpenAIHttpBackend

    monkeypatch.delenv("POOL_KEY", raising=False)
    pools = {"baseline": PoolConfig(replicas=("http://x",), api_key_env="POOL_KEY")}
    with pytest.raises(OSError, match="POOL_KEY"):
        OpenAIHttpBackend(MODEL, OpenAIHttpConfig(pools=pools), FakeClock())
