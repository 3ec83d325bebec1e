"""The gateway is restarted, its disk is full, its clock jumps. Clients get whole answers or clean errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.drill.drill import Drill, drilled, now_s
from tests.e2e.server import until

pytestmark = pytest.mark.e2e
Told = Callable[[str, float], None]


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    with drilled(tmp_path_factory.mktemp("gateway")) as server:
        yield server


def test_a_full_disk_costs_log_lines_and_no_answers(drill: Drill) -> None:
    """Decision log, what was learned, the state of rollouts, the log itself: nothing can be written."""
    lines = drill.folder / "decisions.jsonl"

    def num_lost() -> int:
        return int(drill.server.get("/admin/state").json()["num_lost_log_lines"])

    with drill.load("ngram").running() as load:
        load.wait_answers(6)
        until(lambda: lines.exists() and lines.stat().st_size > 0)
        drill.limit_files(1)
        full_s = now_s()
        until(lambda: num_lost() > 3)
        kept = httpx.put(
            f"{drill.server.url}/admin/policy", json={"force": "baseline", "persist": True}, timeout=30
        )
        assert kept.status_code == 500
        assert "The kill switch acts, but cannot be kept" in kept.json()["error"]["message"]
        assert drill.server.get("/admin/state").json()["force"] == "baseline"
        load.wait_answers(6, since_s=full_s)
        drill.limit_files(-1)
        freed_s = now_s()
        assert drill.server.get("/readyz").status_code == 200
        lifted = httpx.put(f"{drill.server.url}/admin/policy", json={"force": None}, timeout=30)
        assert lifted.status_code == 200
        size = lines.stat().st_size
        until(lambda: lines.stat().st_size > size)
        load.wait_answers(6, since_s=freed_s)
    assert set(load.counts()) == {"ok"}
    for line in lines.read_text().splitlines():
        json.loads(line)
    drill.check_rest()


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0, -1e9])
def test_the_clock_jumps(drill: Drill, jump_s: float) -> None:
    """Only stamps move: deadlines, waits and guards go by a clock that does not."""
    with drill.load("ngram").running() as load:
        load.wait_answers(6)
        drill.faults.set("clock", str(jump_s))
        jumped_s = now_s()
        load.wait_answers(12, since_s=jumped_s)
        newest = drill.server.get("/admin/decisions?limit=1").json()["decisions"][0]
        assert 0 < newest["timings"]["e2e_ms"] < 60_000
        drill.faults.clear("clock")
        load.wait_answers(6, since_s=now_s())
    assert set(load.counts()) == {"ok"}
    drill.check_rest()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_restarted_under_load(drill: Drill, recovered: Told, number: signal.Signals) -> None:
    """By SIGTERM what runs is finished. By SIGKILL it is lost, and neither the engine process nor half
    an answer that looks whole is left behind."""
    with drill.load("ngram", num_tokens=100).running() as load:
        load.wait_answers(6)
        engine = drill.server.engine_pid()
        process = drill.server.process
        process.send_signal(number)
        ended_s = now_s()
        assert process.wait(60) == (0 if number == signal.SIGTERM else -number)
        assert process.stdout is not None
        process.stdout.close()
        until(lambda: not _lives(engine))
        drill.start()
        recovered(f"gateway restarted after {number.name}", load.wait_answers(6, since_s=ended_s) - ended_s)
    assert load.counts()["gone"] > 0  # while there was no server
    if number == signal.SIGTERM:
        assert load.counts()["cut"] == 0
    drill.check_rest()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
