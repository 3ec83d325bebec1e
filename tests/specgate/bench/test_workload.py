"""Prompts, arrivals, traces and schedules: seeded, checked, and never silently changed."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specgate.bench.client import BenchError
from specgate.bench.replay import load_shift
from specgate.bench.trace import LengthPicker, TraceRow, load_trace, shaped_arrivals
from specgate.bench.workload import Asking, Choice, Pool, Prompt, load_pool, make_jobs, poisson_arrivals


def rows(*changes: dict[str, Any]) -> str:
    base = {
        "task": "chat",
        "lang": "en",
        "prompt_tokens": 20,
        "messages": [{"role": "user", "content": "hi"}],
    }
    return "\n".join(json.dumps(base | {"id": f"r{i}"} | change) for i, change in enumerate(changes))


def pool(path: Path, text: str, choice: Choice | None = None, max_model_len: int | None = None) -> Pool:
    path.write_text(text, encoding="utf-8")
    return load_pool(path, choice or Choice(), max_model_len, max_tokens=16)


def test_rows_are_filtered_by_language_length_and_task(tmp_path: Path) -> None:
    text = rows(
        {}, {"lang": "zh"}, {"prompt_tokens": 9999}, {"prompt_tokens": 400}, {"task": "code_edit"},
        {"task": "tool_call", "tools": [{}]}, {"messages": None, "prompt": "x = "},
    )  # fmt: skip
    found = pool(tmp_path / "d.jsonl", text, max_model_len=512)
    assert {task: {p.id for p in prompts} for task, prompts in found.by_task.items()} == {
        "chat": {"r0", "r6"}, "code_edit": {"r4"},
    }  # fmt: skip
    assert {p.endpoint for p in found.prompts} == {"chat/completions", "completions"}
    with_tools = pool(tmp_path / "d.jsonl", text, Choice(tasks=("tool_call",)))
    assert with_tools.prompts[0].body["tools"] == [{}]
    chinese = pool(tmp_path / "d.jsonl", text, Choice(lang="zh"))
    assert [p.id for p in chinese.prompts] == ["r1"]


@pytest.mark.parametrize(
    ("text", "choice", "expected"),
    [
        ("{nonsense", None, "d.jsonl:1 is no prompt"),
        ('{"task": "chat"}', None, "d.jsonl:1 is no prompt"),
        (rows({}) + "\n[1]", None, "d.jsonl:2 is no prompt"),
        (rows({}), Choice(tasks=("translation",)), "no prompt of task 'translation' fits"),
        (rows({}), Choice(lang="zh"), "no prompt of"),
    ],
)
def test_what_is_wrong_with_the_data_is_named(
    tmp_path: Path, text: str, choice: Choice | None, expected: str
) -> None:
    with pytest.raises(BenchError, match=expected):
        pool(tmp_path / "d.jsonl", text, choice)
    with pytest.raises(BenchError, match="cannot read"):
        load_pool(tmp_path / "absent.jsonl", Choice(), None, 16)


def test_the_demos_prompts_serve_where_no_file_is_given() -> None:
    found = load_pool(None, Choice(), None, 16)
    assert len(found.by_task) >= 7
    assert load_pool(None, Choice(tasks=("code_edit",)), None, 16).prompts[0].task == "code_edit"


def prompts(**num: int) -> Pool:
    return Pool(
        {
            task: tuple(
                Prompt(f"{task}{i}", task, "completions", {"prompt": "x" * i}, i) for i in range(count)
            )
            for task, count in num.items()
        }
    )


def test_every_task_comes_once_a_round_and_every_prompt_once_a_deck() -> None:
    drawn = list(itertools.islice(prompts(chat=4, reasoning=4).draw(random.Random(1)), 8))
    assert [sorted(p.task for p in drawn[i : i + 2]) for i in range(0, 8, 2)] == [["chat", "reasoning"]] * 4
    assert len({p.id for p in drawn}) == 8


def test_a_mix_is_followed() -> None:
    mix = {"chat": 9.0, "reasoning": 1.0}
    drawn = itertools.islice(prompts(chat=4, reasoning=4, translation=4).draw(random.Random(1), mix), 1000)
    counts = Counter(p.task for p in drawn)
    assert set(counts) == {"chat", "reasoning"}
    assert 860 <= counts["chat"] <= 940


def test_arrivals_and_jobs_repeat_with_their_seed() -> None:
    def jobs(seed: int) -> tuple[object, ...]:
        rng = random.Random(seed)
        arrivals = poisson_arrivals(5.0, 20.0, rng)
        return make_jobs("s", arrivals, prompts(chat=4, reasoning=4).draw(rng), Asking(sampling="top_p"))

    assert jobs(1) == jobs(1) != jobs(2)


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    arrivals = poisson_arrivals(10.0, 400.0, random.Random(0))
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.06)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.01, rel=0.15)
    assert all(0 < at_s < 400 for at_s in arrivals)


def test_sampled_requests_draw_the_same_text_under_every_arm() -> None:
    prompt = Prompt("p", "chat", "completions", {"prompt": "x"})
    greedy, sampled = Asking(8), Asking(8, "top_p", ignore_eos=True)
    assert greedy.body(prompt) == {"prompt": "x", "max_tokens": 8, "temperature": 0.0}
    body = sampled.body(prompt)
    assert (body["temperature"], body["top_p"], body["ignore_eos"]) == (0.8, 0.9, True)
    assert body["seed"] == sampled.body(prompt)["seed"]
    assert body["seed"] != sampled.body(Prompt("q", "chat", "completions", {"prompt": "x"}))["seed"]


# --- traces and schedules --------------------------------------------------------------------


def test_a_trace_is_read_in_order_and_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = '{"arrival_s": %s, "input_tokens": 5, "output_tokens": 6}\n'
    path.write_text(row % 2 + "\n" + row % 1, encoding="utf-8")
    assert load_trace(path) == [TraceRow(1.0, 5, 6), TraceRow(2.0, 5, 6)]
    for text, expected in (
        ("", "is empty"),
        ("{}", "t.jsonl:1 is no trace row"),
        (row % '"NaN"', "must be a number"),
        (row.replace("5", "-5") % 1, "must not be negative"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(BenchError, match=expected):
            load_trace(path)


def test_shaped_arrivals_keep_the_bursts_and_have_the_rate() -> None:
    burst = [TraceRow(10 * i + 0.01 * j, 1, 1) for i in range(40) for j in range(5)]
    arrivals = shaped_arrivals(burst, rate=2.0, duration_s=30.0, rng=random.Random(0))
    assert len(arrivals) == 60
    assert 0.0 == arrivals[0] <= max(arrivals) < 30.0
    gaps = sorted(b - a for a, b in itertools.pairwise(arrivals))
    assert gaps[len(gaps) // 2] < 0.02 < 1.0 < gaps[-1]


def test_prompts_are_found_by_length() -> None:
    picker = LengthPicker(prompts(chat=50))
    rng = random.Random(0)
    assert all(abs((picker.pick(20, rng).num_tokens or 0) - 20) <= 2 for _ in range(50))
    assert (picker.pick(10_000, rng).num_tokens or 0) >= 46
    assert (picker.pick(0, rng).num_tokens or 0) <= 3


def test_the_shipped_schedule_shifts() -> None:
    shift = load_shift(None)
    assert shift.segment_s == 60
    assert len(shift.segments) >= 6
    assert min(s.rate for s in shift.segments) < 0.3 < 1 < max(s.rate for s in shift.segments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "has `segments` and `segment_s`"),
        ("{segments: [], more: 1}", "no other keys"),
        ("{segments: []}", "at least one segment"),
        ("{segments: [{rate: 1}]}", r"segments.0: a segment has `rate` and `tasks`"),
        ("{segments: [{rate: -1, tasks: {chat: 1}}]}", r"segments.0.rate: is -1"),
        ("{segments: [{rate: 1, tasks: {poetry: 1}}]}", "'poetry' is none of"),
        ("{segments: [{rate: 1, tasks: {chat: true}}]}", "tasks.chat: is True"),
        ("{segments: [{rate: 1, tasks: {chat: 1}}], segment_s: x}", "segment_s: is 'x'"),
        ("{", "cannot read the schedule"),
    ],
)
def test_a_wrong_schedule_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match=expected):
        load_shift(path)
