"""Clients that keep asking, and know the answer they must get: whole, or a clean error, or nothing."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.server import events, parsed

CLEAN_STATUS = frozenset({408, 429, 503})


@dataclass(frozen=True)
class Ask:
    """A request with one right answer: greedy, of a length that is kept."""

    prompt: str
    num_tokens: int
    policy: str

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        return {
            "model": model, "prompt": self.prompt, "max_tokens": self.num_tokens, "temperature": 0,
            "ignore_eos": True, "stream": stream, "specgate": {"policy": self.policy},
        }  # fmt: skip


@dataclass(frozen=True)
class Heard:
    """What one client heard. `text` is all of it, or for a stream that broke what came before."""

    ask: Ask
    began_s: float
    ended_s: float
    outcome: str  # ok; refused: an error instead of an answer; cut: an error after text; gone: no server
    text: str = ""
    detail: str = ""


@dataclass
class Load:
    """Asks in turns from several clients until it is stopped."""

    url: str
    model: str
    answers: Mapping[Ask, str]
    heard: list[Heard] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, num_clients: int = 6) -> Iterator[Load]:
        """Under load. After the block every client has had its last answer, and each is checked."""
        turns = itertools.cycle(self.answers)
        with ThreadPoolExecutor(num_clients) as threads:
            clients: list[Future[None]] = [
                threads.submit(self._client, turns, stream=bool(number % 2)) for number in range(num_clients)
            ]
            try:
                yield self
            finally:
                self.stopped.set()
            for client in clients:
                client.result()
        self.check()

    def wait_answers(self, num: int, since_s: float = 0.0, timeout_s: float = 90.0) -> float:
        """Until so many requests that began after `since_s` were answered. When the first of them ended."""
        ends_s = time.monotonic() + timeout_s
        while True:
            with self.lock:
                done = [h.ended_s for h in self.heard if h.outcome == "ok" and h.began_s >= since_s]
            if len(done) >= num:
                return min(done)
            assert time.monotonic() < ends_s, f"{len(done)} answers of {num}: {self.counts()}"
            time.sleep(0.01)

    def counts(self) -> Counter[str]:
        """By outcome."""
        return Counter(h.outcome for h in self.heard)

    def check(self) -> None:
        """No answer lost or mixed up among those that were whole; the others said so, cleanly."""
        for h in self.heard:
            right = self.answers[h.ask]
            if h.outcome == "ok":
                assert h.text == right, (h, right)
            else:
                assert right.startswith(h.text), (h, right)

    def _client(self, turns: Iterator[Ask], *, stream: bool) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.stopped.is_set():
                with self.lock:
                    ask = next(turns)
                began_s = time.monotonic()
                outcome, text, detail = self._ask(client, ask, stream=stream)
                with self.lock:
                    self.heard.append(Heard(ask, began_s, time.monotonic(), outcome, text, detail))
                if outcome != "ok":
                    time.sleep(0.05)

    def _ask(self, client: httpx.Client, ask: Ask, *, stream: bool) -> tuple[str, str, str]:
        body = ask.body(self.model, stream=stream)
        text = ""
        try:
            if not stream:
                answer = client.post("/v1/completions", json=body)
                return _whole(answer.status_code, answer.json(), answer.headers)
            with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    return _whole(response.status_code, response.json(), response.headers)
                for data in events(response):
                    if data == "[DONE]":
                        return "ok", text, ""
                    chunk = parsed(data)
                    if "error" in chunk:
                        assert chunk["error"]["type"] in ("service_unavailable_error", "timeout_error"), chunk
                        return "cut", text, chunk["error"]["message"]
                    text += "".join(choice["text"] for choice in chunk["choices"])
            raise AssertionError(f"a stream ended without [DONE] and without an error: {text!r}")
        except (httpx.TransportError, json.JSONDecodeError) as error:
            return "gone", text, repr(error)


def _whole(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[str, str, str]:
    if status == 200:
        return "ok", body["choices"][0]["text"], ""
    assert status in CLEAN_STATUS, (status, body)
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    assert status == 408 or int(headers["Retry-After"]) >= 1, headers
    return "refused", "", body["error"]["message"]
