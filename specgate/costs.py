"""What a request cost: device time, memory, network time, and money where a price is configured.

The price of a device hour times the device seconds a request was charged (`engine/charging.py`). Time in
which the device idled belongs to nobody and is in no request's cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.types import DeviceUse, SequenceStats
from specgate.config import CostsConfig
from specgate.types import RequestOutcome

PARTS = ("draft", "forward", "verify")


@dataclass(frozen=True, slots=True)
class RequestCost:
    """None is for what is not known: no price, or a backend that cannot tell."""

    num_target_steps: int
    num_target_steps_saved: int  # that plain decoding would have needed in addition
    draft_s: float
    device_s: float | None  # all parts, drafting among them; None where the backend shows no device
    network_s: float | None  # where the model is served elsewhere
    kv_bytes: int | None  # of the target, at the end
    amount: float | None
    per_1k_tokens: float | None  # of output
    currency: str


def device_of(stats: Iterable[SequenceStats]) -> tuple[DeviceUse, ...]:
    """Several answers' device time together, by method."""
    uses = [use for one in stats for use in one.device]
    methods = dict.fromkeys(use.method for use in uses)
    return tuple(
        DeviceUse(
            method,
            sum(u.num_tokens for u in uses if u.method == method),
            *(
                sum(getattr(u, name) for u in uses if u.method == method)
                for name in ("draft_s", "forward_s", "verify_s", "prefill_s")
            ),
        )
        for method in methods
    )


def saved_steps(stats: Iterable[SequenceStats]) -> int:
    """Target steps that plain decoding would have needed in addition."""
    return sum(max(0, one.num_output_tokens - one.num_target_steps) for one in stats)


def cost_of(outcome: RequestOutcome, prices: CostsConfig, kv_bytes_per_token: float | None) -> RequestCost:
    """Of a request that was decided, however it ended."""
    uses = device_of(outcome.stats)
    device_s = sum(use.seconds for use in uses) if uses else None
    amount = amount_of(device_s, prices)
    num_tokens = outcome.num_output_tokens
    kv_tokens = outcome.num_prompt_tokens + num_tokens
    return RequestCost(
        num_target_steps=sum(stats.num_target_steps for stats in outcome.stats),
        num_target_steps_saved=saved_steps(outcome.stats),
        draft_s=sum(use.draft_s for use in uses),
        device_s=device_s,
        network_s=outcome.network_s,
        kv_bytes=None if kv_bytes_per_token is None else round(kv_tokens * kv_bytes_per_token),
        amount=amount,
        per_1k_tokens=None if amount is None or not num_tokens else amount * 1000 / num_tokens,
        currency=prices.currency,
    )


def amount_of(device_s: float | None, prices: CostsConfig) -> float | None:
    """Money for device time; None without a price."""
    price = prices.price_per_device_hour
    return None if price is None or device_s is None else device_s * price / 3600


def kv_bytes_per_token(details: Mapping[str, Any]) -> float | None:
    """Of the target's cache, as a backend's card tells; None where it does not."""
    kv = details.get("memory_bytes", {}).get("target_kv")
    num_tokens = details.get("num_blocks", 0) * details.get("block_size", 0)
    return kv / num_tokens if kv and num_tokens else None


@dataclass(slots=True)
class _Total:
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_target_steps: int = 0
    num_target_steps_saved: int = 0
    draft_s: float = 0.0
    device_s: float = 0.0
    network_s: float = 0.0

    def add(self, outcome: RequestOutcome, cost: RequestCost) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += outcome.num_prompt_tokens
        self.num_output_tokens += outcome.num_output_tokens
        self.num_target_steps += cost.num_target_steps
        self.num_target_steps_saved += cost.num_target_steps_saved
        self.draft_s += cost.draft_s
        self.device_s += cost.device_s or 0.0
        self.network_s += cost.network_s or 0.0


@dataclass(slots=True)
class CostTotals:
    """Since the server started: by policy decided for, by tenant and by task. Tenants are configured keys."""

    prices: Callable[[], CostsConfig]
    by_policy: dict[str, _Total] = field(default_factory=dict)
    by_tenant: dict[str, _Total] = field(default_factory=dict)
    by_task: dict[str, _Total] = field(default_factory=dict)
    checks_s: float = 0.0  # device time of consistency checks
    _parts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, outcome: RequestOutcome, cost: RequestCost) -> None:
        """A request that has ended."""
        for totals, key in (
            (self.by_policy, outcome.decision.policy),
            (self.by_tenant, outcome.request.tenant),
            (self.by_task, outcome.decision.task.label),
        ):
            totals.setdefault(key, _Total()).add(outcome, cost)
        self._count_parts(outcome.stats)

    def add_check(self, stats: SequenceStats) -> None:
        """A greedy answer that was decoded again."""
        self.checks_s += sum(use.seconds for use in stats.device)
        self._count_parts((stats,))

    def _count_parts(self, stats: Iterable[SequenceStats]) -> None:
        for use in (use for one in stats for use in one.device):
            for part in PARTS:
                self._parts[use.method, part] += getattr(use, f"{part}_s")

    def describe(self) -> dict[str, Any]:
        """For /admin/state."""
        prices = self.prices()

        def shown(totals: Mapping[str, _Total]) -> dict[str, dict[str, Any]]:
            return {
                key: asdict(total) | {"amount": amount_of(total.device_s, prices)}
                for key, total in totals.items()
            }

        device: dict[str, dict[str, float]] = {}
        for (method, part), seconds in self._parts.items():
            device.setdefault(method, {})[f"{part}_s"] = seconds
        return {
            "price_per_device_hour": prices.price_per_device_hour,
            "currency": prices.currency,
            "by_policy": shown(self.by_policy),
            "by_tenant": shown(self.by_tenant),
            "by_task": shown(self.by_task),
            "device_by_method": device,
            "consistency_checks_device_s": self.checks_s,
        }
