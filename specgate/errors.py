"""Errors that become HTTP answers, in OpenAI's shape.

ApiError                     status  type
├── BadRequest               400     invalid_request_error
│   ├── UnknownParameter     400     a name that is no field of the API
│   ├── UnsupportedParameter 400     a field that would change the answer and is not supported
│   ├── ContextTooLong       400     prompt (and answer) do not fit the model
│   └── InvalidConfig        400     the configuration file has a fault
├── Unauthorized             401     authentication_error
├── Forbidden                403     permission_error
├── NotFound                 404     not_found_error (path, or model: code model_not_found)
├── MethodNotAllowed         405     invalid_request_error
├── Conflict                 409     invalid_request_error: does not fit the state things are in
│   └── RestartNeeded        409     a setting that a running server cannot change
├── DeadlineExceeded         408     timeout_error
├── PayloadTooLarge          413     invalid_request_error
├── TooManyRequests          429     rate_limit_error, with Retry-After: the queue is full
│   ├── QueueTooSlow         429     the wait would be too long
│   └── RateLimited          429     the key has used up its requests or tokens
├── InternalError            500     server_error
└── Unavailable              503     service_unavailable_error, with Retry-After
    ├── NotReady             503     the model is still starting or restarting
    ├── Draining             503     the server is being stopped
    ├── EngineLost           503     the engine process died or hung while it ran the request
    └── UpstreamFailed       503     the servers that run the model could not serve the request
UpstreamRefused              4xx     what such a server answered, as it came

ConfigError stands apart: it is for the command line, never for HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault, `code` is machine-readable."""

    status: int = 500
    error_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    default_retry_after_s: ClassVar[int | None] = None

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s if retry_after_s is not None else self.default_retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(ApiError):
    """The request is wrong; the message names the field."""

    status = 400
    error_type = "invalid_request_error"


class UnknownParameter(BadRequest):
    """A name that is no field of the API."""

    default_code = "unknown_parameter"


class UnsupportedParameter(BadRequest):
    """A known field, or value of it, that would change the answer and is not supported."""

    default_code = "unsupported_parameter"


class ContextTooLong(BadRequest):
    """The prompt, or the prompt with the answer asked for, does not fit the model's context."""

    default_code = "context_length_exceeded"


class InvalidConfig(BadRequest):
    """The configuration file that was to be reloaded has a fault."""

    default_code = "invalid_config"


class Unauthorized(ApiError):
    """No key, or a wrong one."""

    status = 401
    error_type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(ApiError):
    """The caller may not do this."""

    status = 403
    error_type = "permission_error"
    default_code = "forbidden"


class NotFound(ApiError):
    """No such path or model."""

    status = 404
    error_type = "not_found_error"
    default_code = "not_found"


class Conflict(ApiError):
    """What was asked for does not fit the state things are in."""

    status = 409
    error_type = "invalid_request_error"
    default_code = "conflict"


class RestartNeeded(Conflict):
    """A setting that a running server cannot change is different in its file."""

    default_code = "restart_needed"


class MethodNotAllowed(ApiError):
    """The path exists, the method does not."""

    status = 405
    error_type = "invalid_request_error"
    default_code = "method_not_allowed"


class DeadlineExceeded(ApiError):
    """The request's time was up before its answer was whole."""

    status = 408
    error_type = "timeout_error"
    default_code = "deadline_exceeded"


class PayloadTooLarge(ApiError):
    """The body is larger than `server.max_body_bytes`."""

    status = 413
    error_type = "invalid_request_error"
    default_code = "payload_too_large"


class TooManyRequests(ApiError):
    """The admission queue is full."""

    status = 429
    error_type = "rate_limit_error"
    default_code = "queue_full"
    default_retry_after_s = 1


class QueueTooSlow(TooManyRequests):
    """By the present pace the request would wait longer than it may."""

    default_code = "queue_too_slow"
    is_for_all = False  # True: longer than anybody may wait, and not only this request


class RateLimited(TooManyRequests):
    """The key has used up its requests or tokens of this minute."""

    default_code = "rate_limit_exceeded"


class InternalError(ApiError):
    """A fault of ours: the caller gets the request id, never a trace."""

    status = 500
    error_type = "server_error"
    default_code = "internal_error"


class Unavailable(ApiError):
    """Not now; the same request may work later."""

    status = 503
    error_type = "service_unavailable_error"
    default_code = "unavailable"
    default_retry_after_s = 1


class NotReady(Unavailable):
    """The model is still starting, or restarting."""

    default_code = "not_ready"
    default_retry_after_s = 2


class Draining(Unavailable):
    """The server finishes what it runs and takes nothing new."""

    default_code = "draining"
    default_retry_after_s = 5


class EngineLost(Unavailable):
    """The engine process died or hung while it ran the request."""

    default_code = "engine_lost"
    default_retry_after_s = 2


class UpstreamFailed(Unavailable):
    """The servers that run the model could not serve the request. `members`: the body one of them gave."""

    default_code = "upstream_failed"
    members: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        return super().body() if self.members is None else dict(self.members)


class UpstreamRefused(ApiError):
    """The server that runs the model refused the request: its status and body, for the caller."""

    default_code = "upstream_refused"

    def __init__(self, status: int, members: Mapping[str, Any], *, retry_after_s: int | None = None) -> None:
        super().__init__(f"The model's server answered {status}.", retry_after_s=retry_after_s)
        self.status = status
        self._members = members

    def body(self) -> dict[str, Any]:
        return dict(self._members)


class ConfigError(Exception):
    """A configuration is wrong. `faults` holds one line each: file, path, what is wrong, what is allowed."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)
