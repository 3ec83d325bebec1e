"""Engines made from settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import DraftModelConfig, EngineConfig, HybridConfig, NgramConfig
from engine.engine import Engine
from engine.errors import DrafterMismatch, ModelSourceError
from engine.factory import build_drafters, build_engine
from engine.models.registry import load_model
from engine.models.tiny import tiny_spec
from engine.models.tiny_files import save_model, save_tiny_model
from engine.spec.hybrid import HybridDrafter
from engine.spec.planner import FollowAssignment
from tests.engine.harness import GREEDY, drive, request, target

SMALL = EngineConfig(num_blocks=64, block_size=16)


def test_the_configured_drafters_are_there() -> None:
    drafters = build_drafters(SMALL, target())
    assert {name: d.num_speculative_tokens for name, d in drafters.items()} == {"ngram": 4}
    config = replace(
        SMALL,
        ngram=NgramConfig(num_speculative_tokens=7),
        draft_model=DraftModelConfig(num_speculative_tokens=2, layers_of_target=1),
    )
    drafters = build_drafters(config, target())
    assert {name: d.num_speculative_tokens for name, d in drafters.items()} == {"ngram": 7, "draft": 2}
    assert build_drafters(replace(SMALL, ngram=None), target()) == {}


@pytest.mark.parametrize("shares", [False, True])
def test_a_hybrid_learns_from_past_outputs_only_where_that_is_wanted(shares: bool) -> None:
    config = replace(
        SMALL,
        draft_model=DraftModelConfig(layers_of_target=1),
        hybrid=HybridConfig(share_past_outputs=shares),
    )
    engine = Engine(
        config, target(), build_drafters(config, target()), FollowAssignment(), lambda: 0.0, lambda: 1
    )
    drive(engine, [request("a", [5, 6, 7, 8] * 4, GREEDY, "hybrid", cache_salt="tenant")])
    hybrid = engine.drafters["hybrid"]
    assert isinstance(hybrid, HybridDrafter)
    assert bool(hybrid.past.num_tokens) is shares


@pytest.mark.parametrize(
    "draft",
    [
        DraftModelConfig(),
        DraftModelConfig(source="x", layers_of_target=1),
        DraftModelConfig(layers_of_target=3),
    ],
)
def test_a_draft_model_that_cannot_be_is_refused(draft: DraftModelConfig) -> None:
    with pytest.raises(DrafterMismatch):
        build_drafters(replace(SMALL, draft_model=draft), target())


def test_a_draft_model_from_elsewhere_must_have_the_targets_tokens(tmp_path: Path) -> None:
    """Vocabularies of one size are not enough: an id has to mean the same to both."""
    target_folder, draft_folder = save_tiny_model(tmp_path / "t"), save_tiny_model(tmp_path / "d", seed=1)
    config = replace(SMALL, model=str(target_folder), draft_model=DraftModelConfig(source=str(draft_folder)))
    model = load_model(str(target_folder))
    assert set(build_drafters(config, model)) == {"ngram", "draft"}

    path = draft_folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(DrafterMismatch, match="'a'"):
        build_drafters(config, model)

    other = tiny_spec(vocab_size=model.spec.vocab_size + 1)
    save_model(draft_folder, other)
    path.unlink()  # without a tokenizer the size has to do
    with pytest.raises(DrafterMismatch, match="must share the target's tokenizer"):
        build_drafters(config, model)


def test_a_missing_model_is_one_clear_error() -> None:
    with pytest.raises(ModelSourceError, match="nowhere"):
        build_engine(replace(SMALL, model="/nowhere/at/all"), FollowAssignment(), lambda: 0.0, lambda: 1)


@pytest.mark.model
def test_the_default_model_answers_the_same_under_every_policy() -> None:
    config = replace(SMALL, max_model_len=256, draft_model=DraftModelConfig(layers_of_target=4))
    engine = build_engine(config, FollowAssignment(), lambda: 0.0, lambda: 1)
    assert engine.max_model_len == 256
    prompts = [tuple(range(1000, 1020)) * 2, tuple(range(300, 309))]
    params = replace(GREEDY, max_tokens=12)
    plain = [drive(engine, [request("a", ids, params)]).finished["a"].token_ids for ids in prompts]
    requests = [
        request(f"{n}-{policy}", ids, params, policy)
        for n, ids in enumerate(prompts)
        for policy in ("baseline", "ngram", "draft")
    ]
    for key, tokens in drive(engine, requests).tokens().items():
        assert tokens == plain[int(key[0])], key
