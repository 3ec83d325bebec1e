"""The choices of a few sequences, number by number.

For few sequences numpy's calls take longer than their work: between two steps of the engine
their code is out of the processor's caches, and some forty calls took a millisecond. The plans are
those of `step_choice.Rows` (a test holds both against each other), where the tokens' price has no knee.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgate.policy.step_choice import Offer, Plan, Prices, Settled, Shared, best_depth, offers

MOST = 8  # sequences


@dataclass(frozen=True, slots=True)
class FewRows:
    """As `step_choice.Rows`: [sequences][columns]."""

    tokens: list[list[float]]
    drafted: list[list[float]]
    extra_s: list[list[float]]
    penalty: list[list[float]]

    def choose(self, prices: Prices, shared: Sequence[Shared], rate: float, token_s: float) -> list[int]:
        """See `Rows.choose`."""
        if not self.tokens:
            return []
        values = [
            [t - rate * (d * token_s + e) - p for t, d, e, p in zip(*row, strict=True)]
            for row in zip(self.tokens, self.drafted, self.extra_s, self.penalty, strict=True)
        ]
        best = [value[0] for value in values]
        column = [0] * len(values)
        settled = shared or prices.nobody
        quiet = prices.quiet(settled)
        for index, arm in enumerate(prices.arms):
            last = arm.first + arm.depth
            if arm.has_calls:
                offered = _offered([value[arm.first : last] for value in values], best)
                depth, num = best_depth(prices, index, settled[index], offered, rate, quiet)
                if not depth:
                    continue
                quiet[index] = 1.0 - arm.drafter.asked(settled[index][1] + num)
                last = arm.first + depth
            tops = [max(value[arm.first : last]) for value in values]
            better = [top > least for top, least in zip(tops, best, strict=True)]
            if arm.has_calls and num != sum(better):
                order = sorted(range(len(best)), key=lambda row: best[row] - tops[row])
                better = [row in order[:num] for row in range(len(best))]
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
        seconds += prices.calls_s(column, settled.shared)
        return Plan(list(column), tokens, drafted, seconds)


def _offered(values: list[list[float]], best: list[float]) -> list[list[Offer]]:
    """As `step_choice.offers`, by depth. `values` [sequences][depths] of an arm, in tokens."""
    lifts = [float("-inf")] * len(best)
    found: list[list[Offer]] = []
    for depth in range(len(values[0])):
        for row, value in enumerate(values):
            lifts[row] = max(lifts[row], value[depth] - best[row])
        found.append(offers(lifts))
    return found
