"""The latency model's word on what policies cost, as guards ask for it."""

from __future__ import annotations

from collections.abc import Callable

from engine.types import BASELINE
from router_models.cost import RequestCost, floor_tokens, request_cost
from specgate.policy.speedup import SATURATED, workload
from specgate.policy.view import CurveBook, ModelView

MIN_STEPS = 200.0  # target steps, and granted steps of a drafter, before the model's word counts


class ViewCosts:
    """Implements `guard_readings.Costs` over one snapshot."""

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._step = view.step if view.step is not None and view.step.num_steps >= MIN_STEPS else None
        self._load = workload(view)
        self._book = CurveBook(view.curves)
        self._plain: RequestCost | None = None
        if self._step is not None:
            self._plain = request_cost(self._step, BASELINE, 0, 1.0, self._load, SATURATED)
        self._under: dict[tuple[str, float], RequestCost | None] = {}

    def capacity_ratio(self, policy: str, batch: float) -> float | None:
        """(C1 + B*C2) of the typical request, in times of baseline's; None while the model, or what it knows
        of `policy`, is young."""
        if (policy, batch) not in self._under:
            self._under[policy, batch] = self._cost_under(policy, batch)
        under, plain = self._under[policy, batch], self._plain
        if under is None or plain is None:
            return None
        return under.in_batch_s(batch) / plain.in_batch_s(batch)

    def _cost_under(self, policy: str, batch: float) -> RequestCost | None:
        curve = self._book.find(policy, None, "greedy")
        if self._step is None or self._plain is None or curve is None or self._plain.c2_s <= 0:
            return None
        if self._view.num_steps.get(policy, 0.0) < MIN_STEPS:
            return None
        depth = min(self._view.methods.get(policy, 0), len(curve.expected_tokens) - 1)
        drafted, expected = curve.drafted_tokens[depth], curve.expected_tokens[depth]
        return request_cost(self._step, policy, drafted, expected, self._load, SATURATED, depth, batch)

    def floor_tokens(self, policy: str, batch: float, depth: float) -> float | None:
        """See `router_models.cost.floor_tokens`."""
        if self._step is None or policy not in self._step.drafters:
            return None
        kv_tokens = self._view.traffic.kv_tokens or self._load.kv_tokens
        return floor_tokens(self._step, policy, batch, depth, kv_tokens)

    def rho(self, answers_per_s: float) -> float | None:
        """lam * C2 of plain decoding; C2 is that of one answer."""
        return None if self._plain is None else answers_per_s * self._plain.c2_s


class LatestCosts:
    """Gives the costs by the newest snapshot; made anew only when there is a new one."""

    def __init__(self, view: Callable[[], ModelView]) -> None:
        self._view = view
        self._seen: ModelView | None = None
        self._costs = ViewCosts(ModelView())

    def __call__(self) -> ViewCosts:
        """As of now."""
        view = self._view()
        if view is not self._seen:
            self._seen, self._costs = view, ViewCosts(view)
        return self._costs
