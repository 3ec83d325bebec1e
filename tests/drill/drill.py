"""A server for drills, and the right answers to what it will be asked."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.drill.faults import FOLDER_VARIABLE, Faults
from tests.drill.load import Ask, Load
from tests.e2e.server import READY_LINE, Server, until

MODEL = "tiny"
NUM_BLOCKS, BLOCK_SIZE = 80, 16
_USED_BLOCKS = 'specgate_kv_blocks{state="used"}'


@dataclass
class Drill:
    """A server under drill; it may be started again in its place."""

    folder: Path
    port: int
    faults: Faults
    server: Server
    log: Path

    def metric(self, series: str) -> float:
        """The value of a series as exported; 0 where it has no sample."""
        lines = self.server.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{series} "))

    def load(self, policy: str, num_tokens: int = 48, num_prompts: int = 4) -> Load:
        """Requests under `policy`; the right answers are those of plain decoding, one at a time."""
        answers = {}
        for number in range(num_prompts):
            prompt = f"{number} the quick brown fox {number} jumps over " * (2 + number)
            plain = Ask(prompt, num_tokens, "baseline")
            answer = httpx.post(
                f"{self.server.url}/v1/completions", json=plain.body(MODEL, stream=False), timeout=60
            )
            assert answer.status_code == 200, answer.text
            answers[Ask(prompt, num_tokens, policy)] = answer.json()["choices"][0]["text"]
        return Load(self.server.url, MODEL, answers)

    def check_rest(self) -> None:
        """Idle again: no request open, none in the engine, no block held, gauges at zero."""
        until(self.server.is_idle)
        for series in ("specgate_running_requests", "specgate_waiting_requests", _USED_BLOCKS):
            until(lambda name=series: self.metric(name) == 0)  # gauges are told a moment later
        assert self.server.load()["num_total_blocks"] == NUM_BLOCKS

    def start(self) -> None:
        """In the place of the one that ended."""
        self.server = _start(self.folder, self.port, self.log)

    def limit_files(self, num_bytes: int) -> None:
        """No file of the server may grow beyond this: to its processes, the disk is full."""
        hard = resource.prlimit(self.server.process.pid, resource.RLIMIT_FSIZE)[1]
        limit = hard if num_bytes < 0 else num_bytes
        resource.prlimit(self.server.process.pid, resource.RLIMIT_FSIZE, (limit, hard))


def _start(folder: Path, port: int, log: Path) -> Server:
    command = [sys.executable, "-m", "tests.drill.server", str(folder / "config.yaml"), str(port)]
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=sink, text=True,
            env={**os.environ, FOLDER_VARIABLE: str(folder / "faults"), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith(READY_LINE):
        process.kill()
        process.wait()
        process.stdout.close()
        raise AssertionError(f"the server did not start: {line!r} {log.read_text()[-2000:]}")
    return Server(line.removeprefix(READY_LINE).strip(), process, MODEL)


@contextmanager
def drilled(folder: Path) -> Iterator[Drill]:
    """A server on a tiny random model, with few KV blocks and impatient guards and watchdog."""
    from engine.models.tiny_files import save_tiny_model

    (folder / "faults").mkdir()
    config = {
        "auth": {"keyless_on_loopback": True},
        "requests": {"allow_overrides": True, "deadline_s": 60},
        "server": {"drain_grace_s": 20},
        "models": [
            {
                "id": MODEL,
                "engine": {
                    "model": str(save_tiny_model(folder / "model", num_layers=4, max_model_len=1024)),
                    "num_threads": 1,
                    "num_blocks": NUM_BLOCKS,
                    "block_size": BLOCK_SIZE,
                    "max_sequences": 6,
                    "draft_timeout_s": 0.1,
                },
                "supervision": {"hang_timeout_s": 3},
            }
        ],
        "guards": {
            "timing": {"cooldown_s": 0.5, "backoff": 1, "probe_samples": 1, "probe_share": 0.5},
            "drafter": {"max_errors": 2, "window_s": 1},
            "memory": {"mode": "off"},
            "force_path": str(folder / "state" / "force.json"),
        },
        "learning": {"folder": str(folder / "state"), "save_every_s": 0.2, "sweep_s": 0},
        "decision_log": {"path": str(folder / "decisions.jsonl")},
        "canary": {"state_path": str(folder / "state" / "canary.json")},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    log = folder / "log"
    drill = Drill(folder, port, Faults(folder / "faults"), _start(folder, port, log), log)
    try:
        yield drill
        if drill.server.process.poll() is None:
            drill.server.process.terminate()
        assert drill.server.process.wait(60) == 0
    finally:
        if drill.server.process.poll() is None:
            drill.server.process.kill()
        drill.server.process.wait()
        assert drill.server.process.stdout is not None
        drill.server.process.stdout.close()


def now_s() -> float:
    """The clock of `Load`."""
    return time.monotonic()
