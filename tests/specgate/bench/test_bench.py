"""`specgate bench` against real server processes: what it sends, what it writes, what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytest_asyncio
from aiohttp import web

from specgate.cli import main
from specgate.launch import Server
from tests.specgate.gateway import make_config, running

FAKE = """
auth: {keyless_on_loopback: true}
requests: {allow_overrides: true}
models: [{id: scripted, backend: fake, fake: {step_s: 0.001, text: "one two three four five six "}}]
"""
QUICK = ["--warmup", "0.1", "--capacity", "60", "--max-tokens", "24"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "c.yaml").write_text(FAKE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def swept(folder: Path) -> Path:
    """A sweep over three arms, each with a server of its own, for greedy and sampled requests."""
    out = folder / "sweep"
    code = main(
        ["bench", "sweep", "--config", str(folder / "c.yaml"), "--arms", "auto,baseline,ngram", *QUICK,
         "--fractions", "0.2,0.6", "--duration", "1", "--slice", "0.5", "--sampling", "greedy,top_p",
         "--slo-ttft-ms", "1000", "--records", "--out", str(out)]
    )  # fmt: skip
    assert code == 0
    return out


def load(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return document


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines()]


def test_all_arms_get_the_same_requests_at_the_same_moments(swept: Path) -> None:
    by_arm: dict[str, list[tuple[object, ...]]] = {}
    for row in records(swept):
        by_arm.setdefault(row["arm"], []).append(
            (row["job_id"], row["prompt_id"], row["task"], row["arrival_s"], row["cell"], row["slice"])
        )
    assert set(by_arm) == {"auto", "baseline", "ngram"}
    assert sorted(by_arm["auto"]) == sorted(by_arm["baseline"]) == sorted(by_arm["ngram"])
    assert len(by_arm["auto"]) > 40


def test_arms_take_turns_in_short_slices(swept: Path) -> None:
    turns = list(dict.fromkeys((row["slice"], row["arm"]) for row in records(swept)))
    slices = list(dict.fromkeys(name for name, _ in turns))
    assert len(slices) == 2 * 2 * 2  # slices, sampling settings, fractions
    firsts = {next(arm for name, arm in turns if name == piece) for piece in slices}
    assert firsts == {"auto", "baseline", "ngram"}, "each arm starts some slices"
    assert [name for name, _ in turns] == [name for name in slices for _ in range(3)], "one slice at a time"


def test_the_report_says_what_was_asked(swept: Path) -> None:
    document = load(swept)
    rows = document["rows"]
    assert len(rows) == 2 * 2 * 3
    assert {row["sampling"] for row in rows} == {"greedy", "top_p"}
    for row in rows:
        assert row["errors"] == 0
        assert row["rate"] == pytest.approx(60 * row["fraction"])
        assert row["n"] == sum(part["n"] for part in row["by_task"].values()) > 0
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p95"] <= row["e2e_ms"]["p99"]
        assert row["queue_wait_ms"]["p50"] is not None
        assert row["identical_to_baseline"] is True
        assert row["goodput_per_s"] == pytest.approx(row["requests_per_s"])
    fixed = {row["arm"]: row for row in rows if row["fraction"] == 0.2 and row["sampling"] == "greedy"}
    assert fixed["baseline"]["policy_mix"] == {"baseline": 1.0}
    assert fixed["baseline"]["mean_acceptance_length"] is None
    assert fixed["ngram"]["policy_mix"] == {"ngram": 1.0}
    assert fixed["ngram"]["reasons"] == {"override": fixed["ngram"]["n"]}
    assert fixed["ngram"]["target_steps_saved_share"] > 0.4
    assert document["acceptance"]["ngram"]["chat"][:2] == [1.0, 1.0]
    assert len(document["regret"]["cells"]) == 4
    meta = document["meta"]
    assert meta["capacity"]["requests_per_s"] == 60
    assert meta["servers"]["one_per_arm"] is True
    assert set(meta["sampling"]) == {"greedy", "top_p"}
    assert meta["versions"]["specgate"]
    assert set(document["latency_model"]) >= {"r2", "mape"}


def test_arms_in_lockstep_answer_all_requests_and_leave_no_server_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers are stopped and continued many times a second, and started anew for each repeat; nothing is
    lost by it."""
    out = folder / "lockstep"
    start = Mock(wraps=Server.start)
    monkeypatch.setattr(Server, "start", start)
    code = main(
        ["bench", "sweep", "--config", str(folder / "c.yaml"), "--arms", "auto,baseline,ngram", *QUICK,
         "--lockstep", "0.05", "--fractions", "0.5", "--duration", "1", "--slice", "0.5", "--records",
         "--repeats", "2", "--out", str(out)]
    )  # fmt: skip
    assert code == 0
    document = load(out)
    assert document["meta"]["servers"]["lockstep_s"] == 0.05
    (cell,) = document["regret"]["cells"]
    assert [document["meta"]["repeats"], len(cell["by_repeat"])] == [2, 2]
    assert len({row["slice"] for row in records(out)}) == 4
    assert start.call_count == 6
    assert {row["arm"]: row["errors"] for row in document["rows"]} == {"auto": 0, "baseline": 0, "ngram": 0}
    assert len({row["n"] for row in document["rows"]}) == 1
    assert all(row["identical_to_baseline"] is not False for row in document["rows"])
    assert _servers(folder / "c.yaml") == set()


