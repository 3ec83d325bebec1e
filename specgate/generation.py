"""A decided request while it runs: its streams, its counts, its times, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from engine.types import PolicyAssignment, SequenceStats
from specgate.backends.base import Backend
from specgate.clock import Clock
from specgate.costs import RequestCost
from specgate.errors import ApiError, DeadlineExceeded, InternalError
from specgate.load import Wait
from specgate.policy.reasons import Reason
from specgate.types import (
    Decision,
    Delta,
    GenerationRequest,
    PreparedPrompt,
    RequestOutcome,
    Timings,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the request, encoded. `request` has it as its only one."""

    request: GenerationRequest
    prepared: PreparedPrompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Times:
    """When things happened, by the injected clock; `ends_at` (the deadline) by the event loop's."""

    arrival_s: float
    admitted_s: float
    ends_at: float


@dataclass(slots=True)
class Answer:
    """One of the request's answers so far."""

    num_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stats: SequenceStats | None = None
    queue_wait_s: float | None = None  # in the backend
    network_s: float | None = None

    def take(self, delta: Delta, now_s: float) -> None:
        """Count a delta that is about to be handed to the writer."""
        if delta.queue_wait_s is not None:
            self.queue_wait_s = delta.queue_wait_s
        if delta.num_tokens:
            if self.last_s is None:
                self.first_s = now_s
            else:
                self.gaps.append((now_s - self.last_s, delta.num_tokens))
            self.last_s = now_s
        self.num_tokens += delta.num_tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        if delta.stats is not None:
            self.stats = delta.stats
        if delta.network_s is not None:
            self.network_s = delta.network_s

    def cut(self, stats: SequenceStats) -> None:
        """It ended before its last delta; what the backend did for it until then."""
        self.stats = stats

    @property
    def num_output_tokens(self) -> int:
        """As the backend counted; what was seen, if it did not come to the end."""
        return self.stats.num_output_tokens if self.stats is not None else self.num_tokens

    @property
    def tpot_s(self) -> float | None:
        """None for fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


class Generation:
    """Answer number `i` belongs to prompt `i // n`."""

    def __init__(
        self,
        request: GenerationRequest,
        decision: Decision,
        prompts: Sequence[Prompt],
        backend: Backend,
        times: Times,
        clock: Clock,
    ) -> None:
        self.request = request
        self.decision = decision
        self.prompts = tuple(prompts)
        self.answers = [Answer() for _ in range(request.n * len(prompts))]
        self._backend = backend
        self._times = times
        self._clock = clock
        self._deltas: AsyncGenerator[tuple[int, Delta], None] | None = None
        self._failure: str | None = None
        self._timeout: asyncio.Timeout | None = None
        self._cut: ApiError | None = None
        self._kept: list[int] | None = None
        self._wait: Wait | None = None
        self._price: Callable[[RequestOutcome], RequestCost] | None = None

    @property
    def is_relay(self) -> bool:
        """Other servers run it: one stream has all answers, and their bytes are passed on."""
        return self._backend.card.is_relay

    def priced_by(self, price: Callable[[RequestOutcome], RequestCost]) -> None:
        """How to tell what it cost."""
        self._price = price

    def cost(self) -> RequestCost | None:
        """As of now; None where nobody can tell."""
        return None if self._price is None else self._price(self.outcome())

    def report_wait(self, wait: Wait) -> None:
        """Where to tell the whole queue wait as soon as it is known."""
        self._wait = wait

    def keep_tokens(self) -> None:
        """Remember the first answer's token ids: it may be decoded again for comparison."""
        self._kept = []

    @property
    def kept_tokens(self) -> tuple[int, ...] | None:
        """Token ids of the first answer; None unless they were to be kept."""
        return None if self._kept is None else tuple(self._kept)

    @property
    def admission_wait_s(self) -> float:
        """Arrival to admitted."""
        return self._times.admitted_s - self._times.arrival_s

    def answers_by_prompt(self) -> list[list[Answer]]:
        """One list per prompt."""
        n = self.request.n
        return [self.answers[i : i + n] for i in range(0, len(self.answers), n)]

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that answer `index` continues."""
        return self.prompts[index // self.request.n]

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(answer index, delta) in order of arrival, until every answer has finished. To be read once.

        Raises ApiError. The reader holds `deadline()` around it.
        """
        streams = [self._open(index) for index in range(1 if self.is_relay else len(self.answers))]
        self._deltas = _merge(streams)
        while True:
            try:
                index, delta = await anext(self._deltas)
            except StopAsyncIteration:
                break
            except ApiError as error:
                self.note_failure(error)
                raise
            index = delta.answer if self.is_relay else index
            self.answers[index].take(delta, self._clock.monotonic())
            if self._wait is not None and delta.queue_wait_s is not None:
                self._wait.value_s = self.timings().queue_wait_s
            if self._kept is not None and index == 0:
                self._kept += delta.token_ids
            yield index, delta
        if any(answer.finish_reason is None for answer in self.answers):
            raise InternalError("The backend ended an answer without saying why.")

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Raises out of the block when the request's time is up: DeadlineExceeded, or what `cut_off` gave."""
        try:
            async with asyncio.timeout_at(self._times.ends_at) as self._timeout:
                yield
        except TimeoutError:
            late = DeadlineExceeded("The request's deadline passed before its answer was whole.")
            raise (self._cut or late) from None

    def cut_off(self, error: ApiError) -> None:
        """Its time is up now, for this reason."""
        self._cut = error
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def note_failure(self, error: ApiError) -> None:
        """It did not end well."""
        self._failure = "deadline" if isinstance(error, DeadlineExceeded) else "error"

    def note_left(self) -> None:
        """The client went away."""
        self._failure = self._failure or "cancelled"

    async def close(self) -> None:
        """Abort what still runs. Safe to call at any time."""
        if self._deltas is not None:
            await self._deltas.aclose()

    def outcome(self) -> RequestOutcome:
        """Everything there is to say about it, once it is over."""
        is_done = all(answer.finish_reason is not None for answer in self.answers)
        stats = tuple(answer.stats for answer in self.answers if answer.stats is not None)
        networks = [answer.network_s for answer in self.answers if answer.network_s is not None]
        return RequestOutcome(
            request=self.request,
            decision=self.decision,
            outcome="ok" if is_done else self._failure or "error",
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            timings=self.timings(),
            stats=stats,
            policy_changes=tuple(change for s in stats for change in s.policy_changes),
            inter_token_s=tuple(gap for answer in self.answers for gap in answer.gaps),
            network_s=sum(networks) if networks else None,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it gets."""
        if self.is_relay and (stats := self.answers[0].stats) is not None:
            return stats.num_prompt_tokens  # as counted there, of all prompts
        return sum(prompt.prepared.num_tokens for prompt in self.prompts)

    @property
    def num_tokens(self) -> int:
        """Of prompts and answers."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        """Of all answers."""
        return sum(answer.num_output_tokens for answer in self.answers)

    def timings(self) -> Timings:
        """As of now; with several answers, TPOT is their mean and the rest that of the whole."""
        arrival_s = self._times.arrival_s
        firsts = [answer.first_s for answer in self.answers if answer.first_s is not None]
        lasts = [answer.last_s for answer in self.answers if answer.last_s is not None]
        tpots = [answer.tpot_s for answer in self.answers if answer.tpot_s is not None]
        waits = [wait_s for answer in self.answers if (wait_s := _backend_wait_s(answer)) is not None]
        return Timings(
            queue_wait_s=self.admission_wait_s + max(waits, default=0.0),
            ttft_s=min(firsts) - arrival_s if firsts else None,
            e2e_s=(max(lasts) if lasts else self._clock.monotonic()) - arrival_s,
            tpot_s=sum(tpots) / len(tpots) if tpots else None,
        )

    def _open(self, index: int) -> AsyncIterator[Delta]:
        prompt, decision = self.prompt_of(index), self.decision
        return self._backend.generate(
            prompt.request,
            prompt.prepared,
            PolicyAssignment(
                decision.policy,
                decision.num_speculative_tokens,
                is_exact=decision.is_exact,
                is_pinned=decision.is_pinned or decision.reason == Reason.OVERRIDE,
                is_probe=decision.is_probe,
                hold_steps=decision.hold_steps,
                may_probe=self.request.overrides.may_probe,
            ),
            index=index % self.request.n,
            max_tokens=prompt.max_tokens,
            label=decision.task.scope,
            on_cut=self.answers[index].cut,
        )


def _backend_wait_s(answer: Answer) -> float | None:
    return answer.queue_wait_s if answer.stats is None else answer.stats.queue_wait_s


async def _merge(streams: Sequence[AsyncIterator[Delta]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """All streams at once. Closing it, or a failure of one, closes them all."""
    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                yield 0, delta
        else:
            async with aclosing(_pumped(streams)) as merged:
                async for item in merged:
                    yield item
    finally:
        for stream in streams:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()


async def _pumped(streams: Sequence[AsyncIterator[Delta]]) -> AsyncGenerator[tuple[int, Delta], None]:
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))

    async def pump(index: int) -> None:
        try:
            async for delta in streams[index]:
                await queue.put((index, delta))
        except Exception as error:  # noqa: BLE001 - carried to the reader, who raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
