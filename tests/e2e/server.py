"""A real `specgate serve` process for tests, and its engine process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

START_TIMEOUT_S = 110.0
READY_LINE = "specgate ready on "


@dataclass(frozen=True)
class Server:
    """A running server and ways to talk to it."""

    url: str
    process: subprocess.Popen[str]
    model: str

    def client(self) -> openai.OpenAI:
        """The official client, without retries: what fails is to be seen."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=100)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30)

    def is_ready(self) -> bool:
        return self.get("/readyz").status_code == 200

    def load(self) -> dict[str, Any]:
        """The engine's load of the one model."""
        return dict(self.get("/admin/state").json()["models"][self.model]["engine"])

    def is_idle(self) -> bool:
        """No request open, none in the engine, no block held."""
        state = self.get("/admin/state").json()
        load = state["models"][self.model]["engine"]
        busy = load["num_running"] + load["num_waiting"] + load["num_used_blocks"]
        return busy == 0 and load["num_total_blocks"] > 0 and state["num_open_requests"] == 0

    def engine_pid(self) -> int:
        """The one child of the server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(child) for child in children]
        return pid


def until(holds: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Poll for a condition."""
    ends_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_at, "did not happen in time"
        time.sleep(0.02)


@contextmanager
def serve(config: Path, model: str) -> Iterator[Server]:
    """Start, wait for the ready line, stop with SIGTERM and check the exit code."""
    command = [sys.executable, "-m", "specgate", "serve", "--port", "0", "--config", str(config)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(READY_LINE):
                process.wait(START_TIMEOUT_S)
                log.seek(0)
                raise AssertionError(f"the server did not start: {line!r} {log.read()[-2000:]}")
            yield Server(line.removeprefix(READY_LINE).strip(), process, model)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each SSE event of a streamed response, strictly read."""
    for line in response.iter_lines():
        assert line == "" or line.startswith("data: "), line
        if line:
            yield line.removeprefix("data: ")


def parsed(data: str) -> dict[str, Any]:
    """One event's JSON object."""
    return dict(json.loads(data))
