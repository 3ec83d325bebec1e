"""Ten minutes of everything at once on a real server: memory, file descriptors and tasks stay flat."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, events, until

DURATION_S = float(os.environ.get("SPECGATE_SOAK_S", "600"))
NUM_CLIENTS = 8
NUM_SAMPLES = 60
POLICIES = ("auto", "baseline", "ngram", "draft")


@dataclass(frozen=True)
class Sample:
    """Of gateway and engine together, but for the tasks."""

    resident_bytes: int
    num_files: int
    num_tasks: int

    @classmethod
    def of(cls, server: Server) -> Sample:
        pids = [server.process.pid, server.engine_pid()]
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        return cls(pages * 4096, files, server.get("/admin/state").json()["num_tasks"])


def body(rng: random.Random, server: Server) -> dict[str, object]:
    words = " ".join(rng.choice(["red", "green", "blue", "fox", "dog"]) for _ in range(rng.randint(1, 60)))
    return {
        "model": server.model,
        "prompt": words,
        "max_tokens": rng.randint(1, 60),
        "temperature": rng.choice([0, 0.8]),
        "n": rng.choice([1, 1, 1, 2]),
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
        "specgate": {"policy": rng.choice(POLICIES)},
    }


def client(seed: int, server: Server, ends_s: float) -> int:
    """Asks, listens to some to the end, leaves others in the middle, and is wrong now and then."""
    rng, num = random.Random(seed), 0
    with httpx.Client(base_url=server.url, timeout=60) as http:
        while time.monotonic() < ends_s:
            num += 1
            asked = body(rng, server)
            fate = rng.random()
            if fate < 0.05:
                assert http.post("/v1/completions", json=asked | {"temperature": 9}).status_code == 400
            elif fate < 0.08:
                assert http.get("/metrics").status_code == 200
            elif asked["stream"]:
                with http.stream("POST", "/v1/completions", json=asked) as response:
                    assert response.status_code == 200
                    for place, _ in enumerate(events(response)):
                        if fate < 0.25 and place == 2:
                            break  # gone, with the answer half told
            else:
                assert http.post("/v1/completions", json=asked).status_code == 200
    return num


def middle(samples: Sequence[int]) -> float:
    return statistics.median(samples)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(DURATION_S + 600)
def test_ten_minutes(tiny: Server) -> None:
    warm_s, ends_s = time.monotonic() + DURATION_S / 5, time.monotonic() + DURATION_S
    samples: list[Sample] = []
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(client, seed, tiny, ends_s) for seed in range(NUM_CLIENTS)]
        while time.monotonic() < ends_s:
            time.sleep(DURATION_S / NUM_SAMPLES)
            if time.monotonic() >= warm_s:
                samples.append(Sample.of(tiny))
        num = sum(done.result() for done in clients)
    until(tiny.is_idle)
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]
    early, late = middle([s.resident_bytes for s in first]), middle([s.resident_bytes for s in last])
    print(f"{num} requests; resident {early / 2**20:.1f} -> {late / 2**20:.1f} MiB")
    print(f"files {[s.num_files for s in first]} -> {[s.num_files for s in last]}")
    print(f"tasks {[s.num_tasks for s in first]} -> {[s.num_tasks for s in last]}")
    assert late < early * 1.05 + 8 * 2**20
    assert middle([s.num_files for s in last]) <= middle([s.num_files for s in first]) + NUM_CLIENTS
    assert middle([s.num_tasks for s in last]) <= middle([s.num_tasks for s in first]) + NUM_CLIENTS
