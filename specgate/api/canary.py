"""POST /admin/canary/{name}/{action}: a rollout by hand."""

from __future__ import annotations

from aiohttp import web

from specgate.api.http import json_response
from specgate.gateway import GATEWAY


async def act(http: web.Request) -> web.Response:
    """promote, pause, resume or rollback. Answers where the rollout then stands."""
    rollouts = http.app[GATEWAY].rollouts
    name = http.match_info["name"]
    return json_response({name: await rollouts.act(name, http.match_info["action"])})
