"""A request as the baseline control of its policy: only where the exploration budget can pay for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.types import BASELINE, EngineLoad
from specgate.backends.base import ModelCard
from specgate.clock import FakeClock
from specgate.config.guards import GuardsConfig, LatencyGuard
from specgate.config.schema import PolicyConfig
from specgate.guarding import Guarding, GuardSurroundings, as_control
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.types import Candidate, Decision, LengthEstimate, LoadView, Prediction, TaskEstimate
from tests.specgate.policy.guard_samples import outcome


class _Backend:
    card = ModelCard("m", 1000, methods={"ngram": 4})

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, 0, 0)

    def set_shut(self, entries: tuple[Shut, ...]) -> None: ...


class _Metrics:
    def door_stands(self, *args: Any) -> None: ...

    def door_moved(self, change: Any) -> None: ...


@pytest.fixture
def guards() -> Guarding:
    """Those of a model on which `ngram` ran often, and baseline never."""
    config = GuardsConfig(latency=LatencyGuard(min_samples=20, control_share=0.5))
    guards = Guarding(config, PolicyConfig(), GuardSurroundings(_Backend(), _Metrics(), FakeClock()))
    for _ in range(40):
        guards.finished(outcome("ngram"))
    return guards


def _decision(plain_ms: float | None, ngram_ms: float | None) -> Decision:
    return Decision(
        "ngram", Reason.PREDICTED_FASTEST.value, 4, False, TaskEstimate("chat", 1.0), LengthEstimate(50, 80),
        LoadView(), predicted=Prediction(e2e_ms=ngram_ms),
        candidates=(
            Candidate(BASELINE, 0, True, None, Prediction(e2e_ms=plain_ms)),
            Candidate("ngram", 4, True, None, Prediction(e2e_ms=ngram_ms)),
        ),
    )  # fmt: skip


def test_a_control_is_paid_from_the_exploration_budget(guards: Guarding) -> None:
    """It is predicted to take 300 ms longer: with less than that to spend, the request stays as it is."""
    decision = _decision(plain_ms=800, ngram_ms=500)
    assert not any(guards.takes_control(decision, 100, credit_s=0.29) for _ in range(50))
    assert any(guards.takes_control(decision, 100, credit_s=0.31) for _ in range(4))
    control = as_control(decision)
    assert (control.policy, control.is_exact) == (BASELINE, True)
    assert control.explore_cost_s == pytest.approx(0.3)
    assert control.predicted.e2e_ms == 800


@pytest.mark.parametrize("times", [(400.0, 500.0), (None, None)])
def test_a_control_that_costs_nothing_needs_no_budget(
    guards: Guarding, times: tuple[float | None, float | None]
) -> None:
    """Plain decoding is predicted faster, or nothing is predicted: only the share of requests counts."""
    decision = _decision(*times)
    assert any(guards.takes_control(decision, 100, credit_s=-1.0) for _ in range(4))
    assert as_control(decision).explore_cost_s == 0


@pytest.mark.parametrize(
    "other", [{"reason": Reason.OVERRIDE.value}, {"arm": "candidate"}, {"policy": BASELINE}]
)
def test_what_is_fixed_is_no_control(guards: Guarding, other: dict[str, str]) -> None:
    """An override, an arm of a rollout, a request that is plain already."""
    decision = replace(_decision(800, 500), **other)  # type: ignore[arg-type]
    assert not any(guards.takes_control(decision, 100, credit_s=9.0) for _ in range(50))
