"""What operators see and switch: state, explain, decisions, policy, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from specgate import __version__
from specgate.api.console import since_of
from specgate.api.generate import caller_of, endpoint_of
from specgate.api.http import json_response, read_json
from specgate.api.jsoncheck import check
from specgate.api.schema import DRAIN, FORCE, LOADED
from specgate.errors import ApiError, BadRequest, InternalError
from specgate.gateway import GATEWAY, Gateway
from specgate.pipeline import ServedModel
from specgate.policy.decide import unknown_policy
from specgate.reload import RELOADER
from specgate.switch_store import save_force
from specgate.telemetry.decision_log import decision_entry
from specgate.telemetry.events import Level
from specgate.types import LoadView

_MAX_DECISIONS = 1000


async def state(http: web.Request) -> web.Response:
    """GET /admin/state"""
    gateway = http.app[GATEWAY]
    return json_response(
        {
            "version": __version__,
            "uptime_s": round(gateway.clock.monotonic() - gateway.started_s, 3),
            "draining": gateway.switches.takes_nothing,
            "force": gateway.switches.forced_policy,
            "num_open_requests": gateway.pipeline.num_open,
            "num_tasks": len(asyncio.all_tasks()),
            "num_lost_log_lines": gateway.log.num_lost,
            "models": {name: _model_state(gateway, model) for name, model in gateway.models.items()},
            "canary": gateway.rollouts.describe(),
            "costs": gateway.telemetry.totals.describe(),
        }
    )


def _model_state(gateway: Gateway, model: ServedModel) -> dict[str, Any]:
    card, status, engine = model.backend.card, model.backend.status(), model.backend.load()
    load = model.meter.view(model.admission, engine)
    return {
        "ready": status.is_ready,
        "detail": status.detail,
        "num_restarts": status.num_restarts,
        "max_model_len": card.max_model_len,
        "methods": dict(card.methods),
        "details": {**card.details, **model.backend.describe()},
        "closed": dict(status.closed),
        "num_admitted": model.admission.num_running,
        "load": asdict(load),
        "engine": asdict(engine),
        "guards": _guards(model, load),
        "acceptance": [asdict(reading) for reading in model.learner.acceptance()],
        "latency_model": model.learner.report(load.answers_per_s),
    }


def _guards(model: ServedModel, load: LoadView) -> list[Mapping[str, Any]]:
    """Every door with reading and threshold, as of now. None: no data, or no limit."""
    model.guards.look(load)
    return model.guards.describe()


async def explain(http: web.Request) -> web.Response:
    """POST /admin/explain: what would be decided for this body. Runs nothing. A request that would be
    refused is explained too: `refused` holds the error, and no candidate is allowed."""
    gateway = http.app[GATEWAY]
    await gateway.turnstile.enter()
    body = await read_json(http, gateway.config)
    if "model" not in body and len(gateway.models) == 1:
        body["model"] = next(iter(gateway.models))
    endpoint = endpoint_of(gateway, body)
    try:
        request = endpoint.parse(gateway.parser_of(body), body, caller_of(http))
        model = gateway.pipeline.find(request.model)
    except ApiError as error:
        return json_response(_refused(gateway, body, error))
    decision = await gateway.pipeline.explain(model, request)
    entry = decision_entry(decision)
    if request.unsupported:
        entry["policy"] = None
        names = ", ".join(request.unsupported)
        entry["refused"] = {"status": 400, "message": f"Generating with {names} is not supported yet."}
    elif wrong := unknown_policy(request.overrides, model.backend.card.methods):
        entry |= {"policy": None, "reason": None, "refused": {"status": 400, "message": f"The {wrong}"}}
    return json_response(entry)


def _refused(gateway: Gateway, body: Mapping[str, Any], error: ApiError) -> dict[str, Any]:
    """No request came of the body: every candidate says why."""
    name = body.get("model")
    known = gateway.models.get(name) if isinstance(name, str) else None
    model = known or next(iter(gateway.models.values()))
    load = model.meter.view(model.admission, model.backend.load())
    return {
        "policy": None,
        "reason": None,
        "task": None,
        "task_probabilities": {},
        "output_tokens": None,
        "load": asdict(load),
        "candidates": [
            {
                "policy": policy, "num_speculative_tokens": depth, "allowed": False,
                "why_not": error.message, "predicted": None, "terms": [],
            }
            for policy, depth in {"baseline": 0, **model.backend.card.methods}.items()
        ],
        "refused": {"status": error.status, "message": error.message, "param": error.param},
    }  # fmt: skip


async def decisions(http: web.Request) -> web.Response:
    """GET /admin/decisions?limit=N&since=T: newest first, those that ended after T."""
    text = http.query.get("limit", "100")
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= _MAX_DECISIONS):
        raise BadRequest(f"'limit' must be a whole number from 1 to {_MAX_DECISIONS}.", "limit")
    return json_response({"decisions": http.app[GATEWAY].log.last(int(text), since_of(http))})


async def policy(http: web.Request) -> web.Response:
    """PUT /admin/policy {"force": "baseline"} or {"force": null}: the kill switch. Running requests
    follow at their next step. With "persist": true it outlives a restart; null always ends that."""
    gateway = http.app[GATEWAY]
    body = await read_json(http, gateway.config)
    if "force" not in body:
        raise BadRequest("'force' is required: \"baseline\", or null to lift it.", "force")
    check(body, FORCE)
    forced, persist = body["force"], bool(body.get("persist"))
    path = gateway.config.guards.force_path
    if persist and path is None:
        raise BadRequest("'persist' needs a file to keep it in: set guards.force_path.", "persist")
    gateway.switches.forced_policy = forced
    said = "lifted" if forced is None else f"everything decodes as {forced}"
    level: Level = "info" if forced is None else "warning"
    gateway.telemetry.events.add("switch", f"the kill switch: {said}", level)
    for model in gateway.models.values():
        model.backend.set_force(forced)
    is_kept = persist and forced is not None
    if path is not None:
        try:
            await asyncio.to_thread(save_force, Path(path), forced if is_kept else None)
        except OSError as error:
            raise InternalError(f"The kill switch acts, but cannot be kept in {path}: {error}.") from error
    return json_response({"force": forced} | ({"persist": is_kept} if persist else {}))


async def drafters(http: web.Request) -> web.Response:
    """PUT /admin/drafters {"method": "draft", "loaded": false}: free a drafter's memory; true loads it
    again. Its running requests go on as baseline. `model` is needed where there are several. A method
    that another one needs takes it along: without `draft` there is no `hybrid`."""
    gateway = http.app[GATEWAY]
    body = await read_json(http, gateway.config)
    if "model" not in body and len(gateway.models) == 1:
        body["model"] = next(iter(gateway.models))
    if "model" not in body:
        raise BadRequest("'model' is required: several are served.", "model")
    check(body, LOADED)
    method, wanted = str(body["method"]), bool(body["loaded"])
    model = gateway.pipeline.find(str(body["model"]))
    await model.backend.set_loaded(method, wanted)
    card = model.backend.card
    said = f"drafter {method} was {'loaded' if wanted else 'unloaded'} by an operator"
    gateway.telemetry.events.add("switch", said, "info" if wanted else "warning", model=card.model_id)
    return json_response(
        {
            "model": card.model_id,
            "methods": dict(card.methods),
            "memory_bytes": dict(card.details.get("memory_bytes", {})),
        }
    )


async def reload(http: web.Request) -> web.Response:
    """POST /admin/reload: read the configuration file again and apply all of it, or nothing of it."""
    changed = await http.app[RELOADER].reload()
    return json_response({"reloaded": True, "changed": changed})


async def drain(http: web.Request) -> web.Response:
    """POST /admin/drain: take nothing new, finish what runs. {"draining": false} takes it back, unless
    the server is being stopped."""
    gateway = http.app[GATEWAY]
    body = await read_json(http, gateway.config) if http.can_read_body else {}
    check(body, DRAIN)
    wanted = body.get("draining")
    gateway.switches.is_draining = True if wanted is None else wanted
    if gateway.switches.is_draining:
        gateway.telemetry.events.add("switch", "the server drains: it takes nothing new", "warning")
    else:
        gateway.telemetry.events.add("switch", "draining was taken back")
    return json_response(
        {"draining": gateway.switches.takes_nothing, "num_open_requests": gateway.pipeline.num_open}
    )
