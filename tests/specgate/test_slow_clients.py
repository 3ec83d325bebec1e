"""Clients that dribble or do not read are cut off; slow answers and idle connections are not."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from specgate.config import ServerConfig
from tests.specgate.gateway import MODEL, Running, eventually, make_config, running

QUICK = ServerConfig(head_timeout_s=0.3, body_timeout_s=0.3, write_timeout_s=0.4, keepalive_s=5.0)
ASKED = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


async def connect(server: Running, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(server.url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port, **kwargs)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection ends, in whatever way."""
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:
        return b""


async def test_heads_that_dribble_are_cut_off_while_others_are_served() -> None:
    async with running(make_config(server=QUICK)) as server:

        async def dribble(begin: bytes, on: bytes) -> bytes:
            reader, writer = await connect(server)
            ended = asyncio.create_task(rest_of(reader))
            for byte in begin + on * 1000:
                if ended.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            writer.close()
            return await ended

        texts = ((b"", b""), (b"GET /", b"x"), (b"GET / HTTP/1.1\r\n", b"A: b\r\n"))
        slow = [asyncio.create_task(dribble(*text)) for text in texts]
        silent, keep = await connect(server)
        assert (await server.complete()).status_code == 200
        assert [await task for task in slow] == [b"", b"", b""]
        assert await rest_of(silent) == b""
        keep.close()
        assert (await server.complete()).status_code == 200
        await server.settled()


async def test_what_is_no_request_is_a_400_and_its_bytes_are_not_logged(caplog: Any) -> None:
    async with running() as server:
        caplog.set_level("DEBUG")
        for sent in (b"\x16\x03\x01 sesame\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nA\x00sesame: 1\r\n\r\n"):
            reader, writer = await connect(server)
            writer.write(sent)
            answer = await rest_of(reader)
            assert answer.split(b" ", 2)[1] == b"400"
            assert b'"type":"invalid_request_error"' in answer
            writer.close()
        assert "could not be read as an HTTP request" in caplog.text
        assert "sesame" not in caplog.text


async def test_a_body_that_dribbles_is_a_408() -> None:
    async with running(make_config(server=QUICK)) as server:
        reader, writer = await connect(server)
        writer.write(HEAD + b"Content-Length: 5000\r\n\r\n{")
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"The body did not arrive in time." in answer
        writer.close()
        await server.settled()


async def test_a_second_head_on_the_same_connection_has_its_time_too() -> None:
    async with running(make_config(server=QUICK), step_s=0.06) as server:
        reader, writer = await connect(server)
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED
        for _ in range(2):  # answers that take longer than a head may, and a pause after them
            writer.write(whole)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            size = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(size.split()[-1]))
            await asyncio.sleep(0.5)
        writer.write(b"GET /heal")
        assert await rest_of(reader) == b""
        writer.close()


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    """Answers without end, asked for in one go on one connection with small buffers."""
    async with running(make_config(server=QUICK)) as server:
        before = len(asyncio.all_tasks())
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", int(server.url.rpartition(":")[2])))
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 2000

        async def send() -> None:
            try:
                await asyncio.get_running_loop().sock_sendall(sock, asked)
            except ConnectionError:
                pass  # cut off, as it should be

        sending = asyncio.create_task(send())
        await eventually(lambda: len(asyncio.all_tasks()) > before + 1)
        await eventually(lambda: len(asyncio.all_tasks()) <= before + 1, timeout_s=20)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        sock.close()
        assert (await server.complete()).status_code == 200
