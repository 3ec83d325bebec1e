"""The planner that runs inside the engine process: what each sequence may draft in the coming step.

Before there is a latency model it follows what was decided per request. With one, requests that
nobody fixed get what makes the step most useful (see `step_choice`), whatever they began with.
Fixed are overrides, arms of a rollout, explorations while they last, and everything under the kill
switch. No clock and no randomness: the step's own time is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.spec.planner import SequenceView, SpecPlan, StepView
from engine.types import BASELINE
from specgate.policy.naps import Naps
from specgate.policy.probing import Probing
from specgate.policy.reasons import Reason
from specgate.policy.seats import Seat, Table
from specgate.policy.shut import Shut, ShutList
from specgate.policy.step_choice import Choices, Plan, Settled, solve
from specgate.policy.view import ModelView

_LOOK_EVERY = 8  # steps between two looks at probes,
_REFRESH_EVERY = 16  # and at what requests themselves have shown
_SOLVE_EVERY = 32  # steps for which a plan is kept at most
_MOST_ROWS = 16  # computed anew in one step
_SAME_RATE = 2e-3  # by which the rate may still move where a plan is kept
_ROUNDS_NEW = 2  # of the price, when the batch is another
# Margins that a step's drafts must bring: to begin with, and where the last step had some; one more in a
# large batch. Of 3 to 5 % predicted for ten and more nothing was left when measured: there each step has news
# to plan for, a percent or two of it (LOG.md).
_TO_START, _TO_STAY = 2.0, 1.0
_LARGE, _STAYS_LARGE = 9, 12  # apart, so that one request more or fewer does not turn drafts on and off
# Of the batch, that may come or go before all are weighed anew: where some draft, and where nobody does.
_MOST_JOINED, _MOST_JOINED_PLAIN = 1 / 8, 1 / 2


class StepPlanner:
    """Implements `engine.spec.planner.SpecPlanner`."""

    def __init__(self) -> None:
        self._forced: str | None = None
        self._shut = ShutList()
        self._table: Table | None = None
        self._seats: dict[str, Seat] = {}
        self._free_rows: list[int] = []
        self._new: list[Seat] = []  # without a row yet
        self._dirty: list[Seat] = []  # whose rows are out of date
        self._is_urgent = False  # they are to be computed at once
        self._methods: frozenset[str] = frozenset()  # loaded
        self._probing = Probing()
        self._num_drifts = 0
        self._has_drifted = False
        self._last: tuple[float, Plan] | None = None  # when the step before was planned, and its plan
        self._rate = 0.0
        self._batch: list[Seat] = []  # free to choose, in the step before
        self._num_steps = 0
        self._step = 0  # the engine's, of the call before
        self._has_slept = False  # it may have, since then
        self._naps = Naps()
        self._num_passed = 1  # steps since the call before
        self._num_decoding = 0  # in that call
        self._is_plain = True  # nobody drafts: it would bring too little
        self._num_joined = 0  # came or went since all were weighed
        self._plans: list[SpecPlan] = []  # by column
        self._steady: tuple[Plan, dict[str, SpecPlan]] | None = None  # holds until something changes

    # --- what comes from outside -----------------------------------------------------------

    def set_shut(self, entries: Iterable[Shut]) -> None:
        """What the guards have shut: from the next step on those policies draft nothing."""
        self._shut = ShutList(entries)
        self._dirty = list(self._seats.values())
        self._is_urgent = bool(self._dirty)
        self._has_slept |= self.is_asleep
        self._naps.end()

    def set_force(self, policy: str | None) -> None:
        """The kill switch: from the next step on every sequence runs under `policy`; None lifts it."""
        self._forced = policy
        self._naps.end()

    def update(self, state: Mapping[str, Any]) -> None:
        """A fresh `ModelView`, as sent by the gateway. Raises ValueError for anything else."""
        self.use(ModelView.from_wire(state))

    def use(self, view: ModelView) -> None:
        """Plan by this from the next step on."""
        self._naps.end()
        self._probing.probes.share = view.planner.probe_share
        self._has_drifted |= view.num_drifts > self._num_drifts
        self._num_drifts = view.num_drifts
        self._methods = frozenset(view.methods)
        if view.step is None or view.step.num_steps == 0 or view.planner.is_following:
            self._table = None
            return
        self._steady = None
        old, self._table = self._table, Table(view)
        arms = self._table.prices.arms
        if old is None or [(a.method, a.depth) for a in old.prices.arms] != [
            (a.method, a.depth) for a in arms
        ]:
            self._seats.clear()
            self._free_rows.clear()
            self._new, self._dirty = [], []
            self._batch = []
            self._rate = 0.0
            self._is_plain = True
            self._probing.forget()
            named = [SpecPlan(BASELINE, 0, reason=Reason.PREDICTED_FASTEST.value)]
            for arm in arms:
                named += [
                    SpecPlan(arm.method, depth, reason=Reason.PREDICTED_FASTEST.value)
                    for depth in range(1, arm.depth + 1)
                ]
            self._plans = named
            return
        self._table.need(len(self._seats) + len(self._free_rows))
        seats = list(self._seats.values())
        for seat in seats:
            column = seat.column
            self._table.place(seat)
            self._table.enforce(seat, column)
        if seats:
            self._table.fill(seats, self._shut, self._num_steps)
        self._new, self._dirty, self._is_urgent = [], [], False

    @property
    def is_asleep(self) -> bool:
        """Every method is shut for everybody, as under load, until it is told otherwise."""
        if self._table is None or not self._table.num_arms:
            return False  # then what was assigned is followed, and doors may open for it
        return all(self._shut.is_for_all(method) for method in self._methods)

    def sleeps(self, step: int, num_sequences: int) -> bool:
        """See `engine.spec.planner.Sleeps`."""
        return self._naps.holds(step, num_sequences) or self.is_asleep

    def reason_asleep(self) -> str:
        """See `engine.spec.planner.Sleeps`. Where a guard has shut something, who it concerns is told so."""
        return "" if self._shut else Reason.PREDICTED_FASTEST.value

    def stands(self, step: int) -> bool:
        """See `engine.spec.planner.Sleeps`."""
        return self._naps.keeps(step)

    # --- planning --------------------------------------------------------------------------

    def plan(self, view: StepView) -> Mapping[str, SpecPlan]:
        """Absent sequences decode plainly, as they did; a plan of zero tokens says why they do now."""
        table = self._table
        self._num_passed = max(view.step - self._step, 1) if self._has_slept else 1
        self._step, self._has_slept = view.step, self.is_asleep
        self._naps.end()
        self._num_steps += self._num_passed
        if table is None or self._forced is not None or not table.num_arms:
            self._last = self._steady = None
            self._is_plain = True
            for seat in self._seats.values():
                seat.granted = 0  # by this planner
            return self._follow(view.sequences)
        self._probing.account(view.now_s, self._last, self._num_passed, self._num_decoding)
        self._num_decoding = len(view.sequences)
        self._last = None
        free, fixed = self._take_seats(view, table)
        plans = self._follow_fixed(fixed) if fixed else {}
        if not free:
            self._last = None
            return plans
        is_fresh = self._refresh(table)
        is_same, self._batch = free == self._batch, free
        has_prompts = view.num_prefill_tokens > 0
        is_calm = not fixed and not self._probing.plain_left and not (has_prompts and not self._is_plain)
        if is_calm and self._steady is not None and not self._passes(_SOLVE_EVERY):
            plan, kept = self._steady  # nothing that was weighed is another now ..
            if is_same:
                plans = kept.copy()
            else:  # .. but that some came or went
                plan, plans = self._join(free, kept, view, table)
            if plans:
                self._last = (view.now_s, plan)
                self._end_step(free, plans, view, table)
                if is_same and not has_prompts and not self._probing.is_active:
                    self._naps.keep(view.step)
                    self._has_slept = True
                return plans
        self._steady, self._num_joined = None, 0
        rows = table.rows([seat.row for seat in free])
        settled = table.settle(view.sequences, [self._seats[sequence.seq_id] for sequence in fixed])
        if has_prompts and self._rate > 0:
            # Prompts make this step long whatever is drafted; a second is worth what it always is.
            prices = table.prices
            chosen = rows.choose(prices, settled.shared, self._rate, prices.mixed_token_s)
            plan = rows.cost(prices, chosen, settled)
            plan = self._unless_too_little(plan, rows, settled, table)
        else:
            rate, is_new = self._rate, is_fresh or not is_same
            plan = solve(rows, table.prices, settled, rate, _ROUNDS_NEW if is_new else 1)
            plan = self._unless_too_little(plan, rows, settled, table)
            self._rate = plan.rate
            is_calm = is_calm and (is_new or abs(plan.rate - rate) <= _SAME_RATE * rate)
        self._last = (view.now_s, plan)
        if self._probing.is_plain(free):
            self._probing.decode_plainly(free, plan, table, settled)
            return plans
        named, step = self._plans, self._num_steps
        for seat, column in zip(free, plan.column, strict=True):
            plan_now = named[column]
            if column != seat.column or not seat.is_planned:
                plan_now = self._leaving(seat, column, table) or plan_now
                self._switch(seat, column, table, step)
            seat.granted = seat.arm
            plans[seat.view.seq_id] = plan_now
        if is_calm and (self._is_plain or not has_prompts):
            self._steady = (plan, plans.copy())
        self._end_step(free, plans, view, table)
        return plans

    def _unless_too_little(self, plan: Plan, rows: Choices, settled: Settled, table: Table) -> Plan:
        """Plain decoding for all, where the drafts of a whole step promise too little.

        Planning, looking up and verifying take a percent or two that no draft is charged with, and prices are
        wrong by as much; and while nobody drafts the planner need not be asked.
        """
        if not plan.num_drafted:
            self._is_plain = True
            return plan
        plain = rows.cost(table.prices, [0] * len(rows.tokens), settled)
        num_margins, large = (_TO_START, _LARGE) if self._is_plain else (_TO_STAY, _STAYS_LARGE)
        least = table.margin * (num_margins + (settled.num_sequences >= large))
        self._is_plain = plan.rate < (1 + least) * plain.rate
        return plain if self._is_plain else plan

    def _join(
        self, free: list[Seat], kept: dict[str, SpecPlan], view: StepView, table: Table
    ) -> tuple[Plan, dict[str, SpecPlan]]:
        """Newcomers to a large batch choose, given what the others do: all of it is not to be weighed anew
        for each of them. No plans where it is time for that. (Where nobody drafts, steps that compute prompts
        are no others: the prompts make drafts dearer, not cheaper.)"""
        stay: list[Seat] = []
        come: list[Seat] = []
        for seat in free:
            (stay if seat.view.seq_id in kept else come).append(seat)
        self._num_joined += len(kept) - len(stay) + len(come)
        most = _MOST_JOINED_PLAIN if self._is_plain else _MOST_JOINED
        if self._num_joined > most * len(free):
            return Plan((), 0.0, 0.0, 0.0), {}
        settled = table.settle(view.sequences, stay)
        rows = table.rows([seat.row for seat in come])
        plan = solve(rows, table.prices, settled, self._rate, 1)
        if self._is_plain:
            plan = self._unless_too_little(plan, rows, settled, table)
            if plan.num_drafted:  # that changes the step for all
                self._is_plain = True
                return Plan((), 0.0, 0.0, 0.0), {}
        self._rate = plan.rate
        plans = {seat.view.seq_id: kept[seat.view.seq_id] for seat in stay}
        for seat, column in zip(come, plan.column, strict=True):
            plan_now = self._leaving(seat, column, table) or self._plans[column]
            self._switch(seat, column, table, self._num_steps)
            seat.granted = seat.arm
            plans[seat.view.seq_id] = plan_now
        self._steady = (plan, plans.copy())
        return plan, plans

    def _end_step(self, free: list[Seat], plans: dict[str, SpecPlan], view: StepView, table: Table) -> None:
        """Probes come on top of a plan. Where neither brings a draft, the next steps need no plan."""
        if self._has_drifted or self._passes(_LOOK_EVERY, _LOOK_EVERY // 2):
            self._probing.mind(free, view.now_s, table, self._rate, has_drifted=self._has_drifted)
            self._has_drifted = False
        self._probing.grant(plans, len(view.sequences), table, self._num_steps, self._rate)
        if not self._is_plain:
            self._naps.forget()
        elif not self._probing.is_active and not any(plan.max_draft_tokens for plan in plans.values()):
            self._has_slept |= self._naps.begin(view.step, len(view.sequences))

    def _passes(self, every: int, at: int = 0) -> bool:
        """Whether one of the steps since the call before is the `at`th of `every`."""
        first = self._num_steps - self._num_passed - at
        return (first + self._num_passed) // every > first // every

    def _follow(self, sequences: Iterable[SequenceView]) -> dict[str, SpecPlan]:
        """What each was assigned, but for the kill switch and closed doors."""
        plans: dict[str, SpecPlan] = {}
        for sequence in sequences:
            assigned = sequence.policy
            if assigned.num_speculative_tokens <= 0:
                continue
            if self._forced is not None and assigned.method != self._forced:
                plans[sequence.seq_id] = SpecPlan(BASELINE, 0, reason=Reason.KILL_SWITCH.value)
                continue
            shut = self._shut.refusal(assigned.method, sequence.label, assigned)
            if shut is not None:
                plans[sequence.seq_id] = SpecPlan(BASELINE, 0, reason=shut.reason.value)
                continue
            reason = Reason.OVERRIDE if assigned.is_exact else Reason.RULE
            if assigned.hold_steps:
                reason = Reason.EXPLORATION
            plans[sequence.seq_id] = SpecPlan(
                assigned.method, assigned.num_speculative_tokens, reason=reason.value
            )
        return plans

    def _follow_fixed(self, fixed: Iterable[SequenceView]) -> dict[str, SpecPlan]:
        plans = self._follow(fixed)
        for sequence in fixed:
            plan = plans.get(sequence.seq_id)
            if plan is None or not plan.max_draft_tokens:  # a door is shut
                self._seats[sequence.seq_id].granted = 0
        return plans

    def _take_seats(self, view: StepView, table: Table) -> tuple[list[Seat], list[SequenceView]]:
        """Those that are free to choose, and those whose choice is fixed."""
        seats, step, dirty = self._seats, self._num_steps, self._dirty
        free: list[Seat] = []
        fixed: list[SequenceView] = []
        for sequence in view.sequences:
            seat, num_passed = seats.get(sequence.seq_id), self._num_passed
            if seat is None:
                seat, num_passed = self._sit(sequence, table), 1
            else:
                seat.view = sequence
                if seat.granted and seat.last_seen == step - num_passed:
                    is_news = seat.note(sequence, num_passed)
                else:
                    is_news = False
                    if sequence.num_drafts != seat.num_drafts:
                        seat.skip(sequence)
                if sequence.in_hindsight is not seat.hindsight:
                    is_news |= seat.look_back(sequence, table.arm_of)
                if is_news:
                    dirty.append(seat)
            seat.last_seen = step
            if seat.is_fixed:
                fixed.append(sequence)
                seat.granted = 0
            elif seat.hold_left > 0:
                seat.hold_left = max(seat.hold_left - num_passed, 0)
                seat.is_planned = True
                fixed.append(sequence)
                seat.granted = seat.arm
            else:
                free.append(seat)
        if len(seats) > 2 * len(view.sequences) + 16:
            self._clear_away(step)
        return free, fixed

    def _sit(self, sequence: SequenceView, table: Table) -> Seat:
        row = self._free_rows.pop() if self._free_rows else len(self._seats)
        table.need(row + 1)
        seat = Seat(sequence, row, table.num_arms)
        table.place(seat)
        if self._num_passed > 1 and sequence.num_output_tokens > 1:  # it came in a nap
            table.enforce(seat, 0)
            seat.is_planned = True
        seat.look_back(sequence, table.arm_of)
        self._seats[sequence.seq_id] = seat
        self._new.append(seat)
        return seat

    def _clear_away(self, step: int) -> None:
        """Forget sequences that have ended."""
        for seq_id in [name for name, seat in self._seats.items() if seat.last_seen < step]:
            seat = self._seats.pop(seq_id)
            self._free_rows.append(seat.row)
            self._probing.forget([seat])
        self._new = [seat for seat in self._new if seat.last_seen >= step]
        self._dirty = [seat for seat in self._dirty if seat.last_seen >= step]

    def _refresh(self, table: Table) -> bool:
        """Rows of new seats at once; of the others when enough have something new to say. True: some had."""
        if self._new:
            table.fill(self._new, self._shut, self._num_steps)
            self._new = []
        if not self._dirty or not (self._is_urgent or self._passes(_REFRESH_EVERY)):
            return False
        dirty = list(dict.fromkeys(self._dirty))
        # No more than fits into a step, if they can wait for their turn.
        num = len(dirty) if self._is_urgent else _MOST_ROWS
        self._dirty = dirty[num:]
        table.fill(dirty[:num], self._shut, self._num_steps, is_whole=self._is_urgent)
        self._is_urgent = False
        self._steady = None
        return True

    def _leaving(self, seat: Seat, column: int, table: Table) -> SpecPlan | None:
        """The plan of a sequence whose method was shut, with the guard's reason; None: it was not."""
        if column or not seat.arm:
            return None
        method = table.prices.arms[seat.arm - 1].method
        shut = self._shut.refusal(method, seat.label, seat.view.policy)
        return None if shut is None else SpecPlan(BASELINE, 0, reason=shut.reason.value)

    def _switch(self, seat: Seat, column: int, table: Table, step: int) -> None:
        arm, is_first = seat.arm, not seat.is_planned
        table.enforce(seat, column)
        seat.is_planned = True
        if seat.arm != arm and not is_first:
            seat.changed_step = step
            seat.num_changes += 1
        if seat.arm != arm or is_first:
            table.set_penalty([seat], self._shut, step)
