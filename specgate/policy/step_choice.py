"""How many draft tokens each sequence of a step gets, to maximise useful tokens per second. Pure.

    maximise  sum_i E_i(K_i) / T(K)      over methods and depths, 0 included

A ratio is maximised by trying a price (Dinkelbach 1967): when a second is worth `rate` tokens, every
sequence takes the choice with the largest `E_i - rate * (seconds it costs)` on its own, and the
price is right when the rate that comes of it is the one it was made with. The rate of the step
before is the price for this one; it moves little from step to step.

A draft model's calls are shared: depth D costs D calls, however many sequences draft; fewer where a
draft does not always need them (`DraftCoefficients.calls`). So each depth is tried, every sequence
taking its best choice up to that depth. (With several methods that share calls, each is settled in
turn, given those before it. With one whose every draft needs every call this is exact.)

Columns of all arrays are the choices: plain decoding first, then each method's depths from 1 on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from router_models.types import DraftCoefficients, StepCoefficients

Array = NDArray[np.float64]
Shared = tuple[int, int]  # the deepest draft of some sequences, and their number
Offer = tuple[float, int]  # tokens by which some sequences would be better off, and their number
_NO_DRAFTER = DraftCoefficients()
_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FEW_TO_CALL_FOR = 8  # sequences, any of which may be left out; of more all draft that gain by it, or one
_MAX_SPREAD = 8  # drafting sequences whose luck is followed one by one


@dataclass(frozen=True, slots=True)
class Arm:
    """A method's columns and what its work costs, in seconds."""

    method: str
    first: int  # column of depth 1
    depth: int  # columns first .. first + depth - 1
    call_s: float  # per call of its draft model, if it has one; shared by all that draft
    seq_s: float  # per drafting sequence
    kv_s: float  # per draft token and KV token of the target's, in the target's window and in the drafter
    token_s: float  # per draft token, in the drafter
    start_s: float = 0.0  # once, if there are calls
    drafter: DraftCoefficients = _NO_DRAFTER

    @property
    def has_calls(self) -> bool:
        """Whether there is a draft model to be called."""
        return self.drafter.calls_per_token > 0

    def calls_s(self, depth: int, num_sequences: int) -> float:
        """Expected seconds of the calls for so many that draft, the deepest of them `depth`."""
        d = self.drafter
        return self.call_s * d.calls(depth, num_sequences) + self.start_s * d.asked(num_sequences)

    @property
    def columns(self) -> slice:
        """Of all depths."""
        return slice(self.first, self.first + self.depth)


