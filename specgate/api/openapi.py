"""/openapi.json, from the schemas that requests are checked with."""

from __future__ import annotations

from typing import Any

from specgate import __version__
from specgate.api.schema import (
    DETOKENIZE,
    DRAIN,
    FORCE,
    LOADED,
    TOKENIZE,
    JsonSchema,
    chat_schema,
    completions_schema,
)
from specgate.config import RequestsConfig

_ERROR_STATUS = {
    "400": "wrong request; the message names the field",
    "401": "no key, or a wrong one",
    "403": "not allowed",
    "404": "unknown model or path",
    "408": "deadline passed",
    "409": "does not fit the state things are in",
    "413": "body too large",
    "429": "queue full, wait too long, or the key's limit; see Retry-After and x-ratelimit-*",
    "500": "internal error; the message holds the request id",
    "503": "not ready, draining, or the engine was lost; see Retry-After",
}
_POLICY = {
    "name": "X-SpecGate-Policy", "in": "header", "required": False, "schema": {"type": "string"},
    "description": "auto, baseline, or a loaded method; wins over the body's specgate.policy",
}  # fmt: skip
_LIMIT = {
    "name": "limit", "in": "query", "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
}  # fmt: skip
_SINCE = {
    "name": "since", "in": "query", "required": False, "schema": {"type": "number"},
    "description": "Unix seconds; only what is later",
}  # fmt: skip
_RANGE = {
    "name": "range", "in": "query", "required": False, "schema": {"type": "string", "enum": ["30m", "24h"]},
}  # fmt: skip
_REQUEST_ID = {
    "name": "X-Request-Id", "in": "header", "required": False, "schema": {"type": "string", "maxLength": 128},
    "description": "kept if it consists of letters, digits and ._:/+=@-; else one is made",
}  # fmt: skip


def openapi_document(limits: RequestsConfig) -> dict[str, Any]:
    """OpenAPI 3.1."""
    chat, completions = chat_schema(limits), completions_schema(limits)
    key: list[Any] = [{"api_key": []}]
    admin: list[Any] = [{"admin_key": []}]
    paths = {
        "/v1/chat/completions": {"post": _post("Answer a conversation", "ChatRequest", key, streams=True)},
        "/v1/completions": {"post": _post("Continue a text", "CompletionRequest", key, streams=True)},
        "/v1/models": {"get": _get("Served models", key)},
        "/v1/models/{id}": {"get": _get("One model", key, [_path_parameter("id")])},
        "/tokenize": {"post": _post("Text or messages to token ids", "TokenizeRequest", key)},
        "/detokenize": {"post": _post("Token ids to text", "DetokenizeRequest", key)},
        "/healthz": {"get": _get("The process is alive")},
        "/readyz": {"get": _get("Requests would be served")},
        "/metrics": {"get": _get("Prometheus text", kind="text/plain")},
        "/version": {"get": _get("Version")},
        "/openapi.json": {"get": _get("This document")},
        "/ui": {"get": _get("The web console", kind="text/html")},
        "/ui/{name}": {"get": _get("A file of the web console", parameters=[_path_parameter("name")])},
        "/admin/state": {"get": _get("Load, guards, acceptance, costs", admin)},
        "/admin/events": {"get": _get("What happened, newest first", admin, [_LIMIT])},
        "/admin/history": {"get": _get("Load, latency and policy mix by interval", admin, [_RANGE, _SINCE])},
        "/admin/predictions": {"get": _get("Step times, predicted and measured", admin)},
        "/admin/explain": {"post": _post("What would be decided, and why", "ChatRequest", admin)},
        "/admin/decisions": {"get": _get("The last decisions", admin, [_LIMIT, _SINCE])},
        "/admin/policy": {"put": _post("Kill switch", "Force", admin)},
        "/admin/drafters": {"put": _post("Load a drafter, or free its memory", "Loaded", admin)},
        "/admin/canary/{name}/{action}": {
            "post": _get(
                "promote, pause, resume or rollback", admin,
                [_path_parameter("name"), _path_parameter("action")],
            )
        },
        "/admin/reload": {"post": _get("Read the configuration file again", admin)},
        "/admin/drain": {"post": _post("Take nothing new", "Drain", admin)},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "specgate", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {
                "ChatRequest": _nullable(chat),
                "CompletionRequest": _nullable(completions),
                "TokenizeRequest": _nullable(TOKENIZE),
                "DetokenizeRequest": _nullable(DETOKENIZE),
                "Force": _nullable(FORCE),
                "Loaded": _nullable(LOADED),
                "Drain": _nullable(DRAIN),
                "Error": _ERROR,
            },
            "securitySchemes": {
                "api_key": {"type": "http", "scheme": "bearer"},
                "admin_key": {"type": "http", "scheme": "bearer"},
            },
        },
    }


_ERROR: JsonSchema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _nullable(schema: JsonSchema) -> JsonSchema:
    """Optional fields may be null, which counts as absent."""
    required = schema.get("required", [])
    properties = {
        name: value if name in required or not value else {"anyOf": [value, {"type": "null"}]}
        for name, value in schema["properties"].items()
    }
    return schema | {"properties": properties}


def _post(
    summary: str, body: str, security: list[Any] | None = None, *, streams: bool = False
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "security": security or [],
        "parameters": [_POLICY, _REQUEST_ID] if streams else [_REQUEST_ID],
        "requestBody": {
            "required": body != "Drain",
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}},
        },
        "responses": {"200": {"description": "OK", "content": content}} | _errors(),
    }


def _get(
    summary: str, security: list[Any] | None = None, parameters: list[Any] | None = None,
    kind: str = "application/json",
) -> dict[str, Any]:  # fmt: skip
    schema = {"type": "string" if kind.startswith("text/") else "object"}
    ok = {"description": "OK", "content": {kind: {"schema": schema}}}
    return {
        "summary": summary,
        "security": security or [],
        "parameters": parameters or [],
        "responses": {"200": ok} | _errors(),
    }


def _errors() -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": schema} for status, text in _ERROR_STATUS.items()}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
