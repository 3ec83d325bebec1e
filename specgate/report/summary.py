"""Lines of the decision log to totals: what was spent, and what plain decoding would have cost instead."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.types import BASELINE, DeviceUse
from specgate.report.read import Line
from specgate.telemetry.decision_log import CHECK

HOW = (
    "Plain decoding is estimated at what a plainly decoded token cost in the same log: device seconds of "
    "plain decode steps over the tokens they gave, by model and by how many requests were running (1, 2-3, "
    "4-7, ...; all together where fewer than {few} such tokens were seen). Saved is that rate times "
    "the tokens of speculating steps, minus what those steps took, drafting included. Prompts cost the same "
    "either way."
)
FEW_TOKENS = 100


@dataclass(slots=True)
class Totals:
    """One row. `saved_s` is None where no token was decoded plainly to compare with."""

    num_requests: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_target_steps: int = 0
    num_target_steps_saved: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_s: float = 0.0
    device_s: float = 0.0
    saved_s: float | None = None
    network_s: float | None = None
    amount: float | None = None  # as logged, or by the price given

    def add(self, line: Line, saved_s: float | None, amount: float | None) -> None:
        """A request."""
        self.num_requests += 1
        self.num_failed += line.outcome in ("error", "deadline")
        self.num_prompt_tokens += line.num_prompt_tokens
        self.num_output_tokens += line.num_output_tokens
        if line.counts is not None:
            self.num_target_steps += line.counts.num_target_steps
            self.num_target_steps_saved += line.counts.num_target_steps_saved
            self.num_draft_tokens += line.counts.num_draft_tokens
            self.num_accepted_tokens += line.counts.num_accepted_tokens
        self.draft_s += sum(use.draft_s for use in line.device)
        self.device_s += sum(use.seconds for use in line.device)
        self.saved_s = _plus(self.saved_s, saved_s)
        self.network_s = _plus(self.network_s, line.costs.network_s if line.costs else None)
        self.amount = _plus(self.amount, amount)

    def describe(self) -> dict[str, Any]:
        """For JSON: the sums and what follows from them."""
        plain_s = None if self.saved_s is None else self.device_s + self.saved_s
        per_device_s = None if self.amount is None or not self.device_s else self.amount / self.device_s
        return asdict(self) | {
            "saved_ratio": None if not plain_s or self.saved_s is None else self.saved_s / plain_s,
            "saved_amount": None
            if per_device_s is None or self.saved_s is None
            else per_device_s * self.saved_s,
            "amount_per_request": None if self.amount is None else self.amount / max(self.num_requests, 1),
            "amount_per_1k_tokens": None
            if self.amount is None or not self.num_output_tokens
            else 1000 * self.amount / self.num_output_tokens,
        }


def _plus(total: float | None, value: float | None) -> float | None:
    return total if value is None else value if total is None else total + value


@dataclass(slots=True)
class _Rate:
    seconds: float = 0.0
    num_tokens: int = 0

    def add(self, use: DeviceUse) -> None:
        self.seconds += use.seconds - use.prefill_s
        self.num_tokens += use.num_tokens


class PlainRates:
    """Device seconds of a plainly decoded token, by model and load."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._rates: dict[tuple[str, int | None], _Rate] = defaultdict(_Rate)
        for line in lines:
            for use in line.device:
                if use.method == BASELINE and use.num_tokens:
                    self._rates[line.model, crowd(line)].add(use)
                    self._rates[line.model, None].add(use)

    def seconds(self, line: Line) -> float | None:
        """Per token, at this line's load; None where nothing was decoded plainly."""
        near, whole = self._rates.get((line.model, crowd(line))), self._rates.get((line.model, None))
        rate = near if near is not None and near.num_tokens >= FEW_TOKENS else whole
        return rate.seconds / rate.num_tokens if rate is not None else None

    def describe(self) -> list[dict[str, Any]]:
        """Every rate; `running` None is all together."""
        return [
            {
                "model": model,
                "running": None if bits is None else [2 ** (bits - 1), 2**bits - 1],
                "num_tokens": rate.num_tokens,
                "s_per_token": rate.seconds / rate.num_tokens,
            }
            for (model, bits), rate in sorted(
                self._rates.items(), key=lambda item: (item[0][0], item[0][1] or 0)
            )
        ]


def crowd(line: Line) -> int:
    """Class of load: 1 for one running request, 2 for two or three, 3 for four to seven."""
    return max(line.load.num_running, 1).bit_length()


@dataclass(slots=True)
class Summary:
    """All of a report."""

    total: Totals = field(default_factory=Totals)
    groups: dict[str, dict[str, Totals]] = field(default_factory=dict)  # by_tenant, by_task, ... -> rows
    device: dict[str, dict[str, float]] = field(default_factory=dict)  # method -> part -> seconds
    checks_s: float = 0.0
    num_without_device: int = 0  # requests whose lines tell no device time
    currencies: set[str] = field(default_factory=set)
    first: float | None = None
    last: float | None = None
    rates: list[dict[str, Any]] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """For --json."""
        return {
            "first": self.first,
            "last": self.last,
            "currency": "/".join(sorted(self.currencies)) or None,
            "total": self.total.describe(),
            **{
                name: {key: row.describe() for key, row in rows.items()} for name, rows in self.groups.items()
            },
            "device_seconds": self.device,
            "consistency_checks_device_s": self.checks_s,
            "num_requests_without_device_time": self.num_without_device,
            "estimate": {"how": HOW.format(few=FEW_TOKENS), "plain_rates": self.rates},
        }


_KEYS: dict[str, Callable[[Line], str]] = {
    "by_month": lambda line: time.strftime("%Y-%m", time.localtime(line.time)),
    "by_tenant": lambda line: line.tenant,
    "by_task": lambda line: line.task,
    "by_policy": lambda line: line.policy,
}


def summarise(lines: Iterable[Line], price_per_device_hour: float | None = None) -> Summary:
    """`price_per_device_hour` replaces what was logged."""
    kept = list(lines)
    requests = [line for line in kept if line.kind is None]
    rates = PlainRates(requests)
    summary = Summary(groups={name: {} for name in _KEYS}, rates=rates.describe())
    for line in kept:
        if line.kind == CHECK:
            summary.checks_s += sum(use.seconds for use in line.device)
        for use in line.device:
            parts = summary.device.setdefault(use.method, {"draft_s": 0.0, "forward_s": 0.0, "verify_s": 0.0})
            for part in parts:
                parts[part] += getattr(use, part)
    for line in requests:
        summary.first = line.time if summary.first is None else min(summary.first, line.time)
        summary.last = line.time if summary.last is None else max(summary.last, line.time)
        summary.num_without_device += not line.device
        saved_s, amount = _saved(line, rates), _amount(line, price_per_device_hour)
        if line.costs is not None and amount is not None:
            summary.currencies.add(line.costs.currency)
        summary.total.add(line, saved_s, amount)
        for name, key in _KEYS.items():
            summary.groups[name].setdefault(key(line), Totals()).add(line, saved_s, amount)
    return summary


def _saved(line: Line, rates: PlainRates) -> float | None:
    """Device seconds less than plain decoding; None where that is unknown."""
    plain_s = rates.seconds(line)
    if not line.device or plain_s is None:
        return None
    speculated = [use for use in line.device if use.method != BASELINE]
    return sum(use.num_tokens * plain_s - use.seconds for use in speculated)


def _amount(line: Line, price: float | None) -> float | None:
    if price is not None:
        return sum(use.seconds for use in line.device) * price / 3600 if line.device else None
    return line.costs.amount if line.costs is not None else None
