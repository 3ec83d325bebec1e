"""Requests and step records as the router models want them. No torch, no I/O.

The models know nothing of the API or the engine; here the two vocabularies meet.
"""

from __future__ import annotations

from engine.types import MethodCounts, StepRecord
from router_models.acceptance import sampling_band
from router_models.asked_length import asked_tokens
from router_models.request_text import content_text, from_messages, from_prompt
from router_models.types import (
    AcceptanceCounts,
    AcceptanceKey,
    DraftFeatures,
    LengthFeatures,
    RequestText,
    StepFeatures,
    StepTiming,
    WaitFeatures,
)
from specgate.types import GenerationRequest, LoadView, TaskEstimate


def request_text(request: GenerationRequest, prompt_text: str | None = None) -> RequestText:
    """The request as text. `prompt_text` stands in where the prompt came as token ids."""
    max_tokens = request.sampling.max_tokens if request.has_explicit_max_tokens else None
    if request.messages is not None:
        has_format = (request.response_format or {}).get("type", "text") != "text"
        return from_messages(request.messages, len(request.tools), has_format, max_tokens)
    text = request.prompt if isinstance(request.prompt, str) else prompt_text or ""
    return from_prompt(text, request.suffix, max_tokens)


def asked_length(request: GenerationRequest) -> float | None:
    """Tokens the caller asks for in words ("in 50 words", "一句话"), if any."""
    if request.messages is None:
        return asked_tokens(request.prompt) if isinstance(request.prompt, str) else None
    texts = [content_text(m.get("content")) for m in request.messages if m.get("role") != "assistant"]
    return next((found for text in reversed(texts) if (found := asked_tokens(text)) is not None), None)


def length_features(
    request: GenerationRequest, task: TaskEstimate | None, num_prompt_tokens: int
) -> LengthFeatures:
    """What the output-length model wants to know."""
    return LengthFeatures(
        task=task.label if task is not None else None,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=request.sampling.max_tokens if request.has_explicit_max_tokens else None,
        caller=request.tenant,
        asked_tokens=asked_length(request),
    )


def wait_features(
    load: LoadView, num_prompt_tokens: int, num_cached_tokens: int = 0, prefill_s: float | None = None
) -> WaitFeatures:
    """What the TTFT and queue-wait models want to know."""
    return WaitFeatures(
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued=load.num_queued,
        requests_per_s=load.requests_per_s,
        prefill_s=prefill_s,
    )


def acceptance_key(policy: str, task: str | None, request: GenerationRequest) -> AcceptanceKey:
    """Where this request's acceptance is counted."""
    return AcceptanceKey(policy, task, sampling_band(request.sampling.temperature, request.sampling.top_p))


def acceptance_counts(counts: MethodCounts) -> AcceptanceCounts:
    """What one drafter showed for one sequence."""
    return AcceptanceCounts(
        num_steps=counts.num_steps,
        num_drafts=min(counts.num_drafts, counts.num_steps),
        drafted_per_position=counts.drafted_per_position,
        accepted_per_position=counts.accepted_per_position,
    )


def step_features(record: StepRecord) -> tuple[StepFeatures, StepTiming]:
    """A step that ran: its work and its duration."""
    features = StepFeatures(
        num_sequences=record.num_decode_sequences,
        num_tokens=record.num_tokens,
        num_kv_tokens=record.num_kv_tokens,
        num_prefill_tokens=record.num_prefill_tokens,
        num_sampled_rows=record.num_sampled_rows,
        drafts=tuple(
            DraftFeatures(d.method, d.num_calls, d.num_sequences, d.num_draft_tokens, d.num_kv_tokens)
            for d in record.drafts
        ),
    )
    return features, StepTiming(record.seconds, tuple(d.seconds for d in record.drafts))
