"""OpenTelemetry traces of requests: gateway, queue, prefill, decode. Imported only where they are asked for.

The gateway's span is opened when a request arrives, so that its context can be offered to servers
behind; its children are written from the request's own times once it is over, so that tracing
costs nothing while tokens come. Attributes follow the semantic conventions for generative AI;
those of `specgate.` are ours. No text of prompts or answers is recorded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.types import PolicyChange
from specgate import __version__
from specgate.clock import Clock
from specgate.config.telemetry import TracingConfig
from specgate.errors import ApiError
from specgate.generation import Answer, Generation
from specgate.types import RequestOutcome

_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
_Value = str | bool | int | float | Sequence[str]


@dataclass(slots=True)
class Trace:
    """One request's. `generation` is set once there is one."""

    span: otel.Span
    generation: Generation | None = None

    @property
    def traceparent(self) -> str:
        """This request's place in the trace, for whoever is asked next."""
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, otel.set_span_in_context(self.span))
        return carrier.get("traceparent", "")


class Tracing:
    """Opens and closes spans. `provider` says where they go."""

    def __init__(self, provider: TracerProvider, clock: Clock) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("specgate", __version__)
        self._clock = clock

    @contextmanager
    def request(self, endpoint: str, headers: Mapping[str, str], arrival_s: float) -> Iterator[Trace]:
        """The span of a request, whatever comes of it. `headers` may have a traceparent to continue."""
        offset_s = self._clock.wall() - self._clock.monotonic()
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            endpoint,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=otel.SpanKind.SERVER,
            start_time=_ns(arrival_s + offset_s),
        )
        trace = Trace(span)
        try:
            yield trace
        except ApiError as error:
            span.set_attribute("error.type", error.code or error.error_type)
            span.set_attribute("http.response.status_code", error.status)
            if error.status >= 500:
                span.set_status(otel.StatusCode.ERROR, error.error_type)
            raise
        except asyncio.CancelledError:
            span.set_attribute("error.type", "cancelled")
            raise
        except Exception as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(otel.StatusCode.ERROR)
            raise
        finally:
            if trace.generation is not None and span.is_recording():
                self._describe(trace, trace.generation, arrival_s + offset_s, offset_s)
            span.end(_ns(self._clock.monotonic() + offset_s))

    async def stop(self) -> None:
        """Send what is left; waits for the collector no longer than one sending may take."""
        await asyncio.to_thread(self._provider.shutdown)

    def _describe(self, trace: Trace, generation: Generation, began_s: float, offset_s: float) -> None:
        outcome, span = generation.outcome(), trace.span
        span.update_name(f"{_OPERATIONS[outcome.request.endpoint]} {outcome.request.model}")
        reasons = [answer.finish_reason or "error" for answer in generation.answers]
        span.set_attributes(_request_attributes(outcome) | _outcome_attributes(outcome, reasons))
        if outcome.outcome in ("error", "deadline"):
            span.set_attribute("error.type", outcome.outcome)
            span.set_status(otel.StatusCode.ERROR, outcome.outcome)
        context = otel.set_span_in_context(span)
        timings = outcome.timings
        ended_s = began_s + timings.e2e_s
        started_s = min(began_s + timings.queue_wait_s, ended_s)
        self._part("queue", context, began_s, started_s)
        if timings.ttft_s is None:
            return
        first_s = began_s + timings.ttft_s
        cached = sum(stats.num_cached_tokens for stats in outcome.stats)
        prefill = {
            "specgate.num_prompt_tokens": outcome.num_prompt_tokens,
            "specgate.num_cached_tokens": cached,
        }
        self._part("prefill", context, min(started_s, first_s), first_s, prefill)
        decode = self._tracer.start_span("decode", context=context, start_time=_ns(first_s))
        decode.set_attributes(_draft_attributes(outcome))
        for answer in generation.answers:
            for change, at_s in _changes(answer):
                said: dict[str, _Value] = {
                    "specgate.policy": change.policy,
                    "specgate.reason": change.reason,
                    "specgate.token_index": change.token_index,
                }
                decode.add_event("specgate.policy_change", said, _ns(at_s + offset_s))
        decode.end(_ns(ended_s))

    def _part(
        self,
        name: str,
        context: Context,
        from_s: float,
        to_s: float,
        attributes: Mapping[str, _Value] | None = None,
    ) -> None:
        span = self._tracer.start_span(name, context=context, start_time=_ns(from_s))
        span.set_attributes(attributes or {})
        span.end(_ns(to_s))


