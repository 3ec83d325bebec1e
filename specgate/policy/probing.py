"""The step planner's probes at work: who is tried on, for how many steps, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.spec.planner import SpecPlan
from engine.types import BASELINE
from specgate.policy.predict import catch_up_s
from specgate.policy.probes import ArmKey, Probes
from specgate.policy.reasons import Reason
from specgate.policy.seats import Seat, Table
from specgate.policy.step_choice import Plan, Settled

_STEPS, _MIN_STEPS = 6, 3
_MIN_TOKENS = 16  # that a sequence must still have to go
_BUSY_FACTOR, _IDLE_FACTOR = 3.0, 10.0  # times its prediction: more of a pause was no work; was idleness
_EARNING_BATCH = 8  # sequences: the time of a larger batch earns as much for probes as if it had been this
_PLAIN: ArmKey = (BASELINE, "")


@dataclass(slots=True)
class _Trial:
    """A probe that goes on."""

    seats: list[Seat]
    number: int  # of the arm
    column: int
    left: int  # steps


class Probing:
    """At most one probe at a time: of an arm, or (so that its cost can be told apart) of plain decoding."""

    def __init__(self) -> None:
        self.probes = Probes()
        self.plain_left = 0
        self._trial: _Trial | None = None
        self._told: set[ArmKey] = set()  # arms that are known in hindsight
        self._cost_s = 0.0  # predicted, of the step that was planned last

    @property
    def is_active(self) -> bool:
        """True while a probe goes on."""
        return self._trial is not None or self.plain_left > 0

    def forget(self, seats: Sequence[Seat] | None = None) -> None:
        """These sequences (all: None) are gone."""
        if self._trial is not None and (seats is None or any(seat in seats for seat in self._trial.seats)):
            for seat in self._trial.seats:
                seat.granted = seat.arm
            self._trial = None
        if seats is None:
            self._told.clear()  # other methods may bear the same names

    def account(
        self, now_s: float, last: tuple[float, Plan] | None, num_steps: int = 1, num_sequences: int = 1
    ) -> None:
        """The step before is over, and those after it that nobody planned: what they took, and what the
        probe cost. A large batch's time earns less: all of it waits for a probe, and close to saturation
        latency suffers several times what is lost of throughput."""
        if last is None:
            return
        planned_s, plan = last
        took_s = max(now_s - planned_s, 0.0)
        spent_s = self._cost_s
        if spent_s and took_s < _IDLE_FACTOR * plan.seconds:
            spent_s = max(spent_s, min(took_s - plan.seconds, _IDLE_FACTOR * spent_s))
        worked_s = min(took_s, _BUSY_FACTOR * plan.seconds * num_steps)
        self.probes.pass_time(worked_s, spent_s, min(_EARNING_BATCH / max(num_sequences, 1), 1.0))
        self._cost_s = 0.0

    def mind(
        self, free: Sequence[Seat], now_s: float, table: Table, rate: float, *, has_drifted: bool
    ) -> None:
        """Note the arms in use; begin a probe of one that is not, if its time has come. `rate` is how
        many tokens a second the plan brings."""
        if has_drifted:
            self.probes.hasten(now_s)
        arms = table.prices.arms
        used = {(arms[seat.arm - 1].method, seat.label) for seat in free if seat.arm}
        # What is known in hindsight needs no probe, also of requests too young to have been looked at.
        self._told |= {(counts.method, seat.label) for seat in free for counts in seat.hindsight}
        used |= self._told
        if 2 * sum(seat.arm > 0 for seat in free) <= len(free):
            used.add(_PLAIN)
        for key in used:
            self.probes.in_use(key, now_s)
        if self.is_active or self.probes.credit_s <= 0:
            return
        if _PLAIN not in used and self.probes.is_due(_PLAIN, now_s) and _may_all(free):
            self.plain_left = _STEPS
            self.probes.begin(_PLAIN, now_s)
            return
        for label in {seat.label for seat in free}:
            for number, arm in enumerate(arms):
                idle: ArmKey = (arm.method, label)
                if idle not in used and self.probes.is_due(idle, now_s):
                    seats = [seat for seat in free if seat.label == label]
                    self._trial = self._begin(number, seats, len(free), table, rate)
                    if self._trial is not None:
                        self.probes.begin(idle, now_s)
                        return
                    self.probes.put_off(idle, now_s)

    def is_plain(self, free: Sequence[Seat]) -> bool:
        """Whether this step is one of a probe of plain decoding. That ends when somebody comes who may
        not be tried on."""
        if self.plain_left > 0 and not _may_all(free):
            self.plain_left = 0
        return self.plain_left > 0

    def decode_plainly(self, free: Sequence[Seat], plan: Plan, table: Table, settled: Settled) -> None:
        """One step in which nobody drafts."""
        for seat in free:
            seat.granted = 0
        self.plain_left -= 1
        plain_s = settled.plain_s + settled.extra_s + table.prices.tokens_s(settled.num_sequences)
        tokens = settled.num_tokens + len(free)
        self._cost_s = max(plain_s - tokens / plan.rate, 0.0) if plan.rate > 0 else 0.0

    def _begin(
        self, number: int, seats: Sequence[Seat], batch: int, table: Table, rate: float
    ) -> _Trial | None:
        """As many sequences as can be afforded, for what a full batch costs is not told by one of
        them; then as many steps and as deep. None where even the least is too much."""
        arm = table.prices.arms[number]
        seats = [
            seat
            for seat in seats
            if seat.view.policy.may_probe
            and seat.view.num_remaining_tokens >= _MIN_TOKENS
            and table.is_open(seat, number)
        ]
        seats.sort(key=lambda seat: seat.view.num_tokens)  # the shortest to read for a drafter
        deepest = arm.first + arm.depth - 1
        # Deep drafts take longer, shallow ones forgo more tokens.
        least = (_Trial(seats[:1], number, column, _MIN_STEPS) for column in {arm.first, deepest})
        if min(self._whole_s(trial, batch, table, rate) for trial in least) > self.probes.credit_s:
            return None  # as most often: an account is empty until it has earned a probe
        trial = _Trial(seats, number, deepest, _MIN_STEPS)
        while trial.seats and self._whole_s(trial, batch, table, rate) > self.probes.credit_s:
            if len(trial.seats) > 1:
                trial.seats = trial.seats[: len(trial.seats) // 2]
            elif trial.column > arm.first:
                trial.column -= 1
            else:
                return None
        while trial.seats and trial.left < _STEPS:
            trial.left += 1
            if self._whole_s(trial, batch, table, rate) > self.probes.credit_s:
                trial.left -= 1
                break
        return trial if trial.seats else None

    def _whole_s(self, trial: _Trial, batch: int, table: Table, rate: float) -> float:
        """What the probe costs, reading the contexts included."""
        method = table.prices.arms[trial.number].method
        read = sum(seat.view.num_tokens for seat in trial.seats if not seat.loaded[trial.number])
        return trial.left * self._step_s(trial, batch, table, rate) + catch_up_s(table.step, method, read)

    def _step_s(self, trial: _Trial, batch: int, table: Table, rate: float) -> float:
        """What one of its steps costs: seconds more than as planned, and tokens fewer (more of them are a
        hope). What the planned drafts' calls would have cost is left out: others may share them."""
        arm, column = table.prices.arms[trial.number], trial.column
        drafted = instead = fewer = 0.0
        seconds = arm.calls_s(column - arm.first + 1, len(trial.seats))
        for seat in trial.seats:
            row, planned = seat.row, seat.column
            drafted += table.drafted.item(row, column)
            instead += table.drafted.item(row, planned)
            seconds += table.extra_s.item(row, column) - table.extra_s.item(row, planned)
            fewer += table.tokens.item(row, planned) - table.tokens.item(row, column)
        seconds += table.prices.tokens_s(batch + drafted) - table.prices.tokens_s(batch + instead)
        if rate > 0:
            seconds += max(fewer, 0.0) / rate
        return max(seconds, 0.0)

    def grant(self, plans: dict[str, SpecPlan], batch: int, table: Table, step: int, rate: float) -> None:
        """One more step of the probe that goes on, if one does."""
        trial = self._trial
        if trial is None:
            return
        tried, trial.seats = trial.seats, []
        for seat in tried:
            seat.granted = seat.arm
            if seat.last_seen == step and seat.arm != trial.number + 1 and table.is_open(seat, trial.number):
                trial.seats.append(seat)
        if not trial.seats or trial.left <= 0:
            self._trial = None
            return
        arm = table.prices.arms[trial.number]
        plan = SpecPlan(arm.method, trial.column - arm.first + 1, reason=Reason.EXPLORATION.value)
        for seat in trial.seats:
            plans[seat.view.seq_id] = plan
            seat.granted = trial.number + 1
        trial.left -= 1
        self._cost_s = self._step_s(trial, batch, table, rate)


def _may_all(seats: Sequence[Seat]) -> bool:
    return all(seat.view.policy.may_probe for seat in seats)
