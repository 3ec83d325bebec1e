"""The learner: predicted before learned, views, lengths, exploration credit, and state over restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.types import BASELINE, DraftWork, MethodCounts, SamplingParams, SequenceStats, StepRecord
from router_models.types import AcceptanceKey
from specgate.config import LearningConfig, PolicyConfig
from specgate.learning import Learner
from specgate.model_store import ModelStore, fingerprint
from specgate.policy.decide import is_cold
from specgate.policy.view import ModelView
from specgate.scores import ScoreWindow
from specgate.types import (
    Decision,
    GenerationRequest,
    LengthEstimate,
    LoadView,
    Prediction,
    RequestOutcome,
    TaskEstimate,
    Timings,
)

CHAT = TaskEstimate("chat", 0.9)


def record(
    number: int, seconds: float, *, batch: int = 1, drafts: int = 0, prompt: int = 0, **changes: Any
) -> StepRecord:
    work = (DraftWork("draft", drafts, batch, drafts * batch, 0, 100, 0.003 * drafts),) if drafts else ()
    tokens = batch * (1 + drafts) + prompt
    base = StepRecord(
        number, number * 1.0, seconds, "decode", batch, batch, tokens, prompt, 100 * batch, tokens, 0, batch,
        0.0, 0.003 * drafts, seconds, 0.0, drafts=work,
    )  # fmt: skip
    return replace(base, **changes)


def request(**changes: Any) -> GenerationRequest:
    base: dict[str, Any] = {
        "request_id": "r", "endpoint": "chat", "model": "m", "sampling": SamplingParams(temperature=0.0),
        "messages": ({"role": "user", "content": "hi"},),
    }  # fmt: skip
    return GenerationRequest(**(base | changes))


def outcome(
    counts: tuple[MethodCounts, ...] = (), *, output: int = 40, task: TaskEstimate = CHAT, **changes: Any
) -> RequestOutcome:
    decision = Decision(
        "draft", "predicted_fastest", 5, False, task, LengthEstimate(50, 90), LoadView(),
        Prediction(50.0, 20.0, 900.0, 50.0),
    )  # fmt: skip
    stats = SequenceStats(num_prompt_tokens=60, num_output_tokens=output, by_method=counts)
    base = RequestOutcome(request(), decision, "ok", 60, output, Timings(0.01, 0.1, 1.0, 0.02), (stats,))
    return replace(base, **changes)


def trained() -> Learner:
    learner = Learner(PolicyConfig(), LearningConfig())
    learner.set_methods({"draft": 5})
    for number in range(200):
        depth, batch = (0, 2, 5)[number % 3], 1 + number % 4
        seconds = 0.02 + 0.001 * batch * (1 + depth) + 0.003 * depth
        learner.stepped(record(number, seconds, batch=batch, drafts=depth))
    for _ in range(30):
        learner.learn(outcome((MethodCounts("draft", 20, 20, 100, (16, 12, 9, 7, 5), (20,) * 5),)))
    learner.refresh()
    return learner


def test_typical_requests_are_known_with_what_the_cache_leaves_of_their_prompts() -> None:
    learner = Learner(PolicyConfig(), LearningConfig())
    done = outcome()
    learner.learn(replace(done, stats=(replace(done.stats[0], num_cached_tokens=45),)))
    learner.refresh()
    traffic = learner.view.traffic
    assert (traffic.prompt_tokens, traffic.computed_tokens) == (60, 15)
    learner.learn(replace(done, stats=()))  # of a backend that does not tell
    learner.refresh()
    assert learner.view.traffic.computed_tokens == 15


def test_steps_are_scored_on_predictions_made_before_they_were_learned() -> None:
    told: list[tuple[str, float, float]] = []
    learner = Learner(PolicyConfig(), LearningConfig(), lambda *prediction: told.append(prediction))
    learner.stepped(record(0, 0.02))
    assert told == []  # nothing was known, so nothing was predicted
    learner.stepped(record(1, 0.05))
    model, predicted_s, measured_s = told[0]
    assert model == "step_latency"
    assert predicted_s == pytest.approx(0.02, abs=0.002)
    assert measured_s == 0.05


def test_a_record_that_cannot_be_is_left_out_and_learning_goes_on() -> None:
    learner = trained()
    before = learner.view.step
    learner.stepped(record(300, -1.0))
    learner.refresh()
    assert learner.view.step == before
    assert learner.steps.scores()["decode"].r2 is not None


def test_warm_up_steps_teach_but_are_not_scored() -> None:
    learner = Learner(PolicyConfig(), LearningConfig())
    for number in range(50):
        learner.stepped(record(number, 0.02, is_warm_up=True))
    learner.refresh()
    assert learner.steps.scores()["decode"].num == 0
    assert not is_cold(learner.experience(CHAT, 10, LoadView()))


def test_the_view_has_curves_by_task_and_band_and_travels() -> None:
    view = trained().view
    keys = {(c.key.policy, c.key.task, c.key.band) for c in view.curves}
    assert {("draft", "chat", "greedy"), ("draft", None, "greedy"), ("draft", None, "warm")} <= keys
    chat = next(c for c in view.curves if c.key.task == "chat")
    assert chat.expected_tokens[2] == pytest.approx(1 + 0.8 + 0.6, abs=0.25)
    assert ModelView.from_wire(json.loads(json.dumps(view.to_wire()))) == view
    assert not trained().refresh()  # nothing new


def test_mixed_tasks_teach_only_the_average() -> None:
    learner = trained()
    mixed = TaskEstimate("code_edit", 0.3, is_mixed=True)
    learner.learn(outcome((MethodCounts("draft", 9, 9, 45, (9,) * 5, (9,) * 5),), task=mixed))
    learner.refresh()
    assert "code_edit" not in {c.key.task for c in learner.view.curves}


def test_counts_that_cannot_be_are_left_out() -> None:
    learner = trained()
    learner.learn(outcome((MethodCounts("draft", 1, 5, 25, (9,), (5,)),)))
    assert learner.view.num_steps["draft"] > 0


def test_lengths_keep_to_limits_and_follow_what_is_asked() -> None:
    learner = trained()

    def length(text: str, room: int = 4000, **sampling: Any) -> LengthEstimate:
        asked = request(
            messages=({"role": "user", "content": text},),
            sampling=SamplingParams(temperature=0.0, **sampling),
        )
        return learner.length(asked, CHAT, 20, room)

    assert length("Write a story of 800 words.").p50 > 2 * length("Write a story.").p50
    assert length("hi", room=7).p90 <= 7
    assert length("hi", min_tokens=900).p50 == 900
    assert length("hi", room=64, ignore_eos=True) == LengthEstimate(64, 64)


def test_exploring_is_paid_for_out_of_the_engines_time() -> None:
    learner = Learner(PolicyConfig(explore_share=0.01), LearningConfig())
    start_s = learner.explore_credit_s
    learner.decided(replace(outcome().decision, reason="exploration", explore_cost_s=0.4))
    assert learner.explore_credit_s == pytest.approx(start_s - 0.4)
    for number in range(50):
        learner.stepped(record(number, 1.0))
    assert learner.explore_credit_s == pytest.approx(start_s - 0.4 + 0.5)


def test_controls_wait_until_their_time_is_earned_and_cost_what_they_took() -> None:
    learner = Learner(PolicyConfig(explore_share=0.01), LearningConfig())
    assert learner.control_credit_s == 0
    for number in range(100):
        learner.stepped(record(number, 1.0))
    assert learner.control_credit_s == pytest.approx(1.0)
    chosen = outcome().decision
    control = replace(chosen, policy=BASELINE, reason="exploration", explore_cost_s=0.2)
    learner.decided(control)  # predicted to take 0.9 s instead of 0.7
    assert learner.control_credit_s == pytest.approx(0.8)
    learner.learn(outcome(decision=control, output=400, timings=Timings(0.01, 0.1, 9.0, 0.02)))
    assert learner.control_credit_s == pytest.approx(0.8)  # longer than expected, but at the pace predicted
    learner.learn(outcome(decision=control, timings=Timings(0.01, 0.1, 1.0, 0.03)))
    assert learner.control_credit_s == pytest.approx(0.8 - 0.01 * 49)  # 10 ms a token, 50 expected
    learner.learn(outcome(decision=control, timings=Timings(0.01, 0.1, 1.0, 0.001)))
    assert learner.control_credit_s == pytest.approx(1.0 - 0.01 * 49)  # given back, and no more than that
    learner.learn(outcome(decision=control, timings=Timings(0.01, 0.1, 1.0, 60.0)))
    assert learner.control_credit_s == pytest.approx(1.0 - 0.01 * 49 - 0.9)  # once the prediction at most
    learner.learn(outcome(decision=control, outcome="cancelled", timings=Timings(e2e_s=0.1)))
    assert learner.control_credit_s == pytest.approx(1.0 - 0.01 * 49 - 0.9)


def test_the_report_names_units_and_what_follows() -> None:
    report = trained().report(0.5)
    assert report["r2"] > 0.97
    assert report["mape"] < 0.1
    assert report["coefficients"]["c0"] == {
        "value": pytest.approx(0.02, rel=0.3), "unit": "s per decode step",
    }  # fmt: skip
    draft = report["derived"]["policies"]["draft"]
    assert {"C1_s", "C2_s", "C1R", "C2R", "r_star", "lam_max_per_s", "floor_tokens_by_batch"} <= set(draft)
    assert draft["floor_tokens_by_batch"]["1"] < draft["floor_tokens_by_batch"]["16"]


def test_state_survives_a_restart_and_a_broken_file_is_set_aside(tmp_path: Path) -> None:
    learner = trained()
    store = ModelStore(tmp_path, "org/model:1", "cpu-a")
    store.save(store.snapshot(learner), {"model": "m"})

    again = Learner(PolicyConfig(), LearningConfig())
    again.set_methods({"draft": 5})
    assert ModelStore(tmp_path, "org/model:1", "cpu-a").restore(again)
    again.refresh()
    assert again.view.step == learner.view.step
    assert {c.key: c for c in again.view.curves} == {c.key: c for c in learner.view.curves}
    assert again.length(request(), CHAT, 60, 500) == learner.length(request(), CHAT, 60, 500)

    store.path.write_text("{broken", encoding="utf-8")
    fresh = Learner(PolicyConfig(), LearningConfig())
    assert not ModelStore(tmp_path, "org/model:1", "cpu-a").restore(fresh)
    assert [p.name for p in tmp_path.glob("*.bad-*")]


def test_a_latency_model_belongs_to_its_setting_and_the_others_are_kept(tmp_path: Path) -> None:
    first = ModelStore(tmp_path, "m", "cpu-a")
    first.save(first.snapshot(trained()), {})
    other = ModelStore(tmp_path, "m", "cpu-b")
    learner = Learner(PolicyConfig(), LearningConfig())
    learner.set_methods({"draft": 5})
    assert not other.restore(learner)
    learner.refresh()
    assert learner.view.step is None
    assert learner.view.num_steps["draft"] > 0  # acceptance does not depend on the machine
    other.save(other.snapshot(learner), {})
    assert ModelStore(tmp_path, "m", "cpu-a").restore(Learner(PolicyConfig(), LearningConfig()))


def test_fingerprints_tell_settings_apart() -> None:
    plain = EngineConfig()
    assert fingerprint(plain) == fingerprint(EngineConfig(num_blocks=7))
    assert fingerprint(plain) != fingerprint(EngineConfig(dtype="int8"))
    assert fingerprint(EngineConfig(num_threads=1)) != fingerprint(EngineConfig(num_threads=2))


def test_scores_know_the_noise_of_equal_work() -> None:
    window = ScoreWindow()
    for number in range(100):
        actual = 0.1 * (1.05 if number % 2 else 0.95)
        window.add(0.1, actual, (1.0, 2.0))
    found = window.score()
    assert found.mape == pytest.approx(0.05, rel=0.05)
    assert found.repeat_mape == pytest.approx(0.1 / 2**0.5, rel=0.05)


def test_r2_is_not_told_of_outcomes_that_hardly_differ() -> None:
    alike, apart = ScoreWindow(), ScoreWindow()
    for number in range(100):
        alike.add(64.0, 64.0 if number else 60.0)
        apart.add(10.0 + number, 11.0 + number)
    assert alike.score().r2 is None
    assert apart.score().r2 == pytest.approx(0.999, abs=0.001)


def test_what_would_have_been_drafted_teaches_like_what_was() -> None:
    learner = Learner(PolicyConfig(), LearningConfig())
    learner.set_methods({"ngram": 4})
    told = MethodCounts("ngram", 40, 40, 160, (36, 33, 30, 27), (40,) * 4)
    done = outcome()
    stats = tuple(replace(one, in_hindsight=(told,)) for one in done.stats)
    before = learner.acceptance_model.num_steps("ngram")
    learner.learn(replace(done, stats=stats))
    assert learner.acceptance_model.num_steps("ngram") == before + 40
    curve = learner.acceptance_model.predict_one(AcceptanceKey("ngram", "chat", "greedy"))
    assert curve.expected_tokens[4] > 3
