"""Requests to a backend, and what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from engine.types import PolicyAssignment, SamplingParams
from specgate.backends.embedded.backend import EmbeddedBackend
from specgate.types import Delta, GenerationRequest

POLICIES = (
    PolicyAssignment(),
    PolicyAssignment("ngram", 4),
    PolicyAssignment("draft", 3),
    PolicyAssignment("ngram", 1),
)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


async def until(holds: Callable[[], bool], timeout_s: float = 90.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  the condition has no event
            await asyncio.sleep(0.005)


def completion(prompt: str, sampling: SamplingParams = GREEDY, **fields: object) -> GenerationRequest:
    """A request of /v1/completions."""
    request = GenerationRequest("id", "completions", "tiny", sampling, prompt=prompt)
    return replace(request, **fields)  # type: ignore[arg-type]


def readable(backend: EmbeddedBackend, sampling: SamplingParams = GREEDY) -> SamplingParams:
    """The same, with every token forbidden that is not ASCII text by itself: a random model talks bytes."""
    texts = {token: backend.detokenize([token]) for token in range(backend.card.vocab_size or 0)}
    bias = {token: -100.0 for token, text in texts.items() if not text.isascii() or text.startswith("<|")}
    return replace(sampling, logit_bias=bias)


def is_idle(backend: EmbeddedBackend) -> bool:
    """Nothing runs, waits or holds a block."""
    load = backend.load()
    return load.num_total_blocks > 0 and load.num_running + load.num_waiting + load.num_used_blocks == 0


async def stream(
    backend: EmbeddedBackend,
    request: GenerationRequest,
    policy: PolicyAssignment = POLICIES[0],
    max_tokens: int = 40,
    index: int = 0,
) -> AsyncIterator[Delta]:
    """Prepare and generate."""
    prepared = await backend.prepare(request)
    deltas = backend.generate(request, prepared, policy, index=index, max_tokens=max_tokens, label="chat")
    try:
        async for delta in deltas:
            yield delta
    finally:
        await deltas.aclose()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Whole:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    last: Delta
    deltas: tuple[Delta, ...]


async def answer(
    backend: EmbeddedBackend,
    request: GenerationRequest,
    policy: PolicyAssignment = POLICIES[0],
    max_tokens: int = 40,
    index: int = 0,
) -> Whole:
    """All deltas of an answer, put together."""
    deltas = [delta async for delta in stream(backend, request, policy, max_tokens, index)]
    return Whole(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        deltas[-1],
        tuple(deltas),
    )