def build_tracing(config: TracingConfig, clock: Clock) -> Tracing:
    """Traces that are sent to the configured collector, from a thread of their own."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=Resource.create({"service.name": config.service_name, "service.version": __version__}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(
        endpoint=config.endpoint, headers=dict(config.headers), timeout=config.timeout_s
    )
    every_ms = config.export_every_s * 1e3
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=every_ms))
    return Tracing(provider, clock)


def _request_attributes(outcome: RequestOutcome) -> dict[str, _Value]:
    request = outcome.request
    sampling = request.sampling
    found: dict[str, _Value | None] = {
        "gen_ai.operation.name": _OPERATIONS[request.endpoint],
        "gen_ai.provider.name": "specgate",
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": sampling.max_tokens if request.has_explicit_max_tokens else None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.stop_sequences": request.stop or None,
        "gen_ai.request.choice.count": request.n if request.n > 1 else None,
        "gen_ai.request.stream": request.is_stream,
        "specgate.request_id": request.request_id,
        "specgate.tenant": request.tenant or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _outcome_attributes(outcome: RequestOutcome, reasons: Sequence[str]) -> dict[str, _Value]:
    decision, predicted = outcome.decision, outcome.decision.predicted
    found: dict[str, _Value | None] = {
        "gen_ai.response.model": outcome.request.model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": outcome.num_prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.num_output_tokens,
        "gen_ai.response.time_to_first_chunk": outcome.timings.ttft_s,
        "specgate.outcome": outcome.outcome,
        "specgate.policy": decision.policy,
        "specgate.reason": decision.reason,
        "specgate.task": decision.task.label,
        "specgate.num_speculative_tokens": decision.num_speculative_tokens,
        "specgate.rollout": decision.rollout,
        "specgate.arm": decision.arm,
        "specgate.predicted.ttft_ms": predicted.ttft_ms,
        "specgate.predicted.e2e_ms": predicted.e2e_ms,
    }
    return {name: value for name, value in found.items() if value is not None}


def _draft_attributes(outcome: RequestOutcome) -> dict[str, _Value]:
    stats = outcome.stats
    return {
        "specgate.num_target_steps": sum(s.num_target_steps for s in stats),
        "specgate.num_drafts": sum(s.num_drafts for s in stats),
        "specgate.num_draft_tokens": sum(s.num_draft_tokens for s in stats),
        "specgate.num_accepted_tokens": sum(s.num_accepted_tokens for s in stats),
        "specgate.num_preemptions": sum(s.num_preemptions for s in stats),
    }


def _changes(answer: Answer) -> Iterator[tuple[PolicyChange, float]]:
    """Each change of policy with the moment its first token was handed on, by the injected clock."""
    if answer.stats is None or answer.first_s is None:
        return
    num_after_first = sum(num for _, num in answer.gaps)
    num_so_far = list(
        itertools.accumulate((n for _, n in answer.gaps), initial=answer.num_tokens - num_after_first)
    )
    at_s = list(itertools.accumulate((gap_s for gap_s, _ in answer.gaps), initial=answer.first_s))
    for change in answer.stats.policy_changes:
        pairs = zip(num_so_far, at_s, strict=True)
        yield change, next((moment for num, moment in pairs if num > change.token_index), at_s[-1])


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
