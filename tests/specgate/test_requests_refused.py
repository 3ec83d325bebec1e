"""Every class of error: status, type, the field it names, and the headers that go with it."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from specgate.config import AdmissionConfig, RequestsConfig, ServerConfig
from tests.specgate.gateway import HELLO, MODEL, eventually, make_config, running

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"temperature": 3}, "temperature", "at most 2"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"temperature": True}, "temperature", "a number"),
        ({"top_p": -0.1}, "top_p", "at least 0"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 1.5}, "n", "whole number"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"max_tokens": 8192}, "max_tokens", "At most"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "above"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"stop": [""]}, "stop[0]", "at least 1"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": 3}, "stop", "a string or an array"),
        ({"seed": 2**63}, "seed", "at most"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "at most 100"),
        ({"logit_bias": {"2000000000": 1}}, "logit_bias", "token ids of this model"),
        ({"stop_token_ids": [2000000]}, "stop_token_ids", "token ids of this model"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "'stream'"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "allowed"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents", "'content'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type", "only text",
        ),
        ({"temprature": 1}, "temprature", "'temperature'"),
        ({"guided_json": {}}, "guided_json", "not a field"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"tools": [_TOOL]}, "tools", "a script"),
        ({"tools": [{"function": {}}]}, "tools[0].type", "required"),
        ({"response_format": {"type": "json_object"}}, "response_format", "a script"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"specgate": {"policy": "medusa"}}, "specgate.policy", "loaded: auto, baseline, ngram, draft"),
        ({"specgate": {"policy": "no such!"}}, "specgate.policy", "no policy"),
        ({"specgate": {"policy": "baseline", "num_speculative_tokens": 3}},
         "specgate.num_speculative_tokens", "zero"),
        ({"specgate": {"task": "poetry"}}, "specgate.task", "allowed"),
        ({"specgate": {"polcy": "auto"}}, "specgate.polcy", "'policy'"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "context"),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_a_400_that_names_it(fields: dict[str, Any], param: str, hint: str) -> None:
    async with running() as server:
        response = await server.chat(**fields)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["param"] == param
        assert hint in error["message"]
        assert server.fake.num_started == 0


async def test_fields_that_cannot_change_the_answer_are_accepted() -> None:
    async with running() as server:
        response = await server.chat(
            user="u", metadata={"a": "b"}, store=True, service_tier="auto", safety_identifier="x",
            prompt_cache_key="k", prediction={"type": "content", "content": "x"}, parallel_tool_calls=True,
            tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"],
            temperature=None, stop=None, seed=-5, top_p=0, top_k=-1, max_tokens=3,
        )  # fmt: skip
        assert response.status_code == 200, response.text
        assert (await server.complete(best_of=1, suffix="")).status_code == 200
        assert (await server.complete(best_of=2)).json()["error"]["param"] == "best_of"
        assert (await server.complete(suffix="x")).json()["error"]["param"] == "suffix"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b'{"model": NaN}', b'{"model": "\\ud800"}', b"\xff\xfe",
        b'{"a":' * 100 + b"1" + b"}" * 100, b"[" * 200_000, b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"temperature": 1e999}', b"{'model': 1}", b'{"model":"x"}}',
    ],
)  # fmt: skip
async def test_what_is_no_json_object_is_a_400(body: bytes) -> None:
    async with running() as server:
        for path in ("/v1/chat/completions", "/admin/explain", "/tokenize"):
            response = await server.client.post(
                path, content=body, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 400, path
            assert response.json()["error"]["message"]


async def test_statuses_of_wrong_paths_methods_models_and_content_types() -> None:
    async with running() as server:
        assert (await server.client.get("/v2/nothing")).status_code == 404
        wrong_method = await server.client.get("/v1/chat/completions")
        assert (wrong_method.status_code, wrong_method.headers["Allow"]) == (405, "POST")
        for response in (await server.chat(model="gpt-9"), await server.client.get("/v1/models/gpt-9")):
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        form = await server.client.post("/v1/completions", data={"model": MODEL, "prompt": "x"})
        assert (form.status_code, form.json()["error"]["param"]) == (400, "Content-Type")
        packed = await server.client.post(
            "/v1/completions", content=b"x",
            headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
        )  # fmt: skip
        assert packed.status_code == 400


async def test_large_bodies_are_a_413_announced_or_not() -> None:
    config = make_config(server=ServerConfig(max_body_bytes=10_000))
    async with running(config) as server:
        big = {"model": MODEL, "prompt": "x" * 20_000}
        assert (await server.client.post("/v1/completions", json=big)).status_code == 413

        async def chunks() -> Any:
            for _ in range(30):
                yield b"x" * 1000

        response = await server.client.post(
            "/v1/completions", content=chunks(), headers={"Content-Type": "application/json"}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


async def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_encoded() -> None:
    config = make_config(requests=RequestsConfig(max_prompt_chars=100))
    async with running(config) as server:
        long = [{"role": "user", "content": "x" * 60}, {"role": "user", "content": "y" * 41}]
        for answer in (
            await server.chat(messages=long),
            await server.complete(prompt="x" * 101),
            await server.complete(prompt=["short", "x" * 101]),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "at most 100 characters" in error["message"]
        assert (await server.chat(messages=long[:1])).status_code == 200
        assert (await server.complete(prompt=["x" * 100, "y" * 100])).status_code == 200


async def test_a_full_queue_is_a_429_with_retry_after_and_the_others_finish() -> None:
    config = make_config(admission=AdmissionConfig(max_concurrent=1, max_queue=1))
    async with running(config, prefill_s=0.2) as server:
        first = asyncio.create_task(server.chat())
        await eventually(lambda: server.fake.num_running == 1)
        second = asyncio.create_task(server.chat(stream=True))
        await eventually(lambda: server.gateway.models[MODEL].admission.num_queued == 1)
        refused = await server.chat()
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["Retry-After"]) >= 1
        assert [(await first).status_code, (await second).status_code] == [200, 200]
        await server.settled()
        assert await server.metric('specgate_rejected_requests_total{reason="queue_full"}') == 1


@pytest.mark.parametrize("where", ["queue", "first", "whole"])
async def test_a_passed_deadline_is_a_408_and_aborts_the_work(where: str) -> None:
    config = make_config(
        requests=RequestsConfig(deadline_s=0.3), admission=AdmissionConfig(max_concurrent=1, max_queue=5)
    )
    hang = {"queue": None, "first": 0, "whole": 4}[where]
    async with running(config, hang_after_tokens=hang) as server:
        if where == "queue":
            slots = server.gateway.models[MODEL].admission.slot(1)
            async with slots:
                response = await server.chat()
        else:
            response = await server.chat(stream=where == "first")
        assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
        await server.settled()


async def test_a_model_that_is_not_ready_is_a_503_with_retry_after() -> None:
    async with running() as server:
        server.fake.is_ready = False
        response = await server.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert "Retry-After" in response.headers
        ready = await server.client.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert MODEL in ready.json()["missing"]
        assert (await server.client.get("/healthz")).status_code == 200
        server.fake.is_ready = True
        assert (await server.client.get("/readyz")).json()["ready"] is True


async def test_a_failing_backend_is_a_503_and_a_fault_of_ours_a_500_without_trace() -> None:
    async with running(fail_after_tokens=0) as server:
        for stream in (False, True):
            response = await server.chat(stream=stream)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_lost")
    async with running() as server:
        server.fake.prepare = None  # type: ignore[method-assign,assignment]
        response = await server.chat(headers={"X-Request-Id": "abc-1"})
        assert response.status_code == 500
        assert "abc-1" in response.json()["error"]["message"]
        assert "Traceback" not in response.text
        assert "NoneType" not in response.text
        await server.settled()


async def test_request_ids_are_kept_if_harmless_and_made_otherwise() -> None:
    async with running() as server:
        for given in ("abc-1.2_3:x", "0" * 128):
            response = await server.chat(headers={"X-Request-Id": given})
            assert response.headers["X-Request-Id"] == given
        for given in ("", "a b", "0" * 129, "é".encode("latin-1").decode("latin-1"), "<script>", "-x"):
            response = await server.client.get(
                "/healthz", headers=[(b"X-Request-Id", given.encode("latin-1"))]
            )
            assert len(response.headers["X-Request-Id"]) == 32
        assert (await server.client.get("/nope")).headers["X-Request-Id"]


async def test_overrides_where_they_are_not_allowed_are_a_403() -> None:
    async with running(make_config(requests=RequestsConfig(allow_overrides=False))) as server:
        for headers, extra in (
            ({"X-SpecGate-Policy": "ngram"}, {}),
            ({}, {"policy": "ngram"}),
            ({}, {"num_speculative_tokens": 2}),
            ({}, {"task": "chat"}),
        ):
            response = await server.chat(headers=headers, specgate=extra)
            assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")
        allowed = await server.chat(
            headers={"X-SpecGate-Policy": "auto"}, specgate={"objective": "latency", "explore": False}
        )
        assert allowed.status_code == 200


async def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    async with running(step_s=0.02) as server:
        old = asyncio.create_task(server.chat(messages=HELLO, stream=True))
        await eventually(lambda: server.fake.num_running == 1)
        drained = await server.client.post("/admin/drain")
        assert drained.json() == {"draining": True, "num_open_requests": 1}
        response = await server.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert (await server.client.get("/readyz")).json()["missing"] == {"server": "draining"}
        assert (await old).text.endswith("data: [DONE]\n\n")
        await server.client.post("/admin/drain", json={"draining": False})
        assert (await server.chat()).status_code == 200


async def test_a_server_that_is_being_stopped_cannot_be_talked_out_of_it() -> None:
    async with running() as server:
        server.gateway.switches.is_stopping = True  # what SIGTERM does
        answer = await server.client.post("/admin/drain", json={"draining": False})
        assert answer.json()["draining"] is True
        assert (await server.chat()).json()["error"]["code"] == "draining"
        assert (await server.client.get("/readyz")).json()["missing"] == {"server": "draining"}


async def test_a_fault_of_ours_before_the_decision_is_a_500_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def prepare(request: Any) -> Any:
        raise RuntimeError("secret detail")

    async with running() as server:
        monkeypatch.setattr(server.fake, "prepare", prepare)
        response = await server.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in response.text
        labels = 'endpoint="chat",model="fake-1",outcome="error",policy="none",task="none"'
        assert await server.metric(f"specgate_requests_total{{{labels}}}") == 1
        await server.settled()


async def test_mutated_requests_never_get_a_5xx_nor_leave_anything_behind() -> None:
    """A seeded walk over bodies: one or two fields replaced by values of the wrong or a strange kind."""
    random = Random(7)
    values: list[Any] = [
        None, True, 0, -1, 2**62, 1e300, "", "x", "\x00 😀", [], [[]], [0], ["a", 1], {}, {"a": {}},
        HELLO, [{"role": "user", "content": [{"type": "text", "text": "y"}]}], {"policy": "ngram"}, {"5": 5},
    ]  # fmt: skip
    async with running() as server:
        for path, base in (
            ("/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 3}),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 3}),
        ):
            document = (await server.client.get("/openapi.json")).json()
            name = "ChatRequest" if "chat" in path else "CompletionRequest"
            fields = sorted(document["components"]["schemas"][name]["properties"])
            for _ in range(150):
                body = base | {
                    random.choice(fields): random.choice(values) for _ in range(random.randint(1, 2))
                }
                response = await server.client.post(path, json=body)
                assert response.status_code in (200, 400, 404), (body, response.text)
                if response.status_code != 200:
                    assert response.json()["error"]["message"]
        await server.settled()
