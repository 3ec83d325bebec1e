"""A model that OpenAI-compatible servers elsewhere run: the caller's body goes there, their bytes come back.

Each policy is a pool of servers that decode in that way; the router chooses the policy, here the
least loaded replica is chosen. A pool that cannot serve a request, as long as nothing of the answer
has gone out, hands it to the pool `baseline`: the request's `policy_changes` say so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import aiohttp

from engine.types import (
    BASELINE,
    EngineLoad,
    PolicyAssignment,
    PolicyChange,
    SequenceStats,
    StepRecord,
)
from specgate.backends.base import BackendStatus, ModelCard
from specgate.backends.openai_http.answers import Tally
from specgate.backends.openai_http.breaker import RetryBudget
from specgate.backends.openai_http.call import Call, Event, Outgoing
from specgate.backends.openai_http.events import payload
from specgate.backends.openai_http.failures import AttemptFailed
from specgate.backends.openai_http.health import HealthChecks
from specgate.backends.openai_http.outgoing import outgoing_body, outgoing_headers, without_member
from specgate.backends.openai_http.pool import AttemptListener, Pool, Replica
from specgate.clock import Clock
from specgate.config.upstream import OpenAIHttpConfig
from specgate.errors import ApiError, BadRequest, UpstreamFailed
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.types import Delta, GenerationRequest, PreparedPrompt

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_KEEP_ALIVE_S = 3.0  # idle connections are dropped before common servers drop them (5 s)
_BYTES_PER_TOKEN = 4
_READY = BackendStatus(True, "ready")


class OpenAIHttpBackend:
    """Implements `specgate.backends.base.Backend`."""

    def __init__(self, model_id: str, config: OpenAIHttpConfig, clock: Clock) -> None:
        """Raises OSError when the environment lacks a key that the configuration names."""
        self._config = config
        self._clock = clock
        self._model_id = model_id
        self._pools = {name: Pool(name, pool, config, clock) for name, pool in config.pools.items()}
        self._headers = {name: _pool_headers(pool) for name, pool in self._pools.items()}
        self._budget = RetryBudget(config.retries)
        self._session: aiohttp.ClientSession | None = None
        self._health: HealthChecks | None = None
        self._tails: set[asyncio.Task[None]] = set()
        self._card = ModelCard(
            model_id,
            config.max_model_len or 0,
            {name: p.num_speculative_tokens for name, p in config.pools.items() if name != BASELINE},
            created_s=int(clock.wall()),
            details={"backend": "openai_http"},
            is_relay=True,
        )

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def pools(self) -> dict[str, Pool]:
        """By policy."""
        return dict(self._pools)

    async def start(self) -> None:
        """Begin to look after the replicas' health."""
        timeouts = aiohttp.ClientTimeout(total=None, sock_connect=self._config.timeouts.connect_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=timeouts,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent",),
            headers={"Accept-Encoding": "identity", "User-Agent": "specgate"},
        )
        self._health = HealthChecks(self._config.health, self._session)
        self._health.start((pool, self._headers[name]) for name, pool in self._pools.items())

    async def stop(self) -> None:
        """Close every connection."""
        if self._health is not None:
            await self._health.stop()
        for task in self._tails:
            task.cancel()
        if self._session is not None:
            await self._session.close()

    def status(self) -> BackendStatus:
        """Ready as long as the pool baseline is; the other pools' policies are closed while they are not."""
        faults = {name: why for name, pool in self._pools.items() if (why := pool.fault()) is not None}
        if not faults:
            return _READY
        fault = faults.pop(BASELINE, None)
        closed = faults
        if fault is None or self._pools[BASELINE].rests_s() is not None:
            return BackendStatus(True, "ready", closed=closed)
        return BackendStatus(False, f"no server of the pool baseline can be asked: {fault}", closed=closed)

    def load(self) -> EngineLoad:
        running = sum(pool.num_open for pool in self._pools.values())
        return EngineLoad(running, 0, 0, 0, 0, 0)

    async def prepare(self, request: GenerationRequest) -> PreparedPrompt:
        """Nothing is encoded here: the number of tokens is guessed from the bytes."""
        if request.prompt is None:
            size = len(request.raw) or len(request.user_text.encode())
            return PreparedPrompt((), "", max(1, size // _BYTES_PER_TOKEN))
        prompt = request.prompt
        num = len(prompt.encode()) // _BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt)
        return PreparedPrompt((), "", max(1, num))

    async def generate(
        self,
        request: GenerationRequest,
        prepared: PreparedPrompt,
        policy: PolicyAssignment,
        *,
        index: int,
        max_tokens: int,
        label: str,
        on_cut: Callable[[SequenceStats], None] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """All answers of the request; see `Backend.generate` and `ModelCard.is_relay`."""
        tally = Tally(request.n * (1 + len(request.more_prompts)), policy.method)
        tally.num_prompt_guess = prepared.num_tokens
        is_over = False
        try:
            call = await self._open(request, policy.method, tally)
            try:
                if request.is_stream:
                    async for batch in call.batches(lambda: tally.is_done):
                        for delta in _deltas(batch, tally, shows_usage=request.has_usage):
                            yield delta
                else:
                    tally.add(call.whole_message)
                is_over = True
                for delta in _last(call, tally):
                    yield delta
            except AttemptFailed as failure:
                raise failure.error from None
            finally:
                call.close()
        finally:
            if not is_over and on_cut is not None:
                on_cut(tally.stats()[0])

    def set_force(self, policy: str | None) -> None:
        """Requests that run elsewhere stay where they are."""

    def set_shut(self, entries: tuple[Shut, ...]) -> None:
        """Likewise."""

    async def set_loaded(self, method: str, is_loaded: bool) -> None:
        """What those servers have loaded is theirs to say."""
        raise BadRequest("The model is served elsewhere: its drafters are not this server's.", "method")

    def push_snapshot(self, state: dict[str, Any]) -> None:
        """Nobody plans steps here."""

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        """Steps of other servers are not seen."""

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        raise _no_tokenizer()

    def detokenize(self, token_ids: list[int]) -> str:
        raise _no_tokenizer()

    def on_attempt(self, listener: AttemptListener) -> None:
        """To be told how every attempt ends."""
        for pool in self._pools.values():
            pool.on_attempt(listener)

    def describe(self) -> dict[str, Any]:
        """Every pool's replicas, for /admin/state."""
        return {"pools": {name: list(pool.describe()) for name, pool in self._pools.items()}}

    # --- attempts ---------------------------------------------------------------------------

    async def _open(self, request: GenerationRequest, policy: str, tally: Tally) -> Call:
        """The first attempt that begins to answer: in the policy's pool, then in baseline's."""
        self._budget.earn()
        error: ApiError | None = None
        for name in dict.fromkeys((policy, BASELINE)):
            if name != policy:
                reason = Reason.DRAFTER_ERROR
                if error is not None and 400 <= error.status < 500 and error.status != 429:
                    reason = Reason.UNSUPPORTED_PARAMS  # this pool's servers do not take what others may
                tally.policy, tally.change = name, PolicyChange(0, name, reason.value)
            found = await self._try(request, self._pools[name])
            if isinstance(found, Call):
                return found
            error = found
        assert error is not None
        raise error

    async def _try(self, request: GenerationRequest, pool: Pool) -> Call | ApiError:
        """Attempts in one pool, on other replicas first; or why they came to nothing."""
        tried: list[Replica] = []
        error: ApiError | None = None
        outgoing = self._outgoing(request, pool)
        while len(tried) < self._config.retries.max_attempts:
            if tried and not self._budget.take():
                break
            attempt = pool.begin(tried)
            if attempt is None:
                break
            call = Call(self._need_session(), attempt, self._config, self._clock, self._tails)
            try:
                if attempt.replica in tried:
                    await asyncio.sleep(self._config.retries.pause_s)
                await call.open(outgoing)
            except AttemptFailed as failure:
                error = failure.error
                if not failure.may_retry:
                    return error
                tried.append(attempt.replica)
            except BaseException:
                call.close()
                raise
            else:
                return call
        return error or _nobody(pool)

    def _outgoing(self, request: GenerationRequest, pool: Pool) -> Outgoing:
        body = outgoing_body(
            request, pool.config.model or self._model_id, asks_usage=self._config.asks_usage
        )
        headers = outgoing_headers(request, self._headers[pool.policy])
        return Outgoing(_PATHS[request.endpoint], body, headers, request.is_stream)

    def _need_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start() comes first"
        return self._session


def _deltas(batch: Sequence[Event], tally: Tally, *, shows_usage: bool) -> list[Delta]:
    """One delta per answer that the batch is about; the first carries the bytes. The chunk that counts
    (usage) comes with the last delta: see `_last`."""
    raw: list[bytes] = []
    found: dict[int, int] = {}
    for event in batch:
        message = event.message
        if event.is_done:
            tally.close()
            continue
        shown = event.raw
        if message is not None:
            if tally.usage_event is not None:  # it was not the last one
                raw.append(tally.usage_event)
                tally.usage_event = None
            for answer, number in tally.add(message).items():
                found[answer] = found.get(answer, 0) + number
            if message.usage is not None and shows_usage and (not message.choices or tally.is_done):
                tally.usage_event = event.raw
                continue
            if message.usage is not None and not shows_usage:
                if not message.choices:
                    continue
                shown = _without_usage(event.raw)
        raw.append(shown)
    reasons = tally.take_reasons()
    answers = list(found) or ([0] if raw else [])
    return [
        Delta(
            num_tokens=found.get(answer, 0),
            finish_reason=reasons.get(answer),
            raw=b"".join(raw) if position == 0 and raw else None,
            answer=answer,
        )
        for position, answer in enumerate(answers)
    ]


def _without_usage(event: bytes) -> bytes:
    """The event, but for the counts that only the gateway asked for."""
    data = payload(event) or b""
    rest = without_member(data, "usage")
    return event.replace(data, rest) if data in event else b"data: " + rest + b"\n\n"


def _last(call: Call, tally: Tally) -> list[Delta]:
    """The counts, by answer; with the first the usage event, or the whole body."""
    raw = call.whole or tally.usage_event
    reasons = tally.take_reasons()
    return [
        Delta(stats=stats, finish_reason=reasons.get(answer), raw=raw if answer == 0 else None, answer=answer)
        for answer, stats in enumerate(tally.stats())
    ]


def _pool_headers(pool: Pool) -> dict[str, str]:
    headers = {"Content-Type": "application/json", **pool.config.headers}
    if (name := pool.config.api_key_env) is not None:
        key = os.environ.get(name)
        if not key:
            raise OSError(f"the environment variable {name} (api_key_env of pool {pool.policy}) is not set")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _nobody(pool: Pool) -> ApiError:
    rests_s = pool.rests_s()
    return UpstreamFailed(
        f"No server of the pool {pool.policy} can be asked: {pool.fault() or 'the retry budget is spent'}.",
        retry_after_s=None if rests_s is None else max(1, int(rests_s)),
    )


def _no_tokenizer() -> BadRequest:
    return BadRequest(
        "This model runs on other servers; its tokenizer is not here.", "model", code="no_tokenizer"
    )
