"""Train the task classifier from labelled rows: features, folds, weights, temperature, scores.

The only place that needs scikit-learn and scipy, and it imports them when it runs. The scores
in the artefact come from folds that keep wordings and groups apart (`splits`), each with its own
augmentation made from its training side alone; the weights are then fitted on all rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from router_models.request_text import from_messages, from_prompt
from router_models.task_class import TaskArtefact
from router_models.task_features import NUM_BUCKETS, TaskFeaturizer
from router_models.training.augment import Augmenter, Sample
from router_models.training.payloads import Row, collect
from router_models.training.splits import folds
from router_models.types import TASKS, RequestText

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Floats = NDArray[np.float64]
Labels = NDArray[np.intp]
Report = Callable[[str], None]
_ABSENT = -20.0  # the bias of a task that a fold has no rows of


@dataclass(frozen=True)
class FitConfig:
    """How to train. `augmented_weight` is a made sample's weight against a real row's 1."""

    per_task: int = 1500
    augmented_weight: float = 0.2
    inverse_regularisation: float = 20.0
    dense_scale: float = 0.7
    hashed_scale: float = 2.0
    num_folds: int = 3
    seed: int = 0
    max_iterations: int = 200


def request_of(row: Row) -> RequestText:
    """What the classifier sees of a labelled row."""
    if row.get("messages"):
        return from_messages(row["messages"], num_tools=len(row.get("tools") or ()))
    return from_prompt(str(row.get("prompt") or ""))


class _Trainer:
    def __init__(self, config: FitConfig, report: Report) -> None:
        self.config = config
        self.report = report
        self.features = TaskFeaturizer()
        self.num_dense = len(self.features.dense_names)

    def matrix(self, texts: Sequence[RequestText]) -> csr_matrix:
        """Features of many requests, scaled for the fit. [texts, dense + buckets]"""
        from scipy import sparse

        values: list[Floats] = []
        columns: list[Labels] = []
        pointers = [0]
        for text in texts:
            found = self.features.extract(text)
            dense = np.flatnonzero(found.dense)
            columns += [dense, found.buckets + self.num_dense]
            values += [found.dense[dense] * self.config.dense_scale, found.weights * self.config.hashed_scale]
            pointers.append(pointers[-1] + len(dense) + len(found.buckets))
        shape = (len(texts), self.num_dense + NUM_BUCKETS)
        made = sparse.csr_matrix((np.concatenate(values), np.concatenate(columns), pointers), shape=shape)
        made.sum_duplicates()
        return made

    def fit(self, real: csr_matrix, labels: Labels, rows: Sequence[Row], seed: int) -> tuple[Floats, Floats]:
        """Weights [tasks, features] and bias [tasks] from rows and what augmentation makes of them."""
        from scipy import sparse
        from sklearn.linear_model import LogisticRegression

        made: list[Sample] = list(Augmenter(collect(rows), seed).samples(self.config.per_task))
        x = sparse.vstack([real, self.matrix([s.text for s in made])]) if made else real
        y = np.concatenate([labels, np.array([TASKS.index(s.task) for s in made], dtype=np.intp)])
        weight = np.concatenate([np.ones(len(labels)), np.full(len(made), self.config.augmented_weight)])
        model = LogisticRegression(C=self.config.inverse_regularisation, max_iter=self.config.max_iterations)
        model.fit(x, y, sample_weight=weight)
        weights, bias = np.zeros((len(TASKS), x.shape[1])), np.full(len(TASKS), _ABSENT)
        weights[model.classes_], bias[model.classes_] = model.coef_, model.intercept_
        return weights, bias


def train(
    rows: Sequence[Row], config: FitConfig | None = None, report: Report = lambda _: None
) -> TaskArtefact:
    """The classifier for `rows`, with its own scores in `meta`. Raises ValueError for unusable rows."""
    config = config or FitConfig()
    check_rows(rows)
    trainer = _Trainer(config, report)
    labels = np.array([TASKS.index(r["task"]) for r in rows], dtype=np.intp)
    report(f"features of {len(rows)} rows")
    x = trainer.matrix([request_of(r) for r in rows])
    logits = np.zeros((len(rows), len(TASKS)))
    for number, (left, right) in enumerate(folds(rows, config.num_folds)):
        report(
            f"fold {number + 1} of {config.num_folds}: {len(left)} rows to train on, {len(right)} to validate"
        )
        weights, bias = trainer.fit(x[left], labels[left], [rows[i] for i in left], config.seed + number + 1)
        logits[right] = x[right] @ weights.T + bias
    temperature = best_temperature(logits, labels)
    chinese = np.array([r.get("lang") == "zh" for r in rows])
    scores = evaluate(softmax(logits / temperature), labels, chinese)
    report(f"macro F1 {scores['macro_f1']}, Chinese {scores['macro_f1_zh']}, ECE {scores['ece']}")
    report("fitting on all rows")
    weights, bias = trainer.fit(x, labels, rows, config.seed)
    return _artefact(trainer, weights, bias, temperature, scores | {"num_rows": len(rows)})


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError naming the first row that cannot be learned from."""
    if not rows:
        raise ValueError("no rows to train on")
    for number, row in enumerate(rows, start=1):
        if row.get("task") not in TASKS:
            raise ValueError(f"row {number}: task {row.get('task')!r} is none of {', '.join(TASKS)}")
        if not row.get("messages") and not row.get("prompt"):
            raise ValueError(f"row {number}: neither messages nor prompt")
    missing = sorted(set(TASKS) - {row["task"] for row in rows})
    if missing:
        raise ValueError(f"no rows of {', '.join(missing)}: every task needs some")


