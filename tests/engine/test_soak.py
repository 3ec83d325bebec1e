"""Two thousand requests of every size, policy and sampling, cancelled at random: nothing is left."""

from __future__ import annotations

import random

import pytest

from engine.config import NgramConfig
from engine.models.tiny import tiny_model
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.ngram import NgramDrafter
from engine.types import EngineRequest, FinishReason, PolicyAssignment, SamplingParams
from tests.engine.harness import VOCAB, Run, all_drafters, make_engine

NUM_REQUESTS = 2000
POLICIES = ("baseline", "ngram", "draft", "draft_other", "wrong")


def random_question(rng: random.Random) -> tuple[tuple[int, ...], SamplingParams]:
    """A prompt and how to answer it. Mostly small, some at the limits; few stems, so that prefixes meet."""
    stem = (rng.randrange(3, VOCAB),) * rng.choice((0, 8, 30))
    own = tuple(rng.choices(range(3, 3 + rng.choice((2, 60))), k=rng.choice((1, 2, 5, 16, 40))))
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.8)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        seed=rng.choice((None, 5)),
        num_logprobs=rng.choice((None, None, 2)),
        has_prompt_logprobs=rng.random() < 0.05,
        max_tokens=rng.choice((0, 1, 2, 6, 12, 30, 1000)),
        min_tokens=rng.choice((0, 0, 4)),
        stop_token_ids=tuple(rng.sample(range(VOCAB), k=rng.choice((0, 6)))),
        ignore_eos=rng.random() < 0.5,
    )
    return stem + own, params


def random_request(
    rng: random.Random, name: str, question: tuple[tuple[int, ...], SamplingParams]
) -> EngineRequest:
    """The question under some policy, priority and salt."""
    policy = rng.choice(POLICIES)
    num = 0 if policy == "baseline" else rng.choice((1, 3, 5, 8))
    return EngineRequest(
        name,
        *question,
        PolicyAssignment(policy, num, rng.random() < 0.5),
        priority=rng.choice((0, 0, 0, 1)),
        cache_salt=rng.choice(("", "", "tenant")),
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_leaks_and_nothing_hangs(seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_model(vocab_size=VOCAB, num_layers=1, max_model_len=96)
    drafters = all_drafters({}, model)
    drafters["ngram"] = NgramDrafter(NgramConfig(prompt_lookup_min=1, prompt_lookup_max=3))
    engine = make_engine(
        drafters, model=model, num_blocks=90, max_sequences=24, max_batch_tokens=rng.choice((48, 160))
    )
    questions = [random_question(rng) for _ in range(200)]
    asked: dict[str, int] = {}
    run = Run()
    live: set[str] = set()
    num_added = num_cancelled = num_steps = 0
    while num_added < NUM_REQUESTS // 2 or engine.has_work:
        num_steps += 1
        assert num_steps < 6000, f"stuck: {sorted(live)}"
        for _ in range(min(rng.choice((0, 0, 1, 8)), NUM_REQUESTS // 2 - num_added)):
            name = f"{seed}-{num_added}"
            asked[name] = rng.randrange(len(questions))
            engine.add(random_request(rng, name, questions[asked[name]]))
            live.add(name)
            num_added += 1
        while live and rng.random() < 0.25:
            num_cancelled += engine.abort(rng.choice(sorted(live)))
        run.add_step(engine)
        live = set(engine.request_ids)
    engine.check_idle()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
    assert load.num_free_blocks == load.num_total_blocks
    for drafter in drafters.values():
        if isinstance(drafter, DraftModelDrafter | NgramDrafter):
            assert drafter.num_sequences == 0
        if isinstance(drafter, DraftModelDrafter):
            drafter.check_integrity()
            assert drafter.blocks.num_used == 0
    reasons = [item.finish_reason for item in run.finished.values()]
    assert len(reasons) == NUM_REQUESTS // 2
    assert reasons.count(FinishReason.ABORT) == num_cancelled > 50
    assert reasons.count(FinishReason.STOP) > 50
    assert reasons.count(FinishReason.LENGTH) > 50
    assert not any(record.drafter_errors or record.num_planner_errors for record in run.records)
    assert sum(record.num_preemptions for record in run.records) > 0
    check_answers(run, questions, asked)


def check_answers(
    run: Run, questions: list[tuple[tuple[int, ...], SamplingParams]], asked: dict[str, int]
) -> None:
    """Whatever happened around it, a greedy or seeded question has one answer, or a beginning of it."""
    answers: dict[int, list[int]] = {}
    num_compared = 0
    for name, item in run.finished.items():
        assert item.stats is not None
        assert item.stats.num_output_tokens == len(item.token_ids)
        _, params = questions[asked[name]]
        if not params.is_greedy and params.seed is None:
            continue
        answer = answers.setdefault(asked[name], item.token_ids)
        num_common = min(len(answer), len(item.token_ids))
        assert item.token_ids[:num_common] == answer[:num_common], name
        if item.finish_reason is not FinishReason.ABORT:
            assert len(item.token_ids) >= len(answer)
        num_compared += 1
        answers[asked[name]] = max(answer, item.token_ids, key=len)
    assert num_compared > 400
