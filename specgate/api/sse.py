"""Server-sent events: bytes that never break, and the headers that keep proxies from buffering."""

from __future__ import annotations

from typing import Any

import msgspec

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
# Line ends to Unicode, not to server-sent events. Clients that split text into lines (httpx' `iter_lines` for
# one) would cut an event there; as escapes they are the same JSON.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))

_encoder = msgspec.json.Encoder()


def event(payload: Any) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line holds it."""
    data = _encoder.encode(payload)
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"
