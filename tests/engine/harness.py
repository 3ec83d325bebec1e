"""A small engine and a loop that drives it, shared by the engine's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from engine.batch import BatchRow, build_batch
from engine.config import DraftModelConfig, EngineConfig, HybridConfig
from engine.engine import Engine
from engine.kv.block_manager import new_block_table
from engine.models.interface import LanguageModel
from engine.models.tiny import tiny_model
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import Drafter
from engine.spec.hybrid import HybridDrafter
from engine.spec.ngram import NgramDrafter
from engine.spec.planner import FollowAssignment, SpecPlanner
from engine.spec.stub import StubDrafter, known_continuations
from engine.spec.suffix import SuffixDrafter
from engine.types import (
    EngineRequest,
    FinishReason,
    PolicyAssignment,
    SamplingParams,
    SequenceStats,
    StepRecord,
    TokenLogprob,
)
from tests.engine.heads import head_drafter

VOCAB = 64
EOS = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@cache
def target() -> LanguageModel:
    """The model under test: two layers, 64 tokens, a context of 256."""
    return tiny_model(vocab_size=VOCAB, max_model_len=256, eos_token_ids=frozenset({EOS}))


def prompt(seed: int, length: int, vocab: int = VOCAB) -> tuple[int, ...]:
    """A prompt of random tokens, none of them end-of-sequence."""
    return tuple(random.Random(seed).choices(range(3, vocab), k=length))


def request(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams = GREEDY,
    policy: str = "baseline",
    num_speculative_tokens: int = 4,
    **fields: Any,
) -> EngineRequest:
    """A request under a fixed policy."""
    num = 0 if policy == "baseline" else num_speculative_tokens
    assignment = PolicyAssignment(policy, num, is_exact=True)
    return EngineRequest(request_id, tuple(prompt_ids), params, assignment, **fields)


def make_engine(
    drafters: Mapping[str, Drafter] | None = None,
    planner: SpecPlanner | None = None,
    model: LanguageModel | None = None,
    clock: Callable[[], float] | None = None,
    **config: Any,
) -> Engine:
    """An engine on the tiny target; time stands still unless a clock is given."""
    settings = replace(EngineConfig(block_size=4, num_blocks=256, max_batch_tokens=64), **config)
    return Engine(
        settings,
        model or target(),
        drafters or {},
        planner or FollowAssignment(),
        clock or (lambda: 0.0),
        _seeds(),
    )


def _seeds() -> Callable[[], int]:
    numbers = random.Random(0)
    return lambda: numbers.getrandbits(63)


@dataclass
class Finished:
    """What came out for one request, over all its steps."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    stats: SequenceStats | None = None
    error: str | None = None


@dataclass
class Run:
    """All requests of a run, and the records of its steps."""

    finished: dict[str, Finished] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    def tokens(self) -> dict[str, list[int]]:
        return {key: value.token_ids for key, value in self.finished.items()}

    def add_step(self, engine: Engine) -> None:
        """One engine step, with every account checked after it."""
        result = engine.step()
        engine.check_integrity()
        if result.record is not None:
            self.records.append(result.record)
        for output in result.outputs:
            seen = self.finished.setdefault(output.request_id, Finished())
            assert seen.finish_reason is None, "an output after the last one"
            seen.token_ids += output.token_ids
            seen.logprobs += output.logprobs
            seen.num_accepted_tokens += output.num_accepted_tokens
            seen.prompt_logprobs = seen.prompt_logprobs or output.prompt_logprobs
            seen.finish_reason, seen.stats, seen.error = output.finish_reason, output.stats, output.error


def drive(engine: Engine, requests: Iterable[EngineRequest], max_steps: int = 5000) -> Run:
    """Add all requests, step until all have ended, and check that nothing is left behind."""
    run = Run()
    for item in requests:
        engine.add(item)
    for _ in range(max_steps):
        if not engine.has_work:
            break
        run.add_step(engine)
    engine.check_idle()
    return run


@torch.inference_mode()
def reference_logits(model: LanguageModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after every token, from one plain forward over a fresh cache: [num_tokens, vocab]."""
    table = new_block_table()
    table.append(0)
    row = BatchRow(token_ids, 0, table, len(token_ids))
    batch = build_batch([row], len(token_ids), model.device)
    return model.logits(model.forward(batch, model.new_cache(1, len(token_ids))))


def reference_greedy(model: LanguageModel, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy decoding with no cache, no batch and no engine."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt_ids) :]


def all_drafters(
    known: Mapping[tuple[int, ...], Sequence[int]], model: LanguageModel | None = None
) -> dict[str, Drafter]:
    """Every kind of drafter: the three stubs (right up to each position), n-gram, two draft models."""
    model = model or target()
    spec = model.spec
    oracle = known_continuations(known)
    stubs = {"right": None, "wrong": 0, "right1": 1, "right2": 2, "right3": 3}
    other = tiny_model("qwen3", seed=7, vocab_size=spec.vocab_size, num_layers=1, max_model_len=64)
    sizes = {"num_blocks": 64, "block_size": 4}
    config = DraftModelConfig()
    drafters: list[Drafter] = [
        *(StubDrafter(oracle, spec.vocab_size, num, name=name) for name, num in stubs.items()),
        NgramDrafter(),
        SuffixDrafter(),
        DraftModelDrafter(model.first_layers(1), spec, config, **sizes),
        DraftModelDrafter(other, spec, config, **sizes, name="draft_other"),
        head_drafter(model, name="draft_head"),
        HybridDrafter(SuffixDrafter(), head_drafter(model), HybridConfig()),
    ]
    return {drafter.name: drafter for drafter in drafters}


POLICIES = (
    "baseline",
    "right",
    "wrong",
    "right1",
    "right2",
    "right3",
    "ngram",
    "suffix",
    "draft",
    "draft_other",
    "draft_head",
    "hybrid",
)
