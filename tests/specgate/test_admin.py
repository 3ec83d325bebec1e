"""Operators' endpoints: explain, state, decisions, the kill switch; overrides by header and body."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from specgate.config import AdmissionConfig, AuthConfig, KeyConfig, PolicyConfig
from specgate.config.guards import DoorTiming, GuardsConfig
from specgate.types import TASKS
from tests.specgate.gateway import MODEL, SUMMARY, events, eventually, make_config, running


async def test_explain_says_everything_and_runs_nothing() -> None:
    async with running() as server:
        response = await server.client.post("/admin/explain", json={"model": MODEL, "messages": SUMMARY})
        body = response.json()
        assert (body["policy"], body["reason"], body["task"]) == ("ngram", "cold_start", "summarization")
        assert set(body["task_probabilities"]) == set(TASKS)
        assert sum(body["task_probabilities"].values()) == pytest.approx(1, abs=0.01)
        assert body["output_tokens"]["p50"] <= body["output_tokens"]["p90"]
        assert body["load"]["num_running"] == 0
        assert [c["policy"] for c in body["candidates"]] == ["baseline", "ngram", "draft"]
        for candidate in body["candidates"]:
            assert set(candidate) == {
                "policy", "num_speculative_tokens", "allowed", "why_not", "predicted", "terms",
            }  # fmt: skip
        assert server.fake.num_started == 0
        assert (await server.client.get("/admin/decisions")).json() == {"decisions": []}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"functions": [{"name": "f"}]}, "unsupported_params: functions"),
        ({"specgate": {"policy": "eagle"}}, "not loaded"),
        ({"temperature": 5}, "at most 2"),
        ({"model": "other"}, "does not exist"),
        ({"messages": "x"}, "an array"),
    ],
)
async def test_explain_is_a_200_for_what_would_be_refused(fields: dict[str, Any], why: str) -> None:
    async with running() as server:
        body = {"messages": SUMMARY} | fields  # the model may be left out where there is one only
        response = await server.client.post("/admin/explain", json=body)
        assert response.status_code == 200
        explained = response.json()
        assert explained["policy"] is None
        assert why in explained["refused"]["message"] or why in explained["candidates"][0]["why_not"]
        assert len(explained["candidates"]) == 3
        assert all(not c["allowed"] and why in c["why_not"] for c in explained["candidates"])
        if "functions" in fields:
            assert explained["reason"] == "unsupported_params"


async def test_explain_sees_that_tools_are_offered() -> None:
    async with running() as server:
        tools = [{"type": "function", "function": {"name": "f"}}]
        body = {"messages": SUMMARY, "tools": tools, "tool_choice": "required"}
        explained = (await server.client.post("/admin/explain", json=body)).json()
        assert explained["task"] == "tool_call"
        assert explained["policy"] is not None


async def test_overrides_by_header_and_body_are_used_exactly() -> None:
    async with running(accepted_per_draft=9) as server:
        for headers, extra, policy, drafted in (
            ({"X-SpecGate-Policy": "ngram"}, {}, "ngram", 4),
            ({}, {"policy": "draft", "num_speculative_tokens": 2}, "draft", 2),
            ({"X-SpecGate-Policy": "baseline"}, {"policy": "draft"}, "baseline", 0),
            ({"X-SpecGate-Policy": "ngram"}, {"policy": "baseline", "num_speculative_tokens": 0}, "ngram", 0),
        ):
            response = await server.chat(
                headers=headers, specgate=extra, max_tokens=1 + drafted, messages=SUMMARY
            )
            body = response.json()["specgate"]
            assert (body["policy"], body["reason"]) == (policy, "override")
            assert response.headers["X-SpecGate-Policy"] == policy
            assert body["num_draft_tokens"] == drafted
        body = (await server.chat(specgate={"task": "code_edit"})).json()["specgate"]
        assert (body["task"], body["policy"], body["reason"]) == ("code_edit", "ngram", "cold_start")


async def test_the_kill_switch_acts_on_new_and_on_running_requests() -> None:
    async with running(step_s=0.02, text="abc " * 50) as server:
        ask = {"specgate": {"policy": "draft"}, "stream": True, "stream_options": {"include_usage": True}}
        old = asyncio.create_task(server.chat(max_tokens=80, **ask))
        await eventually(lambda: server.fake._step >= 3)
        put = await server.client.put("/admin/policy", json={"force": "baseline"})
        assert put.json() == {"force": "baseline"}
        new = (await server.chat(max_tokens=3, specgate={"policy": "draft"})).json()["specgate"]
        assert (new["policy"], new["reason"], new["num_draft_tokens"]) == ("baseline", "kill_switch", 0)
        assert (await server.client.get("/admin/state")).json()["force"] == "baseline"
        extra = events((await old).text)[-2]["specgate"]
        (change,) = extra["policy_changes"]
        assert (change["policy"], change["reason"]) == ("baseline", "kill_switch")
        # Drafts stopped there: every later step gave one token.
        assert extra["num_target_steps"] == change["token_index"] / 3 + (80 - change["token_index"])
        assert (await server.client.put("/admin/policy", json={"force": None})).json() == {"force": None}
        assert (await server.chat(specgate={"policy": "draft"})).json()["specgate"]["policy"] == "draft"
        for bad in ({}, {"force": "draft"}, {"force": "baseline", "x": 1}):
            assert (await server.client.put("/admin/policy", json=bad)).status_code == 400


async def test_drafters_are_loaded_only_where_there_are_some() -> None:
    """The way through a real engine is tested with the embedded backend."""
    async with running() as server:
        for body, word in (
            ({"method": "draft", "loaded": False}, "no drafters"),
            ({"method": "draft"}, "'loaded' is required"),
            ({"method": "draft", "loaded": None}, "'loaded'"),
            ({"loaded": True}, "'method' is required"),
            ({"method": "draft", "loaded": True, "x": 1}, "'x'"),
        ):
            refused = await server.client.put("/admin/drafters", json=body)
            assert refused.status_code == 400
            assert word in refused.json()["error"]["message"]
        unknown = {"model": "other", "method": "draft", "loaded": True}
        assert (await server.client.put("/admin/drafters", json=unknown)).status_code == 404


async def test_the_kill_switch_outlives_a_restart_only_if_asked(tmp_path: Path) -> None:
    async with running() as server:
        refused = await server.client.put("/admin/policy", json={"force": "baseline", "persist": True})
        assert refused.status_code == 400
        assert "guards.force_path" in refused.json()["error"]["message"]
    config = make_config(guards=GuardsConfig(force_path=str(tmp_path / "state" / "force.json")))
    for body, kept in (
        ({"force": "baseline"}, None),
        ({"force": "baseline", "persist": True}, "baseline"),
        ({"force": "baseline"}, None),  # said again without: no longer
        ({"force": "baseline", "persist": True}, "baseline"),
        ({"force": None}, None),
    ):
        async with running(config) as server:
            assert (await server.client.put("/admin/policy", json=body)).status_code == 200
        async with running(config) as server:
            assert (await server.client.get("/admin/state")).json()["force"] == kept
            answer = (await server.chat(messages=SUMMARY)).json()["specgate"]
            assert (answer["reason"] == "kill_switch") == (kept is not None)
            assert (answer["num_draft_tokens"] == 0) == (kept is not None)
    (tmp_path / "state" / "force.json").write_text("{", encoding="utf-8")
    async with running(config) as server:  # what cannot be read is taken for a switch that was thrown
        assert (await server.client.get("/admin/state")).json()["force"] == "baseline"


async def test_guards_act_on_running_requests_and_are_shown() -> None:
    async with running(step_s=0.02, text="abc " * 60) as server:
        ask = {"messages": SUMMARY, "stream": True, "stream_options": {"include_usage": True}}
        old = asyncio.create_task(server.chat(max_tokens=120, **ask))
        await eventually(lambda: server.fake._step >= 3)
        guards = server.gateway.models[MODEL].guards
        guards.checked("ngram", False)
        await asyncio.sleep(0.6)  # the watch looks without any request coming
        extra = events((await old).text)[-2]["specgate"]
        (change,) = extra["policy_changes"]
        assert (change["policy"], change["reason"]) == ("baseline", "consistency_guard")
        assert extra["num_target_steps"] == change["token_index"] / 3 + (120 - change["token_index"])
        doors = (await server.client.get("/admin/state")).json()["models"][MODEL]["guards"]
        door = next(d for d in doors if d["guard"] == "consistency_guard")
        assert (door["state"], door["threshold"], door["reading"]) == ("shut", 0.5, 1.0)
        assert 0 < door["since_s"] < 30


async def test_decisions_hold_inputs_and_outcomes_but_no_text() -> None:
    async with running() as server:
        secret = [{"role": "user", "content": "the password is swordfish"}]
        await server.chat(messages=secret, headers={"X-Request-Id": "one"})
        await server.chat(messages=SUMMARY, headers={"X-Request-Id": "two"})
        response = await server.client.get("/admin/decisions", params={"limit": 1})
        (entry,) = response.json()["decisions"]
        assert (entry["request_id"], entry["outcome"], entry["policy"]) == ("two", "ok", "ngram")
        assert entry["counts"]["num_drafts"] > 0
        assert entry["timings"]["e2e_ms"] > 0
        everything = (await server.client.get("/admin/decisions")).text
        assert "swordfish" not in everything
        assert "Hello" not in everything
        for limit in ("0", "-1", "x", "1001", "9" * 5000, "²"):
            bad = await server.client.get("/admin/decisions", params={"limit": limit})
            assert bad.status_code == 400, limit


async def test_state_shows_load_guards_and_acceptance() -> None:
    config = make_config(policy=PolicyConfig(min_acceptance_samples=2, max_requests_per_s=0.01))
    async with running(config) as server:
        for _ in range(2):
            await server.chat(specgate={"policy": "ngram"}, max_tokens=6)
        state = (await server.client.get("/admin/state")).json()["models"][MODEL]
        # Each request: (2 of 4 accepted, 1 refused), (2 of 2 accepted).
        assert state["acceptance"] == [{"policy": "ngram", "task": "chat", "p50": 0.8, "num_requests": 2}]
        guard = next(g for g in state["guards"] if g["guard"] == "load_guard")
        assert (guard["state"], guard["threshold"]) == ("shut", 0.01)
        assert (await server.chat(messages=SUMMARY)).json()["specgate"]["reason"] == "load_guard"
        assert state["load"]["num_queued"] == 0


async def test_of_a_synthetic_request_nothing_is_learned() -> None:
    async with running() as server:
        learner = server.gateway.models[MODEL].learner

        async def num_lengths(learn: bool) -> int:
            await server.chat(headers={"X-SpecGate-Policy": "ngram"}, specgate={"learn": learn})
            await server.settled()
            return learner.request_scores()["output_tokens"].num

        assert await num_lengths(False) == 0
        assert learner.acceptance() == []
        assert await num_lengths(True) == 1
        assert [reading.policy for reading in learner.acceptance()] == ["ngram"]
        assert len((await server.client.get("/admin/decisions")).json()["decisions"]) == 2


async def test_queue_wait_shuts_speculation_and_recovers() -> None:
    config = make_config(
        admission=AdmissionConfig(max_concurrent=1),
        policy=PolicyConfig(min_window_samples=2, max_queue_wait_p95_ms=20, window_s=1.0),
        guards=GuardsConfig(timing=DoorTiming(cooldown_s=0.2)),
    )
    async with running(config, prefill_s=0.05) as server:
        answers = await asyncio.gather(*(server.chat(messages=SUMMARY) for _ in range(5)))
        reasons = [a.json()["specgate"]["reason"] for a in answers]
        assert "queue_wait_guard" in reasons
        await asyncio.sleep(1.1)
        assert (await server.chat(messages=SUMMARY)).json()["specgate"]["reason"] == "cold_start"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_keys_are_needed_where_the_config_does_not_waive_them(host: str) -> None:
    import hashlib
    from dataclasses import replace

    user = KeyConfig(name="alice", sha256=hashlib.sha256(b"user-key").hexdigest())
    other = KeyConfig(name="bob", sha256=hashlib.sha256(b"other-key").hexdigest())
    operator = KeyConfig(name="ops", sha256=hashlib.sha256(b"admin-key").hexdigest())
    auth = AuthConfig(keyless_on_loopback=host != "127.0.0.1", api_keys=(other, user), admin_keys=(operator,))
    config = make_config(auth=auth)
    config = replace(config, server=replace(config.server, host=host))
    async with running(config) as server:
        for path in ("/v1/models", "/admin/state", "/%61dmin/state"):
            response = await server.client.get(path)
            assert response.status_code == 401, path
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "authentication_error"
        for path in ("/healthz", "/readyz", "/metrics", "/version", "/openapi.json"):
            assert (await server.client.get(path)).status_code == 200, path
        as_user, as_admin = ({"Authorization": f"Bearer {key}"} for key in ("user-key", "admin-key"))
        assert (await server.client.get("/v1/models", headers=as_user)).status_code == 200
        assert (await server.client.get("/v1/models", headers=as_admin)).status_code == 401
        assert (await server.client.get("/admin/state", headers=as_user)).status_code == 401
        assert (await server.client.get("/admin/state", headers=as_admin)).status_code == 200
        for wrong in ("Bearer", "Basic user-key", "Bearer USER-KEY", "Bearer é"):
            response = await server.client.get(
                "/v1/models", headers=[(b"Authorization", wrong.encode("latin-1"))]
            )
            assert response.status_code == 401, wrong
        assert await server.metric('specgate_rejected_requests_total{reason="invalid_api_key"}') >= 6
        await server.chat(headers=as_user)
        decisions = await server.client.get("/admin/decisions", headers=as_admin)
        assert decisions.json()["decisions"][0]["tenant"] == "alice"


async def test_keyless_service_is_closed_to_other_web_pages() -> None:
    async with running() as server:
        port = server.url.rpartition(":")[2]
        for headers in (
            {"Origin": "http://evil.example"},
            {"Host": "evil.example"},
            {"Host": f"evil.example:{port}"},
        ):
            assert (await server.client.post("/admin/drain", headers=headers)).status_code == 403
            assert (await server.chat(headers=headers)).status_code == 403
        own = {"Origin": server.url}
        assert (await server.client.get("/admin/state", headers=own)).status_code == 200
        assert (
            await server.client.get("/admin/state", headers={"Host": f"localhost:{port}"})
        ).status_code == 200