@dataclass(frozen=True, slots=True)
class Prices:
    """A step's costs in seconds, and the arms there are."""

    base_s: float
    seq_s: float
    token_s: float
    token_above_s: float
    knee: float
    kv_s: float
    sampled_s: float
    mixed_token_s: float  # per token of a step that computes prompts too
    lead_s: float  # of a step without draft calls
    arms: tuple[Arm, ...]
    depth_of: tuple[int, ...]  # by column
    depth_of_arm: tuple[tuple[int, ...], ...]  # by arm and column; 0: the column is another arm's

    @property
    def deepest(self) -> int:
        """Most draft tokens of any arm."""
        return max(self.depth_of)

    @property
    def has_knee(self) -> bool:
        """Whether tokens beyond some number cost otherwise."""
        return self.knee != math.inf

    @property
    def num_columns(self) -> int:
        """Plain decoding and all depths of all arms."""
        return 1 + sum(arm.depth for arm in self.arms)

    @classmethod
    def of(cls, step: StepCoefficients, methods: Sequence[tuple[str, int]], pause_s: float) -> Prices:
        """`methods` with their most draft tokens; `pause_s` passes between two steps."""
        arms: list[Arm] = []
        for method, depth in methods:
            d = step.drafters.get(method, _NO_DRAFTER)
            arms.append(
                Arm(
                    method,
                    first=1 + sum(arm.depth for arm in arms),
                    depth=depth,
                    call_s=d.d0_s,
                    seq_s=d.d_seq_s,
                    kv_s=step.c_win_s + d.d_kv_s * d.kv_per_target_kv,
                    token_s=d.d_tok_s,
                    start_s=d.d_lead_s,
                    drafter=d,
                )
            )
        return cls(
            base_s=step.c0_s + pause_s,
            seq_s=step.c_seq_s,
            token_s=step.c_tok_s,
            token_above_s=step.c_tok_above_s,
            knee=math.inf if step.knee_tokens is None else step.knee_tokens,
            kv_s=step.c_kv_s,
            sampled_s=step.c_sample_s,
            mixed_token_s=max(step.p_dec_s, step.p_tok_s, step.c_tok_s),
            lead_s=step.c_lead_s,
            arms=tuple(arms),
            depth_of=(0, *(depth for arm in arms for depth in range(1, arm.depth + 1))),
            depth_of_arm=tuple(
                (0, *(depth if arm is own else 0 for arm in arms for depth in range(1, arm.depth + 1)))
                for own in arms
            ),
        )

    def shared(self, column: Sequence[int]) -> list[Shared]:
        """By arm with calls: of the sequences that draft by it, the deepest draft and their number."""
        found = self.nobody
        for index, (arm, depth_of) in enumerate(zip(self.arms, self.depth_of_arm, strict=True)):
            if arm.has_calls:
                depths = [depth for depth in map(depth_of.__getitem__, column) if depth]
                found[index] = (max(depths, default=0), len(depths))
        return found

    def calls_s(self, column: Sequence[int], settled: Sequence[Shared]) -> float:
        """All draft calls of a step with these choices, beside those of `settled` (by arm)."""
        seconds, quiet = 0.0, 1.0
        chosen = self.shared(column)
        for arm, (depth, num), (paid, num_paid) in zip(
            self.arms, chosen, settled or self.nobody, strict=True
        ):
            if num + num_paid:
                seconds += arm.calls_s(max(depth, paid), num + num_paid)
                quiet *= 1.0 - arm.drafter.asked(num + num_paid)
        return seconds - self.lead_s * (1.0 - quiet)

    @property
    def nobody(self) -> list[Shared]:
        """What is settled where nothing is."""
        return [(0, 0)] * len(self.arms)

    def quiet(self, settled: Sequence[Shared]) -> list[float]:
        """By arm: the chance that those who are settled bring no calls of it."""
        return [1.0 - arm.drafter.asked(num) for arm, (_, num) in zip(self.arms, settled, strict=True)]

    def added_calls_s(
        self, index: int, settled: Shared, depth: int, num: int, quiet: Sequence[float]
    ) -> float:
        """Seconds of the arm's calls for `num` more sequences, the deepest of them `depth`, less what the
        target's forward saves where it no longer leads. `quiet` by arm, as of now."""
        arm, (paid, num_paid) = self.arms[index], settled
        seconds = arm.calls_s(max(depth, paid), num_paid + num) - arm.calls_s(paid, num_paid)
        others = math.prod(chance for at, chance in enumerate(quiet) if at != index)
        asked = arm.drafter.asked
        return seconds - self.lead_s * others * (asked(num_paid + num) - asked(num_paid))

    def tokens_s(self, num_tokens: float) -> float:
        """Of `num_tokens` tokens in the forward."""
        if num_tokens <= self.knee:
            return self.token_s * num_tokens
        return self.token_s * self.knee + self.token_above_s * (num_tokens - self.knee)

    def plain_s(self, num_sequences: int, num_kv_tokens: float, num_sampled: float) -> float:
        """A step without drafts, but for the tokens in its forward."""
        return (
            self.base_s
            + self.lead_s
            + self.seq_s * num_sequences
            + self.kv_s * num_kv_tokens
            + self.sampled_s * num_sampled
        )


@dataclass(frozen=True, slots=True)
class Settled:
    """The part of a step that is not to be chosen."""

    plain_s: float  # see `Prices.plain_s`
    num_sequences: int  # all that decode
    num_drafted: float = 0.0  # draft tokens of those whose choice is fixed
    num_tokens: float = 0.0  # tokens expected of those
    extra_s: float = 0.0
    shared: Sequence[Shared] = ()  # by arm: those of them that draft by it


