"""Greedy answers are decoded again when idle: one that differs shuts its policy; budgets hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from specgate.config import Config
from specgate.config.guards import ConsistencyGuard, DoorTiming, GuardsConfig
from tests.specgate.gateway import MODEL, SUMMARY, Running, eventually, make_config, running

ALL = ConsistencyGuard(share=1.0, max_token_share=1.0)
FORCED: dict[str, Any] = {"messages": SUMMARY, "temperature": 0, "specgate": {"policy": "ngram"}}


def config(guard: ConsistencyGuard = ALL) -> Config:
    return make_config(guards=GuardsConfig(consistency=guard, timing=DoorTiming(cooldown_s=600)))


async def checks(server: Running, result: str) -> float:
    return await server.metric(f'specgate_consistency_checks_total{{result="{result}"}}')


async def until(server: Running, result: str, number: int = 1) -> None:
    async with asyncio.timeout(10):
        while await checks(server, result) < number:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.02)


async def answered_then(server: Running, text: str) -> None:
    """A drafted answer is given; from while it runs on, others are answered with `text`."""
    answer = asyncio.create_task(server.chat(**FORCED))
    await eventually(lambda: server.fake.num_running == 1)
    server.fake.script = replace(server.fake.script, text=text)
    assert (await answer).json()["specgate"]["num_drafts"] > 0


async def test_an_equal_answer_is_a_match_and_costs_one_generation() -> None:
    async with running(config()) as server:
        await server.chat(**FORCED)
        await until(server, "match")
        assert server.fake.num_started == 2
        assert (await checks(server, "mismatch")) == 0
        doors = (await server.client.get("/admin/state")).json()["models"][MODEL]["guards"]
        door = next(d for d in doors if d["guard"] == "consistency_guard")
        assert (door["policy"], door["state"], door["reading"]) == ("ngram", "allowed", 0)
        assert 'guard_state{guard="consistency_guard",policy="ngram",task=""} 0.0' in (
            await server.client.get("/metrics")
        ).text
        await server.settled()


async def test_an_answer_that_differs_shuts_its_policy_and_is_reported(caplog: Any) -> None:
    async with running(config(), step_s=0.02) as server:
        await answered_then(server, "Hello there, someone else!")
        await until(server, "mismatch")
        assert any("token 13 under ngram is" in record.message for record in caplog.records)
        await server.client.get("/admin/state")
        automatic = (await server.chat(messages=SUMMARY)).json()["specgate"]
        assert (automatic["policy"], automatic["reason"]) == ("baseline", "consistency_guard")
        assert automatic["num_draft_tokens"] == 0
        assert (
            await server.metric('specgate_guard_state{guard="consistency_guard",policy="ngram",task=""}') == 2
        )
        trips = 'specgate_guard_trips_total{guard="consistency_guard",reason="mismatch"}'
        assert await server.metric(trips) == 1
        asked = (await server.chat(**FORCED)).json()["specgate"]
        assert asked["policy"] == "ngram"  # an override stands above this guard


async def test_a_shorter_or_longer_answer_differs_too() -> None:
    for text in ("Hello there", "Hello there, 世界! Bye. And more"):
        async with running(config(), step_s=0.02) as server:
            await answered_then(server, text)
            await until(server, "mismatch")


async def test_others_come_first() -> None:
    async with running(config(), step_s=0.05, text="abc " * 20) as server:
        await server.chat(**FORCED, max_tokens=60)
        checker = server.gateway.models[MODEL].checker
        checking = asyncio.create_task(checker.check_next())
        await asyncio.sleep(0.12)
        assert (await server.chat(messages=SUMMARY, max_tokens=2)).status_code == 200
        assert await checking in ("abandoned", None)  # None: the loop had taken it already
        await until(server, "abandoned")
        assert await checks(server, "match") == 0


async def test_sampled_baseline_and_unlucky_answers_are_left_alone() -> None:
    async with running(config()) as server:
        await server.chat(messages=SUMMARY, temperature=0.8, specgate={"policy": "ngram"})
        await server.chat(messages=SUMMARY, temperature=0, specgate={"policy": "baseline"})
        await server.chat(**FORCED, n=2)
        assert await server.gateway.models[MODEL].checker.check_next() is None
    async with running(config(replace(ALL, share=0.0))) as server:
        await server.chat(**FORCED)
        assert await server.gateway.models[MODEL].checker.check_next() is None
    async with running(config(replace(ALL, max_tokens=3))) as server:
        await server.chat(**FORCED)
        assert await server.gateway.models[MODEL].checker.check_next() is None


async def test_the_budget_of_tokens_holds() -> None:
    async with running(config(replace(ALL, max_token_share=0.0)), text="x" * 200) as server:
        for _ in range(4):
            await server.chat(**FORCED)
            await asyncio.sleep(0.3)
        # 256 tokens to begin with, nothing earned: one answer of 200 tokens.
        assert await checks(server, "match") == 1
        assert server.fake.num_started == 5
