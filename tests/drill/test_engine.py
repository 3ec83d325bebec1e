"""The engine process dies or hangs; its memory is not enough. Clients get whole answers or clean errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.drill.drill import Drill, now_s
from tests.e2e.server import until

pytestmark = pytest.mark.e2e
Told = Callable[[str, float], None]


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_killed_in_the_middle_of_a_step(drill: Drill, recovered: Told, phase: str) -> None:
    restarts = drill.metric("specgate_engine_restarts_total")
    retried = drill.metric("specgate_retried_answers_total")
    policy = "ngram" if phase == "verify" else "baseline"
    with drill.load(policy).running() as load:
        load.wait_answers(6)
        drill.faults.set(f"die in {phase}")
        until(lambda: drill.faults.get(f"die in {phase}") is None)
        died_s = now_s()
        recovered(f"engine killed in {phase}", load.wait_answers(6, since_s=died_s) - died_s)
    assert drill.metric("specgate_engine_restarts_total") == restarts + 1
    assert load.counts()["gone"] == 0  # the gateway was there all along
    if phase == "prefill":  # whose prompt it was has seen no token, and is begun again
        assert drill.metric("specgate_retried_answers_total") > retried
        assert drill.metric("specgate_retried_seconds_total") > 0
    drill.check_rest()


def test_hung_and_found_by_the_watchdog(drill: Drill, recovered: Told) -> None:
    restarts = drill.metric("specgate_engine_restarts_total")
    with drill.load("ngram").running() as load:
        load.wait_answers(6)
        os.kill(drill.server.engine_pid(), signal.SIGSTOP)
        hung_s = now_s()
        assert drill.server.get("/healthz").status_code == 200
        recovered("engine hung (3 s of silence allowed)", load.wait_answers(6, since_s=hung_s) - hung_s)
    assert drill.metric("specgate_engine_restarts_total") == restarts + 1
    assert "a hang (no sign of life for" in drill.log.read_text()
    assert load.counts()["gone"] == 0
    drill.check_rest()


def test_kv_exhausted_by_long_requests(drill: Drill) -> None:
    """Six sequences of up to 500 tokens in 80 blocks of 16: some must give way, and lose nothing."""
    preempted = drill.metric("specgate_preemptions_total")
    with drill.load("ngram", num_tokens=400).running() as load:
        load.wait_answers(8)
    assert drill.metric("specgate_preemptions_total") > preempted
    assert set(load.counts()) == {"ok"}
    drill.check_rest()


@pytest.mark.parametrize("kind", ["exception", "invalid_draft", "nan", "oom", "timeout", "wrong"])
def test_a_drafter_that_fails(drill: Drill, recovered: Told, kind: str) -> None:
    """No answer suffers; the guard shuts the drafter, and lets it in again once it is well."""
    errors = f'specgate_drafter_errors_total{{kind="{kind}",policy="drill"}}'
    shut = 'specgate_guard_state{guard="drafter_error",policy="drill",task=""}'
    before = drill.metric(errors)
    with drill.load("drill").running() as load:
        load.wait_answers(6)
        drill.faults.set("drafter", kind)
        failed_s = now_s()
        if kind == "wrong":
            load.wait_answers(12, since_s=failed_s)
            assert drill.metric(errors) == before
        else:
            until(lambda: drill.metric(errors) > before)
            until(lambda: drill.metric(shut) == 2)
            answered_s = load.wait_answers(6, since_s=failed_s)
            recovered(f"drafter fails ({kind}): first answer", answered_s - failed_s)
        drill.faults.clear("drafter")
        well_s = now_s()
        until(lambda: drill.metric(shut) == 0)
        if kind != "wrong":
            recovered(f"drafter well again ({kind}): drafts again", now_s() - well_s)
        load.wait_answers(6, since_s=well_s)
    assert set(load.counts()) == {"ok"}
    drill.check_rest()
