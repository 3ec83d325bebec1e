"""What can go wrong with an attempt, and what follows from it."""

from __future__ import annotations

import email.utils
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from specgate.backends.openai_http.pool import Outcome
from specgate.clock import Clock
from specgate.errors import ApiError, UpstreamFailed, UpstreamRefused

_MAX_SHOWN = 300
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class AttemptFailed(Exception):
    """One attempt came to nothing."""

    outcome: Outcome
    error: ApiError  # for the caller, if nobody else can serve the request
    may_retry: bool = True
    rests_s: float | None = None  # it asked to be left alone for so long
    detail: str | None = None  # for the log and /admin/state alone; None: nothing is wrong with the server


def broken(pool: str, what: str, outcome: Outcome = Outcome.BROKEN, *, why: str = "") -> AttemptFailed:
    """It could not be reached, went silent, or talked nonsense. `why` is not for the caller."""
    return AttemptFailed(outcome, _failed(pool, what), detail=f"{what} ({why})" if why else what)


def of_status(pool: str, status: int, body: bytes, rests_s: float | None) -> AttemptFailed:
    """An answer other than 200."""
    detail = f"answered {status}: {_shown(body)}"
    if status in (401, 403):
        error = _failed(pool, f"does not accept this gateway's key ({status})")
        return AttemptFailed(Outcome.REFUSED, error, may_retry=False, detail=detail)
    if 400 <= status < 500:
        retry_after_s = None
        if status == 429:
            retry_after_s = math.ceil(rests_s) if rests_s is not None else 1
        refused = UpstreamRefused(status, _error_members(body, status), retry_after_s=retry_after_s)
        return AttemptFailed(Outcome.REFUSED, refused, status == 429, rests_s)
    failed = _failed(pool, f"answered {status}", None if rests_s is None else math.ceil(rests_s))
    return AttemptFailed(Outcome.STATUS, failed, rests_s=rests_s, detail=detail)


def of_error(pool: str, body: bytes) -> AttemptFailed:
    """An error inside an answer whose status was 200: a whole body, or an event's payload. The caller gets
    it as it came if it has the shape of one."""
    status = _status_in(body)
    if status is not None and 400 <= status < 500:
        return of_status(pool, status, body, None)
    error = _failed(pool, "failed")
    error.members = _shaped(body)
    return AttemptFailed(Outcome.STATUS, error, detail=f"failed: {_shown(body)}")


def _failed(pool: str, what: str, retry_after_s: int | None = None) -> UpstreamFailed:
    return UpstreamFailed(f"A server of the pool {pool} {what}.", retry_after_s=retry_after_s)


def retry_after_s(value: str | None, clock: Clock, longest_s: float) -> float | None:
    """Seconds of a Retry-After header (a number, or a date), cut to `longest_s`. None: not given."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - clock.wall()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), longest_s) if math.isfinite(seconds) else None


def _status_in(body: bytes) -> int | None:
    """vLLM puts the status in `error.code`, others name the type."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return None
    if not isinstance(error, Mapping):
        return None
    code, kind = error.get("code"), error.get("type")
    if isinstance(code, int) and not isinstance(code, bool):
        return code
    return 400 if kind in ("invalid_request_error", "BadRequestError") else None


def _error_members(body: bytes, status: int) -> dict[str, Any]:
    """The body's members as they came, if it is an error in OpenAI's shape; else its text in one."""
    if (members := _shaped(body)) is not None:
        return members
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": _shown(body), "type": kind, "param": None, "code": None}}


def _shaped(body: bytes) -> dict[str, Any] | None:
    try:
        members: dict[str, Any] = _members.decode(body)
    except msgspec.MsgspecError:
        return None
    if "error" in members:
        return members
    return {"error": members} if "message" in members else None  # older vLLM: the error's fields themselves


def _shown(body: bytes) -> str:
    text = body[:_MAX_SHOWN].decode("utf-8", "replace").strip()
    return "".join(c if c.isprintable() else " " for c in text) or "an empty answer"
