"""POST /v1/chat/completions and /v1/completions: from bytes to bytes around `Pipeline.run`."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from specgate.api.formats import ChatFormat, CompletionsFormat, Format
from specgate.api.http import REQUEST_ID, TENANT, json_response, off_loop, read_raw_json
from specgate.api.parse import POLICY_HEADER, Caller, Parser
from specgate.api.relay import relay_events, relay_whole
from specgate.api.sse import DONE, SSE_HEADERS, event
from specgate.api.usage import decision_headers, specgate_object, usage
from specgate.errors import ApiError, InternalError
from specgate.gateway import GATEWAY, Gateway
from specgate.generation import Generation
from specgate.types import GenerationRequest

if TYPE_CHECKING:
    from specgate.telemetry.tracing import Trace

logger = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[0-9a-zA-Z-]*)?")

_LAST_WORD_S = 1.0


@dataclass(frozen=True, slots=True)
class _Endpoint:
    name: str
    id_prefix: str
    whole: str  # value of `object`
    chunk: str
    parse: Callable[[Parser, Mapping[str, Any], Caller], GenerationRequest]
    format: Callable[[Generation], Format]


def _parse_chat(parser: Parser, body: Mapping[str, Any], caller: Caller) -> GenerationRequest:
    return parser.chat(body, caller)


def _parse_completions(parser: Parser, body: Mapping[str, Any], caller: Caller) -> GenerationRequest:
    return parser.completions(body, caller)


CHAT = _Endpoint("chat", "chatcmpl-", "chat.completion", "chat.completion.chunk", _parse_chat, ChatFormat)
COMPLETIONS = _Endpoint(
    "completions", "cmpl-", "text_completion", "text_completion", _parse_completions, CompletionsFormat
)


async def chat(http: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    return await _generate(http, CHAT)


async def completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    return await _generate(http, COMPLETIONS)


async def _generate(http: web.Request, endpoint: _Endpoint) -> web.StreamResponse:
    gateway = http.app[GATEWAY]
    arrival_s = gateway.clock.monotonic()
    if gateway.tracing is None:
        return await _answer(http, endpoint, arrival_s, None)
    with gateway.tracing.request(endpoint.name, http.headers, arrival_s) as trace:
        return await _answer(http, endpoint, arrival_s, trace)


async def _answer(
    http: web.Request, endpoint: _Endpoint, arrival_s: float, trace: Trace | None
) -> web.StreamResponse:
    gateway = http.app[GATEWAY]
    refusal = gateway.pipeline.refusal(http.get(TENANT, ""))
    if refusal is not None:  # not even the body is read
        gateway.pipeline.count_refused(endpoint.name, refusal)
        raise refusal
    await gateway.turnstile.enter()
    try:
        raw, body = await read_raw_json(http, gateway.config)
        caller = replace(caller_of(http), raw=raw)
        request = await off_loop(len(raw), endpoint.parse, gateway.parser_of(body), body, caller)
    except ApiError as error:
        gateway.pipeline.count_refused(endpoint.name, error)
        raise
    traceparent = http.headers.get("traceparent", "") if trace is None else trace.traceparent
    if _TRACEPARENT.fullmatch(traceparent):
        request = replace(request, traceparent=traceparent)
    async with gateway.pipeline.run(request, arrival_s) as generation:
        if trace is not None:
            trace.generation = generation
        if generation.is_relay:
            if request.is_stream:
                return await _stream(http, generation, relay_events(generation))
            return await relay_whole(generation)
        head = {
            "id": f"{endpoint.id_prefix}{request.request_id}",
            "object": endpoint.chunk if request.is_stream else endpoint.whole,
            "created": int(gateway.clock.wall()),
            "model": request.model,
        }
        shape = endpoint.format(generation)
        if request.is_stream:
            return await _stream(http, generation, _events(generation, shape, head))
        return await _whole(generation, shape, head)


def caller_of(http: web.Request) -> Caller:
    """What the parser needs to know beside the body."""
    wanted = http.app[GATEWAY].rollouts.header_names
    headers = {name: http.headers[name] for name in wanted if name in http.headers}
    tenant = http.get(TENANT, "")
    priority = http.app[GATEWAY].live.limits_of(tenant).priority
    return Caller(http[REQUEST_ID], tenant, http.headers.get(POLICY_HEADER), headers, priority)


async def _whole(generation: Generation, shape: Format, head: dict[str, Any]) -> web.Response:
    async with generation.deadline(), aclosing(generation.deltas()) as deltas:
        async for index, delta in deltas:
            shape.add(index, delta)
    body = head | {
        "choices": shape.choices(),
        "usage": usage(generation),
        "specgate": specgate_object(generation),
    }
    return json_response(body, headers=decision_headers(generation.decision))


async def _stream(
    http: web.Request, generation: Generation, events: AsyncGenerator[bytes, None]
) -> web.StreamResponse:
    """Failures before the first delta keep their status; later ones become an event, and no [DONE]."""
    request = generation.request
    response = web.StreamResponse(headers=SSE_HEADERS | dict(decision_headers(generation.decision)))
    try:
        # The deadline covers the writing too: a client that does not read must not hold the slot.
        async with generation.deadline(), aclosing(events) as pieces:
            async for piece in pieces:
                if not response.prepared:
                    await response.prepare(http)
                await response.write(piece)
            await response.write_eof()
    except ApiError as error:
        if not response.prepared:
            raise
        generation.note_failure(error)
        await _end_with(error, http, response)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:  # the request boundary: after the first byte there is nobody above to answer
        if not response.prepared:
            raise
        logger.exception("request %s failed in mid-stream", request.request_id)
        failure = InternalError(f"Internal error; the request id is {request.request_id}.")
        await _end_with(failure, http, response)
    return response


async def _events(generation: Generation, shape: Format, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream that ends well, piece by piece as they are to go out."""
    has_usage = generation.request.has_usage
    if has_usage:
        head = head | {"usage": None}
    async with aclosing(generation.deltas()) as deltas:
        async for index, delta in deltas:
            if chunks := shape.chunks(index, delta):
                yield b"".join(event(head | {"choices": [choice]}) for choice in chunks)
    tail = b""
    if has_usage:
        last = {"choices": [], "usage": usage(generation), "specgate": specgate_object(generation)}
        tail = event(head | last)
    yield tail + DONE


async def _end_with(error: ApiError, http: web.Request, response: web.StreamResponse) -> None:
    """The last event of a stream that failed. A client that does not read even that is cut off."""
    try:
        async with asyncio.timeout(_LAST_WORD_S):
            await response.write(event(error.body()))
            await response.write_eof()
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()


def endpoint_of(gateway: Gateway, body: Mapping[str, Any]) -> _Endpoint:
    """Which of the two a body is for: for explain, which takes both."""
    return COMPLETIONS if "prompt" in body and "messages" not in body else CHAT
