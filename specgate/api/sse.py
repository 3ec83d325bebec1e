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

_encoder = msgspec.json.Encoder()


def event(payload: Any) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line holds it."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"
