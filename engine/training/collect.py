"""Collecting a corpus: the target answers prompts, then its hidden states over the texts are kept.

Answers come from the engine itself, many at once, as they would be served. The hidden states are
then read off one forward over each text: in int8 they are bit for bit those of decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from engine.batch import BatchRow, build_batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.block_manager import new_block_table
from engine.models.interface import LanguageModel
from engine.spec.planner import FollowAssignment
from engine.training.corpus import Sample, TrainingPrompt, collected_ids, write_shard
from engine.types import EngineRequest, SamplingParams

_BLOCK_SIZE = 16
_PIECE = 256  # tokens of a given text in one sample
_CHUNK = 256  # tokens per forward when hidden states are read
MIN_OUTPUT_TOKENS = 4
"""Shorter answers teach nothing: a draft head guesses from the second token after the prompt on."""


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """How prompts are answered. The same prompt is answered once at each temperature."""

    max_tokens: int = 192
    max_prompt_tokens: int = 1024  # longer prompts are left out
    temperatures: tuple[float, ...] = (0.0, 0.7)
    context_tokens: int = 256  # of the prompt's end, whose hidden states are kept
    batch_size: int = 16
    shard_size: int = 64  # samples to a file: what a stopped collection loses at most
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CollectProgress:
    """After each shard."""

    num_done: int
    num_all: int
    num_done_now: int  # in this run
    num_new_tokens: int  # output tokens of this run
    seconds: float


def collect(
    target: LanguageModel,
    prompts: Sequence[TrainingPrompt],
    folder: Path,
    config: CollectConfig,
    clock: Callable[[], float],
    report: Callable[[CollectProgress], None] | None = None,
) -> int:
    """Answer every prompt that is not answered in `folder` yet; the number of samples then there."""
    done = collected_ids(folder)
    todo = _jobs(prompts, config)
    num_all, started_s, num_tokens = len(todo), clock(), 0
    waiting = iter([job for job in todo if job[0] not in done])
    num_before = num_done = len(done)
    while jobs := list(islice(waiting, config.shard_size)):
        answers = _answer(target, jobs, config)
        samples = list(_samples(target, jobs, answers, config))
        if samples:
            write_shard(folder, samples)
        num_done += len(jobs)
        num_tokens += sum(map(len, answers))
        if report is not None:
            report(CollectProgress(num_done, num_all, num_done - num_before, num_tokens, clock() - started_s))
    return num_done


_Job = tuple[str, TrainingPrompt, float | None]  # sample id, prompt, temperature or None: read its text


def _jobs(prompts: Sequence[TrainingPrompt], config: CollectConfig) -> list[_Job]:
    fitting = [p for p in prompts if 0 < len(p.token_ids) <= config.max_prompt_tokens]
    read: list[_Job] = [(f"{p.id}@text", p, None) for p in prompts if p.text_ids is not None]
    asked: list[_Job] = [
        (f"{p.id}@{t:g}", p, t) for t in config.temperatures for p in fitting if p.text_ids is None
    ]
    return read + asked


def _answer(target: LanguageModel, jobs: Sequence[_Job], config: CollectConfig) -> list[list[int]]:
    """The target's answers, in order; for a given text what comes after the prompt."""
    asked = [(index, job) for index, job in enumerate(jobs) if job[2] is not None]
    answers = [list((prompt.text_ids or ())[len(prompt.token_ids) :]) for _, prompt, _ in jobs]
    if not asked:
        return answers
    length = max(len(prompt.token_ids) for _, prompt, _ in jobs) + config.max_tokens
    settings = EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=(length // _BLOCK_SIZE + 2) * config.batch_size,
        max_sequences=config.batch_size,
        ngram=None,
    )
    # Without a clock and seeds of its own the engine is a function of its requests.
    engine = Engine(settings, target, {}, FollowAssignment(), lambda: 0.0, lambda: config.seed)
    for index, (sample_id, prompt, temperature) in asked:
        assert temperature is not None
        params = SamplingParams(
            temperature=temperature, seed=config.seed + index, max_tokens=config.max_tokens
        )
        engine.add(EngineRequest(sample_id, prompt.token_ids, params))
    places = {job[0]: index for index, job in asked}
    while engine.has_work:
        for output in engine.step().outputs:
            answers[places[output.request_id]] += output.token_ids
    return answers


def _samples(
    target: LanguageModel, jobs: Sequence[_Job], answers: Sequence[Sequence[int]], config: CollectConfig
) -> Iterator[Sample]:
    for (sample_id, prompt, temperature), answer in zip(jobs, answers, strict=True):
        if temperature is None:
            yield from _pieces(target, sample_id, prompt)
            continue
        if len(answer) < MIN_OUTPUT_TOKENS:
            continue
        token_ids = [*prompt.token_ids, *answer]
        first = max(0, len(prompt.token_ids) - config.context_tokens)
        hidden = hidden_states(target, token_ids)[first:]
        yield Sample(
            sample_id,
            prompt.group,
            prompt.label,
            temperature,
            len(prompt.token_ids),
            first,
            torch.tensor(token_ids),
            hidden.to(torch.float16).cpu(),
        )


def _pieces(target: LanguageModel, sample_id: str, prompt: TrainingPrompt) -> Iterator[Sample]:
    """A given text in pieces that are trained on in one go; all of it counts."""
    token_ids = list(prompt.text_ids or ())
    hidden = hidden_states(target, token_ids).to(torch.float16).cpu()
    for first in range(0, len(token_ids) - MIN_OUTPUT_TOKENS, _PIECE):
        end = min(first + _PIECE, len(token_ids))
        texts = torch.tensor(token_ids[:end])
        yield Sample(
            sample_id, prompt.group, prompt.label, None, first + 1, first, texts, hidden[first:end].clone()
        )


@torch.inference_mode()
def hidden_states(target: LanguageModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The target's last hidden states over a text, [num_tokens, hidden]."""
    num_blocks = (len(token_ids) + _BLOCK_SIZE - 1) // _BLOCK_SIZE
    cache = target.new_cache(num_blocks, _BLOCK_SIZE)
    table = new_block_table()
    table.extend(range(num_blocks))
    parts = []
    for start in range(0, len(token_ids), _CHUNK):
        row = BatchRow(token_ids[start : start + _CHUNK], start, table, 0)
        parts.append(target.forward(build_batch([row], _BLOCK_SIZE, target.device), cache))
    return torch.cat(parts)
