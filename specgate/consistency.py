"""Greedy answers decoded again plainly while the model is idle: speculation must not change a token.

A share of the greedy answers that were drafted for waits here until nothing else runs, within a
budget of tokens. An answer that differs counts as a mismatch however close the two best tokens
were; how close they were is told, not forgiven.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from engine.types import BASELINE, PolicyAssignment, SequenceStats
from specgate.backends.base import Backend
from specgate.config.guards import ConsistencyGuard
from specgate.errors import ApiError
from specgate.types import Decision, GenerationRequest, PreparedPrompt

if TYPE_CHECKING:
    from specgate.generation import Generation

logger = logging.getLogger(__name__)

_MAX_WAITING = 16
_POLL_S = 0.1
_START_TOKENS = 256.0  # may be spent before anything was earned
_MAX_CREDIT_TOKENS = 4096.0


class CheckListener(Protocol):
    """Who is told: the guards, and the metrics."""

    def __call__(self, policy: str, result: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Check:
    request: GenerationRequest
    prepared: PreparedPrompt
    policy: str
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Difference:
    at: int
    was: int | None
    plain: int | None
    gap: float | None  # logprob of baseline's token less that of the second best


class ConsistencyChecker:
    """Of one model. `is_idle` says whether nothing else wants it; `wants_all` whether a policy is being
    tried again after a mismatch, so that each of its answers counts."""

    def __init__(
        self,
        config: ConsistencyGuard,
        backend: Backend,
        is_idle: Callable[[], bool],
        wants_all: Callable[[str], bool],
        listener: CheckListener,
        on_cost: Callable[[SequenceStats], None] = lambda _stats: None,
    ) -> None:
        self._config = config
        self._backend = backend
        self._is_idle = is_idle
        self._wants_all = wants_all
        self._listener = listener
        self._on_cost = on_cost
        self._waiting: deque[_Check] = deque(maxlen=_MAX_WAITING)
        self._credit = _START_TOKENS

    def reconfigure(self, config: ConsistencyGuard) -> None:
        """Other settings from now on."""
        self._config = config

    def selects(self, request: GenerationRequest, decision: Decision) -> bool:
        """Whether this request's tokens are to be kept. The same id is always answered alike."""
        if self._config.mode == "off" or decision.policy == BASELINE or not request.sampling.is_greedy:
            return False
        if request.n > 1 or request.more_prompts or request.sampling.has_prompt_logprobs:
            return False
        if self._wants_all(decision.policy):
            return True
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=8, person=b"consist").digest()
        return int.from_bytes(digest) / 2**64 < self._config.share

    def offer(self, generation: Generation) -> None:
        """A request has ended well. What it earned may be spent on checks; it may be one itself."""
        earned = self._config.max_token_share * generation.num_output_tokens
        self._credit = min(_MAX_CREDIT_TOKENS, self._credit + earned)
        tokens = generation.kept_tokens
        stats = generation.answers[0].stats
        if tokens is None or stats is None or not stats.num_drafts or not tokens:
            return
        if len(tokens) <= self._config.max_tokens:
            prompt = generation.prompts[0]
            check = _Check(
                prompt.request, prompt.prepared, generation.decision.policy, tokens, prompt.max_tokens
            )
            self._waiting.append(check)

    async def run(self) -> None:
        """Check what waits, whenever the model is idle; for ever."""
        while True:
            await asyncio.sleep(_POLL_S)
            if self._waiting and self._is_idle() and self._credit >= len(self._waiting[0].token_ids):
                await self.check_next()

    async def check_next(self) -> str | None:
        """Decode the oldest again. Returns the result: match, mismatch or abandoned; None: nothing waits."""
        if not self._waiting:
            return None
        check = self._waiting.popleft()
        self._credit -= len(check.token_ids)
        try:
            difference, is_whole = await self._compare(check)
        except ApiError as error:
            logger.info("a consistency check came to nothing: %s", error.message)
            difference, is_whole = None, False
        result = "mismatch" if difference is not None else "match" if is_whole else "abandoned"
        if difference is not None:
            logger.warning(
                "request %s: token %d under %s is %s, under baseline %s, whose lead over the next best is %s",
                check.request.request_id, difference.at, check.policy, difference.was, difference.plain,
                "unknown" if difference.gap is None else f"{difference.gap:.2g} nats",
            )  # fmt: skip
        self._listener(check.policy, result)
        return result

    async def _compare(self, check: _Check) -> tuple[_Difference | None, bool]:
        """Where the two part, if they do; and whether all was compared. Stops for others."""
        sampling = replace(check.request.sampling, num_logprobs=2)
        request = replace(check.request, sampling=sampling, priority=check.request.priority + 1)
        position = 0
        stream = self._backend.generate(
            request, check.prepared, PolicyAssignment(BASELINE, 0, is_exact=True, is_pinned=True),
            index=0, max_tokens=check.max_tokens, label="", on_cut=self._on_cost,
        )  # fmt: skip
        async with aclosing(stream) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                for offset, token in enumerate(delta.token_ids):
                    was = check.token_ids[position] if position < len(check.token_ids) else None
                    if was != token:
                        top = delta.logprobs[offset].top if offset < len(delta.logprobs) else ()
                        gap = top[0][2] - top[1][2] if len(top) > 1 else None
                        return _Difference(position, was, token, gap), True
                    position += 1
                if delta.stats is not None:
                    self._on_cost(delta.stats)
                if delta.finish_reason is not None:
                    if position < len(check.token_ids):
                        return _Difference(position, check.token_ids[position], None, None), True
                    return None, True
                if not self._is_idle():
                    return None, False
        return None, False