def _servers(config: Path) -> set[str]:
    """Processes with this configuration, running or stopped, by number."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if str(config).encode() in words:
            found.add(entry.name)
    return found


class _Tags(HTMLParser):
    """Checks that tags are closed in order; collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_and_needs_nothing_else(swept: Path) -> None:
    text = (swept / "report.html").read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.fetched == []
    assert not re.search(r"<script|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    shown = " ".join(tags.texts)
    for title in ("Greedy decoding", "top-p", "Mean E2E, ms", "Speed-up over baseline", "Regret of auto",
                  "What auto chose", "Who wins where", "Acceptance by task and position"):  # fmt: skip
        assert title in shown, title
    assert text.count("<svg") == 2 * 6


def test_no_png_files_are_promised_without_matplotlib(
    swept: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from specgate.bench.png import write_pngs

    paths = write_pngs(load(swept), folder / "png")
    if paths is None:
        pytest.skip("matplotlib is not installed")
    assert len(paths) == 2 * 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


# --- the other benches, on servers that run already -----------------------------------------------


@pytest_asyncio.fixture
async def url() -> AsyncIterator[str]:
    async with running(make_config(), text="abc " * 20, step_s=0.001) as server:
        yield server.url


async def bench(*args: str) -> int:
    """The command in a thread of its own, beside the server of the test."""
    import asyncio

    return await asyncio.to_thread(main, ["bench", *args, "--warmup", "0"])


async def test_run_measures_one_arm_of_a_running_server(url: str, tmp_path: Path) -> None:
    assert await bench("run", "--url", url, "--arm", "ngram", "--concurrency", "3", "--duration", "0.3",
                       "--out", str(tmp_path)) == 0  # fmt: skip
    (row,) = load(tmp_path)["rows"]
    assert (row["arm"], row["errors"], row["rate"]) == ("ngram", 0, None)
    assert row["n"] > 3
    assert row["mean_acceptance_length"] == pytest.approx(3.0)


async def test_run_finds_the_largest_concurrency_and_says_when_there_is_none(
    url: str, tmp_path: Path
) -> None:
    search = ["run", "--url", url, "--arm", "baseline", "--find-concurrency", "--max-concurrency", "3",
              "--duration", "0.2", "--out", str(tmp_path)]  # fmt: skip
    assert await bench(*search, "--slo-ttft-ms", "60000") == 0
    assert load(tmp_path)["meta"]["largest_concurrency"] == 3
    assert await bench(*search, "--slo-ttft-ms", "0.001") == 0
    assert load(tmp_path)["meta"]["largest_concurrency"] is None
    assert await bench(*search) == 1


async def test_capacity_is_measured_on_baseline(url: str, tmp_path: Path) -> None:
    assert await bench("sweep", "--url", url, "--arms", "baseline,draft", "--fractions", "0.1", "--duration",
                       "0.4", "--capacity-s", "0.3", "--capacity-concurrency", "2,4", "--out",
                       str(tmp_path)) == 0  # fmt: skip
    document = load(tmp_path)
    capacity = document["meta"]["capacity"]
    assert capacity["concurrency"] in (2, 4)
    assert document["rows"][0]["rate"] == pytest.approx(0.1 * capacity["requests_per_s"])
    assert document["meta"]["servers"]["one_per_arm"] is False


async def test_replay_follows_a_trace(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 0.1 * i, "input_tokens": 300, "output_tokens": 5 + i} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert await bench("replay", "--url", url, "--arms", "auto,baseline", "--trace", str(trace), "--stretch",
                       "0.5", "--duration", "0.8", "--window", "0.4", "--max-tokens", "12", "--records",
                       "--out", str(tmp_path)) == 0  # fmt: skip
    document = load(tmp_path)
    assert [row["segment"] for row in document["rows"]] == [0, 0, 1, 1]
    own = [row for row in records(tmp_path) if row["arm"] == "baseline"]
    assert [row["num_output_tokens"] for row in own] == [min(5 + i, 12) for i in range(16)]
    assert [row["arrival_s"] for row in own] == pytest.approx([0.05 * (i % 8) for i in range(16)])


async def test_replay_shifts_between_mixes(url: str, tmp_path: Path) -> None:
    schedule = tmp_path / "s.yaml"
    schedule.write_text(
        "{segment_s: 0.5, segments: [{rate: 1, tasks: {chat: 1}}, {rate: 0.5, tasks: {code_edit: 1}}]}"
    )
    assert await bench("replay", "--url", url, "--arms", "auto,ngram", "--shift", str(schedule), "--capacity",
                       "30", "--repeats", "2", "--out", str(tmp_path)) == 0  # fmt: skip
    document = load(tmp_path)
    assert [(row["segment"], set(row["by_task"])) for row in document["rows"][::2]] == [
        (0, {"chat"}), (1, {"code_edit"}),
    ]  # fmt: skip
    assert document["regret"]["overall"]["best_single_fixed"] == "ngram"


@pytest_asyncio.fixture
async def foreign() -> AsyncIterator[str]:
    """An OpenAI server that knows nothing of arms."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "other", "object": "model"}]})

    async def answer(http: web.Request) -> web.StreamResponse:
        assert "X-SpecGate-Policy" not in http.headers
        assert (await http.json())["model"] == "other"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for text in ("a", "b"):
            choice = {"delta": {"content": text}, "text": text, "finish_reason": None}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await response.write(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n')
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_any_openai_server_can_be_measured(foreign: str, tmp_path: Path) -> None:
    assert await bench("run", "--url", foreign, "--arm", "default", "--duration", "0.2", "--out",
                       str(tmp_path)) == 0  # fmt: skip
    document = load(tmp_path)
    (row,) = document["rows"]
    assert (row["errors"], row["policy_mix"], row["mean_acceptance_length"]) == (0, {}, None)
    assert document["meta"]["model"]["id"] == "other"
    assert (tmp_path / "report.html").exists()


async def test_what_cannot_be_measured_is_refused_in_one_sentence(
    url: str, foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, expected in (
        (["--url", foreign, "--arm", "ngram"], "use --arms default"),
        (["--url", url, "--arm", "eagle"], "arm 'eagle' is not loaded; there are auto, baseline"),
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--url", url, "--data", "absent.jsonl"], "cannot read the prompts"),
        (["--url", url, "--imposed", "0.5"], "--imposed is for servers started here"),
    ):
        assert await bench("run", *args) == 1
        error = capsys.readouterr().err
        assert expected in error
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["run", "--find-concurrency"], "needs --slo-ttft-ms"),
        (["replay"], "needs --trace FILE or --shift"),
        (["replay", "--shift", "--stretch", "2"], "--stretch does nothing with --shift"),
        (["replay", "--trace", "t", "--capacity", "2"], "does nothing with a trace"),
        (["replay", "--trace", "t", "--sampling", "greedy,top_p"], "one --sampling at a time"),
        (
            ["sweep", "--url", "http://127.0.0.1:9", "--lockstep", "1"],
            "--lockstep is for servers started here",
        ),
        (["sweep", "--share-server", "--lockstep", "1"], "leave out --share-server"),
        (["sweep", "--arms", "auto", "--lockstep", "1"], "for several arms"),
        (["run", "--lockstep", "1"], "for several arms"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *args]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--fractions", "0"],
        ["--fractions", "a"],
        ["--arms", "auto,auto"],
        ["--sampling", "hot"],
        ["--imposed", "1.5"],
        ["--duration", "-1"],
    ],
)
def test_wrong_use_is_refused_by_its_exit_code(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "sweep", *wrong])
    assert exit_.value.code == 2


@pytest.mark.e2e
def test_imposed_acceptance_end_to_end(tmp_path: Path) -> None:
    """A real engine, a draft model that is right as often as imposed, and the same texts."""
    from engine.models.tiny_files import save_tiny_model

    engine = {
        "model": str(save_tiny_model(tmp_path / "model", num_layers=2, max_model_len=8192)),
        "num_threads": 1,
        "num_blocks": 2048,
        "draft_model": {"layers_of_target": 1, "num_speculative_tokens": 4},
    }
    config = {"auth": {"keyless_on_loopback": True}, "models": [{"id": "tiny", "engine": engine}]}
    (tmp_path / "c.yaml").write_text(json.dumps(config), encoding="utf-8")
    code = main(
        ["bench", "sweep", "--config", str(tmp_path / "c.yaml"), "--arms", "baseline,draft", "--share-server",
         "--tasks", "chat,reasoning,translation", "--imposed", "1", "--sampling", "greedy,temperature",
         "--fractions", "0.5", "--capacity", "20", "--duration", "1", "--warmup", "0", "--max-tokens", "24",
         "--set", "learning.sweep_s=0", "--out", str(tmp_path)]
    )  # fmt: skip
    assert code == 0
    document = load(tmp_path)
    assert document["meta"]["imposed_acceptance"] == [1.0]
    assert "imposed" in document["meta"]["notes"][0]
    assert document["meta"]["model"]["weights_sha256"]
    drafted = [row for row in document["rows"] if row["arm"] == "draft"]
    assert len(drafted) == 2
    for row in drafted:
        assert (row["errors"], row["identical_to_baseline"]) == (0, True)
        assert all(share > 0.7 for values in row["acceptance_per_position"].values() for share in values)
