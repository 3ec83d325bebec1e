"""One attempt: a request to one replica, until its last byte or until nobody wants it any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

from specgate.backends.openai_http.answers import Message, read_message
from specgate.backends.openai_http.events import MAX_EVENT_BYTES, EventSplitter, EventTooLarge, payload
from specgate.backends.openai_http.failures import AttemptFailed, broken, of_error, of_status, retry_after_s
from specgate.backends.openai_http.pool import Attempt, Outcome
from specgate.clock import Clock
from specgate.config.upstream import OpenAIHttpConfig

logger = logging.getLogger(__name__)

DONE = b"[DONE]"
_MAX_ERROR_BYTES = 64 * 1024
_MAX_ANSWER_BYTES = MAX_EVENT_BYTES  # one that is not streamed, and what comes before the first event
_LAST_BYTES_S = 1.0  # for the end of a body whose last event is here


@dataclass(frozen=True, slots=True)
class Event:
    """One event as it came, blank line included. `message` None: `[DONE]`, a comment, or unknown."""

    raw: bytes
    message: Message | None = None
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is sent."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    is_stream: bool


class Call:
    """To be opened once, and closed in any case."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        attempt: Attempt,
        config: OpenAIHttpConfig,
        clock: Clock,
        tails: set[asyncio.Task[None]],
    ) -> None:
        """`tails` keeps the tasks that read bodies to their end after the last event."""
        self._session = session
        self._tails = tails
        self._later: AttemptFailed | None = None  # what comes behind the events that came before it
        self._attempt = attempt
        self._config = config
        self._clock = clock
        self._pool = attempt.pool
        self._response: aiohttp.ClientResponse | None = None
        self._splitter = EventSplitter()
        self._first: list[Event] = []
        self.whole = b""  # the body of an answer that is not streamed
        self.whole_message = Message()

    async def open(self, outgoing: Outgoing) -> None:
        """Send, and wait for the first event, or for the whole answer. Raises AttemptFailed; the attempt is
        then over."""
        timeouts = self._config.timeouts
        limit_s = timeouts.first_byte_s if outgoing.is_stream else timeouts.whole_s
        try:
            with self._faults():
                async with asyncio.timeout(limit_s):
                    await self._begin(outgoing)
                    if outgoing.is_stream:
                        await self._read_first()
                    else:
                        await self._read_whole()
        except AttemptFailed as failure:
            self._fail(failure)
            if failure.rests_s is not None:
                self._attempt.replica.rests_until_s = self._clock.monotonic() + failure.rests_s
            raise
        except BaseException:  # nobody waits for it any more
            self._close(Outcome.LEFT)
            raise

    async def batches(self, is_whole: Callable[[], bool]) -> AsyncIterator[list[Event]]:
        """Events as they come, those that came together in one list, up to `[DONE]` or the end, which
        without `[DONE]` is one only if `is_whole` then says so. Raises AttemptFailed."""
        batch, gap_s = self._first, self._config.timeouts.gap_s
        try:
            with self._faults():
                while batch:
                    yield batch
                    if batch[-1].is_done:
                        break
                    async with asyncio.timeout(gap_s):
                        batch = await self._read_batch()
                if not (batch and batch[-1].is_done) and not is_whole():
                    raise broken(self._pool, "ended its answer too early")
        except AttemptFailed as failure:
            self._fail(failure)
            raise
        except BaseException:
            self._close(Outcome.LEFT)
            raise
        self._finish()

    def close(self) -> None:
        """Nobody wants the rest: the connection is closed, which tells the server. Does nothing after the
        end."""
        self._close(Outcome.LEFT)

    # --- parts ------------------------------------------------------------------------------

    async def _begin(self, outgoing: Outgoing) -> None:
        response = self._response = await self._session.post(
            self._attempt.replica.url + outgoing.path,
            data=outgoing.body,
            headers=outgoing.headers,
            allow_redirects=False,
        )
        if response.status != 200:
            body = await _read_up_to(response.content, _MAX_ERROR_BYTES)
            rests_s = retry_after_s(
                response.headers.get("Retry-After"), self._clock, self._config.max_retry_after_s
            )
            raise of_status(self._pool, response.status, body, rests_s)

    async def _read_first(self) -> None:
        assert self._response is not None
        if self._response.content_type != "text/event-stream":
            body = await _read_up_to(self._response.content, _MAX_ERROR_BYTES)
            message = read_message(body)
            if message is not None and message.has_error:
                raise of_error(self._pool, body)
            raise broken(self._pool, f"sent {self._response.content_type[:80]} where events were asked for")
        size, batch = 0, self._first
        while not any(event.message is not None or event.is_done for event in batch):
            batch = await self._read_batch()
            if not batch:
                raise broken(self._pool, "ended its answer before it began")
            self._first += batch
            size += sum(len(event.raw) for event in batch)
            if size > _MAX_ANSWER_BYTES:
                raise broken(self._pool, f"sent over {_MAX_ANSWER_BYTES >> 20} MiB before its answer began")

    async def _read_whole(self) -> None:
        assert self._response is not None
        body = await _read_up_to(self._response.content, _MAX_ANSWER_BYTES + 1)
        if len(body) > _MAX_ANSWER_BYTES:
            raise broken(self._pool, f"sent an answer of more than {_MAX_ANSWER_BYTES >> 20} MiB")
        self.whole = body
        message = read_message(self.whole)
        if message is not None and message.has_error:
            raise of_error(self._pool, self.whole)
        if message is None or not message.choices:
            raise broken(self._pool, "sent an answer without choices")
        self.whole_message = message
        self._attempt.end(Outcome.OK)

    async def _read_batch(self) -> list[Event]:
        """At least one event; none at the end."""
        assert self._response is not None
        content = self._response.content
        if self._later is not None:
            raise self._later
        while True:
            data = await content.readany()
            events = self._splitter.push(data) if data else self._splitter.finish()
            if events or not data:
                return self._read_events(events)

    def _read_events(self, events: list[bytes]) -> list[Event]:
        out = []
        for raw in events:
            data = payload(raw)
            if data == DONE:
                out.append(Event(raw, is_done=True))
                break
            message = read_message(data) if data is not None else None
            if (message is not None and message.has_error) or raw.startswith(b"event: error"):
                self._later = of_error(self._pool, data or raw)
                break
            out.append(Event(raw, message))
        if not out and self._later is not None:
            raise self._later
        return out

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Whatever goes wrong on the wire, as AttemptFailed."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError:
            raise broken(self._pool, "did not accept a connection in time", Outcome.CONNECT) from None
        except aiohttp.ClientConnectorError as error:
            why = error.os_error.strerror or str(error.os_error)  # may hold the address
            raise broken(self._pool, "cannot be reached", Outcome.CONNECT, why=why) from None
        except TimeoutError:
            raise broken(self._pool, "was silent for too long", Outcome.TIMEOUT) from None
        except EventTooLarge:
            raise broken(self._pool, "sent an event without end") from None
        except (aiohttp.ClientError, OSError) as error:
            raise broken(self._pool, f"broke the connection ({type(error).__name__})") from None

    def _finish(self) -> None:
        """The answer is whole. The connection is kept if the end of the body follows soon, which nobody
        else waits for."""
        self._attempt.end(Outcome.OK)
        response = self._response
        if response is not None and not response.content.is_eof():
            task = asyncio.get_running_loop().create_task(_read_end(response))
            self._tails.add(task)
            task.add_done_callback(self._tails.discard)

    def _fail(self, failure: AttemptFailed) -> None:
        if failure.detail is not None:
            replica = self._attempt.replica
            replica.last_failure = failure.detail
            logger.warning("pool %s: replica %s %s", self._pool, replica.url, failure.detail)
        self._close(failure.outcome)

    def _close(self, outcome: Outcome) -> None:
        self._attempt.end(outcome)
        if self._response is not None and not self._response.content.is_eof():
            self._response.close()


async def _read_up_to(content: aiohttp.StreamReader, size: int) -> bytes:
    """All of it, or its first `size` bytes: `read` alone returns what has arrived."""
    parts: list[bytes] = []
    while size > 0 and (data := await content.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


async def _read_end(response: aiohttp.ClientResponse) -> None:
    try:
        async with asyncio.timeout(_LAST_BYTES_S):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):
        response.close()
