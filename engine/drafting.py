"""Drafters as the engine uses them: grouped by method, checked, and never able to hurt a request.

A drafter that raises, runs out of memory or answers rubbish costs its sequences the draft of
that step. The failure is counted under its kind; the drafter forgets the sequence and begins
anew the next time it is asked. One that is too slow is counted as well, though what it drafted is
used: by then it is paid for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from engine.scheduler import ScheduledStep
from engine.sequence import Sequence
from engine.spec.drafter import DraftContext, Drafter, KnowsInHindsight, ReadsHidden
from engine.spec.faults import find_faults
from engine.spec.planner import SpecPlan
from engine.spec.tree import EMPTY_TREE, DraftTree
from engine.types import DrafterError, DraftWork

_Result = TypeVar("_Result")


class Drafting:
    """The loaded drafters and what they did in the current step."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        clock: Callable[[], float],
        timeout_s: float = math.inf,
    ) -> None:
        self.drafters = dict(drafters)
        self._vocab_size = vocab_size
        self._clock = clock
        self._timeout_s = timeout_s
        self._work: dict[str, DraftWork] = {}
        # By method: length of the sequences that wait for their first draft; what was read for such so far.
        self._unread: dict[str, dict[str, int]] = {}
        self._first_fill: dict[str, int] = {}
        self._errors: list[DrafterError] = []

    @property
    def num_hidden_rows(self) -> int:
        """How many of a sequence's newest hidden states the drafters need; 0: none reads them."""
        readers = [d for d in self.drafters.values() if isinstance(d, ReadsHidden)]
        return max((reader.num_hidden_rows for reader in readers), default=0)

    def propose(self, step: ScheduledStep, plans: Mapping[str, SpecPlan]) -> list[DraftTree]:
        """One tree per scheduled sequence, empty where none was granted or the drafter failed."""
        groups: dict[str, list[int]] = {}
        for index, max_draft in enumerate(step.max_draft):
            if max_draft > 0:
                method = plans[step.sequences[index].seq_id].method
                groups.setdefault(method, []).append(index)
        trees = [EMPTY_TREE] * len(step.sequences)
        for method, indices in groups.items():
            started_s = self._clock()
            contexts = [_context(step.sequences[i], step.max_draft[i]) for i in indices]
            sequences = [step.sequences[i] for i in indices]
            proposed = self._propose_with(method, sequences, contexts)
            for index, tree in zip(indices, proposed, strict=True):
                trees[index] = tree
            seconds = self._clock() - started_s
            if seconds > self._timeout_s:
                allowed = f"allowed are {self._timeout_s:g} s"
                self._fail(method, "timeout", f"{seconds:.2f} s for a step; {allowed}")
            num_granted = sum(context.max_draft_tokens for context in contexts)
            self._count(method, sequences, proposed, seconds, num_granted)
        return trees

    def observe(self, seq: Sequence, method: str, token_ids: tuple[int, ...], num_accepted: int) -> None:
        """Tell every drafter that follows `seq` what was committed; `method` drafted, or nobody did."""
        for name in sorted(seq.drafters):
            drafter = self.drafters[name]
            own = num_accepted if name == method else 0
            num_errors = len(self._errors)
            self._guarded(name, partial(drafter.observe, seq.seq_id, token_ids, own))
            if len(self._errors) > num_errors:
                self._forget(name, [seq])
        if num_accepted:
            work = self._work[method]
            self._work[method] = replace(work, num_accepted_tokens=work.num_accepted_tokens + num_accepted)

    def look_back(
        self, method: str, drafter: KnowsInHindsight, seq: Sequence, start: int, depth: int
    ) -> tuple[list[tuple[int, int]], int] | None:
        """See `KnowsInHindsight.hindsight`; `seq` may be new to the drafter. None if it failed."""

        def answer() -> tuple[list[tuple[int, int]], int]:
            self._begin(method, seq)
            return drafter.hindsight(_context(seq, depth), start)

        told = self._guarded(method, answer)
        if told is None:
            self._forget(method, [seq])
        return told

    def end(self, seq: Sequence) -> None:
        """`seq` is over or preempted: all drafters forget it."""
        for name in sorted(seq.drafters):
            self._forget(name, [seq])

    def replace(self, drafters: Mapping[str, Drafter], sequences: Iterable[Sequence]) -> None:
        """Have these from now on. One that goes forgets the sequences first."""
        running = list(sequences)
        for name, drafter in list(self.drafters.items()):
            if drafters.get(name) is not drafter:
                self._forget(name, [seq for seq in running if name in seq.drafters])
        self.drafters.clear()
        self.drafters.update(drafters)

    def drop_work(self) -> None:
        """The step failed and will have no record. Errors stay for the next one's report."""
        self._work = {}

    def take_report(self) -> tuple[tuple[DraftWork, ...], tuple[DrafterError, ...]]:
        """Work and errors since the last call."""
        report = tuple(self._work.values()), tuple(self._errors)
        self._work = {}
        self._errors = []
        return report

    def _propose_with(
        self, method: str, sequences: Seq[Sequence], contexts: Seq[DraftContext]
    ) -> list[DraftTree]:
        drafter = self.drafters[method]

        def propose() -> list[DraftTree]:
            for seq in sequences:
                self._begin(method, seq)
            return list(drafter.propose(contexts))

        trees = self._guarded(method, propose)
        if trees is not None and len(trees) != len(contexts):
            self._fail(method, "invalid_draft", f"{len(trees)} trees for {len(contexts)} contexts")
            trees = None
        if trees is None:
            self._forget(method, sequences)
            return [EMPTY_TREE] * len(contexts)
        granted = [context.max_draft_tokens for context in contexts]
        # The target's forward takes chains.
        faults = find_faults(trees, granted, self._vocab_size, are_chains=True)
        for index, fault in faults.items():
            self._fail(method, fault.kind, fault.message)
            self._forget(method, [sequences[index]])
        return [EMPTY_TREE if index in faults else tree for index, tree in enumerate(trees)]

    def _begin(self, method: str, seq: Sequence) -> None:
        if method not in seq.drafters:
            seq.drafters.add(method)
            self._unread.setdefault(method, {})[seq.seq_id] = len(seq.token_ids)
            self.drafters[method].begin(seq.seq_id, seq.token_ids)

    def _count(
        self,
        method: str,
        sequences: Seq[Sequence],
        trees: Seq[DraftTree],
        seconds: float,
        num_granted: int,
    ) -> None:
        work = self._guarded(method, self.drafters[method].work) or (0, 0)
        num_fill = work[2] if len(work) > 2 else 0
        unread = self._unread.get(method, {})
        if any(seq.seq_id in unread for seq in sequences):
            self._first_fill[method] = self._first_fill.get(method, 0) + num_fill
        drafted = [seq.seq_id for seq, tree in zip(sequences, trees, strict=True) if len(tree)]
        first = [seq_id for seq_id in drafted if seq_id in unread]
        self._work[method] = DraftWork(
            method=method,
            num_calls=work[0],
            num_sequences=len(sequences),
            num_draft_tokens=sum(map(len, trees)),
            num_kv_tokens=work[1],
            num_fill_tokens=num_fill,
            seconds=seconds,
            num_begun_tokens=sum(unread.pop(seq_id) for seq_id in first),
            num_begun_fill=self._first_fill.pop(method, 0) if first else 0,
            num_granted_tokens=num_granted,
        )
        for seq in sequences:
            seq.counters.draft_s += seconds / len(sequences)

    def _forget(self, method: str, sequences: Seq[Sequence]) -> None:
        drafter = self.drafters[method]
        for seq in sequences:
            seq.drafters.discard(method)
            self._unread.get(method, {}).pop(seq.seq_id, None)
            self._guarded(method, partial(drafter.end, seq.seq_id))

    def _guarded(self, method: str, call: Callable[[], _Result]) -> _Result | None:
        """The call's result, or None after counting its failure."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  a drafter may fail in any way; its requests go on
            self._fail(method, failure_kind(error), f"{type(error).__name__}: {error}")
            return None

    def _fail(self, method: str, kind: str, message: str) -> None:
        self._errors.append(DrafterError(method, kind, message))


def failure_kind(error: Exception) -> str:
    """oom for every way to run out of memory, else exception."""
    is_oom = isinstance(error, MemoryError | torch.OutOfMemoryError)
    # The CPU allocator raises a plain RuntimeError, whose words depend on the system.
    return "oom" if is_oom or "DefaultCPUAllocator" in str(error) else "exception"


def _context(seq: Sequence, max_draft_tokens: int) -> DraftContext:
    assert seq.sampling is not None
    params = seq.request.sampling
    return DraftContext(
        seq_id=seq.seq_id,
        token_ids=seq.token_ids,
        prompt_length=seq.prompt_length,
        max_draft_tokens=max_draft_tokens,
        temperature=0.0 if params.is_greedy else params.temperature,
        last_hidden=None if seq.hidden is None else seq.hidden.newest,
        hidden=seq.hidden,
        generator=seq.sampling.key,
        cache_salt=seq.request.cache_salt,
        label=seq.request.label,
    )
