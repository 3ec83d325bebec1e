"""The embedded backend: this machine's own engine, in a process of its own, behind `Backend`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import NEEDED_DRAFTERS, EngineConfig
from engine.errors import ModelSourceError
from engine.types import (
    EngineLoad,
    EngineRequest,
    FinishReason,
    PolicyAssignment,
    SequenceOutput,
    SequenceStats,
    StepRecord,
)
from specgate.backends.base import BackendStatus, ModelCard
from specgate.backends.embedded import wire
from specgate.backends.embedded.answer import Answer
from specgate.backends.embedded.link import Lost, Mailbox
from specgate.backends.embedded.prompt import PromptEncoder
from specgate.backends.embedded.supervisor import Supervision, Supervisor
from specgate.clock import Clock
from specgate.errors import ApiError, BadRequest, EngineLost, InternalError, NotReady
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.types import Delta, GenerationRequest, PreparedPrompt

logger = logging.getLogger(__name__)

_NO_LOAD = EngineLoad(0, 0, 0, 0, 0, 0)
_LAST_WORD_S = 2.0  # from an abort to the engine's word on it, which comes with its next step


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """One embedded model: its name in the API, its engine, and how the process is supervised."""

    model_id: str
    engine: EngineConfig
    supervision: Supervision = field(default_factory=Supervision)
    sweep_s: float = 0.0  # how long the engine tries out step sizes before its first request
    retry_wait_s: float = 60.0  # how long a request without a first delta waits for a restarted engine


class EmbeddedBackend:
    """Implements `specgate.backends.base.Backend`."""

    def __init__(self, config: EmbeddedConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._supervisor = Supervisor(wire.Start(config.engine, config.sweep_s), config.supervision, clock)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")
        self._encoder: PromptEncoder | None = None
        self._loading: asyncio.Task[None] | None = None
        self._fault: str | None = None  # the text side cannot be loaded
        self._created_s = int(clock.wall())
        self._card = ModelCard(config.model_id, config.engine.max_model_len or 0, created_s=self._created_s)
        self._carded: wire.Ready | None = None  # what the card was made of
        self._ids = itertools.count()
        self._num_retries = 0
        self._retried_s = 0.0
        self._shut: tuple[Shut, ...] = ()  # by the guards
        self._unloaded: tuple[Shut, ...] = ()

    @property
    def card(self) -> ModelCard:
        """What is served. Until the engine was ready once, `max_model_len` is the configured one, or 0."""
        ready = self._supervisor.ready
        if ready is not None and ready is not self._carded:
            self._card, self._carded = self._card_of(ready), ready
        return self._card

    async def start(self) -> None:
        """Begin loading tokenizer and engine side by side."""
        self._loading = asyncio.create_task(self._load_text_side(), name="load-tokenizer")
        self._supervisor.start()

    async def stop(self) -> None:
        """Running requests get an error; the engine process ends."""
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._supervisor.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def status(self) -> BackendStatus:
        """Ready when both the engine and the tokenizer are."""
        status = self._supervisor.status()
        if self._num_retries:
            status = replace(status, num_retries=self._num_retries, retried_s=self._retried_s)
        if self._fault is not None:
            return replace(status, is_ready=False, detail=self._fault, is_final=True)
        if status.is_ready and self._encoder is None:
            return replace(status, is_ready=False, detail="loading the tokenizer")
        return status

    def load(self) -> EngineLoad:
        """As of the engine's last step; all zero while none serves."""
        return self._supervisor.load or _NO_LOAD

    async def prepare(self, request: GenerationRequest) -> PreparedPrompt:
        """See `Backend.prepare`."""
        card = self.card
        encoder = self._text_side()
        return await encoder.prepare(
            request, card.max_model_len, card.vocab_size or len(encoder.table), self._threads
        )

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
    ) -> AsyncIterator[Delta]:
        """See `Backend.generate`. Raises BadRequest when the engine refuses, EngineLost when it dies
        after the first delta or twice before it."""
        encoder = self._encoder
        if encoder is None:
            raise NotReady("the tokenizer is not loaded yet")
        seed = request.sampling.seed
        sampling = replace(
            request.sampling, max_tokens=max_tokens, seed=None if seed is None else _seed_of(seed, index)
        )
        has_shown = False
        started_s = self._clock.monotonic()
        for attempt in range(2):
            engine_request = EngineRequest(
                request_id=f"r{next(self._ids)}",
                prompt_token_ids=prepared.token_ids,
                sampling=sampling,
                policy=policy,
                priority=request.priority,
                cache_salt=request.tenant,
                label=label,
                grammar=prepared.grammar,
            )
            salt = f"{self._created_s}/{request.request_id}/{engine_request.request_id}"
            tools = encoder.tool_reader(request, salt)
            num_prompt, has_trace = len(prepared.token_ids), request.has_trace
            answer = Answer(
                encoder.table, sampling, request.stop, num_prompt, tools, has_trace=has_trace
            )
            try:
                async with aclosing(self._run(engine_request, answer, on_cut)) as deltas:
                    async for delta in deltas:
                        has_shown = True
                        yield delta
                return
            except (EngineLost, NotReady) as error:
                can_retry = attempt == 0 and not has_shown
                lost_s = self._clock.monotonic() - started_s
                if not can_retry or not await self._supervisor.wait_ready(self._config.retry_wait_s):
                    raise
                self._num_retries += 1
                self._retried_s += lost_s
                logger.warning("running a request again that had no first token yet: %s", error.message)

    def set_force(self, policy: str | None) -> None:
        """See `Backend.set_force`."""
        self._supervisor.set_force(policy)

    def set_shut(self, entries: tuple[Shut, ...]) -> None:
        """See `Backend.set_shut`."""
        self._shut = entries
        self._tell_shut()

    async def set_loaded(self, method: str, is_loaded: bool) -> None:
        """See `Backend.set_loaded`. A drafter that needs another goes with it, and brings it."""
        engine = self._config.engine
        configured = {
            "ngram": engine.ngram,
            "suffix": engine.suffix,
            "draft": engine.draft_model,
            "hybrid": engine.hybrid,
        }
        names = [name for name, settings in configured.items() if settings is not None]
        if method not in names:
            known = ", ".join(names) or "none"
            raise BadRequest(f"{method!r} is no drafter here; there are: {known}.", "method")
        loaded = set(self.card.methods)
        if is_loaded:
            loaded |= {method, *NEEDED_DRAFTERS.get(method, ())}
        else:
            loaded -= {method, *(name for name, needed in NEEDED_DRAFTERS.items() if method in needed)}
        wanted = tuple(name for name in names if name in loaded)
        before = self._unloaded
        self._unloaded = tuple(
            Shut(name, Reason.UNLOADED, why="unloaded: by an operator", is_hard=True)
            for name in names
            if name not in loaded
        )
        self._tell_shut()  # before the engine: requests that run leave it with this reason
        try:
            await self._supervisor.set_drafters(wanted)
        except ApiError:
            self._unloaded = before
            self._tell_shut()
            raise

    def _tell_shut(self) -> None:
        self._supervisor.set_shut((*self._shut, *self._unloaded))

    def push_snapshot(self, state: dict[str, Any]) -> None:
        """Fresh model state for the engine's planner."""
        self._supervisor.push_snapshot(state)

    def describe(self) -> dict[str, Any]:
        return {}

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        """See `Backend.on_step`."""
        self._supervisor.on_step(listener)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """See `Backend.tokenize`."""
        return self._text_side().tokenize(text, add_special_tokens)

    def detokenize(self, token_ids: list[int]) -> str:
        """See `Backend.detokenize`; special tokens are shown."""
        return self._text_side().table.decode(token_ids, skip_special_tokens=False)

    @property
    def engine_pid(self) -> int | None:
        """The engine process, for drills and diagnosis."""
        return self._supervisor.pid

    @property
    def num_open(self) -> int:
        """Answers the engine works for on behalf of this backend."""
        return self._supervisor.num_open

    async def _run(
        self, request: EngineRequest, answer: Answer, on_cut: Callable[[SequenceStats], None] | None
    ) -> AsyncGenerator[Delta, None]:
        """One attempt. Whatever way it is left, the engine works no longer for it."""
        mailbox = self._supervisor.submit(request)
        try:
            while not answer.is_finished:
                await self._read_mail(mailbox, request, answer)
                if (delta := answer.take()) is not None:
                    yield delta
        finally:
            try:
                if not answer.is_finished and on_cut is not None:
                    await self._cut(mailbox, request.request_id, on_cut)
            finally:
                self._supervisor.release(request.request_id)

    async def _cut(
        self, mailbox: Mailbox, request_id: str, on_cut: Callable[[SequenceStats], None]
    ) -> None:
        """Abort, and wait for the engine's last word: it tells what was done until then."""
        self._supervisor.abort(request_id)
        cancelled: asyncio.CancelledError | None = None
        try:
            async with asyncio.timeout(_LAST_WORD_S) as limit:
                while mailbox.last_stats is None and self._supervisor.is_open(request_id):
                    try:
                        await mailbox.get()
                    except asyncio.CancelledError as error:
                        if limit.expired():
                            raise
                        # A write failed before the connection was seen to be lost: the word is still owed.
                        cancelled = error
        except TimeoutError:
            pass  # the engine hangs or its step is very long: the counts of this answer are lost
        if mailbox.last_stats is not None:
            on_cut(mailbox.last_stats)
        if cancelled is not None:
            raise cancelled

    async def _read_mail(self, mailbox: Mailbox, request: EngineRequest, answer: Answer) -> None:
        for mail in await mailbox.get():
            if isinstance(mail, wire.Refused):
                raise BadRequest(mail.message, mail.param)
            if isinstance(mail, Lost):
                if not answer.needs_abort:
                    raise EngineLost(f"the engine went away during the request ({mail.why})")
                answer.close()
                return
            had_stop = answer.needs_abort
            if not had_stop:
                _check_output(mail)
            answer.push(mail)
            if answer.needs_abort and not had_stop:
                self._supervisor.abort(request.request_id)

    async def _load_text_side(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._encoder = await loop.run_in_executor(
                self._threads, PromptEncoder.load, self._config.engine.model, self._clock.wall
            )
        except ModelSourceError as error:
            self._fault = str(error)

    def _text_side(self) -> PromptEncoder:
        if self._encoder is None or not self.status().is_ready:
            raise NotReady(f"the model is not ready: {self.status().detail}")
        return self._encoder

    def _card_of(self, ready: wire.Ready) -> ModelCard:
        return ModelCard(
            model_id=self._config.model_id,
            max_model_len=ready.max_model_len,
            methods=ready.methods,
            vocab_size=ready.vocab_size,
            created_s=self._created_s,
            details=ready.details,
        )


def _seed_of(seed: int, index: int) -> int:
    """Answers of one request differ, repeatably; the sum stays within 64 signed bits."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _check_output(output: SequenceOutput) -> None:
    """The engine gave the request up: say so in the gateway's terms."""
    if output.finish_reason is FinishReason.ERROR:
        raise InternalError(f"the engine failed on this request: {output.error or 'no reason given'}")
    if output.finish_reason is FinishReason.ABORT:
        raise EngineLost("the engine dropped the request")