def _artefact(
    trainer: _Trainer, weights: Floats, bias: Floats, temperature: float, meta: dict[str, Any]
) -> TaskArtefact:
    config = trainer.config
    dense = weights[:, : trainer.num_dense].T * config.dense_scale
    hashed = weights[:, trainer.num_dense :].T * config.hashed_scale
    scale = np.maximum(np.abs(hashed).max(axis=0), 1e-9) / 127
    quantised = np.rint(hashed / scale).astype(np.int8)
    digest = hashlib.sha256(quantised.tobytes() + dense.astype(np.float32).tobytes()).hexdigest()[:12]
    meta = {"version": digest, "config": vars(config), "scores": meta}
    return TaskArtefact(bias, dense, quantised, scale, temperature, meta)


def softmax(logits: Floats) -> Floats:
    """Probabilities, row by row."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Floats = odds / odds.sum(axis=1, keepdims=True)
    return shares


def best_temperature(logits: Floats, labels: Labels) -> float:
    """The temperature with the least negative log likelihood (Guo et al. 2017)."""
    candidates = np.geomspace(0.3, 5.0, 200)
    picked = np.arange(len(labels))
    losses = [-np.log(softmax(logits / t)[picked, labels] + 1e-12).mean() for t in candidates]
    return float(candidates[int(np.argmin(losses))])


def evaluate(probabilities: Floats, labels: Labels, chinese: NDArray[np.bool_]) -> dict[str, Any]:
    """Macro F1 over all and over Chinese rows, F1 by task, accuracy, calibration error."""
    guess = probabilities.argmax(axis=1)
    by_task = {task: round(_f1(guess, labels, i), 4) for i, task in enumerate(TASKS)}
    zh = [_f1(guess[chinese], labels[chinese], i) for i in sorted(set(labels[chinese].tolist()))]
    return {
        "macro_f1": round(float(np.mean(list(by_task.values()))), 4),
        "macro_f1_zh": round(float(np.mean(zh)), 4) if zh else None,
        "accuracy": round(float((guess == labels).mean()), 4),
        "ece": round(calibration_error(probabilities, labels), 4),
        "f1": by_task,
    }


def _f1(guess: Labels, labels: Labels, task: int) -> float:
    hits = int(((guess == task) & (labels == task)).sum())
    total = int((guess == task).sum() + (labels == task).sum())
    return 2 * hits / total if total else 0.0


def calibration_error(probabilities: Floats, labels: Labels, num_bins: int = 10) -> float:
    """Expected calibration error of the top class: |confidence - accuracy|, averaged over bins."""
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    gaps = [
        abs(float(confidence[bins == b].mean() - right[bins == b].mean())) * float((bins == b).mean())
        for b in range(num_bins)
        if (bins == b).any()
    ]
    return sum(gaps)
