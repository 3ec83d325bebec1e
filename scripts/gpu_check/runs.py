"""The whole engine: greedy equality across policies, graphs against plain steps, tokens a second."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from report import Section
from sizes import Place

from engine.batch import BatchRow, build_batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.llama import CausalLM
from engine.replay import StepReplay
from engine.spec.drafter import Drafter
from engine.spec.imposed import ImposedDrafter
from engine.spec.ngram import NgramDrafter
from engine.spec.planner import FollowAssignment
from engine.spec.stub import StubDrafter, known_continuations
from engine.types import BASELINE, EngineRequest, PolicyAssignment, SamplingParams, StepRecord

BLOCK_SIZE = 16
Answers = dict[tuple[int, ...], list[int]]


@dataclass
class Outcome:
    """What a run gave: answers by prompt, gaps between the two best logprobs, steps, seconds."""

    answers: Answers = field(default_factory=dict)
    gaps: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0


def _prompts(place: Place, vocab: int, num: int) -> list[tuple[int, ...]]:
    """Prompts that repeat themselves, so that n-gram drafting has something to find."""
    rng = random.Random(6)
    length = 24 if place.is_cuda else 5
    return [tuple(rng.choices(range(vocab), k=length)) * 3 for _ in range(num)]


def _run(
    place: Place,
    model: CausalLM,
    prompts: Sequence[tuple[int, ...]],
    method: str,
    drafters: Mapping[str, Drafter],
    *,
    num_speculative_tokens: int = 4,
    num_logprobs: int | None = None,
) -> Outcome:
    """All prompts at once under one method."""
    per_sequence = -(-(len(prompts[0]) + place.num_new_tokens + 16) // BLOCK_SIZE) + 1
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=len(prompts) * per_sequence,
        max_batch_tokens=2048,
        max_sequences=max(place.batches),
        enable_prefix_cache=False,
    )
    seeds = random.Random(0)
    engine = Engine(
        config, model, drafters, FollowAssignment(), time.perf_counter, lambda: seeds.getrandbits(63)
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=place.num_new_tokens, ignore_eos=True, num_logprobs=num_logprobs
    )
    num = 0 if method == BASELINE else num_speculative_tokens
    by_id = {}
    for i, prompt in enumerate(prompts):
        by_id[f"{i}"] = prompt
        engine.add(EngineRequest(f"{i}", prompt, params, PolicyAssignment(method, num, is_exact=True)))
    outcome = Outcome()
    started_s: float | None = None
    while engine.has_work:
        is_prefilling = any(not outcome.answers.get(prompt) for prompt in prompts)
        if not is_prefilling and started_s is None:
            started_s = time.perf_counter()
        result = engine.step()
        if result.record is not None:
            outcome.records.append(result.record)
        for output in result.outputs:
            if output.error:
                raise RuntimeError(f"{method}: {output.error}")
            prompt = by_id[output.request_id]
            outcome.answers.setdefault(prompt, []).extend(output.token_ids)
            if started_s is not None:
                outcome.num_tokens += len(output.token_ids)
            for logprob in output.logprobs:
                best = [value for _, value in logprob.top]
                outcome.gaps.setdefault(prompt, []).append(best[0] - best[1])
    outcome.seconds = time.perf_counter() - (started_s or time.perf_counter())
    return outcome


def check_greedy(place: Place, section: Section) -> None:
    """The same text under every policy, in float32 and bfloat16; a near tie may fall either way."""
    for dtype, tie in ((torch.float32, 1e-3), (torch.bfloat16, 0.25)):
        if dtype is torch.bfloat16 and not place.is_cuda:
            continue
        model = place.model(place.exact_model, dtype)
        vocab = model.spec.vocab_size
        prompts = _prompts(place, vocab, 12 if place.is_cuda else 2)
        plain = _run(place, model, prompts, BASELINE, {}, num_logprobs=2)
        name = str(dtype).removeprefix("torch.")
        section.figure(f"{name} kernels", plain.records[-1].kernels)
        section.check(f"{name} no reference kernel", _is_fast(plain.records))
        oracle = known_continuations(plain.answers)
        drafters: dict[str, Drafter] = {
            "ngram": NgramDrafter(),
            "right": StubDrafter(oracle, vocab, name="right"),
            "wrong": StubDrafter(oracle, vocab, 0, name="wrong"),
            "right2": StubDrafter(oracle, vocab, 2, name="right2"),
        }
        for method in (BASELINE, *drafters):
            got = _run(place, model, prompts, method, drafters)
            num_ties, faults = _judge(plain, got, tie)
            section.check(
                f"{name} {method} equals baseline",
                not faults,
                f"{len(prompts) - num_ties - len(faults)} of {len(prompts)} identical, "
                f"{num_ties} parted at a near tie"
                + "".join(f"; {fault}" for fault in faults[:2]),
            )
        del model
        place.tidy()


def _judge(plain: Outcome, got: Outcome, tie: float) -> tuple[int, list[str]]:
    """How many answers part at a near tie, and what else is wrong."""
    num_ties = 0
    faults = []
    for prompt, expected in plain.answers.items():
        answer = got.answers[prompt]
        at = next(
            (i for i, pair in enumerate(zip(expected, answer, strict=False)) if pair[0] != pair[1]), None
        )
        if at is None:
            if len(expected) != len(answer):
                faults.append(f"{len(answer)} tokens instead of {len(expected)}")
        elif plain.gaps[prompt][at] < tie:
            num_ties += 1
        else:
            faults.append(f"parts at token {at}, where the best two are {plain.gaps[prompt][at]:.4f} apart")
    return num_ties, faults


def _is_fast(records: Sequence[StepRecord]) -> bool:
    """True when no step names a reference where a fast kernel should have run."""
    return bool(records) and all("reference" not in r.kernels and "torch" not in r.kernels for r in records)


def check_replay(place: Place, section: Section) -> None:
    """The first run of a padded size is plain, later ones replay its graph: all must agree."""
    spec = place.models[0]
    model = place.model(spec, torch.bfloat16 if place.is_cuda else torch.float32)
    per_sequence = -(-(place.context + 16) // BLOCK_SIZE)
    num_sequences = max(place.batches)
    num_blocks = num_sequences * per_sequence
    rng = random.Random(8)
    for wanted, window in ((1, 1), (3, 1), (num_sequences, 1), (2, 5), (5, 8)):
        cache = model.new_cache(num_blocks + 1, BLOCK_SIZE)
        replay = StepReplay(model, cache, num_blocks, num_sequences, is_captured=place.is_cuda)
        num = min(wanted, num_sequences)
        rows = [
            BatchRow(
                rng.choices(range(spec.vocab_size), k=window),
                rng.randrange(0, place.context),
                array("i", range(s * per_sequence, (s + 1) * per_sequence)),
                window,
            )
            for s in range(num)
        ]
        batch = build_batch(rows, BLOCK_SIZE, place.device)
        with torch.inference_mode():
            eager = model.logits(model.forward(batch, cache)[batch.logits_rows])
            outcomes = []
            for _ in range(4 if place.is_cuda else 2):
                replayed = replay.run(batch)
                assert replayed is not None
                outcomes.append(replayed[1].clone())
        error = float((outcomes[-1] - eager).abs().max())
        # The first run was no replay, and the library may choose another product for it.
        is_same = all(torch.equal(outcomes[1], other) for other in outcomes[2:])
        section.check(
            f"{num} sequences, window {window}",
            error < (0.25 if place.is_cuda else 1e-4) and is_same,
            f"replays {'bitwise equal' if is_same else 'DIFFER'}, {error:.2e} from the plain step, "
            f"{replay.num_graphs} graphs",
            error=error,
        )


def measure_policies(place: Place, section: Section) -> None:
    """Output tokens a second, plain and with drafts whose acceptance is imposed and that cost nothing."""
    for spec in place.models:
        model = place.model(spec, torch.bfloat16 if place.is_cuda else torch.float32)
        for batch_size in (1, 8, 32) if place.is_cuda else (1,):
            if section.is_late:
                return
            prompts = _prompts(place, spec.vocab_size, batch_size)
            _run(place, model, prompts, BASELINE, {})  # compiles and captures
            plain = _run(place, model, prompts, BASELINE, {})
            base = plain.num_tokens / max(plain.seconds, 1e-9)
            section.figure(
                f"{spec.name} batch {batch_size} baseline", f"{base:8.0f} tokens/s", tokens_per_second=base
            )
            for chance in (0.6, 0.8, 0.95) if place.is_cuda else (0.8,):
                oracle = known_continuations(plain.answers)
                drafters: dict[str, Drafter] = {
                    "imposed": ImposedDrafter(oracle, spec.vocab_size, (chance,), num_speculative_tokens=4)
                }
                _run(place, model, prompts, "imposed", drafters)
                got = _run(place, model, prompts, "imposed", drafters)
                speed = got.num_tokens / max(got.seconds, 1e-9)
                section.figure(
                    f"{spec.name} batch {batch_size} drafts of 4, acceptance {chance}",
                    f"{speed:8.0f} tokens/s, {speed / base:5.2f}x of baseline",
                    tokens_per_second=speed,
                    speed_up=speed / base,
                )
        del model
        place.tidy()
