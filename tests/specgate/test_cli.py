"""The command line: exit codes, messages, and what it prints."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specgate import __version__
from specgate.cli import main
from specgate.config import LOCAL_CONFIG

NOBODY = "http://127.0.0.1:9"  # the discard port: nothing answers there

LOGGED = {
    "policy": "ngram",
    "reason": "rule",
    "task": "code_edit",
    "task_probabilities": {"code_edit": 0.91, "chat": 0.05, "reasoning": 0.03, "translation": 0.01},
    "output_tokens": {"p50": 120.0, "p90": 300.0},
    "load": {"num_running": 3, "queue_wait_p95_ms": None, "requests_per_s": 1.25},
    "candidates": [
        {
            "policy": "baseline",
            "num_speculative_tokens": 0,
            "allowed": True,
            "why_not": None,
            "predicted": {},
        },
        {
            "policy": "ngram",
            "num_speculative_tokens": 4,
            "allowed": True,
            "predicted": {"ttft_ms": 50.0, "tpot_ms": 12.345, "e2e_ms": None},
            "terms": [
                {"name": "tokens", "value": 5.0, "coefficient": 2.0, "effect_ms": 10.0, "unit": "tokens"},
                {"name": "base", "value": 1.0, "coefficient": 2.345, "effect_ms": 2.345},
            ],
        },
        {
            "policy": "draft",
            "num_speculative_tokens": 5,
            "allowed": False,
            "why_not": "answer too short",
            "predicted": {},
        },
    ],
}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    first = {**LOGGED, "policy": "baseline", "reason": "load_guard", "candidates": []}
    path = tmp_path / "decisions.jsonl"
    path.write_text(json.dumps(first) + "\n" + json.dumps(LOGGED) + "\n", encoding="utf-8")
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"specgate {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["no-such"], ["serve", "--port", "x"], ["explain", "a", "--line", "b"], ["bench"]]
)
def test_wrong_use_is_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specgate", "version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"specgate {__version__}\n")


def test_check_config_accepts_the_shipped_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", str(LOCAL_CONFIG)]) == 0
    assert capsys.readouterr().out == f"{LOCAL_CONFIG}: valid\n"


def test_check_config_names_every_fault_of_every_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("models:\n  - id: a\n    backend: fakke\nserve: 1\n", encoding="utf-8")
    missing = tmp_path / "missing.yaml"
    assert main(["check-config", str(LOCAL_CONFIG), str(bad), str(missing)]) == 1
    out, err = capsys.readouterr()
    assert out == f"{LOCAL_CONFIG}: valid\n"
    lines = err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{bad}:3: models.0.backend: ")
    assert "embedded, openai_http, fake" in lines[0]
    assert lines[1].startswith(f"{bad}:4: serve: ")
    assert lines[2].startswith(f"{missing}: ")


def test_check_config_without_a_file_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config"]) == 2
    assert "FILE" in capsys.readouterr().err


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "object"


def test_serve_refuses_a_bad_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--set", "server.prot=1"]) == 2
    assert "port" in capsys.readouterr().err


def test_explain_without_a_server_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "request.json"
    request.write_text('{"messages": [{"role": "user", "content": "hi"}]}', encoding="utf-8")
    assert main(["explain", str(request), "--url", NOBODY]) == 1
    error = capsys.readouterr().err
    assert NOBODY in error
    assert "make serve" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("content", ["{", "[1, 2]", "7"])
def test_explain_refuses_what_is_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    request = tmp_path / "request.json"
    request.write_text(content, encoding="utf-8")
    assert main(["explain", str(request), "--url", NOBODY]) == 2
    assert str(request) in capsys.readouterr().err


def test_explain_needs_one_source(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 2
    assert main(["explain", "request.json", "--log", str(log)]) == 2
    assert "either" in capsys.readouterr().err


def test_explain_shows_a_logged_decision(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--log", str(log)]) == 0
    out = capsys.readouterr().out
    assert "ngram was decided: rule" in out
    assert "code_edit 0.91" in out
    assert "p50 120, p90 300" in out
    assert "num_running 3" in out
    assert "queue_wait_p95_ms" not in out, "what is unknown is left out"
    assert "not allowed: answer too short" in " ".join(out.split())
    assert "12.3" in out, "the effects' sum"


def test_explain_takes_a_line_of_the_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--log", str(log), "--line", "1"]) == 0
    assert "baseline was decided: load_guard" in capsys.readouterr().out
    assert main(["explain", "--log", str(log), "--line", "3"]) == 2
    assert "1 to 2" in capsys.readouterr().err


def test_explain_refuses_a_line_that_is_no_decision(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text("not json\n", encoding="utf-8")
    assert main(["explain", "--log", str(log)]) == 1
    assert "line 1" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    """As with `specgate check-config --schema | head`: more is printed than a pipe holds."""
    command = [sys.executable, "-m", "specgate", "check-config", "--schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_an_interrupt_says_so(tmp_path: Path) -> None:
    """A command that waits, for a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        request = tmp_path / "request.json"
        request.write_text(json.dumps({"model": "m", "prompt": "hi"}))
        # What a shell starts in the background ignores the signal, and hands that down.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            [sys.executable, "-m", "specgate", "explain", "--url", url, str(request)],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        silent.settimeout(30)
        try:
            with silent.accept()[0]:
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=30)
        finally:
            signal.signal(signal.SIGINT, before)
            process.kill()
    assert (process.returncode, said) == (130, "specgate: interrupted\n")
