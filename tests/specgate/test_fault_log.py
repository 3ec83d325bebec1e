"""Faults inside steps are told, but not once a step."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from engine.types import DrafterError, StepRecord
from specgate.clock import FakeClock
from specgate.telemetry.faults import FaultLog

STEP = StepRecord(1, 0.0, 0.1, "decode", 1, 1, 1, 0, 1, 1, 0, 1, 0.0, 0.0, 0.1, 0.0)
OOM = DrafterError("draft", "oom", "CUDA out of memory")


def test_a_fault_is_told_with_its_message_and_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    faults = FaultLog("m1", clock)
    with caplog.at_level(logging.WARNING):
        faults.stepped(STEP)
        for _ in range(100):
            faults.stepped(replace(STEP, drafter_errors=(OOM,)))
            clock.advance(0.1)
        faults.stepped(replace(STEP, drafter_errors=(replace(OOM, kind="nan", message="NaN"),)))
        faults.stepped(replace(STEP, num_planner_errors=1))
        clock.advance(60)
        faults.stepped(replace(STEP, drafter_errors=(OOM,)))
    assert [record.getMessage() for record in caplog.records] == [
        "m1: the drafter draft failed (oom): CUDA out of memory",
        "m1: the drafter draft failed (nan): NaN",
        "m1: the step planner failed: steps run without speculation",
        "m1: the drafter draft failed (oom): CUDA out of memory (99 more since the last such line)",
    ]
