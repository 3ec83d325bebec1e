"""What the console reads: events, history, predictions, files; and traces of streams."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types import DrafterError, StepRecord
from specgate.backends.embedded.origins import Origins
from specgate.config import AdmissionConfig
from specgate.telemetry.events import Events
from specgate.telemetry.history import Gauges, History
from tests.specgate.gateway import MODEL, Running, events, eventually, make_config, running

STEP = StepRecord(
    step=0, started_s=0, seconds=0.01, kind="verify", num_sequences=1, num_decode_sequences=1, num_tokens=2,
    num_prefill_tokens=0, num_kv_tokens=9, num_logits_rows=2, num_sampled_rows=0, num_emitted_tokens=1,
    schedule_s=0, draft_s=0, forward_s=0.01, verify_s=0,
)  # fmt: skip
WEB = Path(__file__).parents[2] / "specgate" / "web"


@dataclass
class Clock:
    """Time by hand."""

    now: float = 1_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


async def _messages(server: Running) -> list[tuple[str, str, str]]:
    found = (await server.client.get("/admin/events")).json()["events"]
    return [(e["kind"], e["level"], e["message"]) for e in found]


async def test_events_tell_switches_failures_refusals_and_restarts() -> None:
    config = make_config(admission=AdmissionConfig(max_concurrent=1, max_queue=0))
    async with running(config, step_s=0.01) as server:
        await eventually(lambda: len(server.gateway.telemetry.events.last(10)) == 2)  # started, ready
        await server.client.put("/admin/policy", json={"force": "baseline"})
        await server.client.put("/admin/policy", json={"force": None})
        server.fake.script = type(server.fake.script)(fail_after_tokens=2)
        assert (await server.chat(max_tokens=5)).status_code == 503
        server.fake.script = type(server.fake.script)(step_s=0.05)
        async with server.client.stream("POST", "/v1/chat/completions", json=_body(stream=True)) as busy:
            assert busy.status_code == 200
            assert [(await server.chat()).status_code for _ in range(3)] == [429] * 3
        server.fake.is_ready = False
        await eventually(lambda: server.gateway.telemetry.events.last(1)[0]["kind"] == "engine")
        server.fake.is_ready = True
        await eventually(lambda: server.gateway.telemetry.events.last(1)[0]["message"] == "ready")
        told = await _messages(server)
        assert [(kind, level) for kind, level, _ in told] == [
            ("engine", "info"), ("engine", "error"), ("refused", "warning"), ("request", "error"),
            ("switch", "info"), ("switch", "warning"), ("engine", "info"), ("server", "info"),
        ]  # fmt: skip
        refused = (await server.client.get("/admin/events?limit=3")).json()["events"][2]
        assert (refused["num"], refused["model"]) == (3, MODEL)  # one entry, counted


async def test_drafter_faults_and_the_guard_that_trips_on_them_are_events() -> None:
    async with running() as server:
        for number in range(20):
            for listener in server.fake._listeners:
                listener(replace(STEP, step=number, drafter_errors=(DrafterError("draft", "nan", "NaN"),)))
        await eventually(lambda: any(e["kind"] == "guard" for e in server.gateway.telemetry.events.last(20)))
        told = {event["kind"]: event for event in server.gateway.telemetry.events.last(20)}
        guard, fault = told["guard"], told["drafter"]
        assert (guard["subject"], guard["level"], guard["model"]) == ("drafter_error", "warning", MODEL)
        assert "draft for all tasks is shut" in guard["message"]
        assert (fault["subject"], fault["num"]) == ("draft: nan", 20)


def test_like_events_are_counted_within_a_minute_and_the_list_is_bounded() -> None:
    clock = Clock()
    told = Events(clock, size=3)
    for _ in range(5):
        clock.now += 30
        told.add("refused", "full", "warning", model="m", may_join=True)
    clock.now += 61
    told.add("refused", "full again", "warning", model="m", may_join=True)
    assert [(e["num"], e["message"]) for e in told.last(9)] == [(1, "full again"), (5, "full")]
    for number in range(4):
        told.add("switch", str(number))
    assert [e["message"] for e in told.last(9)] == ["3", "2", "1"]


def test_history_closes_intervals_and_tells_only_what_is_new() -> None:
    clock = Clock()
    history = History(clock)
    for number in range(12):
        history.look(Gauges(num_running=number, num_waiting=1, used_kv_ratio=0.1 * (number % 3)))
        clock.now += 2.5
    told = history.samples("30m", 0)
    assert told["interval_s"] == 5
    assert [sample["running"] for sample in told["samples"]] == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5]
    assert told["samples"][0]["used_kv_ratio"] == 0.1
    since = told["samples"][3]["time"]
    assert [s["running"] for s in history.samples("30m", since)["samples"]] == [8.5, 10.5]
    assert history.samples("24h", 0)["samples"] == []
    clock.now += 300
    assert len(history.samples("24h", 0)["samples"]) == 1


async def test_history_has_the_policy_mix_and_tokens() -> None:
    async with running() as server:
        clock = Clock()
        server.gateway.telemetry.history._clock = clock
        await server.chat(max_tokens=6, specgate={"policy": "ngram"})
        await server.chat(max_tokens=4, specgate={"policy": "baseline"})
        await server.settled()
        clock.now += 10
        (sample,) = (await server.client.get("/admin/history?range=30m")).json()["samples"][-1:]
        assert sample["policies"] == {"ngram": 1, "baseline": 1}
        assert sample["tokens_per_s"] == 2.0
        assert sample["failed"] == 0
        for query in ("range=1y", "since=never", "since=nan"):
            assert (await server.client.get(f"/admin/history?{query}")).status_code == 400


async def test_only_newer_decisions_are_sent_where_that_is_asked() -> None:
    async with running() as server:
        for _ in range(3):
            await server.chat(max_tokens=2)
        await server.settled()
        told = (await server.client.get("/admin/decisions")).json()["decisions"]
        since = told[1]["time"]
        newer = (await server.client.get(f"/admin/decisions?since={since!r}")).json()["decisions"]
        assert newer == told[:1]
        assert (await server.client.get("/admin/decisions?since=inf")).status_code == 400
        endless = "000000001" + "0" * 5000
        for path in ("decisions", "events"):
            assert (await server.client.get(f"/admin/{path}?limit={endless}")).status_code == 400


async def test_predictions_are_pairs_by_kind_of_step() -> None:
    async with running(step_s=0.031) as server:
        await server.chat(max_tokens=20)
        await server.settled()
        models = (await server.client.get("/admin/predictions")).json()["models"]
        pairs = models[MODEL]["baseline"]
        assert pairs
        assert all(predicted > 0 and measured == pytest.approx(31) for predicted, measured in pairs)


async def test_a_trace_says_which_text_came_from_accepted_drafts() -> None:
    async with running() as server:
        answer = await server.chat(stream=True, max_tokens=8, specgate={"policy": "ngram", "trace": True})
        pieces = [
            (piece["text"], piece["accepted"])
            for chunk in events(answer.text)[:-1]
            for choice in chunk["choices"]
            for piece in choice.get("specgate", {}).get("pieces", ())
        ]
        assert "".join(text for text, _ in pieces) == "Hello th"
        assert [accepted for _, accepted in pieces] == ["ngram", "ngram", None] * 2 + ["ngram", None]
        plain = await server.chat(stream=True, max_tokens=8, specgate={"policy": "ngram"})
        assert "pieces" not in plain.text
        refused = await server.chat(max_tokens=8, specgate={"trace": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "specgate.trace"


@given(
    tokens=st.lists(st.tuples(st.text(max_size=4), st.sampled_from([None, "ngram"])), max_size=20),
    data=st.data(),
)
def test_origins_follow_characters_however_text_is_held_back(
    tokens: list[tuple[str, str | None]], data: st.DataObject
) -> None:
    origins = Origins()
    pending, told = "", []
    for text, method in tokens:
        origins.add(text, method)
        pending += text
        num_shown = data.draw(st.integers(0, len(pending)))
        told += origins.take(pending[:num_shown])
        pending = pending[num_shown:]
    told += origins.take(pending)
    by_character = [(char, method) for text, method in tokens for char in text]
    assert [(char, method) for text, method in told for char in text] == by_character


async def test_the_page_and_its_files_come_with_a_strict_policy_and_without_a_key() -> None:
    async with running() as server:
        page = await server.client.get("/ui")
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        names = re.findall(r'(?:href|src)="ui/([^"]+)"', page.text)
        assert {"app.js", "console.css", "icon.svg"} <= set(names)
        for name in names:
            file = await server.client.get(f"/ui/{name}")
            assert file.status_code == 200
            again = await server.client.get(f"/ui/{name}", headers={"If-None-Match": file.headers["ETag"]})
            assert again.status_code == 304
        assert (await server.client.get("/ui/nothing.js")).status_code == 404
        led = await server.client.get("/ui/", follow_redirects=True)
        assert (led.url.path, led.text) == ("/ui", page.text)
        async with httpx.AsyncClient() as raw:
            assert (await raw.get(f"{server.url}/ui/..%2Fapp.py")).status_code == 404


def test_the_console_needs_nothing_from_elsewhere_and_says_everything_in_both_languages() -> None:
    sources = {
        path.name: path.read_text(encoding="utf-8")
        for path in WEB.iterdir()
        if path.suffix != ".py" and path.is_file()
    }
    for name, text in sources.items():
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
    words = dict(re.findall(r'(\w+): \["((?:[^"\\]|\\.)*)", "', sources["words.js"]))
    pairs = re.findall(r'(\w+): \["(?:[^"\\]|\\.)*", "((?:[^"\\]|\\.)*)"\]', sources["words.js"])
    assert len(pairs) == len(words) > 150
    assert all(chinese or not words[key] for key, chinese in pairs)
    used = {key for text in sources.values() for key in re.findall(r'\bt\("(\w+)"', text)}
    assert used <= set(words)


def _body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20} | fields
