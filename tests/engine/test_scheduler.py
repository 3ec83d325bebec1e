"""The scheduler under random arrivals, aborts and outcomes: sound accounts, nothing starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kv.block_manager import BlockManager
from engine.scheduler import ScheduledStep, Scheduler
from engine.sequence import Sequence
from engine.types import EngineRequest, PolicyAssignment, SamplingParams


def make_sequence(
    arrival: int,
    prompt: list[int],
    scheduler: Scheduler,
    *,
    max_tokens: int = 8,
    priority: int = 0,
    salt: str = "",
    is_exact: bool = False,
) -> Sequence:
    request = EngineRequest(
        f"r{arrival}",
        tuple(prompt),
        SamplingParams(max_tokens=max_tokens),
        PolicyAssignment("stub", 4, is_exact),
        priority=priority,
        cache_salt=salt,
    )
    return Sequence(
        request, arrival=arrival, arrived_s=0.0, eos_token_ids=frozenset(), context_limit=scheduler.capacity
    )


def make_scheduler(num_blocks: int = 32, budget: int = 16, max_sequences: int = 8) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, 4), max_batch_tokens=budget, max_sequences=max_sequences)


def advance(scheduler: Scheduler, step: ScheduledStep, accept: dict[str, int] | None = None) -> None:
    """Play the engine: commit chunks; of each draft window, accept what is said, else nothing."""
    for index, seq in enumerate(step.sequences):
        if index not in step.deciding:
            scheduler.commit(seq, seq.num_computed + step.num_new[index])
            continue
        num_accepted = min((accept or {}).get(seq.seq_id, 0), step.max_draft[index])
        num_before = len(seq.token_ids)
        kept, reason = seq.cut((1,) * (num_accepted + 1))
        seq.append((1,) * kept)
        scheduler.commit(seq, min(num_before + num_accepted, len(seq.token_ids)))
        if reason is not None:
            scheduler.remove(seq)


def numbers(step: ScheduledStep) -> list[tuple[str, int, int]]:
    return [(s.seq_id, n, d) for s, n, d in zip(step.sequences, step.num_new, step.max_draft, strict=True)]


def test_chunks_decodes_and_windows_share_one_budget() -> None:
    scheduler = make_scheduler(budget=10)
    first = make_sequence(0, list(range(6)), scheduler)
    scheduler.add(first)
    advance(scheduler, scheduler.schedule({}))
    scheduler.add(make_sequence(1, list(range(50, 80)), scheduler))
    step = scheduler.schedule({"r0": 9})
    assert numbers(step) == [("r0", 1, 4), ("r1", 5, 0)]  # 1 + half of the other 9, rounded for the prompt
    assert step.num_decodes == 1
    advance(scheduler, step)
    step = scheduler.schedule({"r0": 2})
    assert numbers(step) == [("r0", 1, 2), ("r1", 7, 0)]


def test_windows_get_what_prompts_leave() -> None:
    scheduler = make_scheduler(budget=12)
    scheduler.add(make_sequence(0, list(range(6)), scheduler, max_tokens=12))
    advance(scheduler, scheduler.schedule({}))
    scheduler.add(make_sequence(1, [9, 9], scheduler))
    assert numbers(scheduler.schedule({"r0": 9})) == [("r0", 1, 9), ("r1", 2, 0)]


def test_windows_shrink_equally_and_exact_ones_last() -> None:
    scheduler = make_scheduler(budget=11)
    for index, is_exact in enumerate([False, False, True]):
        scheduler.add(make_sequence(index, [index], scheduler, is_exact=is_exact, max_tokens=20))
    advance(scheduler, scheduler.schedule({}))
    step = scheduler.schedule({"r0": 6, "r1": 1, "r2": 5})
    assert numbers(step) == [("r0", 1, 2), ("r1", 1, 1), ("r2", 1, 5)]


def test_window_ends_with_the_room_for_output() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(0, [5], scheduler, max_tokens=3)
    scheduler.add(seq)
    advance(scheduler, scheduler.schedule({}))
    assert numbers(scheduler.schedule({"r0": 4})) == [("r0", 1, 1)]  # 2 to go: 1 draft token and the bonus
    advance(scheduler, scheduler.schedule({"r0": 0}))
    assert numbers(scheduler.schedule({"r0": 4})) == [("r0", 1, 0)]


def test_a_window_never_preempts() -> None:
    """Nor does it take the last free blocks, for want of which the next step would."""
    scheduler = make_scheduler(num_blocks=6, budget=64)
    for index in range(2):
        scheduler.add(make_sequence(index, [index] * 3, scheduler, max_tokens=9))
    for _ in range(2):
        advance(scheduler, scheduler.schedule({}))
    assert [len(seq.token_ids) for seq in scheduler.running] == [5, 5]
    step = scheduler.schedule({"r0": 9, "r1": 9})
    assert scheduler.blocks.num_free == 2
    assert [d for _, _, d in numbers(step)] == [3, 3]  # to the end of the blocks they hold
    assert not step.preempted


def test_the_newest_of_the_lowest_priority_gives_way() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=64)
    order = [(0, 5), (1, 0), (2, 5)]  # arrival, priority
    for arrival, priority in order:
        scheduler.add(make_sequence(arrival, [arrival] * 4, scheduler, max_tokens=16, priority=priority))
        advance(scheduler, scheduler.schedule({}))
    preempted = []
    while not preempted:
        step = scheduler.schedule({})
        preempted = [seq.seq_id for seq in step.preempted]
        advance(scheduler, step)
    assert preempted == ["r2"]
    assert [seq.seq_id for seq in scheduler.running] == ["r1", "r0"]


def test_equal_prompts_wait_for_the_first_and_share_its_blocks() -> None:
    scheduler = make_scheduler(budget=64)
    prompt = list(range(14))
    for arrival in range(3):
        scheduler.add(make_sequence(arrival, prompt, scheduler))
    scheduler.add(make_sequence(3, prompt, scheduler, salt="another tenant"))
    step = scheduler.schedule({})
    assert [(s, n) for s, n, _ in numbers(step)] == [("r0", 14), ("r3", 14)]
    advance(scheduler, step)
    step = scheduler.schedule({})
    assert [(s, n) for s, n, _ in numbers(step)] == [("r0", 1), ("r3", 1), ("r1", 2), ("r2", 2)]
    assert scheduler.running[1].block_table[:3] == scheduler.running[0].block_table[:3]
    assert scheduler.running[1].counters.num_cached_tokens == 12


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests over a two-letter alphabet, aborts at any moment, random draft outcomes."""

    @initialize(num_blocks=st.integers(6, 20), budget=st.integers(1, 24), max_sequences=st.integers(1, 6))
    def start(self, num_blocks: int, budget: int, max_sequences: int) -> None:
        self.scheduler = make_scheduler(num_blocks, budget, max_sequences)
        self.live: dict[str, Sequence] = {}
        self.num_added = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=22),
        max_tokens=st.integers(0, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "b"]),
    )
    def add(self, prompt: list[int], max_tokens: int, priority: int, salt: str) -> None:
        seq = make_sequence(
            self.num_added, prompt, self.scheduler, max_tokens=max_tokens, priority=priority, salt=salt
        )
        self.num_added += 1
        self.live[seq.seq_id] = seq
        self.scheduler.add(seq)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.live:
            seq_id = data.draw(st.sampled_from(sorted(self.live)))
            self.scheduler.remove(self.live.pop(seq_id))

    @rule(
        wanted=st.lists(st.integers(0, 6), min_size=6, max_size=6),
        accepted=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    )
    def step(self, wanted: list[int], accepted: list[int]) -> None:
        scheduler = self.scheduler
        decoding = [seq for seq in scheduler.running if seq.is_decoding]
        prefilling = [seq for seq in scheduler.running if not seq.is_decoding]
        grants = dict(zip((seq.seq_id for seq in decoding), wanted, strict=False))
        step = scheduler.schedule(grants)
        assert sum(step.num_new) + sum(step.max_draft) <= scheduler.max_batch_tokens
        assert bool(step.sequences) == bool(self.live)
        scheduled = {seq.seq_id for seq in step.sequences}
        assert len(scheduled) == len(step.sequences)
        for seq in decoding:  # a decode moves on in every step, or gave way to a better-placed one
            assert seq.seq_id in scheduled or seq in step.preempted
        survivors = [seq for seq in prefilling if seq not in step.preempted]
        if survivors:
            assert survivors[0].seq_id in scheduled
        for seq in step.preempted:
            assert seq.order >= max(other.order for other in scheduler.running)
        for seq, num_new, max_draft in zip(step.sequences, step.num_new, step.max_draft, strict=True):
            assert max_draft <= grants.get(seq.seq_id, 0)
            assert len(seq.token_ids) + max_draft + 1 <= max(seq.limit, len(seq.token_ids) + 1)
            assert len(seq.block_table) * 4 >= seq.num_computed + num_new + max_draft
        advance(scheduler, step, dict(zip((s.seq_id for s in step.sequences), accepted, strict=False)))
        gone = set(self.live) - {seq.seq_id for seq in scheduler.waiting + scheduler.running}
        for seq_id in gone:
            assert self.live.pop(seq_id).num_remaining <= 0

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert len(self.scheduler.running) <= self.scheduler.max_sequences
            for line in (self.scheduler.running, self.scheduler.waiting):
                assert line == sorted(line, key=lambda seq: seq.order)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(4000):
            if not self.live:
                break
            self.step([3] * 6, [1, 0, 2, 0, 6, 1])
        assert not self.live, "requests that never end"
        assert self.scheduler.blocks.num_used == 0
        self.scheduler.check_integrity()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_held_are_those_who_wait_for_an_end_and_not_for_the_next_step() -> None:
    def waiting(scheduler: Scheduler, lengths: list[int]) -> int:
        for arrival, length in enumerate(lengths):
            scheduler.add(make_sequence(arrival, [arrival] * length, scheduler))
        scheduler.schedule({})
        return len(scheduler.waiting)

    by_budget = make_scheduler(budget=8)
    assert (waiting(by_budget, [8, 5, 5]), by_budget.num_held) == (2, 0)
    by_places = make_scheduler(max_sequences=1, budget=100)
    assert (waiting(by_places, [8, 5, 5]), by_places.num_held) == (2, 2)
    by_blocks = make_scheduler(num_blocks=5, budget=100)
    assert (waiting(by_blocks, [12, 9, 5]), by_blocks.num_held) == (2, 2)
    for seq in list(by_places.running):
        by_places.remove(seq)
    by_places.schedule({})
    assert by_places.num_held == 1
