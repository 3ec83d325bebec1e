"""A real Prometheus beside a running server: what dashboards and rules ask is answered, and alerts ring."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from specgate.config import CanaryConfig
from tests.deploy.prometheus import Prometheus, prometheus
from tests.deploy.support import DEPLOY, recorded
from tests.e2e.server import serve
from tests.specgate.gateway import SUMMARY, Running, make_config, running

FACTOR = 60  # the rules' times are as much shorter
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
ROLLOUT = """
rollout: trial
scope: {tasks: [chat]}
overlay: {drafter: draft}
key: request_id
stages_percent: [50, 100]
"""
# What a scripted server with nothing wrong has no samples of.
SILENT = {
    "specgate_guard_trips_total",
    "specgate_upstream_attempts_total",
    "specgate_rejected_requests_total",
    "specgate_cached_prompt_tokens_total",
}


# Rules about failures, of which there are none.
UNMADE = {"specgate:requests_failed:ratio_rate5m", "specgate:requests_refused:ratio_rate5m"}


def expressions() -> dict[str, str]:
    """Every query of every dashboard, as Grafana would send it: by dashboard, panel and letter."""
    found = {}
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                asked = target["expr"].replace("$__rate_interval", "30s").replace("$price", "1.00")
                found[f"{path.stem}, {panel['title']}, {target['refId']}"] = asked
    return found


async def traffic(server: Running, num_rounds: int) -> None:
    """Every policy, two tasks, streamed and not."""
    for number in range(num_rounds):
        for policy in ("baseline", "ngram", "draft", "auto"):
            more: dict[str, Any] = {"specgate": {"policy": policy}}
            if policy == "auto":
                more = {}
            await server.chat(max_tokens=8, stream=number % 2 == 0, **more)
            await server.chat(max_tokens=8, messages=SUMMARY, **more)


async def test_every_query_of_every_dashboard_is_answered(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    (rollouts / "trial.yaml").write_text(ROLLOUT)
    canary = CanaryConfig(folder=str(rollouts), state_path=str(tmp_path / "canary.json"))
    async with running(make_config(canary=canary), step_s=0.001) as server:
        await traffic(server, 3)
        async with prometheus(tmp_path, server.url.removeprefix("http://"), FACTOR) as found:
            silent = {where for where, asked in expressions().items() if any(n in asked for n in SILENT)}
            left = dict(expressions()) | {name: name for name in recorded() - UNMADE}
            for where in silent:
                await found.query(left.pop(where))  # to be understood is all that can be asked of it
            async with asyncio.timeout(120):
                while left:
                    await traffic(server, 1)
                    left = {where: asked for where, asked in left.items() if not await found.query(asked)}
            assert [a["labels"]["alertname"] for a in await found.alerts() if a["state"] == "firing"] == []


@pytest.mark.slow
async def test_an_alert_rings_when_speculation_is_slow_and_the_guards_only_observe(tmp_path: Path) -> None:
    """A draft model of three of the target's four layers cannot pay. The guards see it and may not act."""
    pytest.importorskip("torch")
    from engine.models.tiny_files import save_tiny_model

    observe = {"mode": "observe"}
    config = {
        "auth": {"keyless_on_loopback": True},
        "requests": {"allow_overrides": True},
        "models": [
            {
                "id": "tiny",
                "engine": {
                    "model": str(save_tiny_model(tmp_path / "model", num_layers=4, max_model_len=1024)),
                    "num_threads": 1,
                    "num_blocks": 512,
                    "draft_model": {"layers_of_target": 3, "num_speculative_tokens": 5},
                },
            }
        ],
        "policy": {
            "router": "rule", "ngram_tasks": [], "draft_min_output_tokens": 0, "draft_min_acceptance": 0.0,
            "max_queue_wait_p95_ms": None,
        },
        "guards": {
            # as much quicker as the rules: controls are run for what is still in the window
            "latency": {**observe, "min_samples": 10, "control_share": 0.3, "window_s": 600 / FACTOR},
            "acceptance": observe, "load": observe, "queue_wait": {"mode": "off"},
        },
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    with serve(path, "tiny") as server:
        async with (
            prometheus(tmp_path, server.url.removeprefix("http://"), FACTOR) as found,
            httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        ):
            for number in range(10):  # the rules want to have seen the draft model's acceptance
                await ask(client, number, "draft")
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(keep_asking(client))
                # by what drafts cost the engine, and by the policy's own requests beside controls
                await until_firing(found, "SpecgateSpeculationSlower", seen_by="engine_time")
                ringing = await until_firing(found, "SpecgateSpeculationSlower", policy="draft")
                asking.cancel()
            state = (await client.get("/admin/state")).json()
    assert ringing["labels"]["severity"] == "page"
    assert float(ringing["value"]) < 0.9
    doors = {
        (door["policy"], door["mode"])  # it may stand at more than one task
        for door in state["models"]["tiny"]["guards"]
        if door["guard"] == "latency_guard" and door["state"] != "allowed"
    }
    assert doors == {("draft", "observe")}


async def ask(client: httpx.AsyncClient, number: int, policy: str | None) -> str:
    """One request; the policy it ran under."""
    words = random.Random(number).sample(["tell", "me", "about", "rivers", "and", "hills", "please"], 5)
    body: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 16,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    if policy is not None:
        body["specgate"] = {"policy": policy, "task": "chat"}
    else:
        body["specgate"] = {"task": "chat"}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["X-SpecGate-Policy"])


async def keep_asking(client: httpx.AsyncClient) -> None:
    """Until cancelled; one at a time, for in one batch a drafter slows the baseline run beside it as well."""
    number = 100
    while True:
        number += 1
        await ask(client, number, None)


async def until_firing(found: Prometheus, name: str, **labels: str) -> dict[str, Any]:
    """The alert with these labels, once it fires: one name may ring for several reasons at once."""
    wanted = {"alertname": name, **labels}
    async with asyncio.timeout(240):
        while True:
            for alert in await found.alerts():
                if wanted.items() <= alert["labels"].items() and alert["state"] == "firing":
                    return alert
            await asyncio.sleep(0.5)