@dataclass(frozen=True, slots=True)
class Plan:
    """A column for every sequence, and what comes of it."""

    column: Sequence[int]  # [sequences]
    num_tokens: float  # expected, of the whole step
    num_drafted: float
    seconds: float

    @property
    def rate(self) -> float:
        """Useful tokens per second."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def worth(self, rate: float) -> float:
        """Tokens less what its seconds are worth at this rate."""
        return self.num_tokens - rate * self.seconds


class Choices(Protocol):
    """The sequences of a step that are free to choose. Column 0 is plain decoding."""

    @property
    def tokens(self) -> Sized:
        """Expected tokens a step."""

    def choose(self, prices: Prices, shared: Sequence[Shared], rate: float, token_s: float) -> Sequence[int]:
        """The best column for every sequence when a second is worth `rate` tokens and a draft token in
        the target's forward costs `token_s`. The draft calls for `shared` (by arm) are paid for already."""

    def cost(self, prices: Prices, column: Sequence[int], settled: Settled) -> Plan:
        """What comes of a choice."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Choices of any number of sequences. All [sequences, columns]."""

    tokens: Array  # expected tokens a step
    drafted: Array  # expected draft tokens
    extra_s: Array  # seconds beside those per token in the target's forward
    penalty: Array  # tokens by which a change of method must be better; huge: shut

    def choose(
        self, prices: Prices, shared: Sequence[Shared], rate: float, token_s: float | Array
    ) -> list[int]:
        """See `Choices`; `token_s` may be another for each column."""
        if not len(self.tokens):
            return []
        value = self.drafted * token_s
        value += self.extra_s
        value *= -rate
        value += self.tokens
        value -= self.penalty
        by_column = np.ascontiguousarray(value.T)  # which numpy reduces several times faster
        best = by_column[0].copy()
        column = np.zeros(len(value), dtype=np.intp)
        settled = shared or prices.nobody
        quiet = prices.quiet(settled)
        for index, arm in enumerate(prices.arms):
            part = by_column[arm.columns]
            if arm.has_calls:
                lift = np.maximum.accumulate(part, axis=0)  # the best up to each depth
                lift -= best
                offered = _offered(lift)
                depth, num = best_depth(prices, index, settled[index], offered, rate, quiet)
                if not depth:
                    continue
                quiet[index] = 1.0 - arm.drafter.asked(settled[index][1] + num)
                part = part[:depth]
            top = part.max(axis=0)
            better = top > best
            if arm.has_calls and num != np.count_nonzero(better):
                better[:] = False
                better[np.argsort(best - top, kind="stable")[:num]] = True
            np.copyto(best, top, where=better)
            np.copyto(column, part.argmax(axis=0) + arm.first, where=better)
        chosen: list[int] = column.tolist()
        return chosen

    def cost(self, prices: Prices, column: Sequence[int], settled: Settled) -> Plan:
        """See `Choices`."""
        num, num_columns = self.tokens.shape
        at = np.arange(0, num * num_columns, num_columns)
        at += np.array(column, dtype=np.intp)
        drafted = self.drafted.take(at)
        num_drafted = settled.num_drafted + float(np.add.reduce(drafted))
        seconds = settled.plain_s + settled.extra_s + float(np.add.reduce(self.extra_s.take(at)))
        seconds += _tokens_s(drafted, prices, column, settled, num_drafted)
        seconds += prices.calls_s(column, settled.shared)
        tokens = settled.num_tokens + float(np.add.reduce(self.tokens.take(at)))
        return Plan(column, tokens, num_drafted, seconds)


def _offered(lift: Array) -> list[list[Offer]]:
    """By depth; `lift` [depth, sequences]: tokens by which each would be better off."""
    if lift.shape[1] <= _FEW_TO_CALL_FOR:
        return [offers(row) for row in lift.tolist()]
    gains = np.maximum(lift, 0.0).sum(axis=1).tolist()
    nums = np.count_nonzero(lift > 0, axis=1).tolist()
    tops = lift.max(axis=1).tolist()
    every = zip(gains, nums, tops, strict=True)
    return [[(top, 1), (gain, num)] if num > 1 else [(top, 1)] for gain, num, top in every]


def offers(lifts: Sequence[float]) -> list[Offer]:
    """Draft calls for the one that gains most by them (or loses least), for the two that do, .. for all that
    gain: who gains little may not be worth the calls that are made for it."""
    gaining = sorted((lift for lift in lifts if lift > 0), reverse=True)
    if not gaining:
        return [(max(lifts), 1)]
    return list(zip(accumulate(gaining), range(1, len(gaining) + 1), strict=True))


