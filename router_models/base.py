"""What every estimator here is: four verbs over typed inputs, and a state you can read.

    learn_one(x, y)    take in one outcome; the only verb that changes anything
    predict_one(x)     the best guess now; works before any learning, or says None
    explain_one(x)     that guess as named terms which add up to it
    state()            everything learned, as plain JSON; `from_state` gives it back

No clock, no randomness, no I/O: the same calls in the same order give the same numbers.
`router_models.checks` holds the contract as code and is run against each estimator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar

from router_models.types import Explanation

State = dict[str, Any]
"""JSON values only, with "kind" and "version" at the top."""

X = TypeVar("X", contravariant=True)
Y = TypeVar("Y", contravariant=True)
P = TypeVar("P", covariant=True)


class StateError(ValueError):
    """A saved state that cannot be used: another kind, another version, or broken."""


class Estimator(Protocol[X, Y, P]):
    """A model that learns online: inputs `X`, outcomes `Y`, predictions `P`."""

    def learn_one(self, x: X, y: Y) -> None:
        """Take in one outcome. Raises ValueError, unchanged, where `x` or `y` is not finite."""
        ...

    def predict_one(self, x: X) -> P:
        """Predict; changes nothing."""
        ...

    def explain_one(self, x: X) -> Explanation:
        """`predict_one` in terms that add up to its `total`."""
        ...

    def state(self) -> State:
        """All that was learned, as JSON values."""
        ...

    @classmethod
    def from_state(cls, state: State) -> Self:
        """The estimator that `state` was taken from. Raises StateError."""
        ...


def header(kind: str, version: int) -> State:
    """The first two fields of every state."""
    return {"kind": kind, "version": version}


def check_header(state: Mapping[str, Any], kind: str, version: int) -> None:
    """Raise StateError unless `state` is of this kind and version."""
    if not isinstance(state, Mapping):
        raise StateError(f"{kind}: the state is no JSON object")
    if state.get("kind") != kind or state.get("version") != version:
        found = f"{state.get('kind')!r} version {state.get('version')!r}"
        raise StateError(f"expected the state of {kind!r} version {version}, found {found}")


def finite(name: str, value: float) -> float:
    """`value`, or ValueError naming it when it is NaN or infinite."""
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)
