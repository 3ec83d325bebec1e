"""Thousands of requests, right and wrong, made from /openapi.json: no 500, no hang, no leak."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from yarl import URL

from tests.e2e.server import READY_LINE, until
from tests.fuzz.strategies import Shot, shots

MODEL = "fake-1"
PER_EXAMPLE = 8
NUM_QUICK, NUM_MANY = 1_200, int(os.environ.get("SPECGATE_FUZZ_REQUESTS", "100000"))
PATIENCE_S = 60.0
QUIET = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),  # a volley that fails is told as it is: making it smaller takes long
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Range:
    """A server of its own process on the scripted backend, and a client."""

    url: str
    pid: int
    log: Path
    document: dict[str, Any]
    session: aiohttp.ClientSession
    runner: asyncio.Runner
    seen: Counter[int] = field(default_factory=Counter)

    def fire(self, volley: list[Shot]) -> None:
        """All at once; each answer is checked."""

        async def all_of_it() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(self._one(shot) for shot in volley))

        self.runner.run(all_of_it())

    async def _one(self, shot: Shot) -> None:
        url = URL(self.url + shot.path, encoded=True)
        headers = {name: value for name, value in shot.headers.items() if value}
        skip = ("Content-Type",) if "Content-Type" not in headers else ()
        async with self.session.request(
            shot.method, url, data=shot.body, headers=headers, skip_auto_headers=skip
        ) as answer:
            body = await answer.read()
        self.seen[answer.status] += 1
        documented = self.document["paths"][shot.template].get(shot.method.lower())
        if documented is None:
            assert answer.status in (404, 405), (shot, answer.status)
        else:
            assert str(answer.status) in documented["responses"], (shot, answer.status, body[:500])
        assert answer.status < 500, (shot, body[:500])
        assert "\r" not in answer.headers["X-Request-Id"]
        assert "X-Evil" not in answer.headers
        if answer.status >= 400:
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]

    def check_log(self) -> None:
        """Nothing that nobody foresaw."""
        text = self.log.read_text()
        assert "Traceback" not in text, text[text.index("Traceback") :][:3000]

    def at_rest(self) -> tuple[int, int]:
        """Tasks and resident bytes of the server once nothing runs any more."""
        until(lambda: self._state()["num_open_requests"] == 0)
        model = self._state()["models"][MODEL]
        assert (model["engine"]["num_running"], model["engine"]["num_used_blocks"]) == (0, 0)
        assert (model["num_admitted"], model["load"]["num_queued"]) == (0, 0)
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return self._state()["num_tasks"], pages * 4096

    def _state(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/admin/state", timeout=60).json())


@pytest.fixture(scope="module")
def shooting_range(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    """Started once: what leaks is to add up."""
    folder = tmp_path_factory.mktemp("fuzz")
    config = {
        "auth": {"keyless_on_loopback": True},
        "requests": {"allow_overrides": True},
        "models": [{"id": MODEL, "backend": "fake", "fake": {"max_model_len": 256}}],
        "canary": {"state_path": str(folder / "canary.json")},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    log = folder / "log"
    command = [sys.executable, "-m", "specgate", "serve", "--port", "0", "--config"]
    with log.open("wb") as sink, asyncio.Runner() as runner:
        process = subprocess.Popen(
            [*command, str(folder / "config.yaml")], stdout=subprocess.PIPE, stderr=sink, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(READY_LINE), log.read_text()[-2000:]
            url = line.removeprefix(READY_LINE).strip()
            document = httpx.get(f"{url}/openapi.json", timeout=60).json()

            async def session() -> aiohttp.ClientSession:
                return aiohttp.ClientSession()

            client = runner.run(session())
            yield Range(url, process.pid, log, document, client, runner)
            runner.run(client.close())
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _fire_many(target: Range, num_shots: int) -> None:
    strategy = st.lists(shots(target.document, MODEL), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE)

    @settings(QUIET, max_examples=-(-num_shots // PER_EXAMPLE))
    @given(strategy)
    def volleys(volley: list[Shot]) -> None:
        target.fire(volley)

    volleys()
    target.check_log()


def test_a_thousand_requests(shooting_range: Range) -> None:
    _fire_many(shooting_range, 80)  # first uses, caches, pools of connections
    tasks, _ = shooting_range.at_rest()
    _fire_many(shooting_range, NUM_QUICK)
    seen = shooting_range.seen
    assert sum(seen.values()) >= NUM_QUICK
    assert {200, 400, 404, 405} <= set(seen), seen  # right ones get through, and wrong ones of each kind
    assert shooting_range.at_rest()[0] <= tasks + PER_EXAMPLE  # idle connections of the client's pool
    assert httpx.get(f"{shooting_range.url}/readyz", timeout=60).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_requests(shooting_range: Range) -> None:
    _fire_many(shooting_range, NUM_MANY // 5)
    tasks, early = shooting_range.at_rest()
    _fire_many(shooting_range, NUM_MANY - NUM_MANY // 5)
    after, late = shooting_range.at_rest()
    print(f"{sum(shooting_range.seen.values())} requests: {dict(shooting_range.seen)}")
    print(f"resident {early / 2**20:.1f} MiB after a fifth, {late / 2**20:.1f} MiB at the end; tasks {after}")
    assert after <= tasks + PER_EXAMPLE
    assert late < early * 1.1 + 8 * 2**20
