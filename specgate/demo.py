"""`specgate demo`: a real server, real prompts of several kinds, and what was decided and measured.

Every prompt runs greedily under `auto` and under `baseline` (and, where the prompt says so, under
another policy by override), in the order A B B A: the first run meets a cold prefix cache and
gives the TTFT; the better of the two runs of each arm gives TPOT and decision, so that one
disturbance of the machine decides nothing. Times are taken here, at the client. The server starts
knowing nothing and keeps nothing: it learns from these very requests.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from engine.types import BASELINE
from specgate.clock import Clock, SystemClock
from specgate.explain import number, one_line
from specgate.launch import LaunchError, Server

AUTO = "auto"
FORGETFUL = ("learning.folder=null", "decision_log.path=null")
MIN_WIDTH = 156  # columns of the table where the terminal does not say


class DemoError(Exception):
    """The demo cannot go on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One prompt of `demo_prompts.jsonl`. `overrides` are policies to show beside `auto`."""

    kind: str
    endpoint: str  # path below /v1/
    body: dict[str, Any]
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One run of one prompt, as the client saw it."""

    text: str
    finish_reason: str | None
    num_tokens: int
    ttft_ms: float
    tpot_ms: float | None  # None for fewer than two tokens
    decided: dict[str, Any] = field(default_factory=dict)  # the answer's `specgate` object
    explanation: str = ""  # what the server said it would decide, just before

    def is_same_text(self, other: Answer) -> bool:
        """Same text, same number of tokens, same reason to stop."""
        return (self.text, self.num_tokens, self.finish_reason) == (
            other.text, other.num_tokens, other.finish_reason,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    kind: str
    arm: str  # auto, or the policy asked for
    task: str
    policy: str
    reason: str
    num_tokens: int
    ttft_ms: float
    tpot_ms: float | None
    mean_acceptance_length: float | None
    speed_up: float | None  # TPOT of baseline / TPOT of this arm
    is_identical: bool
    explanation: str
    predicted_tpot_ms: float | None = None  # when it was decided; None: too little was known
    predicted_e2e_ms: float | None = None
    e2e_ms: float | None = None  # of the same run, as the server measured it


def load_prompts() -> list[DemoPrompt]:
    """The prompts that ship with the package."""
    text = resources.files("specgate").joinpath("demo_prompts.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return [DemoPrompt(r["kind"], r["endpoint"], r["body"], tuple(r.get("overrides", ()))) for r in rows]


def run_demo(config: Path | None, json_file: Path | None) -> bool:
    """Start a server, run all prompts, print the table. True when every text was identical."""
    console = Console()
    if not console.is_terminal or console.width < MIN_WIDTH:
        console = Console(width=MIN_WIDTH)
    try:
        rows = asyncio.run(_run(config, console, SystemClock()))
    except asyncio.CancelledError as error:
        raise DemoError("ended by SIGTERM") from error
    except LaunchError as error:
        raise DemoError(str(error)) from error
    except httpx.HTTPError as error:
        raise DemoError(f"the server stopped answering ({type(error).__name__}: {error})") from error
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        document = [asdict(row) for row in rows]
        json_file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return all(row.is_identical for row in rows)


async def _run(config: Path | None, console: Console, clock: Clock) -> list[Row]:
    this_task = asyncio.current_task()
    assert this_task is not None
    # So that whoever ends the demo ends its server too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    prompts = load_prompts()
    started = clock.monotonic()
    rows: list[Row] = []
    with console.status("starting a server") as status:

        def say(message: str) -> None:
            status.update(message)
            if not console.is_terminal:  # where a spinner cannot be seen
                print(f"{clock.monotonic() - started:4.0f} s  {message}", file=sys.stderr)

        async with (
            Server.start(config, FORGETFUL, on_progress=status.update) as server,
            httpx.AsyncClient(base_url=server.url, timeout=120) as client,
        ):
            ready_s = clock.monotonic() - started
            demo = _Demo(client, clock, await _model_id(client))
            for index, prompt in enumerate(prompts):
                say(f"prompt {index + 1} of {len(prompts)}: {prompt.kind}")
                rows += await demo.rows(prompt)
    _print(console, rows, ready_s, clock.monotonic() - started)
    return rows


class _Demo:
    """Runs prompts against one server."""

    def __init__(self, client: httpx.AsyncClient, clock: Clock, model_id: str) -> None:
        self._client = client
        self._clock = clock
        self._model_id = model_id

    async def rows(self, prompt: DemoPrompt) -> list[Row]:
        """One row for `auto`, one for each override that this server has loaded."""
        body = {**prompt.body, "model": self._model_id, "temperature": 0}
        candidates = (await self._explain(body)).get("candidates", ())
        loaded = {candidate["policy"] for candidate in candidates}
        overrides = [policy for policy in prompt.overrides if policy in loaded]
        arms = [AUTO, *overrides, BASELINE]
        runs: dict[str, list[Answer]] = {arm: [] for arm in arms}
        for arm in arms + arms[::-1]:
            runs[arm].append(await self._answer(prompt.endpoint, body, arm))
        return [_row(prompt.kind, arm, runs) for arm in (AUTO, *overrides)]

    async def _explain(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post("/admin/explain", json=body)
        _raise_for(response, response.content)
        return dict(response.json())

    async def _answer(self, endpoint: str, body: dict[str, Any], arm: str) -> Answer:
        """Stream one answer and take the times."""
        explanation = one_line(await self._explain(body)) if arm == AUTO else "asked for by the caller"
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start = self._clock.monotonic()
        reader = _StreamReader(self._clock.monotonic)
        async with self._client.stream(
            "POST", f"/v1/{endpoint}", json=streamed, headers={"X-SpecGate-Policy": arm}
        ) as response:
            if response.status_code != 200:
                _raise_for(response, await response.aread())
            async for line in response.aiter_lines():
                reader.feed(line)
        return reader.answer(start, explanation)


class _StreamReader:
    """Collects the events of one stream."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._pieces: list[str] = []
        self._times: list[float] = []
        self._finish_reason: str | None = None
        self._last_chunk: dict[str, Any] = {}
        self._is_done = False

    def feed(self, line: str) -> None:
        """One line of the event stream."""
        if not line.startswith("data: "):
            return
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self._is_done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise DemoError(f"the server failed during an answer: {chunk['error'].get('message')}")
        for choice in chunk.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            if piece:
                self._pieces.append(piece)
                self._times.append(self._now())
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if chunk.get("usage"):
            self._last_chunk = chunk

    def answer(self, start: float, explanation: str) -> Answer:
        """What came, once the stream is over."""
        if not (self._is_done and self._times and self._last_chunk):
            raise DemoError("an answer broke off before its end")
        num_tokens = int(self._last_chunk["usage"]["completion_tokens"])
        decode_s = self._times[-1] - self._times[0]
        return Answer(
            text="".join(self._pieces),
            finish_reason=self._finish_reason,
            num_tokens=num_tokens,
            ttft_ms=(self._times[0] - start) * 1e3,
            tpot_ms=decode_s * 1e3 / (num_tokens - 1) if num_tokens > 1 else None,
            decided=dict(self._last_chunk.get("specgate") or {}),
            explanation=explanation,
        )


async def _model_id(client: httpx.AsyncClient) -> str:
    response = await client.get("/v1/models")
    _raise_for(response, response.content)
    return str(response.json()["data"][0]["id"])


def _raise_for(response: httpx.Response, content: bytes) -> None:
    if response.status_code == 200:
        return
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    raise DemoError(f"{response.request.url.path} answered {response.status_code}: {message}")


def _row(kind: str, arm: str, runs: dict[str, list[Answer]]) -> Row:
    best, baseline = _best(runs[arm]), _best(runs[BASELINE])
    decided = best.decided
    policies = [decided.get("policy"), *(change["policy"] for change in decided.get("policy_changes", ()))]
    return Row(
        kind=kind,
        arm=arm,
        task=str(decided.get("task")),
        policy=" > ".join(map(str, policies)),
        reason=str(decided.get("reason")),
        num_tokens=best.num_tokens,
        ttft_ms=runs[arm][0].ttft_ms,
        tpot_ms=best.tpot_ms,
        mean_acceptance_length=decided.get("mean_acceptance_length"),
        speed_up=baseline.tpot_ms / best.tpot_ms if baseline.tpot_ms and best.tpot_ms else None,
        is_identical=all(
            answer.is_same_text(expected) for answer in runs[arm] for expected in runs[BASELINE]
        ),
        explanation=best.explanation,
        predicted_tpot_ms=(decided.get("predicted") or {}).get("tpot_ms"),
        predicted_e2e_ms=(decided.get("predicted") or {}).get("e2e_ms"),
        e2e_ms=(decided.get("timings") or {}).get("e2e_ms"),
    )


def _best(answers: Sequence[Answer]) -> Answer:
    """The one with the lowest TPOT."""
    return min(answers, key=lambda answer: float("inf") if answer.tpot_ms is None else answer.tpot_ms)


def _beside(measured: float | None, predicted: float | None, digits: int) -> str:
    """A measured number with the predicted one behind it."""
    told = "-" if predicted is None else f"{predicted:.{digits}f}"
    return f"{'-' if measured is None else f'{measured:.{digits}f}'} ({told})"


def _print(console: Console, rows: Sequence[Row], ready_s: float, total_s: float) -> None:
    table = Table(title="What was decided, and what it gave", title_justify="left", title_style="bold")
    for name in ("prompt", "task", "policy", "reason"):
        table.add_column(name, no_wrap=True)
    for name in ("TTFT", "TPOT (pred.)", "E2E (pred.)", "accepted", "speed-up", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.kind, row.task, row.policy, row.reason,
            f"{row.ttft_ms:.0f}",
            _beside(row.tpot_ms, row.predicted_tpot_ms, 1),
            _beside(row.e2e_ms, row.predicted_e2e_ms, 0),
            "-" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}",
            "-" if row.speed_up is None else f"{row.speed_up:.2f}x",
            "yes" if row.is_identical else "NO",
        )  # fmt: skip
    console.print(table)
    console.print(
        "Times in ms. (pred.): as predicted when it was decided; - where too little was known yet.\n"
        "accepted: mean acceptance length (bonus token included). speed-up: TPOT of baseline\n"
        "divided by TPOT, each the better of two runs. identical: greedy text equals baseline's.\n"
        "TTFT: with a cold prefix cache under auto, with a warm one where the policy was asked for.\n"
        "TPOT and E2E: of the better run, which may have found its prompt in the cache.",
        style="dim",
        highlight=False,
    )
    for row in rows:
        console.print(f"- {row.kind}, {row.arm}: {row.explanation}", highlight=False, soft_wrap=True)
    num_same = sum(row.is_identical for row in rows)
    console.print(
        f"identical: {'yes' if num_same == len(rows) else 'NO'} ({num_same} of {len(rows)}); "
        f"server ready after {number(ready_s)} s, {number(total_s)} s in all",
        highlight=False,
    )
