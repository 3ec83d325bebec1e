"""What a drafter would have done is told by the text that came without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.spec.drafter import DraftContext, Drafter
from engine.spec.ngram import NgramDrafter
from engine.spec.suffix import SuffixDrafter
from engine.types import EngineRequest, PolicyAssignment
from tests.engine.harness import GREEDY, drive, make_engine, prompt, request

LONG = replace(GREEDY, max_tokens=120)


def free(name: str, **fields: object) -> EngineRequest:
    """A request that the planner may choose for, and that it lets decode plainly."""
    return EngineRequest(name, prompt(3, 20), replace(LONG, **fields), PolicyAssignment())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [NgramDrafter, SuffixDrafter])
def test_a_plain_request_says_what_a_drafter_would_have_done(kind: Callable[[], Drafter]) -> None:
    name = kind().name
    plain = drive(make_engine({name: kind()}), [free("a")])
    alone = drive(make_engine(), [free("a")])
    assert plain.tokens() == alone.tokens()
    stats = plain.finished["a"].stats
    assert stats is not None
    assert stats.num_drafts == 0
    (told,) = stats.in_hindsight
    depth = kind().num_speculative_tokens
    drafted = drive(make_engine({name: kind()}), [request("a", prompt(3, 20), LONG, name, depth)])
    done = drafted.finished["a"].stats
    assert done is not None
    (seen,) = done.by_method
    # The last look is some tokens before the end, and begins one token late.
    assert told.method == name
    assert 0 < told.num_steps <= seen.num_steps + 1
    assert told.num_steps >= 0.5 * seen.num_steps  # the longer the answer, the rarer the looks
    accepted = sum(told.accepted_per_position) / told.num_steps
    assert accepted == pytest.approx(sum(seen.accepted_per_position) / seen.num_steps, abs=0.35)


@pytest.mark.parametrize("policy", [PolicyAssignment(is_exact=True), PolicyAssignment(is_pinned=True)])
def test_nobody_looks_back_at_what_is_fixed(policy: PolicyAssignment) -> None:
    fixed = EngineRequest("a", prompt(3, 20), LONG, policy)
    stats = drive(make_engine({"ngram": NgramDrafter()}), [fixed]).finished["a"].stats
    assert stats is not None
    assert stats.in_hindsight == ()


def test_sampled_requests_of_a_batch_take_turns() -> None:
    asked = [free(f"r{i}", temperature=1.0, seed=i) for i in range(6)]
    run = drive(make_engine({"ngram": NgramDrafter()}), asked)
    looked_at = [done.stats is not None and bool(done.stats.in_hindsight) for done in run.finished.values()]
    assert sum(looked_at) >= 4


class Broken(NgramDrafter):
    """Cannot look back."""

    def hindsight(self, context: DraftContext, start: int) -> tuple[list[tuple[int, int]], int]:
        raise RuntimeError("no memory of that")


def test_a_drafter_that_fails_to_look_back_is_counted_and_costs_no_text() -> None:
    run = drive(make_engine({"ngram": Broken()}), [free("a")])
    assert run.tokens() == drive(make_engine(), [free("a")]).tokens()
    errors = [error for record in run.records for error in record.drafter_errors]
    assert errors
    assert {error.kind for error in errors} == {"exception"}
