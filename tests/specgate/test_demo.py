"""The demo against a real gateway process with the scripted backend (the real model: tests/e2e)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specgate.cli import main
from specgate.demo import load_prompts

CONFIG = """
auth: {keyless_on_loopback: true}
requests: {allow_overrides: true}
models:
  - id: scripted
    backend: fake
    fake: {%s}
"""


def config(folder: Path, script: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(CONFIG % script, encoding="utf-8")
    return path


def test_the_prompts_are_of_many_kinds() -> None:
    prompts = load_prompts()
    kinds = {prompt.kind for prompt in prompts}
    assert len(kinds) == len(prompts) >= 8
    assert {"code edit", "Chinese", "chat"} <= kinds
    assert any("draft" in prompt.overrides for prompt in prompts), "all three ways are to be seen"


def test_the_demo_reports_every_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "demo.json"
    script = f"text: '{'one two three four five ' * 10}', step_s: 0.0001"  # a token a character
    assert main(["demo", "--config", str(config(tmp_path, script)), "--json", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))
    prompts = load_prompts()
    assert [row["kind"] for row in rows if row["arm"] == "auto"] == [prompt.kind for prompt in prompts]
    assert {row["arm"] for row in rows} == {"auto", "draft"}
    assert all(row["is_identical"] and row["ttft_ms"] > 0 and row["speed_up"] > 0 for row in rows)
    assert all(row["reason"] == "override" for row in rows if row["arm"] == "draft")
    asked = {prompt.kind: prompt.body["max_tokens"] for prompt in prompts}
    assert all(row["num_tokens"] == asked[row["kind"]] for row in rows)
    printed = capsys.readouterr().out
    assert f"identical: yes ({len(rows)} of {len(rows)})" in printed
    assert all(prompt.kind in printed for prompt in prompts)


def test_a_method_that_is_not_loaded_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    path = config(tmp_path, "methods: {ngram: 4}, step_s: 0.0001")
    assert main(["demo", "--config", str(path), "--json", str(out)]) == 0
    assert {row["arm"] for row in json.loads(out.read_text(encoding="utf-8"))} == {"auto"}


def test_a_failing_answer_fails_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--config", str(config(tmp_path, "fail_after_tokens: 5"))]) == 1
    assert "the server failed during an answer" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--config", str(config(tmp_path, "txt: hello"))]) == 1
    error = capsys.readouterr().err
    assert "ended before it was ready" in error
    assert "unknown key" in error
