"""What one request was and how it went, as the client saw it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class Job:
    """A request to be sent. `arrival_s` counts from the start of its slice."""

    id: str
    prompt_id: str
    task: str
    endpoint: str  # path below /v1/
    body: Mapping[str, Any]  # all but model and stream
    arrival_s: float = 0.0


@dataclass(slots=True)
class RawAnswer:
    """Bytes with their times, seconds of the client's clock. Read once the load is over: parsing
    while others stream would make the client the bottleneck."""

    job: Job
    due_s: float  # when it was to be sent
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    fault: str | None = None  # the connection failed, or the time was up


@dataclass(frozen=True, slots=True)
class Record:
    """One answered (or failed) request. Times in ms from when the request was *due*, so that a
    late client or a full server is never left out. None where there is no data."""

    job_id: str
    prompt_id: str
    task: str
    arm: str
    arrival_s: float
    send_lag_ms: float  # sent later than due: the client's own fault
    ttft_ms: float | None = None
    tpot_ms: float | None = None  # (E2E - TTFT) / (output tokens - 1)
    e2e_ms: float | None = None
    itl_ms: tuple[float, ...] = ()  # between successive emissions
    emitted_s: tuple[float, ...] = ()  # of every emission, on the client's clock
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_events: int = 0
    finish_reason: str | None = None
    text: str = ""
    text_sha256: str = ""
    policy: str | None = None
    reason: str | None = None
    task_predicted: str | None = None
    specgate: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def queue_wait_ms(self) -> float | None:
        """As the server measured it."""
        wait = (self.specgate.get("timings") or {}).get("queue_wait_ms")
        return None if wait is None else float(wait)

    def policy_tokens(self) -> dict[str, int]:
        """Output tokens by the policy they were made under, changes within the request included."""
        num = self.num_output_tokens or 0
        if self.policy is None:
            return {}
        tokens: dict[str, int] = {}
        start, policy = 0, self.policy
        for change in self.specgate.get("policy_changes") or ():
            at = min(max(int(change.get("token_index", 0)), start), num)
            tokens[policy] = tokens.get(policy, 0) + at - start
            start, policy = at, str(change.get("policy"))
        tokens[policy] = tokens.get(policy, 0) + num - start
        return {name: count for name, count in tokens.items() if count}


def read_answer(raw: RawAnswer, arm: str) -> Record:
    """Parse what came. Anything but a whole answer is an error, in the server's words if it has any."""
    job = raw.job
    seen = _Seen()
    error = raw.fault
    if raw.status is not None and raw.status != 200:
        error = f"{raw.status} {_message(b''.join(piece for _, piece in raw.pieces))}"
    elif raw.status is not None:
        try:
            for at_s, data in _events(raw.pieces):
                seen.add(at_s, data)
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, IndexError) as fault:
            error = error or f"the stream holds what is no OpenAI chunk ({type(fault).__name__}: {fault})"
        error = error or seen.error
        if error is None and not seen.is_done:
            error = "the stream ended without [DONE]"
    elif error is None:
        error = "no answer"
    text = "".join(seen.texts)
    first_s = seen.times[0] if seen.times else None
    num_tokens = seen.usage.get("completion_tokens")
    e2e_s = raw.ended_s - raw.due_s
    ttft_s = None if first_s is None else first_s - raw.due_s
    tpot_s = None
    if ttft_s is not None and num_tokens is not None and num_tokens > 1:
        tpot_s = (e2e_s - ttft_s) / (num_tokens - 1)
    return Record(
        job_id=job.id,
        prompt_id=job.prompt_id,
        task=job.task,
        arm=arm,
        arrival_s=job.arrival_s,
        send_lag_ms=(raw.sent_s - raw.due_s) * 1e3,
        ttft_ms=_ms(ttft_s),
        tpot_ms=_ms(tpot_s),
        e2e_ms=e2e_s * 1e3,
        itl_ms=tuple((b - a) * 1e3 for a, b in zip(seen.times, seen.times[1:], strict=False)),
        emitted_s=tuple(seen.times),
        num_prompt_tokens=seen.usage.get("prompt_tokens"),
        num_output_tokens=num_tokens,
        num_events=len(seen.times),
        finish_reason=seen.finish_reason,
        text=text,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        policy=raw.headers.get("X-SpecGate-Policy"),
        reason=raw.headers.get("X-SpecGate-Reason"),
        task_predicted=raw.headers.get("X-SpecGate-Task"),
        specgate=seen.specgate,
        error=None if error is None else error[:MAX_ERROR_CHARS],
    )


class _Seen:
    """What the events of one stream have said so far."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.texts: list[str] = []
        self.usage: Mapping[str, int] = {}
        self.specgate: Mapping[str, Any] = {}
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.is_done = False

    def add(self, at_s: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            self.error = f"in mid-stream: {(chunk['error'] or {}).get('message')}"
            return
        self.usage = chunk.get("usage") or self.usage
        self.specgate = chunk.get("specgate") or self.specgate
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            piece = choice.get("text") or delta.get("content")
            if piece or delta.get("tool_calls"):
                self.times.append(at_s)
                self.texts.append(piece or msgspec.json.encode(delta["tool_calls"]).decode())
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of every event, at the time its line was complete."""
    rest = b""
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at_s, line[5:].strip()


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return body.decode(errors="replace")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
