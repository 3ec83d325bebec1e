"""`specgate train-classifier`: from labelled lines to an artefact, or one sentence saying why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router_models.task_class import TaskArtefact
from router_models.types import TASKS
from specgate.cli import main


def test_it_trains_and_prints_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out, scores = tmp_path / "rows.jsonl", tmp_path / "deep" / "made.npz", tmp_path / "scores.json"
    rows = [
        {"task": task, "messages": [{"role": "user", "content": f"{task} number {i}"}], "source": "own"}
        for task in TASKS
        for i in range(6)
    ]
    data.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n", encoding="utf-8")
    command = [
        "train-classifier",
        "--data",
        str(data),
        "--out",
        str(out),
        "--per-task",
        "4",
        "--json",
        str(scores),
    ]
    assert main(command) == 0
    made = TaskArtefact.load(out)
    assert made.meta["scores"]["num_rows"] == len(rows)
    assert json.loads(scores.read_text(encoding="utf-8"))["version"] == made.version
    assert made.version in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{oops\n", ":1: not JSON"),
        ("[1]\n", ":1: not a JSON object"),
        ('{"task": "x"}\n', "row 1: task 'x'"),
        ("", "no rows"),
    ],
)
def test_bad_data_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, fault: str
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(content, encoding="utf-8")
    assert main(["train-classifier", "--data", str(data), "--out", str(tmp_path / "x.npz")]) == 1
    assert fault in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-classifier", "--data", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err
