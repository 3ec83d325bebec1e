"""Traces, as a collector receives them by OTLP over HTTP from the real exporter."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from specgate.app import build_app
from specgate.config import TelemetryConfig, TracingConfig
from specgate.errors import ConfigError
from tests.specgate.gateway import MODEL, events, make_config, running

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT[:-1] + "0"


@dataclass
class Collector:
    """What has been received."""

    endpoint: str = ""
    headers: list[Mapping[str, str]] = field(default_factory=list)
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    def spans(self) -> dict[str, Any]:
        """By name; each must come once."""
        spans = [
            s for r in self.requests for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans
        ]
        found = {span.name: span for span in spans}
        assert len(found) == len(spans)
        return found

    def text(self) -> str:
        return "".join(map(str, self.requests))


def attributes(of: Any) -> dict[str, Any]:
    """Of a span, an event or a resource, as Python values."""
    out = {}
    for pair in of.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        out[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return out


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()

    async def take(request: web.Request) -> web.Response:
        collector.headers.append(request.headers)
        collector.requests.append(ExportTraceServiceRequest.FromString(await request.read()))
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield collector
    finally:
        await runner.cleanup()


def traced(collector: Collector, **more: Any) -> Any:
    """A configuration whose traces go there; all are sent at the latest when the server ends."""
    tracing = TracingConfig(endpoint=collector.endpoint, headers={"X-Api": "k"}, export_every_s=60.0, **more)
    return make_config(telemetry=TelemetryConfig(tracing=tracing))


async def test_a_request_is_four_spans_in_the_callers_trace() -> None:
    async with collecting() as collector:
        async with running(traced(collector), step_s=0.002) as server:
            answer = await server.chat(
                {"traceparent": PARENT, "X-Request-Id": "r-1"}, stream=True, max_tokens=7, temperature=0.5,
                seed=3, stop=["zz"], specgate={"policy": "ngram"}, stream_options={"include_usage": True},
            )  # fmt: skip
            last = events(answer.text)[-2]
        spans = collector.spans()
        assert collector.headers[0]["X-Api"] == "k"
    assert set(spans) == {f"chat {MODEL}", "queue", "prefill", "decode"}
    gateway = spans[f"chat {MODEL}"]
    assert gateway.trace_id.hex() == PARENT.split("-")[1]
    assert gateway.parent_span_id.hex() == PARENT.split("-")[2]
    assert gateway.kind == gateway.SPAN_KIND_SERVER
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent_span_id for part in parts} == {gateway.span_id}
    times = [t for part in parts for t in (part.start_time_unix_nano, part.end_time_unix_nano)]
    assert times == sorted(times)
    assert gateway.start_time_unix_nano <= times[0]
    assert times[-1] <= gateway.end_time_unix_nano
    said = attributes(gateway)
    timings = last["specgate"]["timings"]
    assert said == said | {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "specgate", "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 7, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ["zz"], "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": last["usage"]["prompt_tokens"], "gen_ai.usage.output_tokens": 7,
        "specgate.policy": "ngram", "specgate.reason": "override", "specgate.task": "chat",
        "specgate.outcome": "ok", "specgate.request_id": "r-1",
    }  # fmt: skip
    assert said["gen_ai.response.time_to_first_chunk"] * 1e3 == pytest.approx(timings["ttft_ms"], abs=0.01)
    assert attributes(spans["decode"])["specgate.num_accepted_tokens"] == 4
    taken_ms = (spans["decode"].end_time_unix_nano - gateway.start_time_unix_nano) / 1e6
    assert taken_ms == pytest.approx(timings["e2e_ms"], abs=0.5)
    assert "hi" not in [pair.value.string_value for span in spans.values() for pair in span.attributes]


async def test_changes_of_policy_are_events_with_their_moment() -> None:
    async with collecting() as collector:
        async with running(traced(collector), step_s=0.03) as server:
            task = asyncio.create_task(server.chat(max_tokens=12, specgate={"policy": "ngram"}))
            while server.fake._step < 2:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.002)
            server.fake.set_force("baseline")
            changes = (await task).json()["specgate"]["policy_changes"]
        decode = collector.spans()["decode"]
    assert changes
    assert [attributes(event)["specgate.policy"] for event in decode.events] == [c["policy"] for c in changes]
    assert {event.name for event in decode.events} == {"specgate.policy_change"}
    for event in decode.events:
        assert decode.start_time_unix_nano < event.time_unix_nano <= decode.end_time_unix_nano


async def test_refused_and_failed_requests_are_told_as_such() -> None:
    async with collecting() as collector:
        async with running(traced(collector), fail_after_tokens=2) as server:
            assert (await server.chat(temprature=1)).status_code == 400
            assert (await server.complete(max_tokens=9)).status_code == 503
        spans = collector.spans()
    refused, failed = spans["chat"], spans[f"text_completion {MODEL}"]
    assert attributes(refused)["error.type"] == "unknown_parameter"
    assert attributes(refused)["http.response.status_code"] == 400
    assert refused.status.code == refused.status.STATUS_CODE_UNSET  # the caller's fault is not ours
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert attributes(failed)["gen_ai.response.finish_reasons"] == ["error"]


async def test_the_caller_decides_whether_its_requests_are_traced() -> None:
    async with collecting() as collector:
        async with running(traced(collector)) as server:
            await server.chat({"traceparent": NOT_SAMPLED})
        assert collector.requests == []
        async with running(traced(collector, sample_ratio=0.0)) as server:
            await server.chat({"traceparent": PARENT}, max_tokens=1)
            await server.chat(max_tokens=1)
        assert f"chat {MODEL}" in collector.spans()


@pytest.mark.parametrize("is_traced", [True, False])
async def test_servers_behind_are_offered_the_trace(is_traced: bool) -> None:
    async with collecting() as collector:
        config = traced(collector) if is_traced else make_config()
        async with running(config) as server:
            seen = []
            prepare = server.fake.prepare

            async def noting(request: Any) -> Any:
                seen.append(request.traceparent)
                return await prepare(request)

            server.fake.prepare = noting  # type: ignore[method-assign]
            await server.chat({"traceparent": PARENT}, max_tokens=1)
            await server.chat({"traceparent": "nonsense"}, max_tokens=1)
        trace_id, parent_id = seen[0].split("-")[1:3]
        assert trace_id == PARENT.split("-")[1]
        if is_traced:
            assert any(
                s.span_id.hex() == parent_id
                for s in collector.requests[0].resource_spans[0].scope_spans[0].spans
            )
        else:
            assert seen == [PARENT, ""]


async def test_a_collector_that_is_gone_harms_nobody() -> None:
    tracing = TracingConfig(endpoint="http://127.0.0.1:9/v1/traces", timeout_s=0.2, export_every_s=0.05)
    async with running(make_config(telemetry=TelemetryConfig(tracing=tracing))) as server:
        for _ in range(3):
            assert (await server.chat(max_tokens=2)).status_code == 200
            await asyncio.sleep(0.05)


def test_without_the_packages_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "specgate.telemetry.tracing"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracing = TracingConfig(endpoint="http://127.0.0.1:9/v1/traces")
    with pytest.raises(ConfigError, match=r"telemetry\.tracing: needs OpenTelemetry: pip install"):
        build_app(make_config(telemetry=TelemetryConfig(tracing=tracing)))


def test_without_the_setting_nothing_of_it_is_loaded() -> None:
    code = "import sys, specgate.app; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
