"""The caller's body as it goes out: unchanged but for the few members that are not the server's to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from specgate.types import GenerationRequest

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
_USAGE = b'{"include_usage":true}'


def outgoing_body(request: GenerationRequest, model: str, *, asks_usage: bool) -> bytes:
    """The body for a server that knows the model as `model`. `specgate` is left out, `stream_options` asks
    for usage; every other member keeps its bytes. The very bytes that came if nothing has to change."""
    asks_usage = asks_usage and request.is_stream and not request.has_usage
    if model == request.model and not asks_usage and b'"specgate"' not in request.raw:
        return request.raw
    members: dict[str, msgspec.Raw] = _members.decode(request.raw)
    members.pop("specgate", None)
    members["model"] = msgspec.Raw(_encoder.encode(model))
    if asks_usage:
        options = members.get("stream_options")
        members["stream_options"] = msgspec.Raw(_USAGE) if options is None else _with_usage(options)
    return _encoder.encode(members)


def _with_usage(options: msgspec.Raw) -> msgspec.Raw:
    if bytes(options) == b"null":
        return msgspec.Raw(_USAGE)
    wanted: dict[str, msgspec.Raw] = _members.decode(options)
    wanted["include_usage"] = msgspec.Raw(b"true")
    return msgspec.Raw(_encoder.encode(wanted))


def with_member(body: bytes, name: str, value: Any) -> bytes:
    """The JSON object with one member set, all others as they were. Anything else is returned as it is."""
    try:
        members: dict[str, msgspec.Raw] = _members.decode(body)
    except msgspec.MsgspecError:
        return body
    if name not in members:  # the usual case: nothing of the body is touched
        comma = b"," if members else b""
        return b'%b%b"%b":%b}' % (body.rstrip()[:-1], comma, name.encode(), _encoder.encode(value))
    members[name] = msgspec.Raw(_encoder.encode(value))
    return _encoder.encode(members)


def without_member(body: bytes, name: str) -> bytes:
    """The JSON object without one member, all others as they were."""
    members: dict[str, msgspec.Raw] = _members.decode(body)
    members.pop(name, None)
    return _encoder.encode(members)


def outgoing_headers(request: GenerationRequest, fixed: Mapping[str, str]) -> dict[str, str]:
    """`fixed` (key, content type, the pool's own), the request's id, and its place in a trace."""
    trace = {"traceparent": request.traceparent} if request.traceparent else {}
    return {**fixed, "X-Request-Id": request.request_id, **trace}
