"""The choices of a few sequences, number by number.

For few sequences numpy's calls take longer than their work: between two steps of the engine
their code is out of the processor's caches, and some forty calls took a millisecond. The plans are
those of `step_choice.Rows` (a test holds both against each other), where the tokens' price has no knee.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgate.policy.step_choice import Plan, Prices, Settled

MOST = 8  # sequences


@dataclass(frozen=True, slots=True)
class FewRows:
    """As `step_choice.Rows`: [sequences][columns]."""

    tokens: list[list[float]]
    drafted: list[list[float]]
    extra_s: list[list[float]]
    penalty: list[list[float]]

    def choose(self, prices: Prices, depths: Sequence[int], rate: float, token_s: float) -> list[int]:
        """See `Rows.choose`."""
        values = [
            [t - rate * (d * token_s + e) - p for t, d, e, p in zip(*row, strict=True)]
            for row in zip(self.tokens, self.drafted, self.extra_s, self.penalty, strict=True)
        ]
        best = [value[0] for value in values]
        column = [0] * len(values)
        lead_s = 0.0 if prices.has_calls(depths) else prices.lead_s
        for index, arm in enumerate(prices.arms):
            last = arm.first + arm.depth
            if arm.call_s > 0:
                depth = _depth_of_calls(
                    [value[arm.first : last] for value in values],
                    best,
                    arm.call_s * rate,
                    depths[index] if depths else 0,
                    (lead_s * rate, arm.start_s * rate),
                )
                if not depth:
                    continue
                last = arm.first + depth
            tops = [max(value[arm.first : last]) for value in values]
            better = [top > least for top, least in zip(tops, best, strict=True)]
            if arm.call_s > 0:
                lead_s = 0.0
                if not any(better):
                    lifts = [top - least for top, least in zip(tops, best, strict=True)]
                    better[lifts.index(max(lifts))] = True
            for row, is_better in enumerate(better):
                if is_better:
                    best[row] = tops[row]
                    column[row] = values[row].index(tops[row], arm.first, last)
        return column

    def cost(self, prices: Prices, column: Sequence[int], settled: Settled) -> Plan:
        """See `Rows.cost`."""
        drafted, tokens = settled.num_drafted, settled.num_tokens
        seconds = settled.plain_s + settled.extra_s
        for row, at in enumerate(column):
            drafted += self.drafted[row][at]
            tokens += self.tokens[row][at]
            seconds += self.extra_s[row][at]
        seconds += prices.tokens_s(settled.num_sequences + drafted)
        seconds += prices.calls_s(column, settled.depths)
        return Plan(list(column), tokens, drafted, seconds)


def _depth_of_calls(
    values: list[list[float]], best: list[float], call: float, paid: int, once: tuple[float, float]
) -> int:
    """Up to which depth an arm's shared calls pay, 0: not at all. `values` [sequences][depths], in tokens
    as all the others: `call` what one costs, so many being `paid` for already; `once` what is saved by the
    first of all calls, and what this arm's first costs."""
    lifts = [float("-inf")] * len(best)
    most, found = 0.0, 0
    for depth in range(1, len(values[0]) + 1):
        for row, value in enumerate(values):
            lifts[row] = max(lifts[row], value[depth - 1] - best[row])
        gain = sum(lift for lift in lifts if lift > 0) or max(lifts)
        gain += once[0] - (0.0 if paid else once[1]) - call * max(depth - paid, 0)
        if gain > most:
            most, found = gain, depth
    return found
