"""Where ends of requests are reported: metrics, decision log, history, costs and the list of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from engine.types import SequenceStats
from specgate.clock import Clock
from specgate.config import CostsConfig
from specgate.costs import CostTotals, RequestCost, cost_of, kv_bytes_per_token
from specgate.errors import ApiError
from specgate.telemetry.decision_log import DecisionLog
from specgate.telemetry.events import Events
from specgate.telemetry.history import History
from specgate.telemetry.metrics import Metrics
from specgate.types import RequestOutcome

_TOLD_FROM = 429  # statuses from here on are the server's matter, not the caller's


class Telemetry:
    """One place, so that all of them are told the same."""

    def __init__(
        self, metrics: Metrics, log: DecisionLog, clock: Clock, prices: Callable[[], CostsConfig]
    ) -> None:
        """`prices` gives those in force."""
        self.metrics = metrics
        self.log = log
        self.events = Events(clock)
        self.history = History(clock)
        self.totals = CostTotals(prices)
        self._prices = prices

    def cost(self, outcome: RequestOutcome, details: Mapping[str, Any]) -> RequestCost:
        """What it cost. `details`: those of the backend's card."""
        return cost_of(outcome, self._prices(), kv_bytes_per_token(details))

    def finished(self, outcome: RequestOutcome, admission_wait_s: float, details: Mapping[str, Any]) -> None:
        """A request that was decided, however it ended."""
        cost = self.cost(outcome, details)
        self.metrics.finished(outcome, admission_wait_s)
        self.metrics.charged(outcome, cost)
        self.log.add(outcome, cost)
        self.history.finished(outcome)
        self.totals.add(outcome, cost)
        if outcome.outcome in ("error", "deadline"):
            said = f"a request of task {outcome.decision.task.label} under {outcome.decision.policy} failed"
            self._fault("request", said if outcome.outcome == "error" else f"{said}: deadline", outcome)

    def checked(self, model: str, stats: SequenceStats) -> None:
        """What a consistency check took."""
        self.totals.add_check(stats)
        self.log.add_check(model, stats)

    def refused(self, model: str, endpoint: str, error: ApiError) -> None:
        """A request that never came to a decision."""
        code = error.default_code or "invalid_request"
        self.metrics.refused(model, endpoint, code)
        self.history.refused()
        if error.status >= _TOLD_FROM:
            message = f"refused with {error.status}: {error.message}"
            self.events.add("refused", message, "warning", model=model, subject=code, may_join=True)

    def undecided(self, model: str, endpoint: str, error: BaseException | None) -> None:
        """A request that ended before there was a decision: its client left, or we failed."""
        is_left = isinstance(error, asyncio.CancelledError)
        self.metrics.undecided(model, endpoint, "cancelled" if is_left else "error")
        if not is_left:
            self.events.add(
                "request", f"a request failed before it ran: {type(error).__name__}", "error",
                model=model, may_join=True,
            )  # fmt: skip

    def _fault(self, kind: str, message: str, outcome: RequestOutcome) -> None:
        self.events.add(
            kind, message, "error", model=outcome.request.model, subject=outcome.outcome, may_join=True
        )
