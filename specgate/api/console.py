"""The web console's files, and what it reads beside /admin/state: events, history, predictions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from aiohttp import web

from specgate.api.http import json_response
from specgate.errors import BadRequest, NotFound
from specgate.gateway import GATEWAY
from specgate.telemetry.events import SIZE
from specgate.telemetry.history import RANGES

PAGE = "index.html"
_TYPES = {
    ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml",
}  # fmt: skip
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again each time, and answered by 304
}
_MAX_PAIRS = 150  # predictions shown per kind of step


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


class Console:
    """Serves the files of `specgate.web`, read once. They hold no data, so they need no key."""

    def __init__(self) -> None:
        self._files = _read_files()

    async def page(self, http: web.Request) -> web.Response:
        """GET /ui"""
        return self._send(http, PAGE)

    async def file(self, http: web.Request) -> web.Response:
        """GET /ui/{name}; without a name it leads to the page."""
        if not http.match_info["name"]:
            return web.Response(status=308, headers={"Location": "../ui"})
        return self._send(http, http.match_info["name"])

    def _send(self, http: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"There is no {name[:80]!r} here; the console is at /ui.", code="path_not_found")
        headers = _HEADERS | {"ETag": file.etag}
        if http.headers.get("If-None-Match") == file.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)


def _read_files() -> Mapping[str, _File]:
    found = {}
    for entry in files("specgate.web").iterdir():
        kind = _TYPES.get(entry.name[entry.name.rfind(".") :])
        if kind is not None:
            body = entry.read_bytes()
            found[entry.name] = _File(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


async def events(http: web.Request) -> web.Response:
    """GET /admin/events?limit=N: what happened, newest first."""
    limit = _whole_number(http, "limit", SIZE, SIZE)
    return json_response({"events": http.app[GATEWAY].telemetry.events.last(limit)})


async def history(http: web.Request) -> web.Response:
    """GET /admin/history?range=30m|24h&since=T: load, latency and policy mix by interval, oldest first."""
    name = http.query.get("range", "30m")
    if name not in RANGES:
        raise BadRequest(f"'range' must be one of: {', '.join(RANGES)}.", "range")
    return json_response(http.app[GATEWAY].telemetry.history.samples(name, since_of(http)))


async def predictions(http: web.Request) -> web.Response:
    """GET /admin/predictions: (predicted, measured) ms of the last steps, by model and kind of step."""
    models = {
        name: {
            kind: [
                (round(p * 1e3, 4), round(m * 1e3, 4))
                for p, m in model.learner.steps.window(kind)[-_MAX_PAIRS:]
            ]
            for kind in model.learner.steps.kinds
        }
        for name, model in http.app[GATEWAY].models.items()
    }
    return json_response({"models": models})


def since_of(http: web.Request) -> float:
    """The parameter `since`; 0 without one. Raises BadRequest."""
    try:
        since = float(http.query.get("since", "0"))
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise BadRequest("'since' must be a Unix time in seconds.", "since")
    return since


def _whole_number(http: web.Request, name: str, otherwise: int, most: int) -> int:
    text = http.query.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
        raise BadRequest(f"{name!r} must be a whole number from 1 to {most}.", name)
    return int(text)
