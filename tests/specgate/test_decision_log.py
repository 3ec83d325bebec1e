"""The decision log on disk: rotation, and a disk that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.types import SamplingParams
from specgate.clock import FakeClock
from specgate.config import DecisionLogConfig
from specgate.telemetry.decision_log import DecisionLog
from specgate.types import (
    Decision,
    GenerationRequest,
    LengthEstimate,
    LoadView,
    RequestOutcome,
    TaskEstimate,
    Timings,
)


def outcome(request_id: str) -> RequestOutcome:
    request = GenerationRequest(
        request_id, "chat", "m", SamplingParams(), messages=({"role": "user", "content": "s3cret"},)
    )
    decision = Decision(
        "ngram", "rule", 4, False, TaskEstimate("chat", 1.0), LengthEstimate(1, 2), LoadView()
    )
    return RequestOutcome(request, decision, "ok", 3, 5, Timings())


def test_lines_are_json_rotated_by_size_and_hold_no_text(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    log = DecisionLog(
        DecisionLogConfig(path=str(path), max_bytes=4096, max_files=3, ring_size=2), FakeClock(7.0)
    )
    for number in range(40):
        log.add(outcome(f"r{number}"))
    log.close()
    files = sorted(path.parent.iterdir())
    assert [f.name for f in files] == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    assert all(f.stat().st_size <= 4096 for f in files)
    newest_last = [json.loads(line) for f in reversed(files) for line in f.read_text().splitlines()]
    ids = [int(entry["request_id"][1:]) for entry in newest_last]
    assert ids == list(range(ids[0], 40))
    assert "s3cret" not in "".join(f.read_text() for f in files)
    assert [entry["request_id"] for entry in log.last(10)] == ["r39", "r38"]
    assert log.last(1)[0]["time"] == 7.0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_lines_only_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog(DecisionLogConfig(path="/dev/full"), FakeClock())
    for number in range(3):
        log.add(outcome(str(number)))
    assert log.num_lost == 3
    assert len(log.last(10)) == 3
    assert len(caplog.records) == 1
