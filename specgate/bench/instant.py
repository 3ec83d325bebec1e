"""A server that answers at once, always the same: what a gateway's overhead is measured in front of.

As cheap as Python allows (a bare protocol, answers made beforehand), so that what is measured is the
gateway. It understands as much HTTP as the benches and the proxy backend speak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import cast

NUM_CHUNKS = 16
_USAGE = {"prompt_tokens": 20, "completion_tokens": NUM_CHUNKS, "total_tokens": 20 + NUM_CHUNKS}
_MODELS = b'{"object":"list","data":[]}'


def _whole() -> bytes:
    message = {"role": "assistant", "content": "word " * NUM_CHUNKS}
    body = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    }  # fmt: skip
    return _response(json.dumps(body).encode(), b"application/json")


def _response(body: bytes, kind: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


def _stream() -> list[bytes]:
    """The pieces that are written one by one; the first with the headers."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [{"index": 0, "delta": {"content": "word "}, "finish_reason": None} for _ in range(NUM_CHUNKS)]
    payloads = [head | {"choices": [choice]} for choice in choices]
    payloads.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    payloads.append(head | {"choices": [], "usage": _USAGE})
    events = [b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads]
    events.append(b"data: [DONE]\n\n")
    pieces = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    pieces[-1] += b"0\r\n\r\n"
    head_line = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces[0] = head_line + pieces[0]
    return pieces


class _Instant(asyncio.Protocol):
    def __init__(self, whole: bytes, stream: list[bytes]) -> None:
        self._whole = whole
        self._stream = stream
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (end := self._rest.find(b"\r\n\r\n")) >= 0:
            head = self._rest[:end].lower()
            size = _length(head)
            if len(self._rest) < end + 4 + size:
                return
            body = self._rest[end + 4 : end + 4 + size]
            self._rest = self._rest[end + 4 + size :]
            if head.startswith(b"get"):
                self._transport.write(_response(_MODELS, b"application/json"))
            elif b'"stream":true' in body.replace(b" ", b""):
                for piece in self._stream:
                    self._transport.write(piece)
            else:
                self._transport.write(self._whole)


def _length(head: bytes) -> int:
    _, found, rest = head.partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def _serve(port: int) -> None:
    whole, stream = _whole(), _stream()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Instant(whole, stream), "127.0.0.1", port)
    print(f"ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201
    await server.serve_forever()


def main() -> int:
    """Serve until killed; prints one line with the address."""
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parser.parse_args().port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
