"""`specgate train-draft`: from prompts to a head that drafts, stopped and gone on with on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import DraftModelConfig, EngineConfig
from engine.factory import build_drafters
from engine.models.draft_head import head_spec, read_config
from engine.models.llama import CausalLM
from engine.models.registry import load_model
from engine.models.tiny_files import save_tiny_model
from engine.spec.planner import FollowAssignment
from engine.training.acceptance import measure_acceptance
from engine.training.corpus import collected_ids, is_validation, read_corpus
from engine.training.head_module import DraftHeadModule
from engine.training.targets import TargetTables
from engine.types import SamplingParams
from specgate.cli import main
from specgate.train_draft import read_prompts
from tests.engine.harness import drive, make_engine, request

WORDS = ("red", "blue", "green", "old", "new", "small", "house", "tree", "river", "stone")


def write_prompts(path: Path, num: int) -> Path:
    rows = [
        {
            "id": str(n),
            "task": "chat",
            "messages": [{"role": "user", "content": f"{WORDS[n % 10]} {n} {WORDS[n % 7]}"}],
        }
        for n in range(num)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def options(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    return [
        "train-draft", "--model", str(model), "--prompts", str(prompts), "--out", str(out),
        "--max-tokens", "32", "--temperatures", "0", "--steps", "120", "--rounds", "2",
        "--vocabulary", "200", "--batch-tokens", "512", "--learning-rate", "3e-3",
        "--evaluate-every", "40", "--context-tokens", "32", "--threads", "1", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"))


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "specgate", *command], stderr=subprocess.PIPE, text=True, env=environment
    )


def kill_after(process: subprocess.Popen[str], words: str) -> None:
    """SIGKILL as soon as a line of its progress holds `words`."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            break
    else:
        raise AssertionError("".join(seen))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()


def test_killed_and_gone_on_with_it_beats_an_untrained_head(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 150), tmp_path / "run"
    kill_after(start(options(target, prompts, out, "--stage", "collect")), "collected 64 of 150")
    held = collected_ids(out / "corpus")
    assert 64 <= len(held) < 150
    kill_after(start(options(target, prompts, out, "--checkpoint-s", "0")), "step 30 of 120")
    assert len(collected_ids(out / "corpus")) == 150, "what was there was kept, the rest was added"

    assert main(options(target, prompts, out)) == 0
    shown = capsys.readouterr()
    assert "step 40 of 120" in shown.err
    assert "step 20 of 120" not in shown.err, "it went on where it was killed"
    figures = json.loads(shown.out[: shown.out.rindex("}") + 1])

    model = load_model(str(target), dtype="float32")
    assert isinstance(model, CausalLM)
    samples = [s for s in read_corpus(out / "corpus") if is_validation(s.group, 0.1)]
    torch.manual_seed(0)
    tables = TargetTables(model, read_config(out / "head").draft_token_ids)
    untrained = measure_acceptance(DraftHeadModule(head_spec(model.spec)), tables, samples)
    assert figures["mean_acceptance_length_at_3"] > untrained.mean_acceptance_length + 0.2

    again = tmp_path / "again"
    shutil.copytree(out / "corpus", again / "corpus")
    more = options(target, prompts, again, "--stage", "train", "--start", str(out / "head"))
    assert main([word if word != "120" else "1" for word in more]) == 0
    shown = capsys.readouterr().out
    begun = json.loads(shown[: shown.rindex("}") + 1])
    assert begun["mean_acceptance_length_at_3"] > untrained.mean_acceptance_length + 0.15, (
        "it began with the head"
    )

    drafter = build_drafters(
        EngineConfig(
            model=str(target),
            ngram=None,
            num_blocks=64,
            draft_model=DraftModelConfig(3, source=str(out / "head")),
        ),
        model,
    )["draft"]
    engine = make_engine({"draft": drafter}, FollowAssignment(), model)
    params = SamplingParams(temperature=0.0, max_tokens=32)
    asked = [tuple(s.token_ids[: s.prompt_length].tolist()) for s in samples]
    run = drive(engine, [request(str(n), ids, params, "draft", 3) for n, ids in enumerate(asked)])
    stats = [done.stats for done in run.finished.values() if done.stats is not None]
    for n, sample in enumerate(samples):
        assert run.finished[str(n)].token_ids == sample.token_ids[sample.prompt_length :].tolist(), "lossless"
    drafts, accepted = sum(s.num_drafts for s in stats), sum(s.num_accepted_tokens for s in stats)
    assert 1 + accepted / drafts > untrained.mean_acceptance_length + 0.1


def test_references_are_read_and_not_answered(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "one two", "reference": " three"}, {"prompt_token_ids": [5, 6, 7], "group": "g"}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    asked, read, ids = read_prompts(path, str(target), True)
    assert asked.text_ids is None
    assert read.text_ids is not None
    assert read.text_ids[: len(asked.token_ids)] == asked.token_ids
    assert (asked.group, ids.group) == (read.group, "g")
    assert ids.token_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("line", "words"),
    [("{}", "neither messages, prompt"), ("[1]", "not a JSON object"), (None, "--prompts is needed")],
)
def test_what_is_wrong_is_said(
    line: str | None, words: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train-draft", "--model", str(target), "--out", str(tmp_path / "run")]
    if line is not None:
        (tmp_path / "rows.jsonl").write_text(line, encoding="utf-8")
        command += ["--prompts", str(tmp_path / "rows.jsonl")]
    assert main(command) == 1
    assert words in capsys.readouterr().err


def test_a_start_that_is_no_head_is_named(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 40)
    command = options(
        target, prompts, tmp_path / "run", "--max-tokens", "8", "--start", str(tmp_path / "nowhere")
    )
    assert main(command) == 1
    assert "holds no draft head" in capsys.readouterr().err


def test_training_without_a_corpus_says_what_to_do(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train-draft", "--model", str(target), "--out", str(tmp_path), "--stage", "train"]) == 1
    assert "--stage collect" in capsys.readouterr().err
