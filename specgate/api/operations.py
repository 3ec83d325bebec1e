"""Models, tokenizer, health, readiness, metrics, version, OpenAPI."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from specgate import __version__
from specgate.api.generate import caller_of
from specgate.api.http import json_response, off_loop, read_json
from specgate.api.jsoncheck import check
from specgate.api.openapi import openapi_document
from specgate.api.schema import DETOKENIZE, TOKENIZE
from specgate.errors import BadRequest, NotReady
from specgate.gateway import GATEWAY, Gateway
from specgate.pipeline import ServedModel
from specgate.telemetry.exposition import exposition

_WEIGHT = 32  # a character or token to convert costs as much as that many to parse


async def models(http: web.Request) -> web.Response:
    """GET /v1/models"""
    gateway = http.app[GATEWAY]
    return json_response({"object": "list", "data": [_model(m) for m in gateway.models.values()]})


async def model(http: web.Request) -> web.Response:
    """GET /v1/models/{id}"""
    return json_response(_model(http.app[GATEWAY].pipeline.find(http.match_info["id"])))


def _model(served: ServedModel) -> dict[str, Any]:
    card = served.backend.card
    return {
        "id": served.id,
        "object": "model",
        "created": card.created_s,
        "owned_by": "specgate",
        "max_model_len": card.max_model_len or None,
        "specgate": {"methods": {"baseline": 0, **card.methods}, "ready": served.backend.status().is_ready},
    }


async def tokenize(http: web.Request) -> web.Response:
    """POST /tokenize, in vLLM's shape: `prompt`, or `messages` through the chat template."""
    gateway = http.app[GATEWAY]
    body = await read_json(http, gateway.config)
    check(body, TOKENIZE)
    served = _served(gateway, body)
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise BadRequest("Give either 'prompt' or 'messages'.", "prompt")
    if body.get("messages") is not None:
        if body.get("add_special_tokens"):
            name = "add_special_tokens"
            raise BadRequest(f"{name!r} does nothing with 'messages': the template says it all.", name)
        kwargs = dict(body.get("chat_template_kwargs") or {})
        if body.get("add_generation_prompt") is not None:
            kwargs["add_generation_prompt"] = body["add_generation_prompt"]
        chat = {"model": served.id, "messages": body["messages"], "chat_template_kwargs": kwargs}
        prepared = await served.backend.prepare(gateway.parser.chat(chat, caller_of(http)))
        tokens = list(prepared.token_ids)
    else:
        for name in ("chat_template_kwargs", "add_generation_prompt"):
            if body.get(name) is not None:
                raise BadRequest(f"{name!r} does nothing with 'prompt'.", name)
        special = body.get("add_special_tokens")
        tokens = await off_loop(
            _WEIGHT * len(body["prompt"]),
            served.backend.tokenize,
            body["prompt"],
            True if special is None else special,
        )
    strings = None
    if body.get("return_token_strs"):
        strings = await off_loop(_WEIGHT * len(tokens), _strings_of, served, tokens)
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": served.backend.card.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


async def detokenize(http: web.Request) -> web.Response:
    """POST /detokenize, in vLLM's shape."""
    gateway = http.app[GATEWAY]
    body = await read_json(http, gateway.config)
    check(body, DETOKENIZE)
    served, tokens = _served(gateway, body), body["tokens"]
    vocab_size = served.backend.card.vocab_size
    if vocab_size is not None and tokens and max(tokens) >= vocab_size:
        raise BadRequest(f"'tokens' has {max(tokens)}; token ids here are 0 to {vocab_size - 1}.", "tokens")
    return json_response({"prompt": await off_loop(_WEIGHT * len(tokens), served.backend.detokenize, tokens)})


def _strings_of(served: ServedModel, tokens: list[int]) -> list[str]:
    return [served.backend.detokenize([token]) for token in tokens]


def _served(gateway: Gateway, body: dict[str, Any]) -> ServedModel:
    """The model asked for; the first one if none is, as vLLM does."""
    name = body.get("model")
    served = next(iter(gateway.models.values())) if name is None else gateway.pipeline.find(name)
    status = served.backend.status()
    if not status.is_ready:
        raise NotReady(f"The model is not ready: {status.detail}.")
    if served.backend.card.is_relay:
        message = "This model runs on other servers: its tokenizer is not here."
        raise BadRequest(message, "model", code="no_tokenizer")
    return served


async def healthz(_http: web.Request) -> web.Response:
    """GET /healthz: the process is alive."""
    return json_response({"status": "ok"})


async def readyz(http: web.Request) -> web.Response:
    """GET /readyz: 200 only when requests would be served."""
    gateway = http.app[GATEWAY]
    missing = gateway.missing()
    body = {
        "ready": not missing,
        "missing": missing,
        "models": {name: m.backend.status().detail for name, m in gateway.models.items()},
    }
    headers = {"Retry-After": "1"} if missing else None
    return json_response(body, 503 if missing else 200, headers)


async def metrics(http: web.Request) -> web.Response:
    """GET /metrics: Prometheus text."""
    text = await exposition(http.app[GATEWAY].metrics.registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def version(_http: web.Request) -> web.Response:
    """GET /version"""
    return json_response({"version": __version__})


async def openapi(http: web.Request) -> web.Response:
    """GET /openapi.json"""
    return json_response(openapi_document(http.app[GATEWAY].config.requests))
