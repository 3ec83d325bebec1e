"""The bench of the gateway's own cost: it runs against real processes and says what it measured."""

from __future__ import annotations

import asyncio
import os

import pytest

from specgate.bench.gateway import Options, cpu_s, measure, show
from specgate.bench.wire import WireError, connect, request_bytes


@pytest.mark.e2e
async def test_every_target_is_measured_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    report = await measure(Options(num_paired=10, seconds=0.2, concurrency=2))
    found = report["found"]
    assert {"direct", "specgate, proxy", "specgate, scripted"} <= set(found)
    for name, row in found.items():
        for kind in ("whole", "stream"):
            assert 0 < row[kind]["p50"] <= row[kind]["p99"]
            assert row[f"{kind}_first_byte"]["p50"] <= row[kind]["p99"]
            assert row[f"{kind}_load"]["requests"] >= 2
        if name != "direct":
            added = row["added_ms"]["whole"]["p50"]
            assert added == pytest.approx(row["whole"]["p50"] - found["direct"]["whole"]["p50"])
    show(report)
    assert "added" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "is_good"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", True),
        (
            b"HTTP/1.1 200 OK\r\nX-Left: 0\r\nTransfer-Encoding: chunked\r\nX: 0\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            True,
        ),
        (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", False),
    ],
)
async def test_the_client_waits_for_the_end_and_looks_at_the_status(answer: bytes, is_good: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        for at in range(0, len(answer), 7):
            writer.write(answer[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = await connect(port)
        request = request_bytes(port, {"messages": [{"role": "user"}]})
        if is_good:
            timed = await connection.ask(request)
            assert 0 < timed.first_s <= timed.whole_s
        else:
            with pytest.raises(WireError):
                await connection.ask(request)
        connection.close()


def test_cpu_time_is_that_of_the_process() -> None:
    before = cpu_s(os.getpid())
    assert before > 0
    sum(range(3_000_000))
    assert cpu_s(os.getpid()) >= before
