"""Requests and tokens per minute of each key, as token buckets. Pure but for the injected clock.

A bucket holds at most a minute's worth and fills evenly. A request takes its tokens when it
arrives: those of its prompt by a guess, those of its answer by what it asks for at most. When it
has ended it is set right by what was used; a bucket may then be below empty, and is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from specgate.clock import Clock
from specgate.config import KeyLimits
from specgate.errors import RateLimited
from specgate.types import GenerationRequest

_MINUTE_S = 60.0
_CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class Bucket:
    """What is left of one limit. Amounts are those of `per_minute`; times in seconds."""

    per_minute: int
    level: float
    at_s: float

    def fill(self, now_s: float) -> None:
        """Bring it up to date. A clock that stands still or goes back adds nothing."""
        passed_s = max(0.0, now_s - self.at_s)
        self.level = min(self.per_minute, self.level + self.per_minute * passed_s / _MINUTE_S)
        self.at_s = max(self.at_s, now_s)

    def wait_s(self, amount: float) -> float:
        """Until so much is there; 0 if it is. More than the bucket holds is had from a full one."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def resize(self, per_minute: int) -> None:
        """Another limit from now on: what was used stays used."""
        self.level = min(per_minute, self.level + per_minute - self.per_minute)
        self.per_minute = per_minute


class Reservation:
    """What one request has taken of its key's tokens."""

    def __init__(self, bucket: Bucket | None, num_tokens: float) -> None:
        self._bucket = bucket
        self._num_tokens = num_tokens

    def hold(self, num_tokens: float) -> None:
        """So many it may become: no more than a minute's tokens are held back for it."""
        most = num_tokens if self._bucket is None else self._bucket.per_minute
        self.set_to(min(num_tokens, most))

    def set_to(self, num_tokens: float) -> None:
        """So many it is, not what was taken before. May be called again."""
        if self._bucket is not None:
            self._bucket.level += self._num_tokens - num_tokens
            self._bucket.level = min(self._bucket.level, self._bucket.per_minute)
        self._num_tokens = num_tokens


class RateLimits:
    """All keys' buckets. `limits_of` gives a key's limits as they are now."""

    def __init__(self, limits_of: Callable[[str], KeyLimits], clock: Clock) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def take(self, key: str, num_tokens: int) -> Reservation:
        """One request and its tokens. Raises RateLimited, and then nothing is taken."""
        requests, tokens = self._check(key, num_tokens)
        if requests is not None:
            requests.level -= 1
        taken = 0.0
        if tokens is not None:
            taken = min(num_tokens, tokens.per_minute)
            tokens.level -= taken
        return Reservation(tokens, taken)

    def refusal(self, key: str) -> RateLimited | None:
        """Why any request of this key would be refused now, however small it is."""
        try:
            self._check(key, 1)
        except RateLimited as error:
            return error
        return None

    def headers(self, key: str) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*`, for the limits this key has. `reset`: until the bucket is full."""
        out: dict[str, str] = {}
        for unit, bucket in zip(("requests", "tokens"), self._buckets(key), strict=True):
            if bucket is not None:
                out[f"x-ratelimit-limit-{unit}"] = str(bucket.per_minute)
                out[f"x-ratelimit-remaining-{unit}"] = str(max(0, math.floor(bucket.level)))
                out[f"x-ratelimit-reset-{unit}"] = _duration(bucket.wait_s(bucket.per_minute))
        return out

    def _check(self, key: str, num_tokens: int) -> tuple[Bucket | None, Bucket | None]:
        """The key's buckets of requests and of tokens. Raises RateLimited if they hold too little."""
        requests, tokens = self._buckets(key)
        for bucket, amount, unit in ((requests, 1, "requests"), (tokens, num_tokens, "tokens")):
            wait_s = bucket.wait_s(amount) if bucket is not None else 0.0
            if bucket is not None and wait_s > 0:
                again = _duration(wait_s)
                raise RateLimited(
                    f"This key may use {bucket.per_minute} {unit} a minute; try again in {again}.",
                    retry_after_s=max(1, math.ceil(wait_s)),
                )
        return requests, tokens

    def _buckets(self, key: str) -> tuple[Bucket | None, Bucket | None]:
        limits, now_s = self._limits_of(key), self._clock.monotonic()
        return (
            _refreshed(self._requests, key, limits.requests_per_minute, now_s),
            _refreshed(self._tokens, key, limits.tokens_per_minute, now_s),
        )


def estimated_tokens(request: GenerationRequest) -> int:
    """What a request will use, before its prompt is encoded: a guess at the prompt, and the answers'
    ceiling where it names one."""
    size = 0.0
    for message in request.messages or ():
        content = message.get("content")
        size += len(content) / _CHARACTERS_PER_TOKEN if isinstance(content, str) else 0
    for prompt in (request.prompt, *request.more_prompts):
        if isinstance(prompt, str):
            size += len(prompt) / _CHARACTERS_PER_TOKEN
        elif prompt is not None:
            size += len(prompt)
    return math.ceil(size) + answer_ceiling(request)


def answer_ceiling(request: GenerationRequest) -> int:
    """Tokens of all answers at most; 0 where the request names no limit."""
    if not request.has_explicit_max_tokens:
        return 0
    return request.sampling.max_tokens * request.n * (1 + len(request.more_prompts))


def _refreshed(buckets: dict[str, Bucket], key: str, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        buckets.pop(key, None)
        return None
    bucket = buckets.get(key)
    if bucket is None:
        bucket = buckets[key] = Bucket(per_minute, per_minute, now_s)
    bucket.fill(now_s)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute)
    return bucket


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 340ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
