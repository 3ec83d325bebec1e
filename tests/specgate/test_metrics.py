"""/metrics and /openapi.json: all series from the start, fed truly, with bounded labels."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.stats import SequenceCounters
from engine.types import DrafterError, DraftWork, EngineLoad, StepRecord
from specgate.app import build_app
from specgate.config import AdmissionConfig
from specgate.telemetry.exposition import exposition
from specgate.types import RequestOutcome
from tests.specgate.gateway import MODEL, eventually, make_config, running

SERIES = [
    "requests_total",
    "request_duration_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "queue_wait_seconds",
    "prompt_tokens_total",
    "output_tokens_total",
    "cached_prompt_tokens_total",
    "decisions_total",
    "drafts_total",
    "draft_tokens_total",
    "accepted_tokens_total",
    "accepted_tokens_per_position_total",
    "rejections_total",
    "request_prompt_tokens",
    "request_output_tokens",
    "target_steps_total",
    "target_steps_saved_total",
    "step_seconds",
    "draft_seconds_total",
    "verify_seconds_total",
    "guard_state",
    "guard_trips_total",
    "drafter_errors_total",
    "consistency_checks_total",
    "device_seconds_total",
    "running_requests",
    "waiting_requests",
    "kv_blocks",
    "planner_errors_total",
    "preemptions_total",
    "engine_restarts_total",
    "accelerator_utilization_ratio",
    "accelerator_memory_bytes",
    "prediction_error_seconds",
    "latency_model_coefficient",
    "predicted_seconds_total",
    "measured_seconds_total",
    "canary_stage",
    "canary_status",
    "canary_share_ratio",
    "rejected_requests_total",
]


async def test_every_series_of_the_contract_is_there_from_the_start() -> None:
    async with running() as server:
        response = await server.client.get("/metrics")
        assert response.headers["Content-Type"].startswith("text/plain")
        for name in SERIES:
            assert f"# HELP specgate_{name} " in response.text, name
            assert f"# TYPE specgate_{name} " in response.text, name
        assert len(list(text_string_to_metric_families(response.text))) >= len(SERIES)


async def test_requests_and_drafts_are_counted_once_and_truly() -> None:
    async with running() as server:
        await server.chat(specgate={"policy": "ngram"}, max_tokens=7)  # steps of 3, 3, 1
        await server.chat(stream=True, max_tokens=5)
        at = 'policy="ngram",task="chat"'
        for series, value in {
            f'requests_total{{endpoint="chat",model="{MODEL}",outcome="ok",{at}}}': 1,
            'decisions_total{arm="",policy="ngram",reason="override",task="chat"}': 1,
            f"drafts_total{{{at}}}": 2,
            f"draft_tokens_total{{{at}}}": 4 + 3,
            f"accepted_tokens_total{{{at}}}": 4,
            'accepted_tokens_per_position_total{policy="ngram",position="1",task="chat"}': 2,
            'rejections_total{policy="ngram",position="1",task="chat"}': 0,
            'rejections_total{policy="ngram",position="2",task="chat"}': 2,
            "target_steps_total": 3 + 5,
            "target_steps_saved_total": 4,
            "output_tokens_total": 12,
            f"request_duration_seconds_count{{{at}}}": 1,
            f"time_to_first_token_seconds_count{{{at}}}": 1,
            f"inter_token_latency_seconds_count{{{at}}}": 2,
            'step_seconds_count{kind="verify"}': 2,
            "running_requests": 0,
            "waiting_requests": 0,
            'kv_blocks{state="used"}': 0,
        }.items():
            assert await server.metric(f"specgate_{series}") == value, series
        assert await server.metric('specgate_accelerator_memory_bytes{part="other"}') > 1e6


async def test_memory_is_shown_by_part() -> None:
    async with running() as server:
        whole = await server.metric('specgate_accelerator_memory_bytes{part="other"}')
        weights = {"target_weights": 1000, "target_kv": 50, "draft_weights": 200, "draft_kv": 5}
        server.fake._card = replace(server.fake.card, details={"memory_bytes": weights})
        for part, value in weights.items():
            assert await server.metric(f'specgate_accelerator_memory_bytes{{part="{part}"}}') == value
        beside = await server.metric('specgate_accelerator_memory_bytes{part="other"}')
        assert beside == pytest.approx(whole, rel=0.2)
        on_device = weights | {"other": 7}
        server.fake._card = replace(server.fake.card, details={"memory_bytes": on_device})
        assert await server.metric('specgate_accelerator_memory_bytes{part="other"}') == 7


async def test_drafts_count_for_the_method_that_made_them() -> None:
    """One request, decided for n-gram, whose steps were changed over to the draft model."""
    counters = SequenceCounters()
    counters.add_draft(4, 1, 2, "ngram", 4)
    counters.add_draft(2, 2, 3, "draft", 2)
    stats = counters.freeze(num_prompt_tokens=3, num_output_tokens=5, queue_wait_s=0.0)
    async with running() as server:
        outcomes: list[RequestOutcome] = []
        model = server.gateway.models[MODEL]
        learn = model.learner.learn
        model.learner.learn = outcomes.append  # type: ignore[method-assign]
        await server.chat(specgate={"policy": "ngram"}, max_tokens=1)
        model.learner.learn = learn  # type: ignore[method-assign]
        server.gateway.metrics.finished(replace(outcomes[0], stats=(stats,)), 0.0)
        for series, value in {
            'drafts_total{policy="ngram",task="chat"}': 1,
            'draft_tokens_total{policy="ngram",task="chat"}': 4,
            'accepted_tokens_total{policy="ngram",task="chat"}': 1,
            'rejections_total{policy="ngram",position="1",task="chat"}': 1,
            'rejections_total{policy="ngram",position="2",task="chat"}': 0,
            'drafts_total{policy="draft",task="chat"}': 1,
            'accepted_tokens_total{policy="draft",task="chat"}': 2,
            'accepted_tokens_per_position_total{policy="draft",position="1",task="chat"}': 1,
            'rejections_total{policy="draft",position="1",task="chat"}': 0,
        }.items():
            assert await server.metric(f"specgate_{series}") == value, series


async def test_step_records_feed_drafter_errors_and_device_time() -> None:
    async with running() as server:
        server.gateway.metrics.stepped(
            StepRecord(
                step=1, started_s=0, seconds=1.0, kind="mixed", num_sequences=3, num_decode_sequences=2,
                num_tokens=20, num_prefill_tokens=10, num_kv_tokens=0, num_logits_rows=0, num_sampled_rows=0,
                num_emitted_tokens=0, schedule_s=0, draft_s=0.25, forward_s=0.5, verify_s=0.25,
                drafts=(DraftWork("draft", num_sequences=1, num_draft_tokens=4, seconds=0.25),),
                drafter_errors=(DrafterError("ngram", "oom", "m"),), num_preemptions=2, num_planner_errors=1,
            )
        )  # fmt: skip
        for series, value in {
            'drafter_errors_total{kind="oom",policy="ngram"}': 1,
            "preemptions_total": 2,
            "planner_errors_total": 1,
            'draft_seconds_total{policy="draft"}': 0.25,
            'device_seconds_total{part="draft",policy="draft"}': 0.25,
            'device_seconds_total{part="forward",policy="draft"}': 0.125,
            'device_seconds_total{part="forward",policy="baseline"}': 0.375,
            "verify_seconds_total": 0.25,
        }.items():
            assert await server.metric(f"specgate_{series}") == pytest.approx(value), series


async def test_running_and_waiting_are_apart() -> None:
    """What the engine has not scheduled waits; what it has not been told of yet does not vanish."""
    admission = AdmissionConfig(max_concurrent=3)
    async with running(make_config(admission=admission), step_s=30) as server:
        tasks = [asyncio.create_task(server.chat()) for _ in range(4)]
        await eventually(lambda: server.fake.num_running == 3)
        for load, expected in {
            EngineLoad(1, 2, 9, 0, 1, 10): (1, 3),
            EngineLoad(3, 0, 9, 0, 1, 10): (3, 1),
            EngineLoad(0, 0, 10, 0, 0, 10): (3, 1),
        }.items():
            server.fake.load = lambda load=load: load  # type: ignore[method-assign]
            shown = (
                await server.metric("specgate_running_requests"),
                await server.metric("specgate_waiting_requests"),
            )
            assert shown == expected, load
        del server.fake.load
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_predictions_are_set_beside_what_came_of_them() -> None:
    async with running() as server:
        server.gateway.metrics.predicted("ttft", 0.5, 0.2)
        server.gateway.metrics.predicted("ttft", 0.1, 0.2)
        for series, value in {
            'predicted_seconds_total{model="ttft"}': 0.6,
            'measured_seconds_total{model="ttft"}': 0.4,
            'prediction_error_seconds_sum{model="ttft"}': 0.4,
            'prediction_error_seconds_bucket{le="0.1",model="ttft"}': 1,
        }.items():
            assert await server.metric(f"specgate_{series}") == pytest.approx(value), series


async def test_counters_of_what_must_not_happen_start_at_zero() -> None:
    """Else the first oom or mismatch would be a new series at 1, which is no increase."""
    async with running() as server:
        server.gateway.learning[0].publish()
        text = (await server.client.get("/metrics")).text
        assert 'specgate_consistency_checks_total{result="mismatch"} 0.0' in text
        for kind in ("exception", "oom", "timeout", "invalid_draft", "nan", "verify_mismatch"):
            assert f'specgate_drafter_errors_total{{kind="{kind}",policy="draft"}} 0.0' in text


async def test_a_rollout_has_one_status() -> None:
    async with running() as server:
        server.gateway.metrics.rollout_moved("r", 2, 0.25, "running")
        server.gateway.metrics.rollout_moved("r", 0, 0.0, "rolled_back")
        assert await server.metric('specgate_canary_status{name="r",status="rolled_back"}') == 1
        assert await server.metric('specgate_canary_status{name="r",status="running"}') == 0
        assert await server.metric('specgate_canary_share_ratio{name="r"}') == 0


async def test_labels_stay_bounded_whatever_callers_send() -> None:
    async with running() as server:
        for number in range(5):
            await server.chat(model=f"made-up-{number}")
            await server.chat(specgate={"policy": f"made-up-{number}"})
            await server.client.get(f"/made-up-{number}")
        text = (await server.client.get("/metrics")).text
        assert "made-up" not in text
        labels = 'endpoint="chat",model="none",outcome="refused",policy="none",task="none"'
        unknown = f"specgate_requests_total{{{labels}}}"
        assert await server.metric(unknown) == 5


async def test_openapi_describes_what_is_served() -> None:
    async with running() as server:
        document = (await server.client.get("/openapi.json")).json()
        routes = {
            (resource.canonical, route.method.lower())
            for resource in build_app(make_config()).router.resources()
            for route in resource
            if route.method not in ("HEAD", "OPTIONS")
        }
        described = {(path, method) for path, item in document["paths"].items() for method in item}
        assert described == routes
        chat = document["components"]["schemas"]["ChatRequest"]
        assert chat["required"] == ["model", "messages"]
        refs = set(
            re.findall(
                r'"\$ref":"#/components/schemas/(\w+)"', str(document).replace("'", '"').replace(": ", ":")
            )
        )
        assert refs <= set(document["components"]["schemas"])
        assert len(refs) >= 6


async def test_a_scrape_leaves_turns_to_others_and_says_the_same() -> None:
    registry = CollectorRegistry()
    for number in range(20):
        Counter(f"c{number}", "Some", ["of"], registry=registry).labels("it").inc(number)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    text = await exposition(registry)
    task.cancel()
    assert text == generate_latest(registry)
    assert turns >= 20
