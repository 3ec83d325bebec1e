"""The estimator contract as code: run `check_estimator` against every estimator.

Plain assertions, so that it serves tests here and whoever writes another estimator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from router_models.base import Estimator, State, StateError

X = TypeVar("X")
Y = TypeVar("Y")
P = TypeVar("P")


@dataclass(frozen=True)
class EstimatorCase(Generic[X, Y, P]):
    """How to try an estimator: a way to make it, outcomes to learn, inputs to predict.

    `explained` turns a prediction into the number that `explain_one` adds up to.
    `bad` are (x, y) pairs which `learn_one` must refuse.
    """

    name: str
    new: Callable[[], Estimator[X, Y, P]]
    from_state: Callable[[State], Estimator[X, Y, P]]
    stream: Sequence[tuple[X, Y]]
    queries: Sequence[X]
    explained: Callable[[P, X], float]
    bad: Sequence[tuple[X, Y]] = ()


def check_estimator(case: EstimatorCase[Any, Any, Any]) -> None:
    """Every rule of the contract. Raises AssertionError naming the estimator and the rule."""
    check_untrained(case)
    check_deterministic(case)
    check_predict_is_pure(case)
    check_state_round_trip(case)
    check_foreign_state_refused(case)
    check_explanation_adds_up(case)
    check_bad_outcomes_refused(case)


def _trained(case: EstimatorCase[Any, Any, Any]) -> Estimator[Any, Any, Any]:
    model = case.new()
    for x, y in case.stream:
        model.learn_one(x, y)
    return model


def check_untrained(case: EstimatorCase[Any, Any, Any]) -> None:
    """A new estimator predicts and explains without having learned anything."""
    model = case.new()
    for x in case.queries:
        model.predict_one(x)
        model.explain_one(x)


def check_deterministic(case: EstimatorCase[Any, Any, Any]) -> None:
    """The same outcomes in the same order give the same state."""
    first, second = _trained(case), _trained(case)
    assert first.state() == second.state(), f"{case.name}: learning is not deterministic"


def check_predict_is_pure(case: EstimatorCase[Any, Any, Any]) -> None:
    """Predicting and explaining change nothing."""
    model = _trained(case)
    before = json.dumps(model.state())
    for x in case.queries:
        first = model.predict_one(x)
        model.explain_one(x)
        assert model.predict_one(x) == first, f"{case.name}: predict_one differs when repeated"
    assert json.dumps(model.state()) == before, f"{case.name}: predict_one or explain_one changes the state"


def check_state_round_trip(case: EstimatorCase[Any, Any, Any]) -> None:
    """State survives JSON; the copy predicts the same and learns on in the same way."""
    model = _trained(case)
    text = json.dumps(model.state(), allow_nan=False)
    copy = case.from_state(json.loads(text))
    for x in case.queries:
        assert copy.predict_one(x) == model.predict_one(x), f"{case.name}: the copy predicts differently"
    for x, y in case.stream:
        model.learn_one(x, y)
        copy.learn_one(x, y)
    assert json.dumps(copy.state()) == json.dumps(model.state()), f"{case.name}: the copy learns differently"


def check_foreign_state_refused(case: EstimatorCase[Any, Any, Any]) -> None:
    """Another kind, another version, a missing part or no object at all: StateError."""
    good = _trained(case).state()
    parts = [k for k in good if k not in ("kind", "version")]
    broken: list[Any] = [{}, [], {**good, "kind": "something_else"}, {**good, "version": -1}]
    broken += [{k: v for k, v in good.items() if k != missing} for missing in parts]
    broken += [{**good, part: "nonsense"} for part in parts]
    for state in broken:
        try:
            case.from_state(state)
        except StateError:
            continue
        raise AssertionError(f"{case.name}: accepts a broken state: {str(state)[:80]}")


def check_explanation_adds_up(case: EstimatorCase[Any, Any, Any]) -> None:
    """Each effect is value * coefficient; their sum is the total; the total is the prediction."""
    model = _trained(case)
    for x in case.queries:
        told = model.explain_one(x)
        for e in told.effects:
            assert math.isclose(e.effect, e.value * e.coefficient, rel_tol=1e-9, abs_tol=1e-12), (
                f"{case.name}: effect of {e.name} is not value * coefficient"
            )
        total = sum(e.effect for e in told.effects)
        is_sum = math.isclose(total, told.total, rel_tol=1e-9, abs_tol=1e-12)
        assert is_sum, f"{case.name}: effects miss the total"
        predicted = case.explained(model.predict_one(x), x)
        assert math.isclose(told.total, predicted, rel_tol=1e-6, abs_tol=1e-9), (
            f"{case.name}: explains {told.total}, predicts {predicted}"
        )


def check_bad_outcomes_refused(case: EstimatorCase[Any, Any, Any]) -> None:
    """An outcome that is not finite or not possible raises ValueError and leaves no trace."""
    model = _trained(case)
    before = json.dumps(model.state())
    for x, y in case.bad:
        try:
            model.learn_one(x, y)
        except ValueError:
            assert json.dumps(model.state()) == before, f"{case.name}: a refused outcome left a trace"
            continue
        raise AssertionError(f"{case.name}: learns from {y}")
