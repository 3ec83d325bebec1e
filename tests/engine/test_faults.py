"""What fails around a request costs speed, or that request; never the others, never the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch

from engine.errors import RequestRefused
from engine.models.llama import CausalLM
from engine.models.tiny import tiny_model
from engine.spec.drafter import DraftContext
from engine.spec.planner import SpecPlan, StepView
from engine.spec.stub import StubDrafter, known_continuations
from engine.spec.tree import ROOT, DraftTree
from engine.types import BASELINE, EngineRequest, FinishReason, PolicyAssignment, SamplingParams
from tests.engine.harness import GREEDY, VOCAB, drive, make_engine, prompt, reference_greedy, request, target

PROMPT = prompt(21, 10)
UNIFORM = torch.full((2, VOCAB), 1 / VOCAB)


class FaultyDrafter(StubDrafter):
    """Right, but for the proposals that `fault` gets its hands on; counts its life-cycle calls."""

    def __init__(
        self, known: Mapping[tuple[int, ...], Sequence[int]], fault: Callable[[], DraftTree]
    ) -> None:
        super().__init__(known_continuations(known), VOCAB, name="faulty")
        self.fault = fault
        self.is_faulty = True
        self.held: set[str] = set()
        self.num_begins = 0

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        assert seq_id not in self.held
        self.held.add(seq_id)
        self.num_begins += 1

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        assert {context.seq_id for context in contexts} <= self.held
        trees = super().propose(contexts)
        self.is_faulty = not self.is_faulty
        if not self.is_faulty:
            trees[0] = self.fault()
        return trees

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        assert seq_id in self.held
        assert 0 <= num_accepted <= len(token_ids)

    def end(self, seq_id: str) -> None:
        self.held.discard(seq_id)


def _raise(error: Exception) -> DraftTree:
    raise error


def _nan() -> DraftTree:
    probs = UNIFORM.clone()
    probs[1, 3] = math.nan
    return DraftTree.chain((4, 5), probs)


FAULTS: dict[str, tuple[str, Callable[[], DraftTree]]] = {
    "raises": ("exception", lambda: _raise(RuntimeError("broken"))),
    "python memory": ("oom", lambda: _raise(MemoryError())),
    "device memory": ("oom", lambda: _raise(torch.OutOfMemoryError("CUDA out of memory"))),
    "cpu allocator": ("oom", lambda: cast(DraftTree, torch.empty(2**46))),
    "nothing at all": ("invalid_draft", lambda: cast(DraftTree, None)),
    "tensor as id": ("invalid_draft", lambda: DraftTree.chain((4, cast(int, torch.tensor(5))))),
    "too long": ("invalid_draft", lambda: DraftTree.chain((4,) * 9)),
    "negative id": ("invalid_draft", lambda: DraftTree.chain((4, -1))),
    "id outside the vocabulary": ("invalid_draft", lambda: DraftTree.chain((VOCAB,))),
    "fork": ("invalid_draft", lambda: DraftTree((4, 5), (ROOT, ROOT))),
    "fewer parents": ("invalid_draft", lambda: DraftTree((4, 5), (ROOT,))),
    "other vocabulary": ("invalid_draft", lambda: DraftTree.chain((4, 5), torch.full((2, 9), 1 / 9))),
    "too few rows": ("invalid_draft", lambda: DraftTree.chain((4, 5), UNIFORM[:1])),
    "no distribution": ("invalid_draft", lambda: DraftTree.chain((4, 5), UNIFORM * 2)),
    "negative probability": (
        "invalid_draft",
        lambda: DraftTree.chain((4, 5), UNIFORM + torch.tensor([0.5, -0.5] + [0.0] * (VOCAB - 2))),
    ),
    "impossible token": ("invalid_draft", lambda: DraftTree.chain((4, 5), torch.eye(VOCAB)[6:8])),
    "nan": ("nan", _nan),
}


def test_a_drafter_that_is_too_slow_is_counted_and_its_drafts_are_used() -> None:
    now = [0.0]

    class Slow(StubDrafter):
        def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
            now[0] += 0.6 if len(contexts) == 1 else 0.4
            return super().propose(contexts)

    known = {PROMPT: reference_greedy(target(), PROMPT, GREEDY.max_tokens)}
    drafter = Slow(known_continuations(known), VOCAB, name="slow")
    engine = make_engine({"slow": drafter}, clock=lambda: now[0], draft_timeout_s=0.5)
    run = drive(engine, [request("a", PROMPT, policy="slow")])
    assert run.finished["a"].token_ids == known[PROMPT]
    assert run.finished["a"].num_accepted_tokens > 0
    errors = [error for record in run.records for error in record.drafter_errors]
    drafted = [record for record in run.records if record.drafts]
    assert [(error.method, error.kind) for error in errors] == [("slow", "timeout")] * len(drafted)
    assert errors[0].message == "0.60 s for a step; allowed are 0.5 s"
    again = drive(engine, [request(name, PROMPT, policy="slow") for name in "bc"])
    quick = [record for record in again.records if record.drafts and record.drafts[0].num_sequences == 2]
    assert quick
    assert not any(record.drafter_errors for record in quick)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_draft_costs_that_step_its_draft(fault: str) -> None:
    kind, make_tree = FAULTS[fault]
    prompts = [PROMPT, prompt(22, 7)]
    known = {ids: reference_greedy(target(), ids, GREEDY.max_tokens) for ids in prompts}
    drafter = FaultyDrafter(known, make_tree)
    engine = make_engine({"faulty": drafter})
    requests = [request(f"{index}", ids, policy="faulty") for index, ids in enumerate(prompts)]
    run = drive(engine, [*requests, request("plain", PROMPT)])
    for index, ids in enumerate(prompts):
        assert run.finished[f"{index}"].token_ids == known[ids]
        assert run.finished[f"{index}"].num_accepted_tokens > 0  # between the faults it drafts on
    errors = [error for record in run.records for error in record.drafter_errors]
    assert errors
    assert {(error.method, error.kind) for error in errors} == {("faulty", kind)}
    assert all(error.message for error in errors)
    assert drafter.held == set()
    assert drafter.num_begins >= len(prompts) + len(errors) - 1  # anew after each fault


def test_a_wrong_number_of_trees_is_an_invalid_draft() -> None:
    class Short(StubDrafter):
        def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
            return []

    engine = make_engine({"short": Short(lambda context: (), VOCAB, name="short")})
    run = drive(engine, [request("a", PROMPT, policy="short")])
    assert run.finished["a"].token_ids == reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    assert {e.kind for record in run.records for e in record.drafter_errors} == {"invalid_draft"}


@pytest.mark.parametrize("method", ["begin", "observe", "end", "work"])
def test_life_cycle_calls_may_fail_too(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {PROMPT: reference_greedy(target(), PROMPT, GREEDY.max_tokens)}
    drafter = StubDrafter(known_continuations(known), VOCAB)
    monkeypatch.setattr(drafter, method, lambda *args: _raise(RuntimeError(f"{method} broke")))
    run = drive(make_engine({"stub": drafter}), [request("a", PROMPT, policy="stub")])
    assert run.finished["a"].token_ids == known[PROMPT]
    errors = [error for record in run.records for error in record.drafter_errors]
    assert {error.kind for error in errors} == {"exception"}
    assert f"{method} broke" in errors[0].message


class ScriptedPlanner:
    """Answers step n with `script[n]`: a plan for every sequence, or an error."""

    def __init__(self, script: Sequence[SpecPlan | Exception | None]) -> None:
        self.script = list(script)
        self.views: list[StepView] = []

    def plan(self, view: StepView) -> dict[str, SpecPlan]:
        self.views.append(view)
        answer = self.script.pop(0) if self.script else None
        if isinstance(answer, Exception):
            raise answer
        return {} if answer is None else {seq.seq_id: answer for seq in view.sequences}


def test_a_planner_that_fails_means_no_speculation_this_step() -> None:
    expected = reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    stub = StubDrafter(known_continuations({PROMPT: expected}), VOCAB)
    plan = SpecPlan("stub", 3)
    planner = ScriptedPlanner([plan, ValueError("no"), plan, SpecPlan("unheard of", 3), plan])
    run = drive(make_engine({"stub": stub}, planner), [request("a", PROMPT, policy="stub")])
    assert run.finished["a"].token_ids == expected
    decodes = run.records[1:]
    assert [record.num_planner_errors for record in decodes[:5]] == [0, 1, 0, 1, 0]
    assert [record.num_emitted_tokens for record in decodes[:5]] == [4, 1, 4, 1, 4]


def test_a_planner_that_keeps_failing_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    planner = ScriptedPlanner([ValueError("no"), ValueError("no"), ValueError("worse"), ValueError("worse")])
    stub = StubDrafter(known_continuations({}), VOCAB)
    run = drive(make_engine({"stub": stub}, planner), [request("a", PROMPT, policy="stub")])
    assert sum(record.num_planner_errors for record in run.records) == 4
    told = [record for record in caplog.records if record.name == "engine.planning"]
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["no", "worse"]


def test_the_planner_may_change_the_method_of_a_running_request() -> None:
    expected = reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    oracle = known_continuations({PROMPT: expected})
    drafters = {name: StubDrafter(oracle, VOCAB, name=name) for name in ("one", "two")}
    off = SpecPlan(BASELINE, 0, reason="load_guard")
    two = SpecPlan("two", 2, reason="predicted_fastest")
    planner = ScriptedPlanner([SpecPlan("one", 2), two, off, off, SpecPlan("one", 3)])
    run = drive(make_engine(drafters, planner), [request("a", PROMPT, policy="one", label="chat")])
    item = run.finished["a"]
    assert item.token_ids == expected
    assert item.stats is not None
    changes = [(change.token_index, change.policy, change.reason) for change in item.stats.policy_changes]
    assert changes == [(4, "two", "predicted_fastest"), (7, BASELINE, "load_guard"), (9, "one", "")]
    views = [view.sequences[0] for view in planner.views]
    assert [(v.last_method, v.last_num_draft_tokens, v.last_num_accepted_tokens) for v in views[:4]] == [
        (BASELINE, 0, 0),
        ("one", 2, 2),
        ("two", 2, 2),
        (BASELINE, 0, 0),
    ]
    assert [v.num_output_tokens for v in views[:5]] == [1, 4, 7, 8, 9]
    assert views[1].num_remaining_tokens == GREEDY.max_tokens - 4
    assert (views[1].label, views[1].num_drafts, views[1].num_draft_tokens) == ("chat", 1, 2)


class SleepyPlanner(ScriptedPlanner):
    """Asleep from its second answer on."""

    reason = ""

    def sleeps(self, step: int, num_sequences: int) -> bool:
        return len(self.views) > 1

    def stands(self, step: int) -> bool:
        return False

    def reason_asleep(self) -> str:
        return self.reason


def test_a_planner_that_sleeps_is_asked_only_where_somebody_drafts_or_is_pinned() -> None:
    expected = reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    oracle = known_continuations({PROMPT: expected})
    two, off = SpecPlan("stub", 2), SpecPlan(BASELINE, 0, reason="load_guard")
    planner = SleepyPlanner([two, two, off])
    engine = make_engine({"stub": StubDrafter(oracle, VOCAB)}, planner)
    run = drive(engine, [request("a", PROMPT, policy="stub")])
    assert len(planner.views) == 3  # the third told it that it drafts no more
    assert [record.num_emitted_tokens for record in run.records[1:4]] == [3, 3, 1]
    assert run.finished["a"].token_ids == expected
    pinned = EngineRequest("b", PROMPT, GREEDY, PolicyAssignment("stub", 2, is_pinned=True))
    planner.script = [off, off, two]
    drive(engine, [pinned])
    assert len(planner.views) > 6  # it had been turned off, and may be let in again at any time


def test_who_comes_while_the_planner_sleeps_decodes_plainly_and_is_told_why() -> None:
    expected = reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    planner = SleepyPlanner([SpecPlan(BASELINE, 0)] * 2)
    planner.reason = "predicted_fastest"
    engine = make_engine({"stub": StubDrafter(known_continuations({PROMPT: expected}), VOCAB)}, planner)
    drive(engine, [request("a", PROMPT)])
    num_asked = len(planner.views)
    free = EngineRequest("b", PROMPT, GREEDY, PolicyAssignment("stub", 2, is_exact=False))
    stats = drive(engine, [free]).finished["b"].stats
    assert stats is not None
    assert [(c.token_index, c.policy, c.reason) for c in stats.policy_changes] == [
        (1, BASELINE, "predicted_fastest")
    ]
    assert len(planner.views) == num_asked
    held = EngineRequest("c", PROMPT, GREEDY, PolicyAssignment("stub", 2, hold_steps=4))
    drive(engine, [held])
    assert len(planner.views) > num_asked  # what was promised is kept


class LastingPlanner(ScriptedPlanner):
    """Each answer of its stands for four steps. It may fail when asked whether it does."""

    breaks = False
    until = 0

    def plan(self, view: StepView) -> Mapping[str, SpecPlan]:
        self.until = view.step + 4
        return super().plan(view)

    def sleeps(self, step: int, num_sequences: int) -> bool:
        return False

    def stands(self, step: int) -> bool:
        if self.breaks:
            raise RuntimeError("stands")
        return step < self.until

    def reason_asleep(self) -> str:
        return ""


def test_an_answer_stands_while_the_same_sequences_decode() -> None:
    prompts = [PROMPT, tuple(reversed(PROMPT))]
    expected = {prompt: reference_greedy(target(), prompt, GREEDY.max_tokens) for prompt in prompts}
    oracle = known_continuations(expected)

    def run(planner: LastingPlanner) -> tuple[set[int], list[int]]:
        engine = make_engine({"stub": StubDrafter(oracle, VOCAB)}, planner)
        run = drive(engine, [request(name, p, policy="stub") for name, p in zip("ab", prompts, strict=True)])
        assert [run.finished[name].token_ids for name in "ab"] == list(expected.values())
        emitted = [r.num_emitted_tokens / r.num_decode_sequences for r in run.records if r.kind == "verify"]
        return {view.step for view in planner.views}, [round(each) for each in emitted]

    asked, emitted = run(LastingPlanner([SpecPlan("stub", 2)] * 99))
    broken = LastingPlanner([SpecPlan("stub", 2)] * 99)
    broken.breaks = True
    asked_always, emitted_always = run(broken)
    assert emitted == emitted_always
    assert set(emitted[:-1]) == {3}  # drafts go on in the steps for which it was not asked
    assert len(asked) < len(asked_always) / 2
    assert asked < asked_always


def test_what_was_granted_does_not_stand_for_a_drafter_that_is_gone() -> None:
    planner = LastingPlanner([SpecPlan("stub", 2)] * 99)
    expected = reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    engine = make_engine({"stub": StubDrafter(known_continuations({PROMPT: expected}), VOCAB)}, planner)
    engine.add(request("a", PROMPT, policy="stub"))
    results = [engine.step() for _ in range(3)]
    assert [r.record is not None and r.record.kind for r in results] == ["prefill", "verify", "verify"]
    engine.set_drafters({})
    results = [engine.step()]
    assert results[0].record is not None
    assert results[0].record.kind == "decode"


def test_a_request_that_allows_no_token_ends_alone() -> None:
    banned = SamplingParams(temperature=1.0, seed=1, logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    expected = reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    stub = StubDrafter(known_continuations({PROMPT: expected}), VOCAB)
    engine = make_engine({"stub": stub})
    requests = [request("a", PROMPT, policy="stub"), request("bad", PROMPT, banned), request("b", PROMPT)]
    run = drive(engine, requests)
    assert run.finished["bad"].finish_reason is FinishReason.ERROR
    assert run.finished["bad"].error
    assert run.finished["bad"].stats is not None
    assert run.finished["a"].token_ids == run.finished["b"].token_ids == expected


class FlakyModel(CausalLM):
    """The tiny target, whose forward fails when told to."""

    fail_next: Exception | None = None

    def forward(self, *args: object) -> torch.Tensor:
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error
        return super().forward(*args)  # type: ignore[arg-type]


def flaky_model() -> FlakyModel:
    model = tiny_model(vocab_size=VOCAB, max_model_len=256)
    model.__class__ = FlakyModel
    assert isinstance(model, FlakyModel)
    return model


def test_a_failed_step_ends_its_own_requests_and_no_others() -> None:
    model = flaky_model()
    engine = make_engine(model=model, max_sequences=2, max_batch_tokens=16)
    expected = reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    for name in ("a", "b", "later"):
        engine.add(request(name, (*PROMPT, ord(name[0]) % VOCAB)))
    engine.step()
    model.fail_next = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    result = engine.fail_step("out of memory")
    engine.check_integrity()
    assert {(o.request_id, o.finish_reason, o.error) for o in result.outputs} == {
        ("a", FinishReason.ERROR, "out of memory"),
        ("b", FinishReason.ERROR, "out of memory"),
    }
    run = drive(engine, [request("next", PROMPT)])
    assert run.finished["later"].finish_reason is FinishReason.LENGTH
    assert run.finished["next"].token_ids == expected


def test_a_drafters_error_is_not_lost_with_a_failed_step() -> None:
    model = flaky_model()
    known = {PROMPT: reference_greedy(target(), PROMPT, GREEDY.max_tokens)}
    drafter = FaultyDrafter(known, lambda: _raise(MemoryError()))
    engine = make_engine({"faulty": drafter}, model=model)
    engine.add(request("a", PROMPT, policy="faulty"))
    engine.step()
    model.fail_next = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    engine.fail_step("out of memory")
    record = drive(engine, [request("next", PROMPT)]).records[0]
    assert [(error.method, error.kind) for error in record.drafter_errors] == [("faulty", "oom")]
    assert record.drafts == ()


REFUSED = {
    "empty": (EngineRequest("r", ()), "prompt"),
    "token id": (EngineRequest("r", (1, VOCAB)), "prompt"),
    "negative id": (EngineRequest("r", (-1,)), "prompt"),
    "too long": (EngineRequest("r", (3,) * 256), "prompt"),
    "bias": (EngineRequest("r", (3,), SamplingParams(logit_bias={VOCAB: 1.0})), "logit_bias"),
    "stop": (EngineRequest("r", (3,), SamplingParams(stop_token_ids=(VOCAB,))), "stop_token_ids"),
    "temperature": (EngineRequest("r", (3,), SamplingParams(temperature=-1.0)), "temperature"),
    "nan": (EngineRequest("r", (3,), SamplingParams(temperature=math.nan)), "temperature"),
    "top_p": (EngineRequest("r", (3,), SamplingParams(top_p=0.0)), "top_p"),
    "repetition": (EngineRequest("r", (3,), SamplingParams(repetition_penalty=1e-40)), "repetition_penalty"),
    "policy": (EngineRequest("r", (3,), policy=PolicyAssignment("unheard of", 3)), "policy"),
    "depth": (EngineRequest("r", (3,), policy=PolicyAssignment(BASELINE, -1)), "num_speculative_tokens"),
    "twice": (EngineRequest("known", (3,)), "request_id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_never_run_is_refused_naming_the_field(case: str) -> None:
    bad, param = REFUSED[case]
    engine = make_engine()
    engine.add(request("known", PROMPT))
    with pytest.raises(RequestRefused) as caught:
        engine.add(bad)
    assert caught.value.param == param
    assert drive(engine, []).finished.keys() == {"known"}


def test_the_longest_prompt_is_served() -> None:
    engine = make_engine(num_blocks=10)  # 40 tokens, below the model's 256
    with pytest.raises(RequestRefused, match="40 tokens"):
        engine.add(request("a", prompt(1, 40)))
    item = drive(engine, [request("b", prompt(1, 39), replace(GREEDY, max_tokens=9))]).finished["b"]
    assert item.finish_reason is FinishReason.LENGTH
    assert len(item.token_ids) == 1
