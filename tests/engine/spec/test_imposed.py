"""Imposed acceptance: as often right as said, the text untouched, the draft model's work done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import DraftModelConfig, EngineConfig, ImposedConfig
from engine.factory import build_drafters
from engine.models.tiny import tiny_model
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.imposed import ImposedDraftHead, ImposedDraftModel
from engine.types import SamplingParams
from tests.engine.harness import GREEDY, VOCAB, Run, drive, make_engine, prompt, request, target
from tests.engine.heads import tiny_head

NUM = 24
SIZES = {"num_blocks": 256, "block_size": 4}
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=NUM, ignore_eos=True)


def imposed(*acceptance: float) -> ImposedDraftModel:
    model = target()
    return ImposedDraftModel(model.first_layers(1), model.spec, DraftModelConfig(), acceptance, **SIZES)


def prompts(params: SamplingParams = GREEDY, policy: str = "draft", first: int = 0) -> list:
    params = replace(params, max_tokens=NUM)
    return [request(f"{policy}{first}{i}", prompt(i, 9 + i), params, policy) for i in range(12)]


def answers(run: Run) -> list[list[int]]:
    return [run.tokens()[key] for key in sorted(run.tokens())]


def acceptance(run: Run) -> list[float]:
    """Chance per position that a draft token is right given that those before were."""
    positions = [[0, 0] for _ in range(4)]
    for done in run.finished.values():
        assert done.stats is not None
        pairs = zip(done.stats.accepted_per_position, done.stats.drafted_per_position, strict=True)
        for position, (accepted, drafted) in enumerate(pairs):
            positions[position][0] += accepted
            positions[position][1] += drafted
    before = [positions[0][1]] + [accepted for accepted, _ in positions[:-1]]
    return [accepted / max(1, tried) for (accepted, _), tried in zip(positions, before, strict=True)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_the_first_time_it_listens_then_it_is_right_and_the_text_stays(params: SamplingParams) -> None:
    engine = make_engine({"draft": imposed(1.0)})
    plain = drive(make_engine(), prompts(params, "baseline"))
    first = drive(engine, prompts(params))
    second = drive(engine, prompts(params, first=1))
    assert answers(first) == answers(second) == answers(plain)
    assert all(done.stats.num_drafts == 0 for done in first.finished.values())
    for done in second.finished.values():
        assert done.stats.num_drafts > 0
        assert done.stats.num_accepted_tokens == done.stats.num_draft_tokens


def test_acceptance_is_what_was_imposed() -> None:
    engine = make_engine({"draft": imposed(0.8, 0.5)})
    many = [request(f"x{i}", prompt(i, 5 + i % 40), GREEDY, "draft") for i in range(120)]
    drive(engine, many)
    again = drive(engine, [replace(item, request_id=f"y{i}") for i, item in enumerate(many)])
    measured = acceptance(again)
    # Positions 2 and 3 follow the last value; the counts here leave a standard error below 0.03.
    assert measured[:3] == pytest.approx([0.8, 0.5, 0.5], abs=0.1)


def test_the_draft_models_forwards_are_run() -> None:
    runs = {}
    for name, drafter in {
        "imposed": imposed(1.0),
        "real": DraftModelDrafter(target(), target().spec, DraftModelConfig(), **SIZES),  # always right
    }.items():
        engine = make_engine({"draft": drafter}, max_batch_tokens=256)
        drive(engine, prompts())
        runs[name] = drive(engine, prompts(first=1))
    work = {
        name: [
            (w.num_calls, w.num_draft_tokens, w.num_accepted_tokens) for r in run.records for w in r.drafts
        ]
        for name, run in runs.items()
    }
    # The target as its own draft model is always right too; near an answer's end the truth runs out.
    half = len(work["real"]) // 2
    assert work["imposed"][:half] == work["real"][:half]


def test_unseeded_samples_get_no_draft() -> None:
    engine = make_engine({"draft": imposed(1.0)})
    params = SamplingParams(temperature=0.9, max_tokens=NUM, ignore_eos=True)
    for first in range(2):
        run = drive(engine, prompts(params, first=first))
        assert all(done.stats.num_drafts == 0 for done in run.finished.values())


def test_an_answer_that_goes_another_way_is_not_drafted_from_the_old_one() -> None:
    engine = make_engine({"draft": imposed(1.0)})
    drive(engine, prompts())
    biased = replace(GREEDY, max_tokens=NUM, logit_bias={5: 100.0})
    run = drive(engine, [replace(item, sampling=biased) for item in prompts(first=1)])
    assert all(set(tokens) == {5} for tokens in answers(run))


def test_it_is_built_where_the_config_says_so() -> None:
    draft = DraftModelConfig(layers_of_target=1)
    model = tiny_model(vocab_size=VOCAB, num_layers=2)
    config = EngineConfig(num_blocks=16, block_size=4, ngram=None, draft_model=draft)
    assert type(build_drafters(config, model)["draft"]) is DraftModelDrafter
    config = replace(config, imposed=ImposedConfig((0.5,)))
    assert type(build_drafters(config, model)["draft"]) is ImposedDraftModel


def test_a_draft_head_can_be_imposed_on() -> None:
    head = tiny_head(target())
    config = DraftModelConfig(num_speculative_tokens=4)
    drafter = ImposedDraftHead(head, config, [1.0], num_blocks=64, block_size=4)
    engine = make_engine({"draft": drafter})
    first, again = (drive(engine, prompts(first=n)) for n in range(2))
    assert all(done.stats.num_drafts == 0 for done in first.finished.values()), "it only listens"
    assert answers(again) == answers(first)
    assert all(
        done.stats.num_accepted_tokens == done.stats.num_draft_tokens > 0 for done in again.finished.values()
    )


@pytest.mark.parametrize("bad", [(), (1.5,), (-0.1, 0.5)])
def test_chances_are_probabilities(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        imposed(*bad)
