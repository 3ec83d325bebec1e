"""Leavers, a killed engine, a stopped server: the real processes, seen from outside."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, events, parsed, until

pytestmark = pytest.mark.e2e


def body(server: Server, max_tokens: int, **fields: Any) -> dict[str, Any]:
    base = {"model": server.model, "prompt": "on and on and on", "max_tokens": max_tokens, "ignore_eos": True}
    return base | fields


def post(server: Server, asked: dict[str, Any], patience_s: float = 90) -> httpx.Response:
    timeout = httpx.Timeout(90, read=patience_s)
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=timeout)


def test_a_client_that_leaves_a_stream(deep: Server) -> None:
    for policy in ("baseline", "ngram", "draft"):
        asked = body(deep, 6000, stream=True, specgate={"policy": policy})
        with httpx.stream("POST", f"{deep.url}/v1/completions", json=asked, timeout=90) as response:
            received = events(response)
            assert "error" not in parsed(next(received))
            assert deep.load()["num_running"] == 1
        until(deep.is_idle)


def test_a_client_that_leaves_before_its_whole_answer(deep: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        post(deep, body(deep, 6000), patience_s=0.3)
    until(deep.is_idle)


def test_clients_that_leave_before_their_first_token(deep: Server) -> None:
    """Four places in the engine: of eight streams four wait, and leave while they do."""
    leave = threading.Event()

    def stay(_: int) -> None:
        asked = body(deep, 6000, stream=True)
        with httpx.stream("POST", f"{deep.url}/v1/completions", json=asked, timeout=90) as response:
            received = events(response)  # to be kept: dropping it closes the connection
            next(received)
            leave.wait(90)

    def give_up(_: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            post(deep, body(deep, 6000, stream=True), patience_s=0.3)

    with ThreadPoolExecutor(8) as threads:
        staying = [threads.submit(stay, i) for i in range(4)]
        until(lambda: deep.load()["num_running"] == 4)
        for left in [threads.submit(give_up, i) for i in range(4)]:
            left.result()
        until(lambda: deep.load()["num_waiting"] == 0)
        leave.set()
        for stayed in staying:
            stayed.result()
    until(deep.is_idle)


def test_the_engine_is_killed_in_mid_stream(deep: Server) -> None:
    """Streams with text end with an error event and no [DONE]; those that wait are served afterwards."""
    expected = post(deep, body(deep, 6, temperature=0)).json()["choices"][0]["text"]
    started = threading.Barrier(5, timeout=90)

    def run_stream(_: int) -> list[str]:
        asked = body(deep, 6000, stream=True)
        with httpx.stream("POST", f"{deep.url}/v1/completions", json=asked, timeout=90) as response:
            received = events(response)
            first = next(received)
            started.wait()
            return [first, *received]

    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(run_stream, i) for i in range(4)]
        started.wait()
        waiting = [threads.submit(post, deep, body(deep, 6, temperature=0)) for _ in range(3)]
        until(lambda: deep.load()["num_waiting"] == 3)
        os.kill(deep.engine_pid(), signal.SIGKILL)
        until(lambda: not deep.is_ready())
        assert deep.get("/healthz").status_code == 200
        for stream in streams:
            received = stream.result()
            assert "[DONE]" not in received
            assert parsed(received[-1])["error"]["code"] == "engine_lost"
        for answer in waiting:
            assert answer.result().status_code == 200
            assert answer.result().json()["choices"][0]["text"] == expected
    until(deep.is_ready)
    lines = deep.get("/metrics").text.splitlines()
    restarts = [line.split()[-1] for line in lines if line.startswith("specgate_engine_restarts_total")]
    assert restarts == ["1.0"]
    assert deep.get("/admin/state").json()["models"]["tiny"]["num_restarts"] == 1
    until(deep.is_idle)


def test_the_kill_switch_acts_on_a_running_stream(deep: Server) -> None:
    asked = body(deep, 900, stream=True, stream_options={"include_usage": True}, specgate={"policy": "ngram"})
    with httpx.stream("POST", f"{deep.url}/v1/completions", json=asked, timeout=90) as response:
        received = events(response)
        next(received)
        forced = httpx.put(f"{deep.url}/admin/policy", json={"force": "baseline"}, timeout=30)
        assert forced.status_code == 200
        *_, usage, done = list(received)
    assert httpx.put(f"{deep.url}/admin/policy", json={"force": None}, timeout=30).status_code == 200
    assert done == "[DONE]"
    changes = parsed(usage)["specgate"]["policy_changes"]
    assert [(change["policy"], change["reason"]) for change in changes] == [("baseline", "kill_switch")]


def test_a_terminated_server_lets_streams_finish(deep: Server) -> None:
    """Last: it ends the module's server."""
    asked = body(deep, 500, stream=True)
    with httpx.stream("POST", f"{deep.url}/v1/completions", json=asked, timeout=90) as response:
        received = events(response)
        next(received)
        engine = deep.engine_pid()
        deep.process.send_signal(signal.SIGTERM)
        *_, done = list(received)
    assert done == "[DONE]"
    assert deep.process.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
