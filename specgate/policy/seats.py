"""The running sequences as the step planner remembers them: one row of numbers each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.spec.planner import SequenceView
from engine.types import MethodCounts
from router_models.acceptance import RequestCurves, sampling_band
from router_models.types import StepCoefficients
from specgate.policy import few_rows
from specgate.policy.few_rows import FewRows
from specgate.policy.predict import catch_up_s
from specgate.policy.shut import ShutList
from specgate.policy.step_choice import Arm, Array, Choices, Prices, Rows, Settled
from specgate.policy.view import CurveBook, ModelView

_SHUT, _UNPROVEN = 1e9, 1e6  # tokens: no gain is as large; an unproven arm may still be probed
_FIRST_ROWS = 16
_RATE_SHRINK = 16.0  # granted steps of prior, about those of `RequestCurves.rates`
_COOL_FACTOR = 5.0  # how much larger a gain must be right after a change of method
_BETWEEN_DRAFTERS = 4.0  # the same at any time, where both draft: one is as unsure as the other
COOL_STEPS = 24  # steps that count as right after
_MAX_WAIT_STEPS = 32  # granted steps between two looks at a request's own acceptance
_SAME_TOKENS = 0.05  # expected tokens by which a request must be another before its row is computed anew
_NOTHING = MethodCounts("")
_CATCH_UP_TOKENS = 96.0  # within which reading the context must pay for a drafter


class Seat:
    """One sequence. `arm` is the method in force: 0 plain decoding, 1 + place of the arm."""

    __slots__ = (
        "arm",
        "changed_step",
        "column",
        "counts",
        "curves",
        "granted",
        "hindsight",
        "hold_left",
        "is_fixed",
        "is_planned",
        "label",
        "last_seen",
        "loaded",
        "look_at",
        "num_accepted",
        "num_changes",
        "num_drafts",
        "num_granted",
        "num_granted_tokens",
        "row",
        "settled",
        "stale",
        "view",
    )  # fmt: skip

    def __init__(self, view: SequenceView, row: int, num_arms: int) -> None:
        self.row = row
        self.view = view
        self.label = view.label
        self.is_fixed = view.policy.is_exact or view.policy.is_pinned
        self.hold_left = view.policy.hold_steps
        self.is_planned = False  # before its first plan it has nothing to lose by a change
        self.arm = 0
        self.column = 0
        self.granted = 0  # arm that was granted a draft in the step before
        self.changed_step = -COOL_STEPS
        self.num_changes = 0  # each makes the next one dearer
        self.curves: list[int | None] = []  # by arm: place of its curve; None: nothing is known
        self.counts = [[0, 0, 0, 0] for _ in range(num_arms)]  # steps, drafts, granted there, accepted
        self.hindsight: tuple[MethodCounts, ...] = ()
        self.loaded = [False] * num_arms  # the drafter has read this sequence
        self.num_drafts = view.num_drafts
        self.num_granted_tokens = _granted_tokens(view)
        self.num_accepted = view.num_accepted_tokens
        self.num_granted = 0
        # By arm, when the row was computed last: steps, drafts, accepted; drafts a step and tokens a draft.
        self.settled: list[tuple[float, ...]] = [(0, 0, 0, 0.0, 0.0)] * num_arms
        self.look_at = 2
        self.stale: set[int] = set()  # arms whose part of the row is out of date; none: all of it may be
        self.last_seen = 0

    def note(self, view: SequenceView, num_steps: int) -> bool:
        """What the last steps brought, in which this seat was granted a draft. True when the row should be
        computed anew."""
        arm = self.granted
        counts = self.counts[arm - 1]
        counts[0] += num_steps
        if view.num_drafts != self.num_drafts:
            counts[1] += max(view.num_drafts - self.num_drafts, 0)
            counts[2] += max(_granted_tokens(view) - self.num_granted_tokens, 0)
            counts[3] += max(view.num_accepted_tokens - self.num_accepted, 0)
            self.skip(view)
        is_first = not self.loaded[arm - 1]
        self.loaded[arm - 1] = True
        self.num_granted += num_steps
        is_news = is_first
        if self.num_granted >= self.look_at:
            self.look_at += min(self.num_granted, _MAX_WAIT_STEPS)
            is_news |= self._has_news(arm - 1)
        if is_news:
            self.stale.add(arm - 1)
        return is_news

    def skip(self, view: SequenceView) -> None:
        """What was drafted so far is accounted for, or was not this planner's."""
        self.num_drafts = view.num_drafts
        self.num_granted_tokens = _granted_tokens(view)
        self.num_accepted = view.num_accepted_tokens

    def settle(self, number: int, rate: float, tokens: float) -> None:
        """The arm's row was computed from the counts as they are. Drafts a step; tokens when deepest."""
        steps, drafts, _, accepted = self.counts[number]
        self.settled[number] = (steps, drafts, accepted, rate, (tokens - 1) / max(rate, 1e-9))

    def _has_news(self, number: int) -> bool:
        """Whether what came since then changes what is expected of the arm."""
        steps, drafts, _, accepted = self.counts[number]
        old_steps, old_drafts, old_accepted, rate, each = self.settled[number]
        new_rate = (rate * (old_steps + _RATE_SHRINK) + drafts - old_drafts) / (steps + _RATE_SHRINK)
        shrink = _RATE_SHRINK / 2
        new_each = (each * (old_drafts + shrink) + accepted - old_accepted) / (drafts + shrink)
        return abs(new_rate * new_each - rate * each) > _SAME_TOKENS

    def look_back(self, view: SequenceView, arm_of: Mapping[str, int]) -> bool:
        """What arms would have done in the steps they were not granted: as good as having done it. True
        when the row should be computed anew."""
        is_news = False
        before = {counts.method: counts for counts in self.hindsight}
        for counts in view.in_hindsight:
            old = before.get(counts.method, _NOTHING)
            arm = arm_of.get(counts.method)
            if arm is None or counts is old:
                continue
            own = self.counts[arm - 1]
            own[0] += counts.num_steps - old.num_steps
            own[1] += counts.num_drafts - old.num_drafts
            own[2] += _granted_of(counts) - _granted_of(old)
            own[3] += sum(counts.accepted_per_position) - sum(old.accepted_per_position)
            if self._has_news(arm - 1):
                self.stale.add(arm - 1)
                is_news = True
        self.hindsight = view.in_hindsight
        return is_news


