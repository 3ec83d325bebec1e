"""Tries out step sizes before the first request, so that the latency model does not start from nothing.

Synthetic sequences run through the engine as requests would: prompts of several lengths, then
batches of several sizes and contexts, each with no drafter and with each loaded one at several
depths, greedy and sampled. What is drafted is rarely right; only the time it takes matters. The
shapes take turns, so that a short budget covers all of them a little rather than some of them well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from engine.engine import Engine
from engine.spec.planner import SpecPlan, StepView
from engine.types import BASELINE, EngineRequest, SamplingParams, StepRecord

_PROMPTS = (8, 48, 160, 384)  # tokens
_BATCHES = (1, 4, 2, 8, 12)  # sequences
_ROUNDS = 3  # of each shape, in one batch
_CONTEXT_SHARE = 0.5  # of the model's context that a sweep may fill at most
_PATTERN = 7  # tokens after which a prompt repeats, so that lookup finds something to draft
_SEED = 20_260_101


@dataclass(slots=True)
class _Imposed:
    """A planner that is told what everybody drafts."""

    method: str = BASELINE
    depth: int = 0

    def plan(self, view: StepView) -> Mapping[str, SpecPlan]:
        """The same for all."""
        if self.depth <= 0:
            return {}
        return {s.seq_id: SpecPlan(self.method, self.depth, reason="exploration") for s in view.sequences}


def sweep(
    engine: Engine,
    budget_s: float,
    clock: Callable[[], float],
    emit: Callable[[StepRecord], None],
    progress: Callable[[str, float], None],
) -> int:
    """Run synthetic steps for at most `budget_s` (the step in progress ends); returns how many.

    The engine must be idle and is left idle. `emit` gets each record, marked as warm-up.
    """
    planner, imposed = engine.planner, _Imposed()
    engine.planner = imposed
    started_s = clock()
    num_steps = 0
    try:
        for _ in _steps(engine, imposed):
            record = engine.step().record
            if record is not None:
                emit(replace(record, is_warm_up=True))
                num_steps += 1
            spent = (clock() - started_s) / budget_s
            progress("trying out step sizes", min(spent, 1.0))
            if spent >= 1:
                break
    finally:
        engine.planner = planner
        for request_id in engine.request_ids:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
    return num_steps


def _steps(engine: Engine, imposed: _Imposed) -> Iterator[None]:
    """Sets up the engine for one step after another."""
    numbers = random.Random(_SEED)
    room = int(_CONTEXT_SHARE * engine.max_model_len)
    prompts = [length for length in _PROMPTS if length < room]
    for length in prompts:  # prompts alone
        _add(engine, numbers, length, is_sampled=False, name=f"prompt {length}")
        yield from _prefill(engine)
    shapes = [(BASELINE, 0)]
    for method, most in engine.methods.items():
        shapes += [(method, depth) for depth in sorted({most, max(most // 2, 1)}, reverse=True)]
    for batch in _BATCHES:
        if batch > engine.config.max_sequences:
            continue
        while len(engine.request_ids) < batch:
            number = len(engine.request_ids)
            length = prompts[number % len(prompts)] if prompts else 1
            _add(engine, numbers, length, is_sampled=number % 3 == 2, name=f"batch {batch}.{number}")
            yield from _prefill(engine)
        while len(engine.request_ids) > batch:
            engine.abort(engine.request_ids[0])
        for _ in range(_ROUNDS):
            for imposed.method, imposed.depth in shapes:
                yield
        imposed.depth = 0


def _prefill(engine: Engine) -> Iterator[None]:
    """Until no prompt is left to compute."""
    while engine.load().num_waiting or engine.num_prefilling:
        yield


def _add(engine: Engine, numbers: random.Random, length: int, *, is_sampled: bool, name: str) -> None:
    pattern = [numbers.randrange(engine.vocab_size) for _ in range(min(_PATTERN, length))]
    prefix = [numbers.randrange(engine.vocab_size) for _ in range(max(length - 4 * _PATTERN, 0))]
    prompt = (*prefix, *(pattern[i % len(pattern)] for i in range(length - len(prefix))))
    sampling = SamplingParams(
        temperature=0.8 if is_sampled else 0.0,
        seed=1 if is_sampled else None,
        max_tokens=engine.max_model_len - length,
        ignore_eos=True,
    )
    engine.add(EngineRequest(f"warm-up {name}", prompt, sampling))
