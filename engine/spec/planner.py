"""The planner seam: who drafts how much in the coming step. Implemented outside the engine.

The engine calls `plan` before slots are reserved. A planner is fast (64 sequences in under
100 microseconds) and total: if it raises, the step runs without speculation and is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.types import MethodCounts, PolicyAssignment


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A decoding sequence, as the planner sees it."""

    seq_id: str
    policy: PolicyAssignment
    label: str
    temperature: float
    top_p: float
    num_tokens: int  # prompt and output so far
    num_output_tokens: int
    num_remaining_tokens: int  # until max_tokens or the context limit
    num_drafts: int  # so far, this request
    num_draft_tokens: int
    num_accepted_tokens: int
    last_method: str  # of the step before
    last_num_draft_tokens: int  # of the step before
    last_num_accepted_tokens: int
    in_hindsight: tuple[MethodCounts, ...] = ()  # another object whenever there is news
    num_granted_tokens: int = 0  # in those drafts, of which not all need be used; 0: as many as were drafted


@dataclass(frozen=True, slots=True)
class StepView:
    """The coming step. Prefilling sequences are not in `sequences` and do not count as batch."""

    step: int
    now_s: float
    sequences: tuple[SequenceView, ...]
    num_prefill_tokens: int  # prompt tokens still to be computed by running sequences
    num_waiting: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """What one sequence may draft this step. `width` above 1 asks for a tree.

    `reason` is recorded as a policy change when the method differs from the step before.
    """

    method: str
    max_draft_tokens: int
    width: int = 1
    reason: str = ""


class SpecPlanner(Protocol):
    """Grants draft tokens. A sequence that is absent from the answer decodes plainly."""

    def plan(self, view: StepView) -> Mapping[str, SpecPlan]: ...


class Sleeps(Protocol):
    """A planner that now and then knows its answer beforehand, so that a batch is not described to it for
    nothing: in a large one every tenth of a percent counts, and in a small one asking is some percent of a
    step."""

    def sleeps(self, step: int, num_sequences: int) -> bool:
        """True where it has nothing to grant in this step, with so many decoding, to anybody who was not
        pinned to a method. It is asked all the same while somebody is pinned, or has yet to be told and
        `reason_asleep` is empty."""
        ...

    def reason_asleep(self) -> str:
        """While it sleeps, why those who come decode plainly; empty: it has to be asked for each."""
        ...

    def stands(self, step: int) -> bool:
        """True where its last answer is also that for this step, if just the same sequences run and all of
        them decode."""
        ...


class FollowAssignment:
    """The simplest planner: every sequence gets the method and depth it was assigned."""

    def plan(self, view: StepView) -> Mapping[str, SpecPlan]:
        return {
            s.seq_id: SpecPlan(s.policy.method, s.policy.num_speculative_tokens)
            for s in view.sequences
            if s.policy.num_speculative_tokens > 0
        }
