"""Counting and timing: what goes into `SequenceStats` and `StepRecord`. Integers and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from engine.types import DeviceUse, MethodCounts, PolicyChange, SequenceOutput, SequenceStats, StepRecord

if TYPE_CHECKING:
    from engine.scheduler import ScheduledStep
    from engine.spec.tree import DraftTree


class _Draws:
    """One drafter's counts for one sequence."""

    __slots__ = ("accepted", "allowed", "drafted", "num_draft_tokens", "num_drafts", "num_steps", "refused")

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted: list[int] = []
        self.drafted: list[int] = []
        self.refused: list[int] = []
        self.allowed: list[int] = []

    def add(self, num_drafted: int, num_accepted: int, num_kept: int, num_allowed: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        # Behind a cut (nothing but accepted tokens was kept) it is unknown what would have stood.
        is_cut = num_kept <= num_accepted
        num_known = num_kept if is_cut else num_drafted
        num_allowed = num_kept if is_cut else max(num_allowed, num_drafted)
        for _ in range(len(self.allowed), num_allowed):
            self.drafted.append(0)
            self.accepted.append(0)
            self.refused.append(0)
            self.allowed.append(0)
        for depth in range(num_allowed):
            self.allowed[depth] += 1
        for depth in range(num_known):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < num_accepted
        if num_accepted < num_known:
            self.refused[num_accepted] += 1

    def freeze(self, method: str) -> MethodCounts:
        return MethodCounts(
            method=method,
            num_steps=self.num_steps,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            accepted_per_position=tuple(self.accepted),
            drafted_per_position=tuple(self.drafted),
            refused_per_position=tuple(self.refused),
            allowed_per_position=tuple(self.allowed),
        )


class _Use:
    """One method's device time for one sequence."""

    __slots__ = ("draft_s", "forward_s", "num_tokens", "prefill_s", "verify_s")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.draft_s = 0.0
        self.forward_s = 0.0
        self.verify_s = 0.0
        self.prefill_s = 0.0


class SequenceCounters:
    """The running counts of one sequence; `freeze` makes them a `SequenceStats`.

    When a stop token or a limit cuts an accepted block, what lies behind the cut was never
    emitted: it is left out of `num_accepted_tokens` and out of all per-position counts, since
    whether it would have stood says nothing a reader could check. `num_draft_tokens` is cost and
    counts every draft token that was verified.
    """

    __slots__ = (
        "_by_method",
        "_device",
        "_judged",
        "draft_s",
        "in_hindsight",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_drafts",
        "num_granted_tokens",
        "num_preemptions",
        "num_target_steps",
        "policy_changes",
    )

    def __init__(self) -> None:
        self.num_cached_tokens = 0
        self.num_target_steps = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_granted_tokens = 0  # in steps that had a draft
        self.num_accepted_tokens = 0
        self.num_preemptions = 0
        self.draft_s = 0.0
        self.policy_changes: list[PolicyChange] = []
        self.in_hindsight: tuple[MethodCounts, ...] = ()
        self._by_method: dict[str, _Draws] = {}
        self._judged: dict[str, _Draws] = {}
        self._device: dict[str, _Use] = {}

    def charge_decode(
        self, method: str, num_tokens: int, draft_s: float, forward_s: float, verify_s: float
    ) -> None:
        """A decode step in which `num_tokens` were emitted, and this sequence's shares of its time."""
        use = self._use_of(method)
        use.num_tokens += num_tokens
        use.draft_s += draft_s
        use.forward_s += forward_s
        use.verify_s += verify_s

    def charge_prefill(self, method: str, forward_s: float, verify_s: float) -> None:
        """A prompt chunk's shares of its step's time."""
        use = self._use_of(method)
        use.forward_s += forward_s
        use.verify_s += verify_s
        use.prefill_s += forward_s + verify_s

    def device(self) -> tuple[DeviceUse, ...]:
        """What was charged so far."""
        return tuple(
            DeviceUse(method, use.num_tokens, use.draft_s, use.forward_s, use.verify_s, use.prefill_s)
            for method, use in self._device.items()
        )

    def _use_of(self, method: str) -> _Use:
        use = self._device.get(method)
        if use is None:
            use = self._device[method] = _Use()
        return use

    def grant(self, method: str) -> None:
        """A target step in which `method` was allowed to draft, whether it found a draft or not."""
        self._of(method).num_steps += 1

    def add_draft(
        self, num_drafted: int, num_accepted: int, num_kept: int, method: str, num_allowed: int
    ) -> None:
        """One verified chain of `num_drafted` tokens, of `num_allowed` that were granted; `num_kept` tokens
        of the block were emitted."""
        self._of(method).add(num_drafted, num_accepted, num_kept, num_allowed)
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_granted_tokens += max(num_allowed, num_drafted)
        self.num_accepted_tokens += num_accepted

    def judge(self, method: str, drafts: Iterable[tuple[int, int]], num_allowed: int) -> None:
        """Steps that went by without `method`: (draft tokens it would have had, how many were right)."""
        draws = self._judged.setdefault(method, _Draws())
        for num_drafted, num_right in drafts:
            draws.num_steps += 1
            if num_drafted:
                draws.add(num_drafted, num_right, num_right + 1, num_allowed)
        self.in_hindsight = tuple(draws.freeze(name) for name, draws in self._judged.items())

    def _of(self, method: str) -> _Draws:
        draws = self._by_method.get(method)
        if draws is None:
            draws = self._by_method[method] = _Draws()
        return draws

    def freeze(self, *, num_prompt_tokens: int, num_output_tokens: int, queue_wait_s: float) -> SequenceStats:
        """The counts as they stand."""
        by_method = tuple(draws.freeze(method) for method, draws in self._by_method.items())
        accepted = _sum_by_depth(counts.accepted_per_position for counts in by_method)
        refused = _sum_by_depth(counts.refused_per_position for counts in by_method)
        decided = [a + r for a, r in zip(accepted, refused, strict=True)]
        num_decided = sum(1 for count in decided if count)  # depths further down were never come to
        return SequenceStats(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=num_output_tokens,
            num_target_steps=self.num_target_steps,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            accepted_per_position=tuple(accepted[:num_decided]),
            drafted_per_position=tuple(decided[:num_decided]),
            num_preemptions=self.num_preemptions,
            queue_wait_s=queue_wait_s,
            draft_s=self.draft_s,
            policy_changes=tuple(self.policy_changes),
            by_method=by_method,
            in_hindsight=self.in_hindsight,
            device=self.device(),
        )


def _sum_by_depth(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


class StepTimer:
    """Splits one step's time into named laps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.started_s = self._now_s = clock()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the lap before is called `name`."""
        before, self._now_s = self._now_s, self._clock()
        self.laps[name] = self._now_s - before

    def move(self, source: str, target: str, seconds: float | None) -> None:
        """Lap `target` lasted `seconds`, not what it took to launch: the rest came out of `source`."""
        if seconds is not None:
            both = self.laps[source] + self.laps[target]
            self.laps[target] = min(both, max(self.laps[target], seconds))
            self.laps[source] = both - self.laps[target]

    @property
    def total_s(self) -> float:
        """Seconds from the start to the last lap."""
        return self._now_s - self.started_s


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much the target's forward had to do."""

    num_tokens: int
    num_kv_tokens: int
    num_logits_rows: int
    num_window_kv_tokens: int


def record_step(
    number: int,
    step: ScheduledStep,
    trees: Sequence[DraftTree],
    sizes: StepSizes,
    outputs: Sequence[SequenceOutput],
    timer: StepTimer,
) -> StepRecord:
    """The record of a finished step, but for what drafters, planner and kernels add to it."""
    sampled = (1 + len(trees[i]) for i in step.deciding if not step.sequences[i].request.sampling.is_greedy)
    return StepRecord(
        step=number,
        started_s=timer.started_s,
        seconds=timer.total_s,
        kind=step_kind(step.num_prefill_tokens, step.num_decodes, sum(map(len, trees))),
        num_sequences=len(step.sequences),
        num_decode_sequences=step.num_decodes,
        num_tokens=sizes.num_tokens,
        num_prefill_tokens=step.num_prefill_tokens,
        num_kv_tokens=sizes.num_kv_tokens,
        num_logits_rows=sizes.num_logits_rows,
        num_sampled_rows=sum(sampled),
        num_emitted_tokens=sum(len(output.token_ids) for output in outputs),
        schedule_s=timer.laps["schedule"],
        draft_s=timer.laps["draft"],
        forward_s=timer.laps["forward"],
        verify_s=timer.laps["verify"],
        num_preemptions=len(step.preempted),
        num_window_kv_tokens=sizes.num_window_kv_tokens,
    )


def step_kind(num_prefill_tokens: int, num_decodes: int, num_draft_tokens: int) -> str:
    """prefill: prompt chunks only; mixed: chunks and decodes; verify: decodes with drafts; else decode."""
    if num_prefill_tokens:
        return "mixed" if num_decodes else "prefill"
    return "verify" if num_draft_tokens else "decode"
