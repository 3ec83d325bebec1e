"""Who says what kind of request it is. The shipped one is `specgate.features.LearnedEstimator`."""

from __future__ import annotations

from typing import Protocol

from specgate.types import GenerationRequest, TaskEstimate


class Estimator(Protocol):
    """What a decision needs to know of a request's text beforehand."""

    def task(self, request: GenerationRequest) -> TaskEstimate:
        """The task, with a probability for each. An override is certain."""
        ...
