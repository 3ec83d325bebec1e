"""What every handler shares: request ids, reading a body, JSON answers, errors, keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from specgate.api.parse import decode_json
from specgate.config import Config, KeyConfig, is_loopback
from specgate.errors import (
    ApiError,
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    Unauthorized,
)
from specgate.gateway import GATEWAY
from specgate.live import Live

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
TENANT = web.RequestKey("tenant", str)
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_T = TypeVar("_T")
_INLINE_SIZE = 64 * 1024
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_encoder = msgspec.json.Encoder()


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """JSON, encoded once."""
    return web.Response(
        body=_encoder.encode(body), status=status, headers=headers, content_type="application/json"
    )


async def read_json(http: web.Request, config: Config) -> dict[str, Any]:
    """The body as a JSON object, within the limits. Raises BadRequest or PayloadTooLarge."""
    return (await read_raw_json(http, config))[1]


async def read_raw_json(http: web.Request, config: Config) -> tuple[bytes, dict[str, Any]]:
    """The same, with the bytes as they came."""
    kind = http.content_type
    if "Content-Type" in http.headers and kind != "application/json" and not kind.endswith("+json"):
        raise BadRequest("The Content-Type must be application/json.", "Content-Type")
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise BadRequest("Compressed bodies are not supported.", "Content-Encoding")
    data = await _read_body(http, config.server.max_body_bytes, config.server.body_timeout_s)
    return data, await off_loop(len(data), decode_json, data, config.server.max_json_depth)


async def off_loop(size: int, function: Callable[..., _T], *args: Any) -> _T:
    """Run a pure function here, or in a thread if its input is so large that others would wait for it."""
    if size <= _INLINE_SIZE:
        return function(*args)
    return await asyncio.to_thread(function, *args)


async def _read_body(http: web.Request, max_bytes: int, timeout_s: float) -> bytes:
    too_large = PayloadTooLarge(f"The body is larger than {max_bytes} bytes, the most allowed here.")
    if http.content_length is not None and http.content_length > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in http.content.iter_any():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise DeadlineExceeded("The body did not arrive in time.") from None
    return b"".join(parts)


@web.middleware
async def request_ids(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Keep the caller's X-Request-Id if it is short and harmless in headers and logs, else make one."""
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return await handler(request)


async def add_request_id(http: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: on every response, streams included."""
    response.headers["X-Request-Id"] = http.get(REQUEST_ID) or uuid.uuid4().hex
    response.headers["Server"] = "specgate"
    tenant = http.get(TENANT)
    if tenant is not None:
        response.headers.update(http.app[GATEWAY].rates.headers(tenant))


@web.middleware
async def errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Everything raised becomes an answer in OpenAI's shape; what nobody foresaw, a 500 without a trace."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPNotFound:
        message = f"There is no {request.path[:200]!r} here; see /openapi.json, or /ui for the console."
        return error_response(NotFound(message, code="path_not_found"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method[:20]} is not allowed here; allowed: {allowed}."
        response = error_response(MethodNotAllowed(message))
        response.headers["Allow"] = allowed
        return response
    except web.HTTPException as error:
        is_theirs = error.status < 500
        return error_response(BadRequest(error.reason) if is_theirs else _internal(request))
    except ConnectionError:  # the client is gone: there is nobody to answer, and no fault to report
        return web.Response(status=499, reason="Client Closed Request")
    except Exception:  # the request boundary
        logger.exception("request %s failed", request[REQUEST_ID])
        return error_response(_internal(request))


def _internal(http: web.Request) -> InternalError:
    return InternalError(f"Internal error; the request id is {http[REQUEST_ID]}.")


def error_response(error: ApiError) -> web.Response:
    """OpenAI's error object with the error's status and retry hint."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error.body(), error.status, headers)


class KeyCheck:
    """API keys and admin keys, by hash and in constant time."""

    def __init__(self, live: Live) -> None:
        self._live = live

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Checks the paths that need a key, and notes whose it is."""
        resource = request.match_info.route.resource  # what will run, however the path was spelled
        path = resource.canonical if resource is not None else ""
        if path.startswith("/admin/"):
            self._check(request, self._live.config.auth.admin_keys, "admin key")
        elif path.startswith("/v1/") or path in ("/tokenize", "/detokenize"):
            try:
                request[TENANT] = self._check(request, self._live.config.auth.api_keys, "API key")
            except ApiError as error:
                request.app[GATEWAY].metrics.turned_away(error.default_code or "")
                raise
        return await handler(request)

    def _check(self, http: web.Request, keys: tuple[KeyConfig, ...], what: str) -> str:
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token and keys:
            name = _match(token.strip(), keys)
            if name is not None:
                return name
            raise Unauthorized(f"This is no valid {what}.")
        config = self._live.config
        if config.auth.keyless_on_loopback and is_loopback(config.server.host):
            _refuse_other_sites(http)
            return ""
        if not keys:
            raise Unauthorized(f"No {what} is configured here, so nobody may call this.")
        raise Unauthorized(f"Send your {what} as 'Authorization: Bearer KEY'.", code="missing_api_key")


def _match(token: str, keys: tuple[KeyConfig, ...]) -> str | None:
    """Every key is compared, so that time tells nothing."""
    digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
    found: str | None = None
    for key in keys:
        if hmac.compare_digest(digest, key.sha256):
            found = key.name
    return found


def _refuse_other_sites(http: web.Request) -> None:
    """Without keys, a web page open in the operator's browser must not be able to call: neither from
    another origin nor by a name that was made to resolve to this machine."""
    host = http.headers.get("Host", "")
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if name and not is_loopback(name):
        raise Forbidden("Without a key this server answers to loopback names only.", "Host")
    origin = http.headers.get("Origin")
    if origin is not None and origin != f"{http.scheme}://{host}":
        raise Forbidden("Without a key, calls from other web pages are refused.", "Origin")
