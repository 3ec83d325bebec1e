"""Drafters that go and come back while requests run: memory is freed, texts stay, nothing is left behind."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from engine.config import DraftModelConfig, EngineConfig, HybridConfig, SuffixConfig
from engine.engine import Engine
from engine.errors import RequestRefused
from engine.factory import build_drafters, keep_drafters
from engine.spec.suffix import SuffixDrafter
from tests.engine.harness import (
    GREEDY,
    Run,
    drive,
    make_engine,
    prompt,
    reference_greedy,
    request,
    target,
)
from tests.engine.heads import head_drafter

CONFIG = EngineConfig(
    block_size=4,
    num_blocks=256,
    suffix=SuffixConfig(),
    draft_model=DraftModelConfig(layers_of_target=1),
    hybrid=HybridConfig(),
)
METHODS = ("ngram", "suffix", "draft", "hybrid")


def engine_with_all() -> Engine:
    settings = {name: getattr(CONFIG, name) for name in ("ngram", "suffix", "draft_model", "hybrid")}
    return make_engine(build_drafters(CONFIG, target()), **settings)


def step(engine: Engine, run: Run, num_steps: int) -> None:
    for _ in range(num_steps):
        run.add_step(engine)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_a_running_request_goes_on_plainly_and_drafts_again_when_it_is_back(
    method: str, num_steps: int
) -> None:
    engine = engine_with_all()
    text = prompt(1, 6) * 4
    params = replace(GREEDY, max_tokens=30)
    engine.add(request("a", text, params, method))
    engine.add(request("b", text[:-3], params, "ngram" if method != "ngram" else "draft"))
    run = Run()
    step(engine, run, num_steps)
    keep_drafters(engine, [name for name in METHODS if name not in (method, "hybrid")])
    assert method not in engine.methods
    step(engine, run, 4)
    assert not any(work.method == method for record in run.records[num_steps:] for work in record.drafts)
    keep_drafters(engine, METHODS)
    assert tuple(engine.methods) == METHODS
    while engine.has_work:
        run.add_step(engine)
    engine.check_idle()
    for name, ids in (("a", text), ("b", text[:-3])):
        assert run.finished[name].token_ids == reference_greedy(target(), ids, 30)
    stats = run.finished["a"].stats
    assert stats is not None
    left, back = [c for c in stats.policy_changes if c.reason == "unloaded" or c.policy == method][-2:]
    assert (left.policy, left.reason, back.policy) == ("baseline", "unloaded", method)
    assert left.token_index < back.token_index
    held = [getattr(drafter, "num_sequences", 0) for drafter in engine.drafters.values()]
    assert not any(held)


def test_what_goes_is_freed_and_the_others_stay_as_they_are() -> None:
    engine = engine_with_all()
    suffix = engine.drafters["suffix"]
    assert isinstance(suffix, SuffixDrafter)
    gone = weakref.ref(engine.drafters["draft"])
    before = engine.memory_bytes()
    assert before["draft_kv"] > 0
    engine.add(request("a", prompt(2, 20), policy="hybrid"))
    engine.add(request("b", prompt(2, 20), policy="suffix"))
    run = Run()
    step(engine, run, 3)
    keep_drafters(engine, ("ngram", "suffix"))
    assert engine.drafters["suffix"] is suffix
    gc.collect()
    assert gone() is None
    assert engine.memory_bytes()["draft_kv"] == 0
    while engine.has_work:
        run.add_step(engine)
    keep_drafters(engine, METHODS)
    assert engine.memory_bytes() == before
    keep_drafters(engine, ())
    assert dict(engine.methods) == {}
    # Asked for by name: it runs plainly. What was never there is refused as ever.
    plain = drive(engine, [request("c", prompt(2, 20), policy="draft")]).finished["c"]
    assert plain.token_ids == run.finished["a"].token_ids == run.finished["b"].token_ids
    assert plain.stats is not None
    assert (plain.stats.num_drafts, plain.stats.policy_changes[0].reason) == (0, "unloaded")
    with pytest.raises(RequestRefused, match="never"):
        engine.add(request("d", prompt(2, 20), policy="never"))


def test_hidden_states_go_with_their_reader() -> None:
    """And requests from the time without it are not drafted for by a head that came after them."""
    head = head_drafter(target())
    engine = make_engine({"draft": head})
    kept = engine.memory_bytes()["draft_kv"]
    engine.add(request("old", prompt(3, 12), replace(GREEDY, max_tokens=30), "draft"))
    run = Run()
    step(engine, run, 4)
    engine.set_drafters({})
    assert head.num_sequences == 0
    assert (engine.memory_bytes()["draft_kv"], kept > 0) == (0, True)
    step(engine, run, 2)
    engine.set_drafters({"draft": head})
    engine.add(request("new", prompt(3, 12), replace(GREEDY, max_tokens=30), "draft"))
    num_before = len(run.records)
    while engine.has_work:
        run.add_step(engine)
    engine.check_idle()
    assert run.finished["old"].token_ids == run.finished["new"].token_ids
    assert max(work.num_draft_tokens for record in run.records[num_before:] for work in record.drafts) <= 4
    assert run.finished["new"].stats is not None
    assert run.finished["new"].stats.num_drafts > 0
