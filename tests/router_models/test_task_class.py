"""The shipped classifier on prompts of our own, its explanations, and its file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from router_models.task_class import ArtefactError, TaskArtefact, TaskClassifier
from router_models.training.fit import FitConfig, train
from router_models.training.splits import folds, groups
from router_models.types import TASKS, RequestText

SHARED = Path(__file__).parents[3] / "shared" / "data" / "tasks_dev.jsonl"
DOCUMENT = (
    "The old lighthouse at Cape Verrin was built in 1872 by a local mason, Edda Holm. It guided fishing "
    "boats for ninety years until an automatic beacon replaced it. Since then the tower has been a museum "
    "with a small library, and every summer the village holds a concert on its terrace. "
)
DOCUMENT_ZH = (
    "松溪村位于山谷之中，全村共有两百多户人家。村民以种植茶叶为生，每年春天都会举办采茶节，吸引许多游客前来参观。"
    * 3
)
CODE = """```python
def mean(values):
    total = 0
    for v in values:
        total += v
    return total / len(values)
```"""
TOOL = '{"type": "function", "function": {"name": "get_rate", "parameters": {"type": "object"}}}'

PROMPTS = [
    ("document_qa", RequestText(f"{DOCUMENT}\n\nWho built the lighthouse?")),
    ("document_qa", RequestText("Who built it?", system=f"Answer from this document only.\n{DOCUMENT}")),
    ("document_qa", RequestText(f"请看这份资料：{DOCUMENT_ZH}\n请问村民靠什么生活？")),
    ("summarization", RequestText(f"Give me the short version of this:\n\n{DOCUMENT * 3}")),
    ("summarization", RequestText(f"{DOCUMENT * 3}\n\nMain points, as three bullets.")),
    ("summarization", RequestText(f"把下面的内容浓缩成一句话：\n{DOCUMENT_ZH}")),
    ("code_edit", RequestText(f"This crashes on an empty list, please fix it.\n\n{CODE}")),
    ("code_edit", RequestText(f"{CODE}\n给这个函数加上类型注解和空列表处理。")),
    ("code_completion", RequestText("def fibonacci(n: int) -> int:\n    ", is_raw_prompt=True)),
    ("code_completion", RequestText("Write a Python function that returns the n largest words of a text.")),
    ("code_completion", RequestText("用 Go 写一个并发下载器")),
    ("chat", RequestText("What should I visit in Lisbon in two days?")),
    ("chat", RequestText("为什么天空是蓝色的？")),
    ("chat", RequestText("hey, how's it going")),
    (
        "reasoning",
        RequestText("A bus has 40 seats. 3/8 are taken and 5 more people get on. How many are free?"),
    ),
    ("reasoning", RequestText("甲每小时走5千米，乙每小时走4千米，两人相距27千米，相向而行几小时相遇？")),
    ("translation", RequestText("Translate into French: The library closes at six on Fridays.")),
    ("translation", RequestText("“请问最近的地铁站在哪里”用英语怎么说？")),
    ("translation", RequestText("Der Zug hat heute leider Verspätung.\n\nIn English, please.")),
    ("tool_call", RequestText("What is the euro worth in yen?", num_tools=2)),
    ("tool_call", RequestText("欧元现在兑多少日元？", system=f"你可以调用下列函数：\n{TOOL}\n请输出 JSON。")),
    ("creative_writing", RequestText("Write a bedtime story about a snail who wants to race.")),
    ("creative_writing", RequestText("以“故乡的雨”为题写一篇800字的散文。")),
]


@pytest.fixture(scope="module")
def classifier() -> TaskClassifier:
    return TaskClassifier()


@pytest.mark.parametrize(("task", "text"), PROMPTS, ids=[f"{i}-{t}" for i, (t, _) in enumerate(PROMPTS)])
def test_plain_cases_in_words_of_our_own(classifier: TaskClassifier, task: str, text: RequestText) -> None:
    found = classifier.predict_one(text)
    assert found.label == task
    assert math.isclose(sum(found.probabilities.values()), 1.0, rel_tol=1e-9)
    assert tuple(found.probabilities) == TASKS


def test_an_empty_request_is_mixed(classifier: TaskClassifier) -> None:
    assert classifier.predict_one(RequestText("ok")).confidence < 0.95
    assert classifier.predict_one(RequestText("")).confidence <= 1


def test_explanations_name_what_was_read(classifier: TaskClassifier) -> None:
    told = classifier.explain_one(RequestText("请将以下句子翻译成英文：今天下雨了"))
    assert told.unit.startswith("log odds of translation over")
    assert any("翻译" in e.name or e.name.startswith("translate") for e in told.effects)


def test_a_callers_label_moves_the_balance(classifier: TaskClassifier) -> None:
    model = TaskClassifier(classifier.artefact)
    text = RequestText("notes about the harbour")
    before = model.predict_one(text).probabilities["creative_writing"]
    for _ in range(20):
        model.learn_one(text, "creative_writing")
    assert model.predict_one(text).probabilities["creative_writing"] > before


def test_the_artefact_is_small_plain_and_scored(tmp_path: Path, classifier: TaskClassifier) -> None:
    path = tmp_path / "copy.npz"
    classifier.artefact.save(path)
    assert path.stat().st_size < 2_000_000
    assert TaskArtefact.load(path).version == classifier.artefact.version
    scores = classifier.artefact.meta["scores"]
    assert scores["macro_f1"] >= 0.95
    assert scores["macro_f1_zh"] >= 0.92
    assert scores["ece"] < 0.03


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no", b"\x80\x04."])
def test_a_broken_artefact_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match=r"bad\.npz"):
        TaskArtefact.load(path)


def _small_rows() -> list[dict[str, object]]:
    """Two prompts of each task, as labelled rows."""
    rows: list[dict[str, object]] = []
    for i, (task, text) in enumerate(PROMPTS * 2):
        messages = [{"role": "user", "content": f"{text.user} {i}"}]
        if text.system:
            messages.insert(0, {"role": "system", "content": text.system})
        tools = [json.loads(TOOL)] if text.num_tools else None
        lang = "zh" if any("\u4e00" <= c <= "\u9fff" for c in text.user) else "en"
        rows.append({"task": task, "messages": messages, "source": "own", "lang": lang, "tools": tools})
    return rows


def test_training_gives_a_working_artefact_twice_the_same(tmp_path: Path) -> None:
    config = FitConfig(per_task=20, num_folds=2)
    first, second = (train(_small_rows(), config) for _ in range(2))
    assert first.version == second.version
    assert (first.hashed == second.hashed).all()
    first.save(tmp_path / "own.npz")
    model = TaskClassifier(TaskArtefact.load(tmp_path / "own.npz"))
    right = [model.predict_one(text).label == task for task, text in PROMPTS]
    assert np.mean(right) > 0.8


def test_unusable_rows_are_named() -> None:
    with pytest.raises(ValueError, match="row 1: task 'poetry'"):
        train([{"task": "poetry", "messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(ValueError, match="no rows"):
        train([])


def test_folds_keep_documents_and_wordings_apart() -> None:
    shared = "the same very long line of a document that stands in two different rows, word for word, really"
    rows = [
        {
            "task": "chat",
            "messages": [{"role": "user", "content": f"{shared}\n{i}"}],
            "wrapper": f"tmpl-dev-{i}",
        }
        for i in range(3)
    ] + [{"task": "chat", "prompt": f"number {i}", "wrapper": "none"} for i in range(30)]
    group = groups(rows)
    assert len(set(group[:3])) == 1
    for left, right in folds(rows):
        assert not {group[i] for i in left} & {group[i] for i in right}
        wordings = [{str(rows[i]["wrapper"]) for i in side} - {"none"} for side in (left, right)]
        assert not wordings[0] & wordings[1]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the labelled prompts are not at hand")
def test_scores_on_labelled_prompts_with_wordings_apart() -> None:
    with SHARED.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    scores = train(rows).meta["scores"]
    assert scores["macro_f1"] >= 0.95
    assert scores["macro_f1_zh"] >= 0.92
