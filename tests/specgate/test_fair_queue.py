"""Fairness between keys as properties of the queue alone."""

from __future__ import annotations

from fractions import Fraction
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specgate.fair_queue import FairQueue, Ticket

KEYS = ("a", "b", "c")


def test_one_request_is_not_behind_two_hundred_of_another_key() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.push(Ticket("many", 1))
    for _ in range(3):
        head = queue.next()
        assert head is not None
        queue.serve(head)
    single = Ticket("one", 1)
    assert queue.cost_ahead(single) <= 1
    queue.push(single)
    ahead = 0
    while (head := queue.next()) is not single:
        assert head is not None
        queue.serve(head)
        ahead += 1
    assert ahead <= 1


def test_priority_comes_before_fairness_and_order_settles_the_rest() -> None:
    queue = FairQueue()
    tickets = [Ticket("a", 1, priority=1), Ticket("b", 1), Ticket("a", 1), Ticket("a", 1, priority=-1)]
    for ticket in tickets:
        queue.push(ticket)
    served = []
    while (head := queue.next()) is not None:
        queue.serve(head)
        served.append(tickets.index(head))
    assert served == [3, 1, 2, 0]


def test_a_key_at_its_own_limit_holds_nobody_up_and_saves_nothing_up() -> None:
    queue = FairQueue()
    for key in ("held", "free") * 20:
        queue.push(Ticket(key, 1))
    for _ in range(10):
        head = queue.next(lambda ticket: ticket.key != "held")
        assert head is not None
        assert head.key == "free"
        queue.serve(head)
    order = []
    for _ in range(8):
        head = queue.next()
        assert head is not None
        queue.serve(head)
        order.append(head.key)
    assert 3 <= order.count("held") <= 5


@settings(max_examples=150, deadline=None)
@given(
    weights=st.tuples(*[st.sampled_from([1, 2, 5])] * 3),
    costs=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 8)), min_size=60, max_size=90),
    num_served=st.integers(1, 50),
)
def test_keys_that_wait_all_along_get_service_by_weight(
    weights: tuple[int, ...], costs: list[tuple[str, int]], num_served: int
) -> None:
    """The bound of start-time fair queueing, for every pair and every prefix."""
    weight = dict(zip(KEYS, weights, strict=True))
    queue = FairQueue()
    for key, cost in costs:
        queue.push(Ticket(key, cost, weight[key]))
    got = dict.fromkeys(KEYS, Fraction(0))
    most = {key: max((c for k, c in costs if k == key), default=0) for key in KEYS}
    for _ in range(num_served):
        head = queue.next()
        assert head is not None
        queue.serve(head)
        got[head.key] += Fraction(head.cost, weight[head.key])
        waiting = [key for key in KEYS if queue.num_of(key)]
        for one in waiting:
            for other in waiting:
                bound = Fraction(most[one], weight[one]) + Fraction(most[other], weight[other])
                assert abs(got[one] - got[other]) <= bound


class QueueMachine(RuleBasedStateMachine):
    """Any order of pushing, serving and dropping: nobody is lost, doubled, or passed for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: list[Ticket] = []
        self.numbers = count()

    @rule(key=st.sampled_from(KEYS), cost=st.integers(1, 4), priority=st.integers(-1, 1))
    def push(self, key: str, cost: int, priority: int) -> None:
        ticket = Ticket(key, cost, weight=1 + KEYS.index(key), priority=priority)
        ahead = self.queue.cost_ahead(ticket)
        assert 0 <= ahead <= sum(t.cost for t in self.waiting)
        self.queue.push(ticket)
        self.waiting.append(ticket)

    @precondition(lambda self: self.waiting)
    @rule(held=st.sampled_from([*KEYS, ""]))
    def serve(self, held: str) -> None:
        head = self.queue.next(lambda ticket: ticket.key != held)
        able = [t for t in self.waiting if t.key != held]
        assert (head is None) == (not able)
        if head is not None:
            best = min(t.priority for t in able)
            first = [t for t in able if t.key == head.key and t.priority == best]
            assert first[0] is head  # within key and priority: in order of arrival
            self.queue.serve(head)
            self.waiting.remove(head)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        assert self.queue.drop(ticket)
        assert not self.queue.drop(ticket)
        self.waiting.remove(ticket)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.queue) == len(self.waiting)
        for key in KEYS:
            assert self.queue.num_of(key) == sum(t.key == key for t in self.waiting)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