class Table:
    """The rows of all seats, filled from one snapshot."""

    def __init__(self, view: ModelView) -> None:
        """Raises ValueError where the snapshot has no latency model."""
        if view.step is None:
            raise ValueError("no step was seen yet")
        self.step: StepCoefficients = view.step
        self.margin = view.planner.switch_margin
        self.book = CurveBook(view.curves)
        self.curves = RequestCurves(self.book.curves) if self.book.curves else None
        top = len(self.book.curves[0].expected_tokens) - 1 if self.book.curves else 0
        known = [(m, min(depth, top)) for m, depth in view.methods.items() if m in view.step.drafters]
        self.prices = Prices.of(
            view.step, [pair for pair in known if pair[1] > 0], view.traffic.between_steps_s
        )
        self.arm_of = {arm.method: 1 + i for i, arm in enumerate(self.prices.arms)}
        self.arm_of_column = [0]
        for index, arm in enumerate(self.prices.arms):
            self.arm_of_column += [index + 1] * arm.depth
        # By arm in force and column: does the margin apply, how often at least, and is the arm unproven?
        self._is_other: Array = np.ones((1 + self.num_arms, self.prices.num_columns))
        self._is_other[:, 0] = 0.0
        self._margins: Array = np.ones_like(self._is_other)
        self._margins[1:, 1:] = _BETWEEN_DRAFTERS
        self._unproven: Array = np.zeros_like(self._is_other)
        for number, arm in enumerate(self.prices.arms):
            self._is_other[number + 1, arm.columns] = 0.0
            if view.num_steps.get(arm.method, 0.0) < view.planner.min_drafting_steps:
                self._unproven[:, arm.columns] = _UNPROVEN
                self._unproven[number + 1, arm.columns] = 0.0
        # The same three for one sequence: a list a row.
        self._by_arm = [
            list(zip(*rows, strict=True))
            for rows in zip(
                self._margins.tolist(), self._is_other.tolist(), self._unproven.tolist(), strict=True
            )
        ]
        self._places: dict[tuple[str, str], list[int | None]] = {}
        self._keep(_FIRST_ROWS, None)

    @property
    def num_arms(self) -> int:
        """Methods there are."""
        return len(self.prices.arms)

    def need(self, num: int) -> None:
        """Have at least `num` rows."""
        have = len(self.tokens)
        if num > have:
            self._keep(max(num, 2 * have), self._numbers)

    def _keep(self, num_rows: int, old: Array | None) -> None:
        """One array under all four, so that a step's rows are gathered in one go."""
        self._numbers: Array = np.zeros((4, num_rows, self.prices.num_columns))
        self._numbers[0] = 1.0
        if old is not None:
            self._numbers[:, : old.shape[1]] = old
        # As in `Rows`; all [rows, columns].
        self.tokens, self.drafted, self.extra_s, self.penalty = self._numbers

    def rows(self, index: Sequence[int]) -> Choices:
        """Those of the given seats."""
        if len(index) <= few_rows.MOST and not self.prices.has_knee:
            return FewRows(*self._numbers.take(index, axis=1).tolist())
        return Rows(*self._numbers.take(np.array(index, dtype=np.intp), axis=1))

    def settle(self, sequences: Sequence[SequenceView], seats: Sequence[Seat]) -> Settled:
        """What a step of these sequences costs and yields whatever is chosen; `seats`, of some of them, have
        chosen already."""
        num_kv_tokens = num_sampled = 0
        for sequence in sequences:
            num_kv_tokens += sequence.num_tokens
            num_sampled += sequence.temperature > 0
        plain_s = self.prices.plain_s(len(sequences), num_kv_tokens, num_sampled)
        if not seats:
            return Settled(plain_s, len(sequences))
        index = np.array([seat.row for seat in seats], dtype=np.intp)
        column = [seat.column for seat in seats]
        return Settled(
            plain_s,
            len(sequences),
            num_drafted=float(self.drafted[index, column].sum()),
            num_tokens=float(self.tokens[index, column].sum()),
            extra_s=float(self.extra_s[index, column].sum()),
            shared=self.prices.shared(column),
        )

    def place(self, seat: Seat) -> None:
        """The arm in force of a new seat, and the curves it goes by."""
        policy = seat.view.policy
        band = sampling_band(seat.view.temperature, seat.view.top_p)
        place = (seat.label, band)
        curves = self._places.get(place)
        if curves is None:
            task = seat.label or None
            curves = [self.book.index(arm.method, task, band) for arm in self.prices.arms]
            self._places[place] = curves
        seat.curves = curves
        self.enforce(seat, self.column_of(policy.method, policy.num_speculative_tokens))

    def column_of(self, method: str, depth: int) -> int:
        """The column of a method and depth, or the nearest there is; 0 for plain decoding."""
        arm = self.arm_of.get(method, 0)
        if not arm or depth <= 0:
            return 0
        return self.prices.arms[arm - 1].first + min(depth, self.prices.arms[arm - 1].depth) - 1

    def enforce(self, seat: Seat, column: int) -> None:
        """From now on this is the seat's choice."""
        seat.column = column
        seat.arm = self.arm_of_column[column]

    def is_open(self, seat: Seat, number: int) -> bool:
        """False where the arm is shut for this sequence, or nothing is known of it."""
        return bool(self.penalty[seat.row, self.prices.arms[number].first] < _SHUT)

    def fill(self, seats: Sequence[Seat], shut: ShutList, step: int, *, is_whole: bool = True) -> None:
        """Compute the rows of these seats from what is known of them now; not `is_whole`: what is stale."""
        if len(seats) <= few_rows.MOST:
            for seat in seats:
                self._fill_one(seat, is_whole=is_whole or not seat.stale)
                seat.stale.clear()
            self.set_penalty(seats, shut, step)
            return
        for seat in seats:
            seat.stale.clear()
        arms = self.prices.arms
        every = [seat.row for seat in seats]
        self.tokens[every], self.drafted[every], self.extra_s[every] = 1.0, 0.0, 0.0
        # All arms' curves in one go: the number of calls is much of the time.
        told = [
            (number, seat, curve)
            for number in range(len(arms))
            for seat in seats
            if (curve := seat.curves[number]) is not None
        ]
        if told and self.curves is not None:
            at = np.array([curve for _, _, curve in told], dtype=np.intp)
            counts = np.array([seat.counts[number] for number, seat, _ in told], dtype=np.float64)
            expected = self.curves.expected(at, counts[:, 1], counts[:, 2], counts[:, 3], counts[:, 0])
            rates = self.curves.rates(at, counts[:, 1], counts[:, 0])
            first = 0
            for number, arm in enumerate(arms):
                own = [seat for seat in seats if seat.curves[number] is not None]
                part = slice(first, first + len(own))
                first += len(own)
                if own:
                    drafted = rates[part, None] * self.curves.lengths[at[part], 1 : arm.depth + 1]
                    self._fill_arm(number, arm, own, expected[part, 1 : arm.depth + 1], drafted, rates[part])
        self.set_penalty(seats, shut, step)

    def _fill_one(self, seat: Seat, *, is_whole: bool) -> None:
        """The same for one, without numpy (see `few_rows`)."""
        row, kv = seat.row, seat.view.num_tokens
        if is_whole:
            self.tokens[row], self.drafted[row], self.extra_s[row] = 1.0, 0.0, 0.0
        sampled_s = self.prices.sampled_s if seat.view.temperature > 0 else 0.0
        for number in range(len(self.prices.arms)) if is_whole else seat.stale:
            curve, arm = seat.curves[number], self.prices.arms[number]
            if curve is None or self.curves is None:
                continue
            steps, drafts, num_granted_tokens, accepted = seat.counts[number]
            expected, rate, lengths = self.curves.expected_one(
                curve, drafts, num_granted_tokens, accepted, steps
            )
            tokens = expected[1 : arm.depth + 1]
            drafted = [rate * length for length in lengths[1 : arm.depth + 1]]
            each_s = arm.token_s + arm.kv_s * kv + sampled_s
            catch_up_s = self._catch_up_s(number, arm, seat)
            self.tokens[row, arm.columns] = tokens
            self.drafted[row, arm.columns] = drafted
            self.extra_s[row, arm.columns] = [
                num * each_s + arm.seq_s + catch_up_s * more
                for num, more in zip(drafted, tokens, strict=True)
            ]
            seat.settle(number, rate, expected[arm.depth])

    def _fill_arm(
        self, number: int, arm: Arm, seats: Sequence[Seat], tokens: Array, drafted: Array, rates: Array
    ) -> None:
        """`tokens`, `drafted` [seats, depth], `rates` [seats]: what the arm yields, drafts, and how often."""
        index = np.array([seat.row for seat in seats], dtype=np.intp)
        kv = np.array([seat.view.num_tokens for seat in seats], dtype=np.float64)
        sampled = np.array([seat.view.temperature > 0 for seat in seats], dtype=np.float64)
        each = arm.token_s + arm.kv_s * kv + sampled * self.prices.sampled_s
        extra = drafted * each[:, None] + arm.seq_s
        if not all(seat.loaded[number] for seat in seats):
            extra += np.array([self._catch_up_s(number, arm, seat) for seat in seats])[:, None] * tokens
        self.tokens[index, arm.columns] = tokens
        self.drafted[index, arm.columns] = drafted
        self.extra_s[index, arm.columns] = extra
        for seat, rate, deepest in zip(seats, rates.tolist(), tokens[:, -1].tolist(), strict=True):
            seat.settle(number, rate, deepest)

    def _catch_up_s(self, number: int, arm: Arm, seat: Seat) -> float:
        """What reading the context costs a drafter that has not, for each token to come."""
        if seat.loaded[number]:
            return 0.0
        tokens = max(1.0, min(_CATCH_UP_TOKENS, seat.view.num_remaining_tokens))
        return catch_up_s(self.step, arm.method, seat.view.num_tokens) / tokens

    def set_penalty(self, seats: Sequence[Seat], shut: ShutList, step: int) -> None:
        """By how many tokens a change of method must be better: plain decoding is left only for a
        gain above the margin, and returned to for any."""
        if len(seats) <= few_rows.MOST:
            for seat in seats:
                better_by = self.margin * float(self.tokens[seat.row, seat.column])
                least = _least_margin(seat, step)
                between = _BETWEEN_DRAFTERS if seat.is_planned else 1.0
                self.penalty[seat.row] = [
                    better_by * max(least, min(margin, between)) * is_other + unproven
                    for margin, is_other, unproven in self._by_arm[seat.arm]
                ]
        else:
            self._set_penalties(seats, step)
        for seat in seats:
            for number, known in enumerate(seat.curves):
                method = self.prices.arms[number]
                if known is None or (shut and shut.refusal(method.method, seat.label, seat.view.policy)):
                    self.penalty[seat.row, method.columns] = _SHUT

    def _set_penalties(self, seats: Sequence[Seat], step: int) -> None:
        index = np.array([seat.row for seat in seats], dtype=np.intp)
        column = np.array([seat.column for seat in seats], dtype=np.intp)
        arm = np.array([seat.arm for seat in seats], dtype=np.intp)
        least = [_least_margin(seat, step) for seat in seats]
        between = [_BETWEEN_DRAFTERS if seat.is_planned else 1.0 for seat in seats]
        margins = np.minimum(self._margins[arm], np.array(between)[:, None])
        margins = np.maximum(np.array(least)[:, None], margins) * self._is_other[arm]
        better_by = self.margin * self.tokens[index, column]
        self.penalty[index] = better_by[:, None] * margins + self._unproven[arm]


def _least_margin(seat: Seat, step: int) -> float:
    """By how many margins a change must be better, at least: more after each change, and right after one."""
    is_fresh = step - seat.changed_step < COOL_STEPS
    return max(_COOL_FACTOR if is_fresh else 1.0, 1.0 + 2.0 * seat.num_changes)


def _granted_tokens(view: SequenceView) -> int:
    return max(view.num_granted_tokens, view.num_draft_tokens)


def _granted_of(counts: MethodCounts) -> int:
    return max(sum(counts.allowed_per_position), counts.num_draft_tokens)