def best_depth(
    prices: Prices,
    index: int,
    settled: Shared,
    offered: Sequence[Sequence[Offer]],
    rate: float,
    quiet: Sequence[float],
) -> tuple[int, int]:
    """Up to which depth the shared calls of the arm at `index` pay, and for how many sequences. Depth 0: for
    none. `offered` by depth."""
    most, found = 0.0, (0, 0)
    for depth, each in enumerate(offered, start=1):
        for gain, num in each:
            more = gain - rate * prices.added_calls_s(index, settled, depth, num, quiet)
            if more > most:
                most, found = more, (depth, num)
    return found


def solve(rows: Choices, prices: Prices, settled: Settled, rate: float, max_rounds: int) -> Plan:
    """The plan with the highest rate; `rate` is where to start, 0: that of plain decoding.

    One round is enough where `rate` is the last step's. Where the tokens' price has a knee, prices
    between its two sides are tried when a plan crosses it.
    """
    if rate <= 0:
        plain = rows.cost(prices, [0] * len(rows.tokens), settled)
        rate = plain.rate
        max_rounds += 1
    plan: Plan | None = None
    for _ in range(max(max_rounds, 1)):
        before = settled.num_sequences + (settled.num_drafted if plan is None else plan.num_drafted)
        slope = prices.token_s if before < prices.knee else prices.token_above_s
        found = rows.cost(prices, rows.choose(prices, settled.shared, rate, slope), settled)
        most = settled.num_sequences + prices.deepest * len(rows.tokens)
        if isinstance(rows, Rows) and settled.num_sequences < prices.knee < most:
            found = max(found, _at_the_knee(rows, prices, settled, rate), key=lambda p: p.worth(rate))
        plan = found
        if abs(plan.rate - rate) <= 1e-3 * rate:
            break
        rate = plan.rate
    assert plan is not None
    return plan


def _at_the_knee(rows: Rows, prices: Prices, settled: Settled, rate: float) -> Plan:
    """The best of the plans for a token's price below the knee, above it, and between; for what each
    sequence's draft would cost if it were the only one; and with only as many of those as fit below."""
    low, high = prices.token_s, prices.token_above_s
    alone = np.zeros(prices.num_columns)
    num = settled.num_sequences
    for arm in prices.arms:
        for depth in range(1, arm.depth + 1):
            more_s = prices.tokens_s(num + depth) - prices.tokens_s(num)
            alone[arm.first + depth - 1] = more_s / depth
    tried: list[float | Array] = [alone, *(low + part * (high - low) for part in _PARTS)]
    columns = [rows.choose(prices, settled.shared, rate, token_s) for token_s in tried]
    columns.append(_below_the_knee(rows, columns[0], prices.knee - num - settled.num_drafted))
    plans = [rows.cost(prices, column, settled) for column in columns]
    return max(plans, key=lambda plan: plan.worth(rate))


def _below_the_knee(rows: Rows, column: Sequence[int], room: float) -> list[int]:
    """Of these drafts those that bring the most, until `room` for draft tokens is used up."""
    pick, at = np.arange(len(column)), np.array(column, dtype=np.intp)
    drafted, tokens = rows.drafted[pick, at].tolist(), rows.tokens[pick, at]
    kept = [0] * len(column)
    for row in np.argsort(-tokens).tolist():
        if drafted[row] <= room:
            kept[row] = column[row]
            room -= drafted[row]
    return kept


def _tokens_s(
    drafted: Array, prices: Prices, column: Sequence[int], settled: Settled, num_drafted: float
) -> float:
    """The tokens' part of a step; `drafted` [sequences] as chosen. A draft is found or not: around a knee,
    the mean of the cost is not the cost of the mean."""
    num = settled.num_sequences
    if num >= prices.knee or prices.knee == math.inf or settled.num_drafted:
        return prices.tokens_s(num + num_drafted)
    drafting = [row for row, at in enumerate(column) if at]
    if len(drafting) > _MAX_SPREAD:
        return prices.tokens_s(num + num_drafted)
    chances = np.ones(1)  # [draft tokens so far + 1]
    for row in drafting:
        depth = prices.depth_of[column[row]]
        found = min(float(drafted[row]) / depth, 1.0)
        longer = np.zeros(len(chances) + depth)
        longer[: len(chances)] += (1 - found) * chances
        longer[depth:] += found * chances
        chances = longer
    return sum(chance * prices.tokens_s(num + more) for more, chance in enumerate(chances.tolist()) if chance)
