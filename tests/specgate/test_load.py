"""The queue wait is known when it happens, not when the request ends."""

from __future__ import annotations

import asyncio

from engine.types import EngineLoad
from specgate.admission import Admission
from specgate.clock import FakeClock
from specgate.config import AdmissionConfig, KeyLimits
from specgate.load import LoadMeter
from tests.specgate.gateway import MODEL, eventually, make_config, running

IDLE = EngineLoad(0, 0, 8, 0, 0, 8)


def test_a_wait_counts_from_admission_and_grows_when_the_backend_has_told_its_part() -> None:
    clock = FakeClock()
    meter, admission = LoadMeter(clock, window_s=10.0, min_samples=1), Admission(AdmissionConfig(), clock)

    def p95_ms() -> float | None:
        clock.advance(0.1)  # readings are kept for a moment
        return meter.view(admission, IDLE).queue_wait_p95_ms

    assert p95_ms() is None
    wait = meter.admitted(0.25)
    assert p95_ms() == 250
    wait.value_s = 0.75
    assert p95_ms() == 750
    meter.reconfigure(window_s=0.2, min_samples=1)
    assert p95_ms() is None


def test_a_request_for_several_answers_is_several_answers_of_load() -> None:
    clock = FakeClock()
    meter, admission = LoadMeter(clock, window_s=10.0, min_samples=1), Admission(AdmissionConfig(), clock)
    meter.arrived(8)
    meter.arrived()
    load = meter.view(admission, IDLE)
    assert (load.requests_per_s, load.answers_per_s) == (0.2, 0.9)
    clock.advance(11)
    assert meter.view(admission, IDLE).answers_per_s == 0


async def test_the_meter_has_a_request_that_still_runs() -> None:
    async with running(hang_after_tokens=3) as server:
        meter = server.gateway.models[MODEL].meter
        task = asyncio.create_task(server.chat(stream=True))
        await eventually(lambda: server.fake.num_running == 1)
        await eventually(lambda: len(meter._waits) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.settled()
        assert len(meter._waits) == 1


async def test_refused_callers_who_try_again_are_no_load() -> None:
    async with running() as server:
        meter = server.gateway.models[MODEL].meter
        for _ in range(3):
            assert (await server.chat(specgate={"policy": "eagle"})).status_code == 400
        server.fake.is_ready = False
        assert (await server.chat()).status_code == 503
        server.fake.is_ready = True
        assert len(meter._arrivals) == 0
        assert (await server.chat()).status_code == 200
        assert len(meter._arrivals) == 1


async def test_a_caller_beyond_its_limit_is_no_load() -> None:
    limited = AdmissionConfig(per_key=KeyLimits(requests_per_minute=1))
    async with running(make_config(admission=limited)) as server:
        codes = [(await server.chat()).status_code for _ in range(4)]
        assert codes == [200, 429, 429, 429]
        assert len(server.gateway.models[MODEL].meter._arrivals) == 1
